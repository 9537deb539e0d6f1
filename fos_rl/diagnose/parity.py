"""The same tokens through trainer and generator, compared operation by operation."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fos_rl.algorithms.mismatch import mismatch_metrics
from fos_rl.diagnose.capture import capture
from fos_rl.diagnose.full_vocabulary import full_vocabulary_kl
from fos_rl.diagnose.operations import (
    Trace,
    concatenate,
    operations,
    quantizer_inputs,
    run_operation,
)
from fos_rl.generator.engine import VllmGenerator
from fos_rl.generator.inspection import Place, generator_decoder, prefill, sampler_log_probs
from fos_rl.model.checksum import checksum_differences, named_checksums
from fos_rl.model.convert import QuantizedExperts, QuantizedLinear, named_codes
from fos_rl.model.decoder import Decoder
from fos_rl.model.log_probs import scale_logits
from fos_rl.quant.linear_autograd import tensors_of
from fos_rl.trainer.packing import pack
from fos_rl.trainer.routing_flips import routing_flip_metrics
from fos_rl.trainer.trainer import GrpoTrainer
from fos_rl.types import Rollout, TrainBatch

# Difference of one operation given the same input that is still the rounding of another order of
# additions, in units of eps * (|x| + rms of the row). bf16: one output rounding that falls to the
# other side is 1, and an attention kernel that rounds its probabilities adds as much. fp32: sums of
# thousands of terms, each rounded.
ROUNDING_UNITS = {torch.bfloat16: 4.0, torch.float32: 256.0}
# Tokens whose whole next-token distribution is compared.
FULL_VOCABULARY_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationDifference:
    """How far one operation's outputs are apart.

    In place: each one's own forward, with the differences that came before. Given the same input:
    the trainer's operation run on what entered the generator's.
    """

    name: str
    mean: float
    max: float
    same_input_max: float
    units: float
    """Largest same-input difference in units of rounding; see ROUNDING_UNITS."""
    computes_other: bool
    """More than rounding separates the two given the same input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """What `compare_forwards` found."""

    tokens: int
    sampled: int
    weights_that_differ: list[str]
    codes_that_differ: list[str]
    operations: list[OperationDifference]
    flipped_codes: dict[str, tuple[int, int]]
    """Codes and block scales that differ, of how many, by the linears that share an input."""
    routing_flips: dict[str, float]
    full_vocabulary_kl: float
    """Mean KL(generator || trainer) over the vocabulary, nats."""
    log_softmax_max: float
    """Trainer's log-softmax against the engine's, of the same logits."""
    sampled_differences: dict[str, float]
    """mismatch/ metrics of the trainer against the log-probs of the sampling (decode)."""
    prefill_mean: float
    """Mean |trainer - generator's prefill| over the sampled tokens."""
    decode_mean: float
    """Mean |generator's prefill - its decode|: the generator against itself."""

    @property
    def first_difference(self) -> OperationDifference | None:
        """The first operation with any differing bit."""
        return next((op for op in self.operations if op.max > 0), None)

    @property
    def culprit(self) -> OperationDifference | None:
        """The first operation that computes something else, given the same input."""
        return next((op for op in self.operations if op.computes_other), None)


@torch.no_grad()
def compare_forwards(
    trainer: GrpoTrainer, generator: VllmGenerator, rollouts: Sequence[Rollout]
) -> Parity:
    """The forwards of trainer and generator over rollouts that the generator has just sampled."""
    batch = _batch_of(rollouts)
    ours, trainer_log_probs = _trainer_trace(trainer, batch)
    theirs = _generator_trace(generator, batch)
    decoder = trainer.decoder
    # What the generator's rows attend to, when the trainer's attention runs on them.
    trainer._sequences.set([len(ids) - 1 for ids in batch.token_ids])
    predicting, targets = _predicting_rows(batch, ours["positions"].device)
    their_logits = generator_decoder(generator).logits(theirs["norm"][predicting])
    our_logits = decoder.logits(ours["norm"][predicting])
    differences = [_difference(decoder, name, ours, theirs) for name in operations(decoder)[:-1]]
    head = decoder.logits(theirs["norm"][predicting])
    differences.append(_measure("logits", our_logits, their_logits, head))
    temperature = trainer.rollout.temperature
    their_log_probs = sampler_log_probs(generator, their_logits)
    same_logits = scale_logits(their_logits, temperature).log_softmax(-1)
    our_log_probs = scale_logits(our_logits, temperature).log_softmax(-1)
    of_prefill = their_log_probs.gather(1, targets[:, None])[:, 0].double().cpu().numpy()
    sampled = np.concatenate(batch.generator_log_probs).astype(np.float64)
    scored = torch.cat(trainer_log_probs).double().cpu().numpy()
    some = slice(FULL_VOCABULARY_TOKENS)
    return Parity(
        tokens=len(ours["positions"]),
        sampled=len(sampled),
        weights_that_differ=checksum_differences(
            trainer.weight_checksums(), named_checksums(generator_decoder(generator))
        ),
        codes_that_differ=_codes_that_differ(decoder, generator_decoder(generator)),
        operations=differences,
        flipped_codes=_flipped_codes(decoder, ours, theirs),
        routing_flips=_routing_flips(decoder, ours, theirs),
        full_vocabulary_kl=float(
            full_vocabulary_kl(
                their_log_probs[some].cpu().numpy(), our_log_probs[some].cpu().numpy()
            ).mean()
        ),
        log_softmax_max=float((same_logits - their_log_probs).abs().max()),
        sampled_differences=mismatch_metrics([scored], [sampled]),
        prefill_mean=float(np.abs(scored - of_prefill).mean()),
        decode_mean=float(np.abs(of_prefill - sampled).mean()),
    )


