"""The generator: vLLM's V1 engine in this process, stepped once per batch until all have ended."""

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import numpy as np
import torch
from vllm import SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.engine.arg_utils import EngineArgs
from vllm.inputs import TokensPrompt
from vllm.logprobs import FlatLogprobs
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine

from fos_rl.config import GeneratorConfig, RolloutConfig
from fos_rl.generator import vllm_model
from fos_rl.generator.cache_size import chosen_cache_gib
from fos_rl.generator.compat import rewind_cpu_generators
from fos_rl.generator.prefill import prefill_log_probs
from fos_rl.generator.routing_record import FinishedRouting
from fos_rl.model.checksum import checksum_differences
from fos_rl.model.machine import device_memory_gib, peak_memory_gib
from fos_rl.spec import ModelSpec
from fos_rl.types import FinishReason, Prompt, Rollout, Sampling, SharedWeights, WeightBucket

T = TypeVar("T")

# vLLM reports more endings than the policy distinguishes; all others ended early.
_FINISH_REASONS: dict[str | None, FinishReason] = {"stop": "stop", "length": "length"}


class VllmGenerator:
    """Samples rollouts with the shared decoder; holds the weights of one policy version.

    It starts with random weights: nothing is sampled before the first sync.
    """

    def __init__(
        self,
        spec: ModelSpec,
        model_folder: Path,
        rollout: RolloutConfig,
        config: GeneratorConfig,
        device: Literal["cpu", "cuda"],
        *,
        shares_gpu: bool = False,
    ) -> None:
        """Start the engine, in a thread of its own.

        Args:
            shares_gpu: a trainer in another process uses the GPU in turns with this one.
        """
        self.spec = spec
        self.device = torch.device(device)
        self.rollout = rollout
        self.policy_version = -1
        self._checksums: dict[str, int] = {}
        self._request_ids = itertools.count()
        self._engine_steps = 0
        # One thread makes every engine call: OpenMP keeps a team of threads per calling thread.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="vllm")
        self._engine = self._thread.submit(
            _build_engine, spec, model_folder, rollout, config, device, shares_gpu
        ).result()
        self._shares_gpu = shares_gpu
        self._has_cache = True
        self._tokenizer = self._engine.get_tokenizer()
        self._routing: FinishedRouting | None = None
        if spec.architecture.num_experts:
            self._routing = self._thread.submit(FinishedRouting, self._engine).result()

    def contract(self) -> dict[str, object]:
        """What its spec says of log-probs, to be compared with the trainer's."""
        return self.spec.contract()

    def generate(
        self,
        prompts: Sequence[Prompt],
        seed: int,
        sampling: Sampling | None = None,
        first_index: int = 0,
    ) -> list[list[Rollout]]:
        """A group of rollouts per prompt; the same prompts and seed sample the same tokens.

        Args:
            sampling: by default the rollout settings'.
            first_index: the first prompt's place in the batch that the seed is of.

        Raises:
            RuntimeError: before the first weight sync.
        """
        if self.policy_version < 0:
            raise RuntimeError("generate called before the first weight sync")
        sampling = sampling or Sampling(
            num_samples=self.rollout.group_size,
            temperature=self.rollout.temperature,
            max_new_tokens=self.rollout.max_new_tokens,
        )
        self._take_cache()
        return self._thread.submit(self._generate, prompts, seed, sampling, first_index).result()

    def _generate(
        self, prompts: Sequence[Prompt], seed: int, sampling: Sampling, first_index: int
    ) -> list[list[Rollout]]:
        groups: list[list[str]] = []
        for index, prompt in enumerate(prompts, first_index):
            group = [str(next(self._request_ids)) for _ in range(sampling.num_samples)]
            for member, request_id in enumerate(group):
                member_seed = (seed * 1_000_003 + index) * 4093 + member
                tokens = TokensPrompt(prompt_token_ids=prompt.token_ids)
                self._engine.add_request(
                    request_id, tokens, _sampling_params(sampling, member_seed)
                )
            groups.append(group)
        outputs = self._finish_all()
        return [
            [self._rollout(prompt, outputs[request_id]) for request_id in group]
            for prompt, group in zip(prompts, groups, strict=True)
        ]

    def _finish_all(self) -> dict[str, RequestOutput]:
        """Step the engine until every request has ended; its last output by request id."""
        finished: dict[str, RequestOutput] = {}
        while self._engine.has_unfinished_requests():
            for output in cast("list[RequestOutput]", self._engine.step()):
                if output.finished:
                    finished[output.request_id] = output
            self._between_steps()
        return finished

    def _between_steps(self) -> None:
        """What is done after each engine step, before the next."""
        self._engine_steps += 1

    def heartbeat(self) -> int:
        """Engine steps so far; another thread may ask while responses are generated."""
        return self._engine_steps

    def _rollout(self, prompt: Prompt, output: RequestOutput) -> Rollout:
        completion = output.outputs[0]
        log_probs = cast(FlatLogprobs, completion.logprobs)
        assert log_probs.token_ids == list(completion.token_ids)
        return Rollout(
            prompt_id=prompt.id,
            prompt_ids=list(prompt.token_ids),
            response_ids=list(completion.token_ids),
            log_probs=log_probs.logprobs,
            finish_reason=_FINISH_REASONS.get(completion.finish_reason, "abort"),
            policy_version=self.policy_version,
            text=self._tokenizer.decode(completion.token_ids, skip_special_tokens=True),
            experts=self._routing.pop(output.request_id) if self._routing else None,
        )

    def rescore(self, rollouts: Sequence[Rollout]) -> list[np.ndarray]:
        """fp32 log-probs of the responses' tokens by the prefill, one array per rollout.

        They were sampled by decode steps: the difference is what the generator gives the same
        tokens under the same weights in another batch.
        """
        self._take_cache()
        scored = self._in_engine_thread(
            lambda: prefill_log_probs(self._engine, rollouts, self.rollout.temperature)
        )
        if self._routing is not None:
            self._routing.forget()
        return scored

    def release_memory(self) -> None:
        """Give the cache's memory to the trainer that shares the GPU, until something is sampled.

        Keys and values are lost, so the next prompts are computed again.
        """
        if self._shares_gpu and self._has_cache:
            self._in_engine_thread(self._reset_prefix_cache)
            self._rpc("release_cache")
            self._has_cache = False

    def _take_cache(self) -> None:
        if not self._has_cache:
            self._rpc("take_cache")
            self._has_cache = True

    def peak_memory_gib(self) -> float:
        """The most that weights, cache, graphs and activations have held since vLLM last reset its
        count, which it does before it fills its cache."""
        return peak_memory_gib(self.device)

    def close(self) -> None:
        """Free the engine, so that another can be built in this process."""
        # vLLM's allocator frees only what is there.
        self._take_cache()
        self._thread.submit(self._shut_down).result()
        self._thread.shutdown()

    def _shut_down(self) -> None:
        self._engine.engine_core.shutdown()
        del self._engine
        cleanup_dist_env_and_memory()

    # Weight sync: begin, shared weights or buckets, finish; `fos_rl.model.sync` keeps the order.

    def begin_weight_sync(self) -> None:
        """Nothing samples until finish; ValueError names weights changed since the last sync."""
        if self.policy_version >= 0:
            changed = checksum_differences(self._rpc("weight_checksums"), self._checksums)
            if changed:
                raise ValueError(
                    "generator weights changed without a sync since policy version "
                    f"{self.policy_version}: {', '.join(changed[:5])}"
                )
        # Until finish, the model is half old and half new and must not sample.
        self.policy_version = -1
        self._rpc("begin_weight_sync")

    def load_shared_weights(self, weights: SharedWeights) -> bool:
        """Copy all weights from where they lie; False where they cannot be read from here."""
        return self._rpc("load_shared_weights", weights)

    def load_weight_bucket(self, bucket: WeightBucket) -> None:
        """Copy a bucket's weights into the decoder, by name."""
        self._rpc("load_weight_bucket", bucket)

    def finish_weight_sync(self, policy_version: int, checksums: dict[str, int]) -> None:
        """Compare every tensor with the trainer's checksum and drop cached keys and values.

        Raises:
            ValueError: naming the tensors that are missing or differ.
        """
        loaded = self._rpc("finish_weight_sync")
        wrong = checksum_differences(loaded, checksums)
        if wrong:
            raise ValueError(
                f"weight sync to policy version {policy_version}: {len(wrong)} tensors differ "
                f"from the trainer's: {', '.join(wrong[:5])}"
            )
        self._in_engine_thread(self._reset_prefix_cache)
        self._checksums = loaded
        self.policy_version = policy_version

    def _reset_prefix_cache(self) -> None:
        # Cached keys and values are of the old weights, or gone.
        if not self._engine.reset_prefix_cache():
            raise RuntimeError("vLLM refused to reset its prefix cache: requests are running")

    def _rpc(self, method: str, *args: object) -> Any:
        """Call a WeightSyncWorker method on the (single) vLLM rank."""
        [result] = self._in_engine_thread(lambda: self._engine.collective_rpc(method, args=args))
        return result

    def _in_engine_thread(self, call: Callable[[], T]) -> T:
        return self._thread.submit(call).result()


