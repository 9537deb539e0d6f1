"""The trainer: fp32 masters, one forward and backward over packed micro-batches, AdamW."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fos_rl.algorithms.aggregation import token_weights
from fos_rl.algorithms.corrections import correct
from fos_rl.algorithms.losses import PolicyTokens, policy_loss
from fos_rl.algorithms.mismatch import mismatch_metrics, num_non_finite
from fos_rl.config import AlgorithmConfig, RolloutConfig, TrainerConfig
from fos_rl.model.checksum import named_checksums
from fos_rl.model.convert import build_decoder, compute_dtype
from fos_rl.model.finite import check_loaded
from fos_rl.model.hf import load_hf_weights, named_hf_weights, read_weights, write_model
from fos_rl.model.log_probs import token_log_probs
from fos_rl.model.machine import peak_memory_gib
from fos_rl.model.packed_attention import PackedSequences, packed_attention
from fos_rl.model.router_replay import RoutingReplay
from fos_rl.model.shared_weights import SharedWeights
from fos_rl.model.transport import pack_weights
from fos_rl.spec import ModelSpec
from fos_rl.trainer.checkpoint import load_checkpoint, save_checkpoint
from fos_rl.trainer.health import (
    check_log_probs,
    check_updated,
    entropy_metrics,
    first_broken_output,
    too_many_skipped,
)
from fos_rl.trainer.layer_errors import MAX_TOKENS, first_tokens, layer_errors
from fos_rl.trainer.masters import Masters
from fos_rl.trainer.packing import MicroBatch, pack
from fos_rl.trainer.routing_flips import routing_flip_metrics
from fos_rl.trainer.step_metrics import StepSums, is_sound
from fos_rl.types import StepResult, TrainBatch, WeightBucket


class GrpoTrainer:
    """Learns from one batch per step and hands out the weights to sync.

    `policy_version` counts finished steps; version 0 is the loaded model.
    """

    def __init__(
        self,
        spec: ModelSpec,
        model_folder: Path,
        rollout: RolloutConfig,
        algorithm: AlgorithmConfig,
        config: TrainerConfig,
        device: torch.device,
        *,
        shares_gpu: bool = False,
    ) -> None:
        """Load the weights of model_folder.

        Args:
            shares_gpu: a generator in another process uses the GPU in turns with this one.
        """
        self.spec = spec
        self.model_folder = model_folder
        self.rollout = rollout
        self.algorithm = algorithm
        self.config = config
        self.device = device
        self._shares_gpu = shares_gpu
        self.policy_version = 0
        self._sequences = PackedSequences()
        with torch.device(device):
            self.decoder = build_decoder(
                spec, packed_attention(self._sequences, spec.consistency), config.backward_override
            )
        self.routing: RoutingReplay | None = None
        if spec.architecture.num_experts:
            self.routing = RoutingReplay(self.decoder, replay=algorithm.router_replay)
        # The masters start from the file's own precision, before the working copy is rounded.
        self.decoder.to(torch.float32)
        load_hf_weights(self.decoder, read_weights(model_folder))
        self.masters = Masters(self.decoder, compute_dtype(spec))
        check_loaded(named_hf_weights(self.decoder), f"model.path: {model_folder}")
        self.optimizer = torch.optim.AdamW(
            list(self.masters),
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            # One pass over the weights: on two CPU cores a fifth of the time of the default.
            fused=True,
        )
        self._shared: SharedWeights | None = None
        self.updates = 0
        self._skipped_in_a_row = 0
        # A sequence that the weights are tried on before they are saved.
        self._probe: TrainBatch | None = None
        # Of the tokens scored since the list was last emptied.
        self._entropies: list[Tensor] = []
        # What the routers chose for each sequence of the step, before its first update.
        self._own_experts: dict[int, np.ndarray] = {}

    def contract(self) -> dict[str, object]:
        """What its spec says of log-probs, to be compared with the generator's."""
        return self.spec.contract()

    def step(self, batch: TrainBatch) -> StepResult:
        """Measure the mismatch, then make the step's optimizer updates.

        Raises:
            DeadModel: when the step leaves no model that could be trained, or saved.
        """
        self._own_experts.clear()
        # Later updates change the policy: everything is scored before the first one.
        initial = self._score(batch) if self.algorithm.minibatches > 1 else []
        self._entropies.clear()
        scored: list[Tensor] = []
        sums = StepSums()
        for minibatch in np.array_split(np.arange(batch.num_sequences), self._num_updates(batch)):
            scored += self._update(batch, minibatch.tolist(), initial, sums)
        self.policy_version += 1
        self._probe = batch.first()
        log_probs = [values.cpu().numpy() for values in initial or scored]
        return StepResult(
            policy_version=self.policy_version,
            metrics={
                **sums.means(),
                **self._mismatch(batch, log_probs),
                **self._entropy_metrics(),
                "loss/ratio_is_generator": float(self.algorithm.ratio == "bypass"),
                "policy/version": float(self.policy_version),
                "trainer/lr": self.optimizer.param_groups[0]["lr"],
                "memory/trainer_peak_gib": peak_memory_gib(self.device),
            },
            log_probs=log_probs,
        )

    def measure(self, batch: TrainBatch) -> StepResult:
        """The mismatch of a batch that nothing is learned from; raises as `step` does."""
        self._own_experts.clear()
        log_probs = [values.cpu().numpy() for values in self._score(batch)]
        return StepResult(
            policy_version=self.policy_version,
            metrics={
                **self._mismatch(batch, log_probs),
                **self._entropy_metrics(),
                "policy/version": float(self.policy_version),
            },
            log_probs=log_probs,
        )

    def layer_errors(self, batch: TrainBatch) -> dict[str, float]:
        """Relative error of each layer's quantized products: `layer_errors` of the first tokens."""
        sequences = first_tokens(batch.token_ids, MAX_TOKENS)
        self._sequences.set([len(sequence) for sequence in sequences])
        if self.routing is not None:
            self.routing.recorded = None
        token_ids = torch.from_numpy(np.concatenate(sequences)).to(self.device)
        return layer_errors(self.decoder, token_ids, self._sequences.positions(self.device))

    def _mismatch(self, batch: TrainBatch, log_probs: list[np.ndarray]) -> dict[str, float]:
        """The trainer's log-probs and choices of experts beside the generator's."""
        theirs = batch.generator_log_probs
        check_log_probs(log_probs, theirs, lambda: self._first_broken_output(batch))
        metrics = mismatch_metrics(log_probs, theirs)
        if number := num_non_finite(log_probs, theirs):
            metrics["mismatch/non_finite_tokens"] = float(number)
        return metrics | self._routing_flips(batch)

    def _entropy_metrics(self) -> dict[str, float]:
        return entropy_metrics(self._entropies, self.spec.architecture.vocab_size)

    def _first_broken_output(self, batch: TrainBatch) -> str:
        order = range(batch.num_sequences)
        first = pack(batch, order, self.config.microbatch_tokens, self.device)[0]
        return first_broken_output(self.decoder, lambda: self._forward(first))

    def _routing_flips(self, batch: TrainBatch) -> dict[str, float]:
        """How often the two routers disagreed about a token that both have seen."""
        if self.routing is None or batch.experts is None:
            return {}
        own = [self._own_experts[i][:-1] for i in range(batch.num_sequences)]
        recorded = np.concatenate(batch.experts)
        return routing_flip_metrics(np.concatenate(own), recorded, self.routing.layers)

    def _num_updates(self, batch: TrainBatch) -> int:
        return min(self.algorithm.minibatches, batch.num_sequences)

    def _update(
        self, batch: TrainBatch, sequences: list[int], initial: list[Tensor], sums: StepSums
    ) -> list[Tensor]:
        """One optimizer update; returns the sequences' log-probs under the weights before it."""
        weights = self._token_weights(batch, sequences)
        scored: list[Tensor] = []
        for microbatch in pack(batch, sequences, self.config.microbatch_tokens, self.device):
            log_probs, _ = self._forward(microbatch)
            tokens = self._policy_tokens(microbatch, log_probs, weights, initial)
            result = policy_loss(tokens, self.algorithm)
            result.loss.backward()
            scored += log_probs.detach().split(microbatch.response_lengths)
            sums.add(result, tokens)
        sums.update_done(self._apply_gradients(sums.loss))
        return scored

    def _policy_tokens(
        self,
        microbatch: MicroBatch,
        log_probs: Tensor,
        weights: dict[int, Tensor],
        initial: list[Tensor],
    ) -> PolicyTokens:
        """The micro-batch as the loss sees it.

        Args:
            initial: each sequence's log-probs before the step; empty where this is the step's only
                update, so that they are those of this very forward.
        """
        before = log_probs.detach()
        if initial:
            before = torch.cat([initial[i] for i in microbatch.sequences])
        share = torch.cat([weights[i] for i in microbatch.sequences]).to(self.device)
        theirs, lengths = microbatch.generator_log_probs, microbatch.response_lengths
        return PolicyTokens(
            log_probs=log_probs,
            old_log_probs=theirs if self.algorithm.ratio == "bypass" else before,
            advantages=microbatch.advantages,
            weights=share,
            correction=correct(self.algorithm.correction, before, theirs, share != 0, lengths),
            lengths=lengths,
        )

    def _token_weights(self, batch: TrainBatch, sequences: list[int]) -> dict[int, Tensor]:
        """Each token's share of the loss; 0 where the generator's log-prob is not finite."""
        masks = [np.isfinite(batch.generator_log_probs[i]) for i in sequences]
        weights = token_weights(
            masks,
            aggregation=self.algorithm.aggregation,
            max_new_tokens=self.rollout.max_new_tokens,
        )
        return {i: torch.from_numpy(w) for i, w in zip(sequences, weights, strict=True)}

    def _forward(self, microbatch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Log-probs (with gradient) and entropies of a micro-batch's response tokens."""
        self._sequences.set(microbatch.lengths)
        if self.routing is not None:
            self.routing.recorded = microbatch.experts
        hidden = self.decoder(microbatch.token_ids, microbatch.positions)
        if self.routing is not None and microbatch.experts is not None:
            own = self.routing.own.cpu().numpy()
            parts = np.split(own, np.cumsum(microbatch.lengths)[:-1])
            for sequence, part in zip(microbatch.sequences, parts, strict=True):
                # Later forwards are of updated weights.
                self._own_experts.setdefault(sequence, part)
        log_probs, entropy = token_log_probs(
            self.decoder.logits,
            hidden[microbatch.predicted_from],
            microbatch.targets,
            self.rollout.temperature,
            self.config.log_prob_chunk_tokens,
        )
        self._entropies.append(entropy)
        return log_probs, entropy

    @torch.no_grad()
    def _score(self, batch: TrainBatch) -> list[Tensor]:
        """Each sequence's log-probs under the current weights."""
        self._entropies.clear()
        scored: list[Tensor] = []
        order = range(batch.num_sequences)
        for microbatch in pack(batch, order, self.config.microbatch_tokens, self.device):
            log_probs, _ = self._forward(microbatch)
            scored += log_probs.split(microbatch.response_lengths)
        return scored

    def _apply_gradients(self, loss: float = 0.0) -> float:
        """Clip, step, publish, unless loss or gradient is not finite; returns the gradient norm
        before clipping."""
        self.updates += 1
        warmup = min(1.0, self.updates / max(1, self.config.warmup_steps))
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.lr * warmup
        norm = torch.nn.utils.clip_grad_norm_(list(self.masters), self.config.max_grad_norm)
        if is_sound(loss, float(norm)):
            self._skipped_in_a_row = 0
            self.optimizer.step()
            self.masters.publish()
            check_updated(self.decoder)
        else:
            self._skipped_in_a_row += 1
            if self._skipped_in_a_row == self.config.max_nonfinite_updates:
                raise too_many_skipped(
                    self._skipped_in_a_row, self.decoder, self.masters.gradients()
                )
        self.optimizer.zero_grad(set_to_none=True)
        return float(norm)

    def check_alive(self) -> None:
        """DeadModel when the weights as last updated give a sequence of the last step no finite
        log-prob; nothing else has computed with them yet."""
        if (probe := self._probe) is not None:
            log_probs = [values.cpu().numpy() for values in self._score(probe)]
            check_log_probs(log_probs, log_probs, lambda: self._first_broken_output(probe))

    def save_model(self, folder: Path) -> None:
        """Write the weights as a Hugging Face folder that transformers and vLLM load."""
        self.check_alive()
        write_model(self.decoder, self.spec, self.model_folder, folder)

    def save_checkpoint(self, folder: Path, settings: dict[str, object]) -> None:
        """Write all that a bit-equal continuation needs, with the run's settings."""
        save_checkpoint(self, folder, settings)

    def load_checkpoint(self, folder: Path) -> None:
        """Continue from a folder that `save_checkpoint` wrote; ValueError names what is wrong."""
        load_checkpoint(self, folder)

    def release_memory(self) -> None:
        """Give memory of finished forwards and backwards to the generator that shares the GPU."""
        if self._shares_gpu:
            torch.cuda.empty_cache()

    # Weight sync.

    def weights_version(self) -> int:
        """The policy version of the weights."""
        return self.policy_version

    def shared_weights(self) -> SharedWeights:
        """The working copy where it lies."""
        if self._shared is None or not self._shared.are_of(self.decoder):
            self._shared = SharedWeights(self.decoder)
        if self.device.type == "cuda":
            # Whoever reads it does so in a stream of its own.
            torch.cuda.synchronize(self.device)
        return self._shared

    def export_weights(self, bucket_bytes: int = 64 << 20) -> Iterator[WeightBucket]:
        """The bf16 weights by Hugging Face name, in buckets of about that size."""
        bucket: dict[str, Tensor] = {}
        size = 0
        for name, tensor in named_hf_weights(self.decoder):
            bucket[name] = tensor
            size += 2 * tensor.numel()
            if size >= bucket_bytes:
                yield pack_weights(bucket)
                bucket, size = {}, 0
        if bucket:
            yield pack_weights(bucket)

    def weight_checksums(self) -> dict[str, int]:
        """One checksum per tensor, by Hugging Face name."""
        return named_checksums(self.decoder)
