"""Causes in the arithmetic of the forward: dtype, precision, scales, kernels."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, get_args

import torch
from torch import Tensor, nn

from fos_rl.diagnose.hypotheses import Hypothesis, Question, Untested, from_forward, remaining
from fos_rl.diagnose.operations import seeing_routes
from fos_rl.diagnose.scorer import Forward, run_forward
from fos_rl.model.convert import QuantizedExperts, QuantizedLinear
from fos_rl.model.decoder import Decoder
from fos_rl.model.moe import SparseMlp
from fos_rl.quant.quantizers import NVFP4Quantizer, QuantizedWeight
from fos_rl.spec import Bf16, FourOverSix, Mxfp8, Nvfp4, Precision, Quantized
from fos_rl.trainer.packing import MicroBatch


def compute_dtype(question: Question) -> Iterator[Hypothesis]:
    """The other of bfloat16 and float32 as the dtype of activations."""
    forward = question.forward
    dtype = "bfloat16" if forward.spec.precision.compute_dtype == "float32" else "float32"
    other = _with_precision(forward, compute_dtype=dtype)
    detail = f"activations were {dtype}"
    if dtype == "float32":
        yield from_forward("compute dtype", detail, other)
        return
    yield _noisy("compute dtype", detail, other)


def consistency(question: Question) -> Iterator[Hypothesis]:
    """Ordinary kernels where the exact ones were configured."""
    forward = question.forward
    if forward.spec.consistency == "exact":
        fast = forward.but(spec=forward.spec.model_copy(update={"consistency": "fast"}))
        yield _noisy("consistency", "ordinary kernels ran (consistency = fast)", fast)


def precision(question: Question) -> Iterator[Hypothesis]:
    """Every other precision, and every other value of an option of the configured one."""
    forward, configured = question.forward, question.forward.spec.precision
    common = {"compute_dtype": configured.compute_dtype}
    for other in _precisions(common):
        if other.recipe != configured.recipe:
            detail = f"the precision was {other.recipe}{_options(other)}"
            yield from_forward("precision", detail, _in(forward, other))
    for name in ("err_mode", "e4m3_scale_bound", "weight_block", "scale_mode"):
        if (option := type(configured).model_fields.get(name)) is None:
            continue
        for value in get_args(option.annotation):
            if value != getattr(configured, name):
                yield from_forward(
                    f"precision option {name}",
                    f"{name} was {value}",
                    _with_precision(forward, **{name: value}),
                )


def quantized_layers(question: Question) -> Iterator[Hypothesis | Untested]:
    """Other layers, or only one operand, quantized."""
    forward, precision = question.forward, question.forward.spec.precision
    if not isinstance(precision, Quantized):
        return
    everything: dict[str, Any] = {
        "include": ("*",),
        "exclude": (),
        "first_layers_bf16": 0,
        "last_layers_bf16": 0,
    }
    selections = {"all layers were quantized": everything}
    if forward.spec.architecture.num_layers > 2:
        selections["the first and last layer were not quantized"] = {
            "first_layers_bf16": 1,
            "last_layers_bf16": 1,
        }
    for detail, changes in selections.items():
        other = _with_precision(forward, **changes)
        if other.spec != forward.spec:
            yield from_forward("quantized layers", detail, other)
    yield from_forward(
        "quantized operands",
        "only the weights were quantized",
        forward.but(edit_decoder=_plain_activations),
    )
    yield from_forward(
        "quantized operands",
        "only the activations were quantized",
        forward.but(edit_decoder=_plain_weights),
    )


def quantizer_input(question: Question) -> Iterator[Hypothesis | Untested]:
    """fp32 masters where the bf16 weights that travel should be."""
    masters = question.forward.weights.values()
    if all(torch.equal(m, m.to(torch.bfloat16).float()) for m in masters):
        yield Untested(
            cause="quantizer input",
            reason="these masters are bf16 numbers, as before the first update, so that rounding "
            "changes nothing",
        )
        return
    yield from_forward(
        "quantizer input",
        "the fp32 masters were used, not their bf16 rounding",
        question.forward.but(rounded_weights=False),
    )


def scale_scope(question: Question) -> Iterator[Hypothesis]:
    """One activation amax per token, micro-batch, sequence, or decode step."""
    forward, precision = question.forward, question.forward.spec.precision
    if not isinstance(precision, Nvfp4):
        return
    if not precision.row_scaled_activation:
        row = _with_precision(forward, row_scaled_activation=True)
        yield from_forward("scale scope", "the activation scale was of each row", row)
    else:
        tensor = _with_precision(forward, row_scaled_activation=False)
        yield from_forward("scale scope", "the activation scale was of the whole tensor", tensor)
    # A decode step has a token of every sequence: they all are one micro-batch.
    whole = forward.config.trainer.model_copy(update={"microbatch_tokens": 1 << 40})
    forward = forward.but(config=forward.config.model_copy(update={"trainer": whole}))
    for detail, groups_of in (
        ("of one sequence at a time", _by_sequence),
        ("of the tensor of each decode step", _by_decode_step),
    ):
        scope = AmaxGroups()
        yield from_forward(
            "scale scope",
            f"the activation scale was {detail}",
            _with_precision(forward, row_scaled_activation=True).but(
                edit_decoder=scope.install,
                before_forward=lambda m, scope=scope, of=groups_of: scope.set(of(m)),
            ),
        )


def other_kernels(forward: Forward) -> Forward:
    """The same mathematics in another order of additions, which need not be the same anywhere."""

    def edit(decoder: Decoder) -> None:
        rounded_attention(decoder)
        for module in decoder.modules():
            if isinstance(module, nn.Linear):
                linear: Any = module
                linear.forward = lambda x, m=module: _split_linear(m, x)

    return forward.but(edit_decoder=edit)


def rounded_attention(decoder: Decoder) -> None:
    """Attention whose probabilities are rounded to the compute dtype before they are summed."""
    for layer in decoder.model.layers:
        inner: Any = layer.self_attn.inner  # type: ignore[union-attr]
        inner.forward = lambda q, k, v, s=inner.sequences: attend(q, k, v, s.lengths)


def attend(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
    """[tokens, heads, head_dim], causal within each sequence, fp32 sums."""
    parts = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
    return torch.cat([_attend_one(*part) for part in parts])


def _attend_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    group = q.shape[1] // k.shape[1]
    wide = [x.float().transpose(0, 1) for x in (q, k.repeat_interleave(group, 1))]
    scores = wide[0] @ wide[1].transpose(1, 2) * q.shape[-1] ** -0.5
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1)
    scores = scores.masked_fill(hidden, -torch.inf)
    unnormalised = (scores - scores.amax(-1, keepdim=True)).exp()
    values = v.repeat_interleave(group, 1).float().transpose(0, 1)
    mixed = unnormalised.to(q.dtype).float() @ values / unnormalised.sum(-1, keepdim=True)
    return mixed.transpose(0, 1).to(q.dtype)


def _split_linear(module: nn.Linear, x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    weight = module.weight.float()
    total = x[..., half:].float() @ weight[:, half:].T + x[..., :half].float() @ weight[:, :half].T
    return (total if module.bias is None else total + module.bias.float()).to(x.dtype)


@dataclass(eq=False)
class AmaxGroups:
    """An activation amax of each group of a micro-batch's tokens; of each expert's rows of one."""

    group: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    chosen: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """Experts of each token, as the last router chose them."""

    def set(self, group: Tensor) -> None:
        """Name the group of each token of the next forward; int64 [tokens]."""
        self.group = group

    def install(self, decoder: Decoder) -> None:
        """Give every NVFP4 module of the decoder an amax per group."""
        for module in decoder.modules():
            if isinstance(module, QuantizedLinear | QuantizedExperts) and isinstance(
                module.quantizer, NVFP4Quantizer
            ):
                sorted_by_expert = isinstance(module, QuantizedExperts)
                values = {
                    f.name: getattr(module.quantizer, f.name) for f in fields(module.quantizer)
                }
                groups = self.of_expert_rows if sorted_by_expert else lambda: self.group
                module.quantizer = _GroupedQuantizer(**values, groups=groups)
            elif isinstance(module, SparseMlp):
                mlp: Any = module
                mlp.forward = lambda x, run=mlp.forward: self._see(run, x)

    def of_expert_rows(self) -> Tensor:
        """Groups of rows that are sorted by expert, as those of `SparseMlp` are."""
        experts, order = self.chosen.flatten().sort(stable=True)
        tokens = order // self.chosen.shape[1]
        return self.group[tokens] * (int(experts.max()) + 1) + experts

    def _see(self, run: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        with seeing_routes(lambda experts, _: setattr(self, "chosen", experts)):
            return run(hidden)


@dataclass(frozen=True, kw_only=True)
class _GroupedQuantizer(NVFP4Quantizer):
    """NVFP4 whose rows share the amax of their group."""

    groups: Callable[[], Tensor]

    def activation(self, x: Tensor, **_: Any) -> Any:
        group = self.groups()
        amax = x.float().abs().amax(-1)
        shared = amax.new_zeros(int(group.max()) + 1).scatter_reduce(0, group, amax, "amax")
        return NVFP4Quantizer.activation(self, x, amax=shared[group], amax_per_row=True)

    def activation_for_gemm(self, x: Tensor, **_: Any) -> tuple[Any, Any]:
        quantized = self.activation(x)
        return quantized, quantized


def _by_sequence(microbatch: MicroBatch) -> Tensor:
    lengths = torch.tensor(microbatch.lengths)
    return torch.repeat_interleave(torch.arange(len(lengths)), lengths).to(
        microbatch.token_ids.device
    )


def _by_decode_step(microbatch: MicroBatch) -> Tensor:
    """Prompts together, then the tokens of all responses at one index, as if all began at once."""
    parts = []
    for length, response in zip(microbatch.lengths, microbatch.response_lengths, strict=True):
        prompt = torch.zeros(length - response, dtype=torch.int64)
        parts += [prompt, torch.arange(1, response + 1)]
    return torch.cat(parts).to(microbatch.token_ids.device)


def _plain_activations(decoder: Decoder) -> None:
    _dequantize(decoder, weights=True)


def _plain_weights(decoder: Decoder) -> None:
    _dequantize(decoder, weights=False)


def _dequantize(decoder: Decoder, *, weights: bool) -> None:
    """Multiply in plain precision with one operand's quantized values."""
    for module in decoder.modules():
        if isinstance(module, QuantizedLinear):
            module.forward = lambda x, m=module: _one_operand(m, x, weights)