def _sampling_params(sampling: Sampling, seed: int) -> SamplingParams:
    """ValueError where vLLM would sample at another temperature."""
    params = SamplingParams(
        temperature=sampling.temperature,
        max_tokens=sampling.max_new_tokens,
        seed=seed % (1 << 62),
        # 0 asks for the sampled token's log-prob and no alternatives.
        logprobs=0,
        # One output at the end, as numbers: a text of every token at every step would take a
        # fifth of a small model's time.
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    if params.temperature != sampling.temperature:
        raise ValueError(
            f"temperature = {sampling.temperature:g}: vLLM changed it to "
            f"{params.temperature:g}, and log-probs would be of another distribution than the "
            "trainer's; use 0.01 to 2, or 0 for greedy responses"
        )
    return params


def _build_engine(
    spec: ModelSpec,
    model_folder: Path,
    rollout: RolloutConfig,
    config: GeneratorConfig,
    device: Literal["cpu", "cuda"],
    shares_gpu: bool,
) -> LLMEngine:
    vllm_model.register()
    rewind_cpu_generators()
    graphs = config.cuda_graphs and device == "cuda"
    cache_gib = config.kv_cache_gib
    if cache_gib == "auto":
        cache_gib = chosen_cache_gib(
            rollout,
            config,
            spec,
            device=device,
            memory_gib=device_memory_gib(device),
            with_trainer=shares_gpu,
        )
    arguments = EngineArgs(
        model=str(model_folder),
        # Every weight arrives through the sync; loading the folder's would only hide a missing one.
        load_format="dummy",
        hf_overrides={"architectures": [vllm_model.ARCHITECTURE]},
        additional_config={vllm_model.SPEC_KEY: spec.model_dump(mode="json")},
        worker_cls="fos_rl.generator.gpu_worker.CacheSleepWorker" if shares_gpu else "auto",
        worker_extension_cls="fos_rl.generator.weight_sync.WeightSyncWorker",
        dtype=spec.precision.compute_dtype,
        max_model_len=rollout.max_prompt_tokens + rollout.max_new_tokens,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        # The CPU build's blocks of 128 tokens would share no prompt shorter than that.
        block_size=32 if device == "cpu" else None,
        kv_cache_memory_bytes=int(cache_gib * (1 << 30)),
        # The cache's size is given, so this is only the share of the GPU that must be free at the
        # start; trainers and other engines may be on it.
        gpu_memory_utilization=0.01,
        logprobs_mode="processed_logprobs",
        enforce_eager=not graphs,
        compilation_config=cast(Any, _graphs(config.max_num_seqs) if graphs else {}),
        disable_log_stats=True,
    )
    return LLMEngine.from_engine_args(arguments)


def _graphs(max_num_seqs: int) -> dict[str, object]:
    """No torch.compile, which would change bits; whole decode steps as CUDA graphs, of no more
    sequences than decode together (vLLM captures twice as many)."""
    sizes = [1, 2, 4, *range(8, max_num_seqs, 8), max_num_seqs]
    return {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": sorted({size for size in sizes if size <= max_num_seqs}),
    }
