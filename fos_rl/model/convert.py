"""From a spec to a decoder with quantized layers, for trainer and generator alike."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from fos_rl.exact.fixed_tiles import check_fixed_tiles
from fos_rl.model.decoder import AttentionFactory, Decoder
from fos_rl.model.moe import Experts
from fos_rl.quant import (
    MXFP8Quantizer,
    NVFP4Quantizer,
    QuantizedWeight,
    prepare_weight,
    quantized_grouped_mm,
    quantized_linear,
)
from fos_rl.quant.gemm import Gemm
from fos_rl.quant.linear_autograd import (
    as_quantized_weight,
    check_contraction,
    check_native_shapes,
    tensors_of,
)
from fos_rl.quant.quantizers import Backward, Quantizer, resolve_backward
from fos_rl.quant.weight_state import WeightState
from fos_rl.spec import Bf16, FourOverSix, ModelSpec, Mxfp8, Nvfp4, Quantized

_COMPUTE_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_EXPERT_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def compute_dtype(spec: ModelSpec) -> torch.dtype:
    """Of activations and of the working copy of the weights, in trainer and generator."""
    return _COMPUTE_DTYPES[spec.precision.compute_dtype]


def build_decoder(
    spec: ModelSpec, attention: AttentionFactory, backward_override: Backward | None = None
) -> Decoder:
    """A decoder whose layers are quantized as `spec.precision` says; weights are not loaded.

    Args:
        backward_override: how the quantized layers differentiate; None takes the precision's
            default. It changes no forward.

    Raises:
        ValueError: when a pattern matches nothing, a layer cannot be quantized, or the backward
            mode does not fit the precision.
        RuntimeError: when this machine's products cannot be as `spec.consistency` wants them.
    """
    decoder = Decoder(spec, attention)
    if not isinstance(spec.precision, Bf16):
        _quantize(decoder, spec.precision, backward_override)
    if spec.consistency == "exact" and decoder.head_weight.is_cpu:
        check_fixed_tiles({p.shape[-2:] for p in decoder.parameters() if p.dim() > 1})
    return decoder


def _quantize(
    decoder: Decoder, precision: Mxfp8 | Nvfp4 | FourOverSix, backward_override: Backward | None
) -> None:
    quantizer = quantizer_of(precision)
    backward = resolve_backward(backward_override, quantizer.row_scaled_activation)
    gemm: Gemm = "fixed_tile" if decoder.spec.consistency == "exact" else precision.gemm
    chosen = _chosen_layers(decoder, precision, decoder.spec.architecture.num_layers)
    for name, module in list(decoder.named_modules()):
        if isinstance(module, Experts):
            quantized = [p for p in _EXPERT_PROJECTIONS if f"{name}.{p}" in chosen]
            for projection in quantized:
                _check(
                    f"{name}.{projection}", getattr(module, projection), quantizer, gemm, backward
                )
            if quantized:
                replacement = QuantizedExperts(module, quantized, quantizer, gemm, backward)
                decoder.set_submodule(name, replacement)
        elif name in chosen:
            assert isinstance(module, nn.Linear)
            _check(name, module.weight, quantizer, gemm, backward)
            decoder.set_submodule(name, QuantizedLinear(module, quantizer, gemm, backward))


def check_spec(spec: ModelSpec, backward_override: Backward | None = None) -> list[str]:
    """Names of the layers that get quantized; raises what `build_decoder` would, without memory."""
    with torch.device("meta"):
        decoder = build_decoder(spec, lambda _: nn.Identity(), backward_override)
    return list(quantized_weight_names(decoder))


def quantizer_of(precision: Mxfp8 | Nvfp4 | FourOverSix) -> Quantizer:
    """What quantizes as a spec's precision says."""
    match precision:
        case Mxfp8():
            return MXFP8Quantizer(precision.scale_mode)
        case FourOverSix():
            return NVFP4Quantizer(
                "four_over_six",
                weight_block=precision.weight_block,
                err_mode=precision.err_mode,
                e4m3_scale_bound=precision.e4m3_scale_bound,
                row_scaled_activation=precision.row_scaled_activation,
            )
        case Nvfp4():
            return NVFP4Quantizer(
                "nvfp4",
                weight_block=precision.weight_block,
                row_scaled_activation=precision.row_scaled_activation,
            )