def _one_operand(module: QuantizedLinear, x: Tensor, weights: bool) -> Tensor:
    quantizer: Any = module.quantizer
    weight = module.weight
    if weights:
        rowwise: QuantizedWeight = module.prepared("weight")
        weight = quantizer.dequantize(rowwise.rowwise, torch.float32)
    else:
        x = quantizer.dequantize(quantizer.activation(x), torch.float32)
    out = x.float() @ weight.float().T
    return (out if module.bias is None else out + module.bias.float()).to(module.weight.dtype)


def _noisy(cause: str, detail: str, forward: Forward) -> Hypothesis:
    """A hypothesis whose rounding repeats in size only."""
    log_probs = cache(lambda: run_forward(forward).log_probs)
    return Hypothesis(
        cause=cause,
        detail=detail,
        log_probs=log_probs,
        noise=lambda: remaining(run_forward(other_kernels(forward)).log_probs, log_probs()),
    )


def _precisions(common: dict[str, Any]) -> Iterator[Precision]:
    yield Bf16(**common)
    yield Mxfp8(**common)
    for block in ("16x16", "1x16"):
        yield Nvfp4(weight_block=block, **common)
        yield FourOverSix(weight_block=block, **common)


def _options(precision: Precision) -> str:
    return f", weight_block {precision.weight_block}" if isinstance(precision, Nvfp4) else ""


def _with_precision(forward: Forward, **changes: Any) -> Forward:
    return _in(forward, forward.spec.precision.model_copy(update=changes))


def _in(forward: Forward, precision: Precision) -> Forward:
    return forward.but(spec=forward.spec.model_copy(update={"precision": precision}))


KINDS = (compute_dtype, consistency, precision, quantized_layers, quantizer_input, scale_scope)