def _batch_of(rollouts: Sequence[Rollout]) -> TrainBatch:
    return TrainBatch(
        token_ids=[np.array(r.prompt_ids + r.response_ids) for r in rollouts],
        prompt_lengths=[len(r.prompt_ids) for r in rollouts],
        generator_log_probs=[np.array(r.log_probs, np.float32) for r in rollouts],
        advantages=np.zeros(len(rollouts), np.float32),
    )


def _trainer_trace(trainer: GrpoTrainer, batch: TrainBatch) -> tuple[Trace, list[Tensor]]:
    """The trainer's forwards in its own micro-batches, without each sequence's last token, whose
    forward predicts nothing; and its log-probs."""
    order = range(batch.num_sequences)
    traces, log_probs = [], []
    with capture(trainer.decoder) as trace:
        for microbatch in pack(batch, order, trainer.config.microbatch_tokens, trainer.device):
            scored, _ = trainer._forward(microbatch)
            log_probs.append(scored)
            ends = np.cumsum(microbatch.lengths) - 1
            kept = np.delete(np.arange(sum(microbatch.lengths)), ends)
            index = torch.from_numpy(kept).to(trainer.device)
            traces.append({name: rows[index] for name, rows in trace.items()})
    return concatenate(traces, list(range(sum(len(t["positions"]) for t in traces)))), log_probs


def _generator_trace(generator: VllmGenerator, batch: TrainBatch) -> Trace:
    """The same rows from the generator's prefill, in the same order."""
    traces: list[Trace] = []
    places: list[Place] = []

    with capture(generator_decoder(generator)) as trace:

        def take(of_forward: list[Place]) -> None:
            # The engine may pad a batch.
            traces.append({name: rows[: len(of_forward)] for name, rows in trace.items()})
            places.extend(of_forward)

        prefill(generator, [ids[:-1].tolist() for ids in batch.token_ids], take)
    row = {place: number for number, place in enumerate(places)}
    wanted = [(i, p) for i, ids in enumerate(batch.token_ids) for p in range(len(ids) - 1)]
    return concatenate(traces, [row[place] for place in wanted])


def _predicting_rows(batch: TrainBatch, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows whose hidden state predicts a response token, and those tokens."""
    rows, targets, start = [], [], 0
    for ids, prompt in zip(batch.token_ids, batch.prompt_lengths, strict=True):
        rows.append(start + np.arange(prompt - 1, len(ids) - 1))
        targets.append(ids[prompt:])
        start += len(ids) - 1
    as_tensor = [torch.from_numpy(np.concatenate(x)).to(device) for x in (rows, targets)]
    return as_tensor[0], as_tensor[1]


def _difference(decoder: Decoder, name: str, ours: Trace, theirs: Trace) -> OperationDifference:
    return _measure(name, ours[name], theirs[name], run_operation(decoder, name, theirs))


def _measure(name: str, ours: Tensor, theirs: Tensor, replayed: Tensor) -> OperationDifference:
    size = (ours.float() - theirs.float()).abs()
    own = (replayed.float() - theirs.float()).abs()
    wide = theirs.float()
    scale = wide.abs() + wide.square().mean(dim=-1, keepdim=True).sqrt()
    unit = torch.finfo(theirs.dtype).eps * scale
    units = float((own / unit.clamp_min(torch.finfo(torch.float32).tiny)).max())
    return OperationDifference(
        name=name,
        mean=float(size.mean()),
        max=float(size.max()),
        same_input_max=float(own.max()),
        units=units,
        # NaN is no rounding.
        computes_other=not units <= ROUNDING_UNITS[theirs.dtype],
    )


def _codes_that_differ(ours: Decoder, theirs: Decoder) -> list[str]:
    """Quantized weights whose codes or scales are not the same bytes."""
    pairs = zip(named_codes(ours), named_codes(theirs), strict=True)
    return [
        name
        for (name, a), (_, b) in pairs
        if not torch.equal(a.view(torch.uint8).cpu(), b.view(torch.uint8).cpu())
    ]


def _flipped_codes(decoder: Decoder, ours: Trace, theirs: Trace) -> dict[str, tuple[int, int]]:
    """Elements that the two own activations quantize to different codes or block scales."""
    flips = {}
    modules = dict(decoder.named_modules())
    for site, name, read in quantizer_inputs(decoder):
        module = modules[name]
        if not isinstance(module, QuantizedLinear | QuantizedExperts):
            continue
        a, b = (tensors_of(module.quantizer.activation(read(t)))[:2] for t in (ours, theirs))
        elements = read(ours).numel()
        codes, scales = (
            x.view(torch.uint8) ^ y.view(torch.uint8) for x, y in zip(a, b, strict=True)
        )
        if 2 * codes.numel() == elements:
            # Two 4-bit codes per byte.
            codes = torch.stack((codes & 0x0F, codes >> 4))
        flips[site] = (int(codes.count_nonzero() + scales.count_nonzero()), elements)
    return flips


def _routing_flips(decoder: Decoder, ours: Trace, theirs: Trace) -> dict[str, float]:
    names = [name for name in operations(decoder) if name.endswith(".router")]
    if not names:
        return {}
    k = decoder.spec.architecture.num_experts_per_token
    chosen = [
        np.stack([t[name].topk(k, dim=-1).indices.cpu().numpy() for name in names], axis=1)
        for t in (ours, theirs)
    ]
    layers = [int(name.split(".")[1]) for name in names]
    return routing_flip_metrics(chosen[0], chosen[1], layers)
