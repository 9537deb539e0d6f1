"""The only `import ray`: actors, where they run, and what happens when one does not answer."""

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
import ray.exceptions
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from fos_rl.config import RunConfig
from fos_rl.spec import ModelSpec, contract_difference
from fos_rl.trainer.dead_model import DeadModel
from fos_rl.types import Prompt, Rollout, Sampling, StepResult, TrainBatch, WeightBucket

# OpenMP: passive waiting, else the threads of the idle host spin on the busy host's cores.
# vLLM: the engine runs inside the actor (https://docs.vllm.ai/en/latest/usage/v1_guide.html), no
# usage report, errors only, and torch's own sampler, whose log-probs do not depend on a package.
# torch: vLLM compiles a helper of its sampler, which needs a C++ compiler and 20 s at the first
# call (https://docs.pytorch.org/docs/stable/torch.compiler.html).
_ENVIRONMENT = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "TOKENIZERS_PARALLELISM": "false",
}


def host_environment() -> None:
    """Give this process the environment of the hosts' actors, to run them in it.

    Call it before torch is imported: OpenMP reads its variables once.
    """
    os.environ.update(_ENVIRONMENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """GPUs of each host; `colocated` hosts share one and take turns."""

    trainer_gpus: int
    generator_gpus: int
    colocated: bool

    @property
    def num_gpus(self) -> int:
        """Distinct GPUs."""
        return 1 if self.colocated else self.trainer_gpus + self.generator_gpus

    def describe(self) -> str:
        if self.trainer_gpus == self.generator_gpus == 0:
            return "trainer and generator on the CPU"
        if self.colocated:
            return "trainer and generator share one GPU"
        where = {0: "the CPU", 1: "a GPU of its own"}
        return f"trainer on {where[self.trainer_gpus]}, generator on {where[self.generator_gpus]}"


def plan_placement(config: RunConfig, available_gpus: int) -> Placement:
    """Where the hosts run: a GPU each, one shared, or the CPU.

    Raises:
        ValueError: when a host asks for more GPUs than there are.
    """
    gpus: dict[str, int] = {}
    for host, wanted in (
        ("trainer", config.trainer.num_gpus),
        ("generator", config.generator.num_gpus),
    ):
        if isinstance(wanted, str):  # auto
            gpus[host] = min(1, available_gpus)
            continue
        if wanted > available_gpus:
            raise ValueError(
                f"{host}.num_gpus = {wanted}: only {available_gpus} GPUs are available; set it to "
                f"{available_gpus} or leave it out to use what is there"
            )
        gpus[host] = wanted
    return Placement(
        trainer_gpus=gpus["trainer"],
        generator_gpus=gpus["generator"],
        colocated=sum(gpus.values()) > available_gpus,
    )


def runs_at_once(config: RunConfig, placement: Placement, available_gpus: int) -> int:
    """How many runs like this one have hosts of their own: by GPUs, or by the CPU's cores.

    A run that does not limit its `num_threads` takes all cores.
    """
    if placement.num_gpus:
        return max(1, available_gpus // placement.num_gpus)
    cores = os.cpu_count() or 1
    threads = max(host.num_threads or cores for host in (config.trainer, config.generator))
    return max(1, cores // threads)


def gpu_environments(count: int, gpus_per_run: int, available_gpus: int) -> list[dict[str, str]]:
    """Variables that give each of `count` processes its GPUs of this machine.

    Groups of GPUs are dealt in turn, so that more runs than groups share them: 3 runs of 1 GPU on
    2 GPUs get 0, 1 and 0.
    """
    if gpus_per_run == 0:
        return [{} for _ in range(count)]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(i) for i in range(available_gpus)]
    groups = [names[i : i + gpus_per_run] for i in range(0, len(names), gpus_per_run)]
    whole = [",".join(group) for group in groups if len(group) == gpus_per_run]
    return [{"CUDA_VISIBLE_DEVICES": whole[i % len(whole)]} for i in range(count)]


class TrainerActor:
    """GrpoTrainer in a Ray actor."""

    def start(
        self, spec: ModelSpec, folder: str, config: RunConfig, device: str, threads: int
    ) -> None:
        """Load the model. Not a constructor, whose errors Ray hands on as text alone."""
        import torch

        from fos_rl.trainer.trainer import GrpoTrainer

        torch.set_num_threads(threads)
        self.settings = config.model_dump(mode="json")
        self.trainer = GrpoTrainer(
            spec,
            Path(folder),
            config.rollout,
            config.algorithm,
            config.trainer,
            torch.device(device),
        )

    def contract(self) -> dict[str, object]:
        return self.trainer.contract()

    def step(self, batch: TrainBatch) -> StepResult:
        return self.trainer.step(batch)

    def measure(self, batch: TrainBatch) -> StepResult:
        return self.trainer.measure(batch)

    def layer_errors(self, batch: TrainBatch) -> dict[str, float]:
        return self.trainer.layer_errors(batch)

    def policy_version(self) -> int:
        return self.trainer.policy_version

    def weight_checksums(self) -> dict[str, int]:
        return self.trainer.weight_checksums()

    def save_model(self, folder: Path) -> None:
        self.trainer.save_model(folder)

    def save_checkpoint(self, folder: Path) -> None:
        from fos_rl.trainer.checkpoint import save_checkpoint

        save_checkpoint(self.trainer, folder, self.settings)

    def load_checkpoint(self, folder: Path) -> None:
        from fos_rl.trainer.checkpoint import load_checkpoint

        load_checkpoint(self.trainer, folder)

    def export_weights(self) -> Iterator[WeightBucket]:
        yield from self.trainer.export_weights()


class GeneratorActor:
    """VllmGenerator in an async Ray actor: many calls in flight."""

    def __init__(self, spec: ModelSpec, folder: str, config: RunConfig, device: Any) -> None:
        from fos_rl.generator.engine import VllmGenerator

        self.generator = VllmGenerator(spec, Path(folder), config.rollout, config.generator, device)

    async def contract(self) -> dict[str, object]:
        return self.generator.contract()

    async def generate(
        self, prompts: Sequence[Prompt], seed: int, sampling: Sampling | None
    ) -> list[list[Rollout]]:
        return await self.generator.generate(prompts, seed, sampling)

    async def rescore(self, rollouts: Sequence[Rollout]) -> list[np.ndarray]:
        return await self.generator.rescore(rollouts)

    async def peak_memory_gib(self) -> float:
        return self.generator.peak_memory_gib()

    async def begin_weight_sync(self) -> None:
        await self.generator.begin_weight_sync()

    async def load_weight_bucket(self, bucket: WeightBucket) -> None:
        await self.generator.load_weight_bucket(bucket)

    async def finish_weight_sync(self, policy_version: int, checksums: dict[str, int]) -> None:
        await self.generator.finish_weight_sync(policy_version, checksums)


class Cluster:
    """Both hosts, started and checked; use as a context manager so that nothing outlives the run.

    Raises:
        ValueError: when the hosts were built with different contracts, with the fields that differ.
        RuntimeError: naming the actor and the call that failed or did not answer in time.
    """

    def __init__(self, config: RunConfig, spec: ModelSpec, folder: Path, placement: Placement):
        self.config = config
        self._own_ray = config.cluster.address == "local"
        self._group = None
        try:
            self._start(spec, folder, placement)
        except BaseException:
            self.close()
            raise

    def _start(self, spec: ModelSpec, folder: Path, placement: Placement) -> None:
        _init_ray(self.config)
        share = 0.5 if placement.colocated else 1.0
        bundles = [
            {"CPU": 1.0, "GPU": placement.trainer_gpus * share},
            {"CPU": 1.0, "GPU": placement.generator_gpus * share},
        ]
        bundles = [{k: v for k, v in bundle.items() if v} for bundle in bundles]
        self._group = placement_group(bundles, strategy="PACK")
        self._get("cluster", "placement", self._group.ready(), self.config.cluster.start_timeout_s)
        cores = int(ray.available_resources().get("CPU", 0)) + 2
        self.trainer = self._actor(
            TrainerActor,
            0,
            bundles[0],
            self.config.trainer.num_threads or cores,
        )
        started = self.trainer.start.remote(
            spec,
            str(folder),
            self.config,
            "cuda" if placement.trainer_gpus else "cpu",
            self.config.trainer.num_threads or cores,
        )
        self.generator = self._actor(
            GeneratorActor,
            1,
            bundles[1],
            self.config.generator.num_threads or cores,
            spec,
            str(folder),
            self.config,
            "cuda" if placement.generator_gpus else "cpu",
        )
        timeout = self.config.cluster.start_timeout_s
        self._get("trainer", "start", started, timeout)
        ours = self._get("trainer", "contract", self.trainer.contract.remote(), timeout)
        theirs = self._get("generator", "start", self.generator.contract.remote(), timeout)
        if different := contract_difference(ours, theirs):
            raise ValueError(
                "trainer and generator were built with different contracts (trainer != generator): "
                + "; ".join(different)
            )

    def _actor(self, cls: type, index: int, bundle: dict, threads: int, *args: object) -> Any:
        assert self._group is not None
        return (
            ray.remote(cls)
            .options(
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=self._group, placement_group_bundle_index=index
                ),
                runtime_env={"env_vars": {**_ENVIRONMENT, "OMP_NUM_THREADS": str(threads)}},
            )
            .remote(*args)
        )

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the actors, and Ray itself where this run started it."""
        for name in ("generator", "trainer"):
            if actor := getattr(self, name, None):
                ray.kill(actor)
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None
        if self._own_ray:
            ray.shutdown()

    # The loop's verbs.

    def generate(
        self, prompts: Sequence[Prompt], seed: int, sampling: Sampling | None = None
    ) -> list[list[Rollout]]:
        call = self.generator.generate.remote(prompts, seed, sampling)
        return self._get("generator", "generate", call)

    def rescore(self, rollouts: Sequence[Rollout]) -> list[np.ndarray]:
        return self._get("generator", "rescore", self.generator.rescore.remote(rollouts))

    def peak_memory_gib(self) -> float:
        return self._get("generator", "peak_memory_gib", self.generator.peak_memory_gib.remote())

    def step(self, batch: TrainBatch) -> StepResult:
        return self._get("trainer", "step", self.trainer.step.remote(batch))

    def measure(self, batch: TrainBatch) -> StepResult:
        return self._get("trainer", "measure", self.trainer.measure.remote(batch))

    def layer_errors(self, batch: TrainBatch) -> dict[str, float]:
        return self._get("trainer", "layer_errors", self.trainer.layer_errors.remote(batch))

    def sync_weights(self) -> None:
        """Stream the trainer's bf16 weights into the generator and compare every checksum."""
        begin = self.generator.begin_weight_sync.remote()
        self._get("generator", "begin_weight_sync", begin)
        stream = self.trainer.export_weights.options(
            num_returns="streaming", _generator_backpressure_num_objects=2
        )
        for bucket in self._buckets(stream.remote()):
            load = self.generator.load_weight_bucket.remote(bucket)
            self._get("generator", "load_weight_bucket", load)
        finish = self.generator.finish_weight_sync.remote(
            self.trainer.policy_version.remote(), self.trainer.weight_checksums.remote()
        )
        self._get("generator", "finish_weight_sync", finish)

    def _buckets(self, stream: Any) -> Iterator[Any]:
        """References of a streaming call's results, each waited for under the call's limit."""
        timeout_s = self.config.cluster.call_timeout_s
        while True:
            ready, _ = ray.wait([stream], timeout=timeout_s)
            if not ready:
                raise _no_answer("trainer", "export_weights", timeout_s)
            try:
                yield next(stream)
            except StopIteration:
                return

    # Between steps.

    def save_model(self, folder: Path) -> None:
        self._get("trainer", "save_model", self.trainer.save_model.remote(folder.resolve()))

    def save_checkpoint(self, folder: Path) -> None:
        call = self.trainer.save_checkpoint.remote(folder.resolve())
        self._get("trainer", "save_checkpoint", call)

    def load_checkpoint(self, folder: Path) -> None:
        call = self.trainer.load_checkpoint.remote(folder.resolve())
        self._get("trainer", "load_checkpoint", call)

    def _get(self, actor: str, call: str, ref: Any, timeout_s: float | None = None) -> Any:
        timeout_s = timeout_s or self.config.cluster.call_timeout_s
        try:
            return ray.get(ref, timeout=timeout_s)
        except ray.exceptions.GetTimeoutError:
            raise _no_answer(actor, call, timeout_s) from None
        except ray.exceptions.RayTaskError as error:
            cause = error.cause if isinstance(error.cause, Exception) else error
            if isinstance(cause, ValueError | DeadModel):
                raise cause from error
            raise RuntimeError(f"{actor} failed in {call}: {cause}") from error
        except ray.exceptions.RayActorError as error:
            raise RuntimeError(
                f"{actor} died during {call}; its logs are in {_log_folder()}: {error}"
            ) from error


def _no_answer(actor: str, call: str, timeout_s: float) -> RuntimeError:
    return RuntimeError(
        f"{actor} did not answer {call} within {timeout_s:.0f} s; its logs are in {_log_folder()}; "
        "raise cluster.call_timeout_s (start: cluster.start_timeout_s) if it was only slow"
    )


def _init_ray(config: RunConfig) -> None:
    if ray.is_initialized():
        return
    # Ray's own handler prints a stack and aborts, with the actors left to themselves.
    on_terminate = signal.getsignal(signal.SIGTERM)
    if config.cluster.address == "local":
        cores = os.cpu_count() or 1
        ray.init(
            # Always a new one: without it Ray joins a cluster that happens to run on this machine.
            address="local",
            # Two actors of one CPU each, whatever the machine has.
            num_cpus=max(2, cores),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            # Weights travel in two buckets of 64 MiB at most; the rest is small.
            object_store_memory=512 << 20,
        )
    else:
        find_cluster(config.cluster.address)
        ray.init(address=config.cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, on_terminate)


def find_cluster(address: str, limit_s: float = 30.0) -> None:
    """Make sure that a Ray cluster answers at an address, within twice the limit.

    `ray.init` waits for minutes, in a call that nothing can interrupt, and then ends the process.

    Raises:
        ValueError: naming cluster.address, what is wrong with it and the remedy.
    """
    field = f"cluster.address = {address!r}"
    if address != "auto":
        host, _, port = address.rpartition(":")
        if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise ValueError(
                f"{field}: give HOST:PORT of a running cluster's head, as in 10.0.0.1:6379, 'auto' "
                "for the one on this machine, or 'local' to start one"
            )
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=limit_s).close()
        except OSError as error:
            raise ValueError(
                f"{field}: no connection within {limit_s:.0f} s ({error.strerror or error}); start "
                "the cluster with ray start --head, or check its address and the network"
            ) from None
    command = [sys.executable, "-m", "ray.scripts.scripts", "status", "--address", address]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        reason = "it does not speak to Ray"
    else:
        if asked.returncode == 0:
            return
        reason = (
            asked.stderr.strip().splitlines()[-1][:300] if asked.stderr.strip() else "no reason"
        )
    raise ValueError(
        f"{field}: no Ray cluster answers there within {limit_s:.0f} s ({reason}); start one with "
        "ray start --head, or see what ray status says"
    )


def cluster_gpus(config: RunConfig) -> int:
    """GPUs of a running cluster."""
    _init_ray(config)
    return int(ray.cluster_resources().get("GPU", 0))


def _log_folder() -> str:
    """Where Ray keeps the actors' output on this machine."""
    context = ray.get_runtime_context()
    return f"{context.get_temp_dir()}/{context.get_session_name()}/logs"