class PreparedWeights(nn.Module):
    """A leaf module that multiplies weights quantized ahead of the forward.

    `prepare` quantizes the current weights. It writes into the tensors of the call before, so that
    a captured CUDA graph sees them. Whoever writes weights calls `prepare_weights` after it; until
    then, and with weights that `functional_call` puts in their place, each forward quantizes the
    weight it finds, which is slow but never stale. Copies and pickles come without codes.
    """

    quantizer: Quantizer

    def __init__(self) -> None:
        super().__init__()
        self._prepared: dict[str, QuantizedWeight] = {}

    def weights(self) -> dict[str, Tensor]:
        """The weights that are quantized, by parameter name."""
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_prepared": {}}

    def prepared(self, name: str) -> QuantizedWeight:
        """The named weight as it is now, quantized: ahead if it has not changed since."""
        weight = getattr(self, name)
        # A compiled graph would keep the codes for good.
        if not torch.compiler.is_compiling():
            if name not in self._prepared:
                self.prepare()
            if self._prepared[name].is_of(weight):
                return self._prepared[name]
        return as_quantized_weight(None, weight, self.quantizer)

    # vLLM first calls the forward in inference mode, whose tensors could not be written later.
    @torch.inference_mode(False)
    @torch.no_grad()
    def prepare(self) -> None:
        """Quantize every weight as it is now, into the memory of its earlier codes."""
        for name, weight in self.weights().items():
            new = prepare_weight(weight, self.quantizer)
            old = self._prepared.get(name)
            self._prepared[name] = new if old is None else _copy_prepared(old, new)

    def keep_codes(self) -> None:
        """Let the codes count as those of the weights as they are now."""
        for name, weight in self.weights().items():
            held = self._prepared[name]
            self._prepared[name] = replace(held, state=WeightState.of(weight))


class QuantizedLinear(PreparedWeights):
    """nn.Linear with quantized operands; holds the very parameters it replaces."""

    def __init__(
        self, linear: nn.Linear, quantizer: Quantizer, gemm: Gemm, backward: Backward
    ) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        self.quantizer = quantizer
        self.gemm: Gemm = gemm
        self.backward: Backward = backward

    def weights(self) -> dict[str, Tensor]:
        """The one weight, [n, k], under its name."""
        return {"weight": self.weight}

    def forward(self, x: Float[Tensor, "tokens k"]) -> Float[Tensor, "tokens n"]:
        """x @ weight.T + bias in x's dtype, by quantized operands."""
        return quantized_linear(
            x,
            self.weight,
            self.bias,
            quantizer=self.quantizer,
            gemm=self.gemm,
            backward=self.backward,
            quantized_weight=self.prepared("weight"),
        )


class QuantizedExperts(Experts, PreparedWeights):
    """`Experts` with some or all of its projections quantized, one amax per expert's weight."""

    def __init__(
        self,
        experts: Experts,
        projections: Sequence[str],
        quantizer: Quantizer,
        gemm: Gemm,
        backward: Backward,
    ) -> None:
        PreparedWeights.__init__(self)
        self.ops = experts.ops
        self.gate_proj = experts.gate_proj
        self.up_proj = experts.up_proj
        self.down_proj = experts.down_proj
        self.projections = frozenset(projections)
        self.quantizer = quantizer
        self.gemm: Gemm = gemm
        self.backward: Backward = backward

    def weights(self) -> dict[str, Tensor]:
        """The quantized projections' weights, [experts, n, k], by name."""
        return {name: getattr(self, name) for name in sorted(self.projections)}

    def multiply(
        self, projection: str, rows: Float[Tensor, "rows k"], ends: Int[Tensor, " experts"]
    ) -> Float[Tensor, "rows n"]:
        """Rows sorted by expert times their expert's projection, by quantized operands where the
        projection is quantized."""
        if projection not in self.projections:
            return super().multiply(projection, rows, ends)
        return quantized_grouped_mm(
            rows,
            getattr(self, projection),
            ends,
            quantizer=self.quantizer,
            gemm=self.gemm,
            backward=self.backward,
            quantized_weight=self.prepared(projection),
        )


def prepare_weights(decoder: nn.Module) -> None:
    """Quantize every quantized layer's current weights: once per step, once per sync."""
    for _, module in _quantized_modules(decoder):
        module.prepare()


