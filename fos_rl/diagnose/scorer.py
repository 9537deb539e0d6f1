"""Recorded tokens through the trainer's forward, as it is or with one thing changed."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fos_rl.config import RunConfig
from fos_rl.model.convert import compute_dtype, keep_codes, prepare_weights
from fos_rl.model.decoder import Decoder
from fos_rl.model.log_probs import scale_logits
from fos_rl.spec import ModelSpec
from fos_rl.trainer.packing import MicroBatch, pack
from fos_rl.trainer.trainer import GrpoTrainer
from fos_rl.types import TrainBatch

Weights = dict[str, Tensor]
"""fp32 masters by the decoder's own parameter names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """Everything that makes hidden states of recorded tokens; a hypothesis replaces one field."""

    config: RunConfig
    model_folder: Path
    spec: ModelSpec
    weights: Weights
    batch: TrainBatch
    device: torch.device
    rounded_weights: bool = True
    """Whether the weights are rounded to bf16 before they are quantized or multiplied."""
    edit_decoder: Callable[[Decoder], None] | None = None
    edit_batch: Callable[[TrainBatch], TrainBatch] | None = None
    edit_microbatch: Callable[[MicroBatch], MicroBatch] | None = None
    before_forward: Callable[[MicroBatch], None] | None = None

    def but(self, **changes: object) -> "Forward":
        """The same forward with some fields changed."""
        return replace(self, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """A chunk of predictions."""

    logits: Float[Tensor, "rows vocab"]
    """fp32, before the temperature."""
    targets: Int[Tensor, " rows"]
    places: list[tuple[int, int]]
    """(sequence, index of the response token) of each row."""
    temperature: float
    batch: TrainBatch

    @property
    def seen(self) -> Bool[Tensor, "rows vocab"]:
        """Tokens of the context, as a repetition penalty knows them."""
        seen = torch.zeros_like(self.logits, dtype=torch.bool)
        for row, (sequence, index) in enumerate(self.places):
            end = self.batch.prompt_lengths[sequence] + index
            context = torch.from_numpy(self.batch.token_ids[sequence][:end]).to(seen.device)
            seen[row, context] = True
        return seen


Readout = Callable[[Rows], Float[Tensor, " rows"]]


def log_softmax_readout(rows: Rows) -> Float[Tensor, " rows"]:
    """The log-prob as it is defined: fp32 log-softmax of logits / temperature."""
    return target_log_probs(scale_logits(rows.logits, rows.temperature), rows.targets)


def target_log_probs(
    logits: Float[Tensor, "rows vocab"], targets: Int[Tensor, " rows"]
) -> Float[Tensor, " rows"]:
    """fp32 log-probs of the targets, from a log-softmax in the logits' dtype."""
    return logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0].float()


@dataclass(frozen=True, kw_only=True)
class Scored:
    """Hidden states that predict the response tokens; log-probs are read off them."""

    decoder: Decoder
    hidden: Float[Tensor, "rows hidden"]
    batch: TrainBatch
    temperature: float
    chunk: int
    targets: Int[Tensor, " rows"] = field(init=False)
    places: list[tuple[int, int]] = field(init=False)

    def __post_init__(self) -> None:
        responses = list(_responses(self.batch))
        ids = torch.from_numpy(np.concatenate(responses)).to(self.hidden.device)
        object.__setattr__(self, "targets", ids)
        places = [(i, j) for i, response in enumerate(responses) for j in range(len(response))]
        object.__setattr__(self, "places", places)

    @cached_property
    def log_probs(self) -> np.ndarray:
        """Log-probs of all response tokens as the trainer reads them out, one after another."""
        return self.read(log_softmax_readout)

    @torch.no_grad()
    def read(self, readout: Readout, rows: Sequence[int] | None = None) -> np.ndarray:
        """fp64 log-probs of all rows, or of some."""
        index = torch.arange(len(self.places)) if rows is None else torch.tensor(list(rows))
        parts = []
        for part in index.split(self.chunk):
            chunk = Rows(
                logits=self.decoder.logits(self.hidden[part.to(self.hidden.device)]),
                targets=self.targets[part.to(self.targets.device)],
                places=[self.places[i] for i in part.tolist()],
                temperature=self.temperature,
                batch=self.batch,
            )
            parts.append(readout(chunk).double().cpu().numpy())
        return np.concatenate(parts)


@torch.no_grad()
def run_forward(forward: Forward) -> Scored:
    """The trainer's forward over the batch, packed as the trainer packs it."""
    config = forward.config
    trainer = GrpoTrainer(
        forward.spec,
        forward.model_folder,
        config.rollout,
        config.algorithm,
        # The run's own way of differentiating may not fit another precision; it changes no forward.
        config.trainer.model_copy(update={"backward_override": None}),
        forward.device,
    )
    _load(trainer, forward)
    if forward.edit_decoder:
        forward.edit_decoder(trainer.decoder)
    batch = forward.edit_batch(forward.batch) if forward.edit_batch else forward.batch
    order = range(batch.num_sequences)
    hidden = []
    for packed in pack(batch, order, config.trainer.microbatch_tokens, forward.device):
        microbatch = forward.edit_microbatch(packed) if forward.edit_microbatch else packed
        if forward.before_forward:
            forward.before_forward(microbatch)
        trainer._sequences.set(microbatch.lengths)
        states = trainer.decoder(microbatch.token_ids, microbatch.positions)
        hidden.append(states[microbatch.predicted_from])
    return Scored(
        decoder=trainer.decoder,
        hidden=torch.cat(hidden),
        batch=batch,
        temperature=config.rollout.temperature,
        chunk=min(256, config.trainer.log_prob_chunk_tokens),
    )


def _load(trainer: GrpoTrainer, forward: Forward) -> None:
    if forward.rounded_weights:
        for name, master in trainer.masters.weights.items():
            master.copy_(forward.weights[name])
        trainer.masters.publish()
        return
    decoder = trainer.decoder.to(torch.float32)
    for name, parameter in decoder.named_parameters():
        parameter.copy_(forward.weights[name])
    # Quantized layers keep the codes of the fp32 weights; all others multiply in the compute dtype.
    prepare_weights(decoder)
    decoder.to(compute_dtype(forward.spec))
    keep_codes(decoder)


def _responses(batch: TrainBatch) -> Iterator[np.ndarray]:
    for ids, prompt in zip(batch.token_ids, batch.prompt_lengths, strict=True):
        yield ids[prompt:]
