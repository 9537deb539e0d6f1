"""The trainer: fp32 masters, one forward and backward over packed micro-batches, AdamW."""

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fos_rl.config import AlgorithmConfig, RolloutConfig, TrainerConfig
from fos_rl.model.attention import PackedSequences, packed_attention
from fos_rl.model.checksum import named_checksums
from fos_rl.model.convert import build_decoder
from fos_rl.model.hf import load_hf_weights, named_hf_weights, read_weights, write_model
from fos_rl.model.transport import to_wire
from fos_rl.spec import ModelSpec
from fos_rl.trainer.aggregation import token_weights
from fos_rl.trainer.corrections import correct
from fos_rl.trainer.log_probs import token_log_probs
from fos_rl.trainer.losses import PolicyTokens, policy_loss
from fos_rl.trainer.masters import Masters
from fos_rl.trainer.mismatch import mismatch_metrics, over_floor
from fos_rl.trainer.noise_floor import floor_batches
from fos_rl.trainer.packing import MicroBatch, group_by_tokens, pack, pack_together
from fos_rl.trainer.step_metrics import StepSums
from fos_rl.types import StepResult, TrainBatch

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class GrpoTrainer:
    """Learns from one batch a step and hands out the weights to sync.

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
    ) -> None:
        self.spec = spec
        self.model_folder = model_folder
        self.rollout = rollout
        self.algorithm = algorithm
        self.config = config
        self.device = device
        self.policy_version = 0
        self._sequences = PackedSequences()
        with torch.device(device):
            self.decoder = build_decoder(
                spec, packed_attention(self._sequences, spec.consistency), config.backward_override
            )
        # The masters start from the file's own precision, before the working copy is rounded.
        self.decoder.to(torch.float32)
        load_hf_weights(self.decoder, read_weights(model_folder))
        self.masters = Masters(self.decoder, DTYPES[spec.precision.compute_dtype])
        self.optimizer = torch.optim.AdamW(
            list(self.masters),
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
        )
        self.updates = 0

    def contract(self) -> dict[str, object]:
        return self.spec.contract()

    def step(self, batch: TrainBatch) -> StepResult:
        """Measure the mismatch and its noise floor, then make the step's optimizer updates."""
        rescored = self._rescore_sample(batch)
        # Later updates change the policy: everything is scored before the first one.
        initial = list(self._score(batch)) if self.algorithm.minibatches > 1 else []
        scored: list[Tensor] = []
        sums = StepSums()
        for minibatch in np.array_split(np.arange(batch.num_sequences), self._num_updates(batch)):
            scored += self._update(batch, minibatch.tolist(), initial, sums)
        self.policy_version += 1
        log_probs = [values.cpu().numpy() for values in initial or scored]
        return StepResult(
            policy_version=self.policy_version,
            metrics={
                **sums.means(),
                **self._mismatch(batch, log_probs, rescored),
                "loss/ratio_is_generator": float(self.algorithm.ratio == "bypass"),
                "policy/version": float(self.policy_version),
                "trainer/lr": self.optimizer.param_groups[0]["lr"],
            },
            log_probs=log_probs,
        )

    @staticmethod
    def _mismatch(
        batch: TrainBatch, log_probs: list[np.ndarray], rescored: dict[int, np.ndarray]
    ) -> dict[str, float]:
        """Trainer against generator, and beside it the trainer against itself in other batches."""
        metrics = mismatch_metrics(log_probs, batch.generator_log_probs)
        metrics |= mismatch_metrics(
            list(rescored.values()), [log_probs[i] for i in rescored], prefix="mismatch/floor_"
        )
        return metrics | over_floor(metrics)

    def _num_updates(self, batch: TrainBatch) -> int:
        return min(self.algorithm.minibatches, batch.num_sequences)

    def _update(
        self, batch: TrainBatch, sequences: list[int], initial: list[Tensor], sums: StepSums
    ) -> list[Tensor]:
        """One optimizer update; returns the sequences' log-probs under the weights before it."""
        weights = self._token_weights(batch, sequences)
        scored: list[Tensor] = []
        for microbatch in pack(batch, sequences, self.config.microbatch_tokens, self.device):
            log_probs, entropy = self._forward(microbatch)
            tokens = self._policy_tokens(microbatch, log_probs, weights, initial)
            result = policy_loss(tokens, self.algorithm)
            result.loss.backward()
            scored += log_probs.detach().split(microbatch.response_lengths)
            sums.add(result, tokens, entropy)
        sums.update_done(self._apply_gradients())
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
        hidden = self.decoder(microbatch.token_ids, microbatch.positions)
        return token_log_probs(
            self.decoder.logits,
            hidden[microbatch.predicted_from],
            microbatch.targets,
            self.rollout.temperature,
            self.config.log_prob_chunk_tokens,
        )

    @torch.no_grad()
    def _score(self, batch: TrainBatch) -> Iterator[Tensor]:
        """Each sequence's log-probs under the current weights."""
        order = range(batch.num_sequences)
        for microbatch in pack(batch, order, self.config.microbatch_tokens, self.device):
            log_probs, _ = self._forward(microbatch)
            yield from log_probs.split(microbatch.response_lengths)

    @torch.no_grad()
    def _rescore_sample(self, batch: TrainBatch) -> dict[int, np.ndarray]:
        """Log-probs of some of the batch's sequences, by index, each computed in another batch."""
        lengths = [len(ids) for ids in batch.token_ids]
        groups = group_by_tokens(lengths, self.config.microbatch_tokens)
        rescored: dict[int, np.ndarray] = {}
        for sequences in floor_batches(lengths, groups, seed=self.policy_version):
            microbatch = pack_together(batch, sequences, self.device)
            log_probs, _ = self._forward(microbatch)
            own = log_probs[: microbatch.response_lengths[0]]
            rescored[sequences[0]] = own.cpu().numpy()
        return rescored

    def _apply_gradients(self) -> float:
        """Clip, step, publish; returns the gradient norm before clipping."""
        self.updates += 1
        warmup = min(1.0, self.updates / max(1, self.config.warmup_steps))
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.lr * warmup
        norm = torch.nn.utils.clip_grad_norm_(list(self.masters), self.config.max_grad_norm)
        if math.isfinite(float(norm)):
            self.optimizer.step()
            self.masters.publish()
        self.optimizer.zero_grad(set_to_none=True)
        return float(norm)

    def save_model(self, folder: Path) -> None:
        """Write the weights as a Hugging Face folder that transformers and vLLM load."""
        write_model(self.decoder, self.spec, self.model_folder, folder)

    # Weight sync.

    def export_weights(self, bucket_bytes: int = 64 << 20) -> Iterator[dict[str, np.ndarray]]:
        """The bf16 weights by Hugging Face name, as int16 bits, in buckets of about that size."""
        bucket: dict[str, np.ndarray] = {}
        size = 0
        for name, tensor in named_hf_weights(self.decoder):
            bucket[name] = to_wire(tensor)
            size += bucket[name].nbytes
            if size >= bucket_bytes:
                yield bucket
                bucket, size = {}, 0
        if bucket:
            yield bucket

    def weight_checksums(self) -> dict[str, int]:
        return named_checksums(self.decoder)