def keep_codes(decoder: nn.Module) -> None:
    """Multiply the codes of before with weights that were only cast since, such as to bf16."""
    for _, module in _quantized_modules(decoder):
        module.keep_codes()


def quantized_weight_names(decoder: nn.Module) -> Iterator[str]:
    """Dotted names of the quantized weights; experts of a layer come stacked, under one name."""
    for name, module in _quantized_modules(decoder):
        yield from (f"{name}.{weight}" for weight in module.weights())


def named_codes(decoder: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Codes, block scales and global amaxes of every quantized weight, as the forward uses them."""
    for name, module in _quantized_modules(decoder):
        for weight in module.weights():
            tensors = tensors_of(module.prepared(weight).rowwise)
            for part, tensor in zip(("codes", "block_scale", "global_amax"), tensors, strict=False):
                yield f"{name}.{weight}.{part}", tensor


def _quantized_modules(decoder: nn.Module) -> Iterator[tuple[str, PreparedWeights]]:
    for name, module in decoder.named_modules():
        if isinstance(module, PreparedWeights):
            yield name, module


def _copy_prepared(old: QuantizedWeight, new: QuantizedWeight) -> QuantizedWeight:
    """new in the memory of old; new itself on another device, where no graph knows old's."""
    targets = [*tensors_of(old.rowwise), *tensors_of(old.operand)]
    sources = [*tensors_of(new.rowwise), *tensors_of(new.operand)]
    if old.rowwise.device != new.rowwise.device:
        return new
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)
    return replace(old, state=new.state)


def _chosen_layers(decoder: Decoder, precision: Quantized, num_layers: int) -> set[str]:
    """Names of the linears and expert projections that the patterns and windows select."""
    first, last = precision.first_layers_bf16, num_layers - precision.last_layers_bf16
    if first >= last:
        raise ValueError(
            f"model.precision.first_layers_bf16 = {precision.first_layers_bf16} and "
            f"last_layers_bf16 = {precision.last_layers_bf16} leave none of {num_layers} layers to "
            "quantize; lower them"
        )
    candidates = list(_candidates(decoder))
    for field in ("include", "exclude"):
        for pattern in getattr(precision, field):
            if not any(fnmatchcase(name, pattern) for name in candidates):
                raise ValueError(
                    f"model.precision.{field}: pattern {pattern!r} matches no layer of this model; "
                    f"remove it, or write it for names like {candidates[0]} and {candidates[-1]}"
                    f"{_dense_hint(decoder, pattern)}"
                )
    inside = [name for name in candidates if first <= int(name.split(".")[2]) < last]
    chosen = set(_matching(inside, precision.include)) - set(_matching(inside, precision.exclude))
    if not chosen:
        raise ValueError(
            f"model.precision quantizes nothing: include {list(precision.include)} less exclude "
            f"{list(precision.exclude)} leaves no layer from {first} to {last - 1}. Widen include, "
            "or set model.precision.recipe = 'bf16'"
        )
    return chosen


def _matching(names: list[str], patterns: tuple[str, ...]) -> Iterator[str]:
    return (name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns))


def _dense_hint(decoder: Decoder, pattern: str) -> str:
    if "experts" not in pattern or decoder.spec.architecture.num_experts:
        return ""
    return ". The model is dense, without experts: quantize its MLPs with '*.mlp.*'"


def _candidates(decoder: Decoder) -> Iterator[str]:
    for name, module in decoder.named_modules():
        if not name.startswith("model.layers."):
            continue
        if isinstance(module, Experts):
            yield from (f"{name}.{projection}" for projection in _EXPERT_PROJECTIONS)
        elif isinstance(module, nn.Linear) and not name.endswith(".mlp.gate"):
            yield name


def _check(name: str, weight: Tensor, quantizer: Quantizer, gemm: Gemm, backward: Backward) -> None:
    try:
        check_contraction(quantizer, backward, weight)
        if gemm == "native":
            check_native_shapes(quantizer, backward, *weight.shape[-2:])
    except (ValueError, RuntimeError) as error:
        raise ValueError(
            f"{name} cannot be quantized: {error} Add {name!r} to model.precision.exclude to leave "
            "it in bf16"
        ) from None
