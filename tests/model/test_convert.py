"""From a spec to quantized layers: which, with what refusals, and never with stale codes."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fos_rl.model import transport
from fos_rl.model.checksum import named_checksums
from fos_rl.model.convert import (
    QuantizedExperts,
    QuantizedLinear,
    build_decoder,
    check_spec,
    named_codes,
    prepare_weights,
    quantized_weight_names,
    quantizer_of,
)
from fos_rl.model.hf import (
    load_hf_weights,
    named_hf_weights,
    read_weights,
    write_model,
)
from fos_rl.model.packed_attention import packed_attention
from fos_rl.model.tiny import tiny_weights, write_tiny_model
from fos_rl.model.transport import WeightLoader, pack_weights, unpack_weights
from fos_rl.quant import (
    MXFP8Quantizer,
    NVFP4Quantizer,
    four_over_six_quantize,
    mxfp8_quantize,
    nvfp4_quantize,
    prepare_weight,
    quantized_grouped_mm,
    quantized_linear,
)
from fos_rl.quant.linear_autograd import tensors_of
from fos_rl.quant.quantizers import Backward, Quantizer
from fos_rl.spec import Bf16, FourOverSix, Mxfp8, Nvfp4, Precision
from fos_rl.trainer import masters
from fos_rl.trainer.masters import Masters
from tests.support.decoders import Packed, random_samples, tiny

ATTENTION = [f"self_attn.{p}_proj" for p in "qkvo"]
DENSE_MLP = [f"mlp.{p}_proj" for p in ("gate", "up", "down")]
EXPERTS = [f"mlp.experts.{p}_proj" for p in ("gate", "up", "down")]
PARTS = ("codes", "block_scale", "global_amax")
QUANTIZERS = [
    pytest.param(Mxfp8(), MXFP8Quantizer("rceil"), id="mxfp8"),
    pytest.param(Mxfp8(scale_mode="floor"), MXFP8Quantizer("floor"), id="mxfp8 floor"),
    pytest.param(Nvfp4(), NVFP4Quantizer("nvfp4", "16x16"), id="nvfp4"),
    pytest.param(
        Nvfp4(row_scaled_activation=False, weight_block="1x16"),
        NVFP4Quantizer("nvfp4", "1x16", row_scaled_activation=False),
        id="nvfp4 per tensor",
    ),
    pytest.param(
        FourOverSix(weight_block="1x16"),
        NVFP4Quantizer("four_over_six", "1x16", "mse", 256),
        id="four_over_six",
    ),
    pytest.param(
        FourOverSix(err_mode="mae", e4m3_scale_bound=448, row_scaled_activation=False),
        NVFP4Quantizer("four_over_six", "16x16", "mae", 448, row_scaled_activation=False),
        id="four_over_six mae 448 per tensor",
    ),
]


def converted(
    family: str, precision: Precision, backward: Backward | None = None, **changes: Any
) -> Packed:
    """A tiny model whose decoder is built from the precision, with the same bf16 weights."""
    packed = tiny(family, **changes)
    packed.spec = packed.spec.model_copy(update={"precision": precision})
    packed.decoder = build_decoder(packed.spec, packed_attention(packed.sequences), backward)
    load_hf_weights(packed.decoder, packed.weights.items())
    return packed


def names(layers: list[int], modules: list[str]) -> set[str]:
    return {f"model.layers.{layer}.{module}" for layer in layers for module in modules}


def chosen(family: str, precision: Precision, **changes: Any) -> set[str]:
    spec = tiny(family, **changes).spec.model_copy(update={"precision": precision})
    return {name.removesuffix(".weight") for name in check_spec(spec)}


ALL = [0, 1, 2]


@pytest.mark.parametrize(
    ("family", "selection", "expected"),
    [
        pytest.param("llama", {}, names(ALL, ATTENTION + DENSE_MLP), id="everything"),
        pytest.param("qwen3_moe", {}, names(ALL, ATTENTION + EXPERTS), id="not the router"),
        pytest.param(
            "qwen3_moe", {"include": ["*.mlp.experts.*"]}, names(ALL, EXPERTS), id="experts only"
        ),
        pytest.param(
            "qwen3",
            {"exclude": ["*.self_attn.*", "*.down_proj"]},
            names(ALL, DENSE_MLP[:2]),
            id="exclude wins",
        ),
        pytest.param(
            "qwen3",
            {"include": ["*.layers.0.*", "*.o_proj"], "exclude": ["model.layers.1.*"]},
            names([0], ATTENTION + DENSE_MLP) | names([2], ["self_attn.o_proj"]),
            id="union of patterns",
        ),
        pytest.param(
            "qwen3",
            {"first_layers_bf16": 1, "last_layers_bf16": 1},
            names([1], ATTENTION + DENSE_MLP),
            id="both windows",
        ),
        pytest.param(
            "qwen3_moe",
            {"first_layers_bf16": 2, "include": ["*_proj"], "exclude": ["*.k_proj"]},
            names([2], [a for a in ATTENTION if "k_" not in a] + EXPERTS),
            id="first window",
        ),
        pytest.param(
            "qwen3_moe",
            {"include": ["*.experts.down_proj"], "last_layers_bf16": 2},
            names([0], EXPERTS[2:]),
            id="one expert projection",
        ),
    ],
)
def test_patterns_and_windows_select_layers(
    family: str, selection: dict[str, Any], expected: set[str]
) -> None:
    for precision in (Mxfp8, Nvfp4, FourOverSix):
        assert chosen(family, precision(**selection)) == expected


def test_a_dense_layer_of_a_mixture_has_linears() -> None:
    picked = chosen("qwen3_moe", Mxfp8(include=("*.mlp.*",)), mlp_only_layers=[1])
    assert picked == names([0, 2], EXPERTS) | names([1], DENSE_MLP)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_norms_embeddings_router_and_head_stay(family: str) -> None:
    decoder = converted(family, FourOverSix()).decoder
    quantized = set(quantized_weight_names(decoder))
    rest = {name for name, _ in decoder.named_parameters()} - quantized
    kinds = ("norm.weight", ".bias", "embed_tokens.weight", "lm_head", "mlp.gate.weight")
    assert rest
    assert all(name.endswith(kinds) or "lm_head" in name for name in rest), rest
    for outside in ("lm_head*", "*norm*", "*embed*", "*.mlp.gate"):
        with pytest.raises(ValueError, match="matches no layer"):
            chosen(family, FourOverSix(include=("*", outside)))


def test_bf16_converts_nothing() -> None:
    decoder = converted("qwen3_moe", Bf16()).decoder
    assert list(quantized_weight_names(decoder)) == list(named_codes(decoder)) == []


# Refusals.


@pytest.mark.parametrize(
    ("family", "precision", "words"),
    [
        pytest.param(
            "qwen3",
            FourOverSix(include=("*.mlp.experts.*",)),
            ["model.precision.include", "'*.mlp.experts.*'", "matches no layer", "'*.mlp.*'"],
            id="experts of a dense model",
        ),
        pytest.param(
            "qwen3_moe",
            Mxfp8(exclude=("*.down",)),
            ["model.precision.exclude", "'*.down'", "model.layers.2.mlp.experts.down_proj"],
            id="exclude matches nothing",
        ),
        pytest.param(
            "llama",
            Nvfp4(first_layers_bf16=2, last_layers_bf16=1),
            ["first_layers_bf16 = 2", "last_layers_bf16 = 1", "none of 3 layers", "lower"],
            id="windows leave nothing",
        ),
        pytest.param(
            "llama",
            Nvfp4(first_layers_bf16=1, include=("model.layers.0.*",)),
            ["quantizes nothing", "'model.layers.0.*'", "from 1 to 2", "bf16"],
            id="include outside the windows",
        ),
        pytest.param(
            "llama", Mxfp8(exclude=("*",)), ["quantizes nothing", "Widen"], id="all excluded"
        ),
    ],
)
def test_selections_of_nothing_are_refused(
    family: str, precision: Precision, words: list[str]
) -> None:
    with pytest.raises(ValueError, match=r".") as error:
        chosen(family, precision)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("family", "changes", "precision", "backward", "first", "words"),
    [
        pytest.param(
            "qwen3",
            {"intermediate_size": 72},
            FourOverSix(weight_block="1x16"),
            None,
            "model.layers.0.mlp.down_proj",
            ["K = 72", "K % 16"],
            id="K of 16",
        ),
        pytest.param(
            "qwen3_moe",
            {"moe_intermediate_size": 48},
            Mxfp8(),
            "dequantized",
            "model.layers.0.mlp.experts.down_proj",
            ["K = 48", "K % 32"],
            id="K of 32, experts",
        ),
        pytest.param(
            "qwen3",
            {"num_key_value_heads": 1, "head_dim": 24, "num_attention_heads": 2},
            Nvfp4(weight_block="16x16"),
            None,
            "model.layers.0.self_attn.k_proj",
            ["N = 24", "'16x16'", "'1x16'"],
            id="N of 16x16",
        ),
        pytest.param(
            "qwen3",
            {"num_key_value_heads": 1, "head_dim": 24, "num_attention_heads": 2},
            Nvfp4(weight_block="1x16", row_scaled_activation=False),
            None,
            "model.layers.0.self_attn.k_proj",
            ["N = 24", "backward 'quantized'", "'high_precision' or 'dequantized'"],
            id="N of backward quantized",
        ),
    ],
)
def test_a_layer_that_cannot_be_is_named_with_the_remedy(
    family: str,
    changes: dict[str, Any],
    precision: Any,
    backward: Backward | None,
    first: str,
    words: list[str],
) -> None:
    def refusal(precision: Precision) -> str | None:
        spec = tiny(family, **changes).spec.model_copy(update={"precision": precision})
        try:
            check_spec(spec, backward)
        except ValueError as error:
            return str(error)
        return None

    message = refusal(precision)
    assert message is not None
    assert message.startswith(f"{first} cannot be quantized")
    for word in [*words, f"Add {first!r} to model.precision.exclude"]:
        assert word in message
    # The remedy, taken for as long as something is refused, leads to a model that is built.
    excluded: list[str] = []
    while message is not None:
        excluded.append(message.split(" ")[0])
        message = refusal(precision.model_copy(update={"exclude": tuple(excluded)}))
    assert 3 <= len(excluded) <= 9


def test_other_remedies_of_the_message_work() -> None:
    changes = {"num_key_value_heads": 1, "head_dim": 24, "num_attention_heads": 2}
    spec = tiny("qwen3", **changes).spec
    per_tensor = Nvfp4(
        weight_block="1x16", row_scaled_activation=False, exclude=("*.o_proj", "*.q_proj")
    )
    for mode in ("high_precision", "dequantized"):
        assert check_spec(spec.model_copy(update={"precision": per_tensor}), mode)


@pytest.mark.wrong_types
def test_a_backward_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'quantized' with row_scaled_activation=True"):
        converted("llama", Nvfp4(), "quantized")
    with pytest.raises(ValueError, match="'Dequantized'"):
        converted("llama", Nvfp4(), "Dequantized")  # type: ignore[arg-type]


# What a converted layer computes.


def modes_of(quantizer: Quantizer) -> list[Backward]:
    modes: list[Backward] = ["high_precision", "dequantized"]
    return modes if quantizer.row_scaled_activation else ["quantized", *modes]


def recorded_calls(packed: Packed) -> dict[str, tuple[tuple[Tensor, ...], Tensor]]:
    """Inputs and output of every quantized module in one forward."""
    calls: dict[str, tuple[tuple[Tensor, ...], Tensor]] = {}

    def record(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            calls[name] = tuple(x.detach().clone() for x in inputs), output.detach().clone()

        return hook

    for name, module in packed.decoder.named_modules():
        if isinstance(module, QuantizedLinear | QuantizedExperts):
            module.register_forward_hook(record(name))
    packed.hidden(random_samples(9, 30, 1))
    return calls


@pytest.mark.parametrize(("precision", "quantizer"), QUANTIZERS)
def test_a_linear_is_quantized_linear_of_the_files_weight(
    precision: Precision, quantizer: Quantizer
) -> None:
    """Outputs and gradients, with biases, bit for bit."""
    for mode in modes_of(quantizer):
        packed = converted("llama", precision, mode, attention_bias=True, mlp_bias=True)
        calls = recorded_calls(packed)
        assert set(calls) == names(ALL, ATTENTION + DENSE_MLP)
        for name, ((x,), output) in calls.items():
            module = packed.decoder.get_submodule(name)
            weight = packed.weights[f"{name}.weight"].float().requires_grad_()
            bias = packed.weights[f"{name}.bias"].float()
            by_hand = quantized_linear(x, weight, bias, quantizer=quantizer, backward=mode)
            assert torch.equal(output, by_hand), name
            dy = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
            [want] = torch.autograd.grad(by_hand, weight, dy)
            [got] = torch.autograd.grad(module(x), module.weight, dy)
            assert torch.equal(got, want), f"{name}: gradient of {mode}"


@pytest.mark.parametrize(("precision", "quantizer"), QUANTIZERS)
def test_experts_are_quantized_grouped_mms_of_the_files_weights(
    precision: Precision, quantizer: Quantizer
) -> None:
    for mode in modes_of(quantizer):
        packed = converted("qwen3_moe", precision, mode)
        calls = recorded_calls(packed)
        for layer in ALL:
            name = f"model.layers.{layer}.mlp.experts"
            (rows, ends), output = calls[name]
            stacked = {
                part: torch.stack(
                    [packed.weights[f"{name}.{e}.{part}.weight"].float() for e in range(8)]
                ).requires_grad_()
                for part in ("gate_proj", "up_proj", "down_proj")
            }

            def multiply(x: Tensor, part: str, stacked=stacked, ends=ends, mode=mode) -> Tensor:
                return quantized_grouped_mm(
                    x, stacked[part], ends, quantizer=quantizer, backward=mode
                )

            hidden = F.silu(multiply(rows, "gate_proj")) * multiply(rows, "up_proj")
            by_hand = multiply(hidden, "down_proj")
            assert torch.equal(output, by_hand), name
            module = packed.decoder.get_submodule(name)
            dy = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
            wanted = torch.autograd.grad(by_hand, list(stacked.values()), dy)
            parameters = [getattr(module, part) for part in stacked]
            for got, want in zip(
                torch.autograd.grad(module(rows, ends), parameters, dy), wanted, strict=True
            ):
                assert torch.equal(got, want), f"{name}: gradient of {mode}"


def test_unquantized_projections_of_experts_stay_exact() -> None:
    packed = converted("qwen3_moe", FourOverSix(include=("*.experts.down_proj",)))
    (rows, ends), output = recorded_calls(packed)["model.layers.1.mlp.experts"]
    module = packed.decoder.get_submodule("model.layers.1.mlp.experts")
    plain = tiny("qwen3_moe").decoder.get_submodule("model.layers.1.mlp.experts")
    starts = [0, *ends.tolist()]
    hidden = torch.cat(
        [
            F.silu(F.linear(part, plain.gate_proj[e])) * F.linear(part, plain.up_proj[e])
            for e, part in enumerate(rows[a:b] for a, b in pairwise(starts))
        ]
    )
    quantizer = NVFP4Quantizer("four_over_six", "16x16")
    assert torch.equal(
        output, quantized_grouped_mm(hidden, module.down_proj, ends, quantizer=quantizer)
    )


def test_all_backward_modes_have_one_forward() -> None:
    for precision in (Mxfp8(), Nvfp4(row_scaled_activation=False)):
        outputs = [
            converted("qwen3_moe", precision, mode).log_probs(random_samples(20, 7))
            for mode in (None, "quantized", "high_precision", "dequantized")
        ]
        assert all(torch.equal(outputs[0], other) for other in outputs[1:])
        assert not torch.equal(outputs[0], tiny("qwen3_moe").log_probs(random_samples(20, 7)))


# Weights are quantized once an update, in place, and never multiplied stale.


def codes_of(packed: Packed) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in named_codes(packed.decoder)}


def assert_codes(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, tensor in got.items():
        different = tensor.view(torch.uint8) != want[name].view(torch.uint8)
        assert not different.any(), f"{name}: {int(different.sum())}/{different.numel()} bytes"


SAMPLES = random_samples(24, 11)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("precision", [Mxfp8(), Nvfp4(), FourOverSix()], ids=lambda p: p.recipe)
def test_preparing_again_writes_the_same_tensors(family: str, precision: Precision) -> None:
    packed = converted(family, precision)
    other = Packed(packed.config, seed=1)
    before = {name: tensor.data_ptr() for name, tensor in named_codes(packed.decoder)}
    operands = operands_of(packed)
    old_output = packed.log_probs(SAMPLES)
    load_hf_weights(packed.decoder, other.weights.items())
    # Without prepare_weights each use quantizes the new weight, somewhere else.
    unprepared = codes_of(packed)
    assert not {t.data_ptr() for _, t in named_codes(packed.decoder)} & set(before.values())
    prepare_weights(packed.decoder)
    assert_codes(codes_of(packed), unprepared)
    assert {name: t.data_ptr() for name, t in named_codes(packed.decoder)} == before
    assert all(a is b for a, b in zip(operands, operands_of(packed), strict=True))
    fresh = converted(family, precision)
    fresh.decoder = build_decoder(fresh.spec, packed_attention(fresh.sequences))
    load_hf_weights(fresh.decoder, other.weights.items())
    assert_codes(codes_of(packed), codes_of(fresh))
    assert torch.equal(packed.log_probs(SAMPLES), fresh.log_probs(SAMPLES))
    assert not torch.equal(packed.log_probs(SAMPLES), old_output)


def operands_of(packed: Packed) -> list[Tensor | None]:
    modules = packed.decoder.modules()
    quantized = [m for m in modules if isinstance(m, QuantizedLinear | QuantizedExperts)]
    return [m.prepared(name).operand for m in quantized for name in m.weights()]


def all_held(decoder: nn.Module) -> bool:
    """Whether every quantized weight is multiplied as prepared, none anew."""
    modules = (m for m in decoder.modules() if isinstance(m, QuantizedLinear | QuantizedExperts))
    return all(m.prepared(name) is m.prepared(name) for m in modules for name in m.weights())


def updates(packed: Packed) -> dict[str, Callable[[dict[str, Tensor]], None]]:
    """The two ways in which weights reach a decoder: the trainer's update and the sync."""

    def publish(weights: dict[str, Tensor]) -> None:
        held = Masters(packed.decoder, torch.float32)
        packed.log_probs(SAMPLES)
        source = tiny(packed.config["model_type"]).decoder
        load_hf_weights(source, weights.items())
        for name, parameter in source.named_parameters():
            held.weights[name].copy_(parameter.detach())
        held.publish()

    def sync(weights: dict[str, Tensor]) -> None:
        packed.log_probs(SAMPLES)
        loader = WeightLoader(packed.decoder)
        loader.load(weights.items())
        loader.finish()

    return {"masters": publish, "sync": sync}


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("update", ["masters", "sync"])
def test_an_update_is_quantized_at_once(
    family: str, update: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal to a fresh conversion, and quantized ahead of the forward."""
    precision = FourOverSix()
    fresh = converted(family, precision)
    new = tiny_weights(fresh.spec, seed=1)
    load_hf_weights(fresh.decoder, new.items())
    want = fresh.log_probs(SAMPLES)

    updated = converted(family, precision)
    updates(updated)[update](new)
    assert_codes(codes_of(updated), codes_of(fresh))
    assert torch.equal(updated.log_probs(SAMPLES), want)

    # An update that left prepare_weights out would be right, but quantize in every forward.
    late = converted(family, precision)
    for module in (masters, transport):
        monkeypatch.setattr(module, "prepare_weights", lambda _: None)
    updates(late)[update](new)
    assert torch.equal(late.log_probs(SAMPLES), want)
    held = (all_held(packed.decoder) for packed in (updated, late))
    assert list(held) == [True, False]


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("precision", [Mxfp8(), Nvfp4(), FourOverSix()], ids=lambda p: p.recipe)
def test_codes_do_not_depend_on_the_compute_dtype(family: str, precision: Precision) -> None:
    """What is quantized is what travelled: the bf16 values, also where masters have more bits."""
    codes = []
    for dtype in (torch.float32, torch.bfloat16):
        packed = converted(family, precision)
        held = Masters(packed.decoder, dtype)
        for weight in held:
            # Masters between two bf16 numbers.
            weight *= 1 + 2**-10
        held.publish()
        codes.append(codes_of(packed))
    assert_codes(codes[0], codes[1])
    synced = converted(family, precision)
    loader = WeightLoader(synced.decoder)
    loader.load((name, t.to(torch.bfloat16)) for name, t in named_hf_weights(packed.decoder))
    loader.finish()
    assert_codes(codes_of(synced), codes[0])


def test_codes_are_those_of_the_files_weight() -> None:
    """Each weight by itself, an expert at a time: one global amax a named weight."""
    weights = tiny("qwen3_moe").weights
    quantizers = {
        Mxfp8(): mxfp8_quantize,
        Nvfp4(weight_block="1x16"): nvfp4_quantize,
        FourOverSix(): lambda w: four_over_six_quantize(w, "16x16", "mse", 256),
    }
    for precision, quantize in quantizers.items():
        got = codes_of(converted("qwen3_moe", precision))
        for layer in ALL:
            attention = f"model.layers.{layer}.self_attn.q_proj.weight"
            down = f"model.layers.{layer}.mlp.experts.down_proj"
            pairs = [(attention, None, weights[attention])]
            pairs += [
                (down, e, weights[down.replace("experts", f"experts.{e}") + ".weight"])
                for e in range(8)
            ]
            for name, expert, weight in pairs:
                wanted = tensors_of(quantize(weight))
                for part, want in zip(
                    ("codes", "block_scale", "global_amax"), wanted, strict=False
                ):
                    mine = got[f"{name}.{part}"]
                    mine = mine if expert is None else mine[expert]
                    assert torch.equal(mine.view(torch.uint8), want.view(torch.uint8)), (name, part)


@pytest.mark.parametrize("axis", ["rows", "columns"])
@pytest.mark.parametrize(
    "precision",
    [Mxfp8(), Nvfp4(weight_block="1x16"), FourOverSix(weight_block="1x16"), FourOverSix()],
    ids=["mxfp8", "nvfp4", "four_over_six 1x16", "four_over_six 16x16"],
)
def test_shards_quantize_to_slices(precision: Any, axis: str) -> None:
    """With the full weight's amax; with its own a shard has other codes (trap 35)."""
    packed = converted("qwen3", precision)
    name = "model.layers.1.mlp.up_proj.weight"
    full = codes_of(packed)
    quantizer, weight = quantizer_of(precision), packed.weights[name]
    amax = full.get(f"{name}.global_amax")
    dim = 0 if axis == "rows" else 1
    codes, scales = full[f"{name}.codes"], full[f"{name}.block_scale"]
    others = 0
    for index, shard in enumerate(weight.chunk(2, dim)):
        for given in (amax, None):
            rowwise = prepare_weight(shard, quantizer, global_amax=given).rowwise
            mine = tensors_of(rowwise)[:2]
            same = all(
                torch.equal(a.view(torch.uint8), b.chunk(2, dim)[index].view(torch.uint8))
                for a, b in zip(mine, (codes, scales), strict=True)
            )
            if given is amax:
                assert same
            others += not same
    assert (others > 0) == (amax is not None)


# Everything around the layers stays as it was.


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_names_and_checksums_are_those_of_the_plain_decoder(family: str) -> None:
    plain = tiny(family).decoder
    for precision in (Mxfp8(), Nvfp4(), FourOverSix(include=("*.mlp.*",))):
        decoder = converted(family, precision).decoder
        prepare_weights(decoder)
        shapes = [(name, p.shape) for name, p in plain.named_parameters()]
        assert [(name, p.shape) for name, p in decoder.named_parameters()] == shapes
        assert decoder.state_dict().keys() == plain.state_dict().keys()
        assert list(named_checksums(decoder).items()) == list(named_checksums(plain).items())


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3_moe"])
def test_a_converted_decoder_writes_its_bf16_weights(family: str, tmp_path) -> None:
    source = write_tiny_model(family, tmp_path / "source", seed=0)
    packed = converted(family, FourOverSix())
    plain_spec = packed.spec.model_copy(update={"precision": Bf16()})
    out = write_model(packed.decoder, plain_spec, source, tmp_path / "out")
    written = dict(read_weights(out))
    assert written.keys() == packed.weights.keys()
    assert all(torch.equal(written[name], packed.weights[name]) for name in written)
    again = converted(family, FourOverSix())
    load_hf_weights(again.decoder, written.items())
    prepare_weights(again.decoder)
    assert_codes(codes_of(again), codes_of(packed))


def test_wire_bytes_are_the_weights_not_the_codes() -> None:
    packed = converted("qwen3_moe", FourOverSix())
    for name, tensor in named_hf_weights(packed.decoder):
        assert pack_weights({name: tensor}).bits.nbytes == 2 * packed.weights[name].numel()


def test_a_bucket_brings_each_tensor_by_name() -> None:
    weights = {
        "a": torch.tensor([[1.0, -2.5], [3.0, 1.00390625]]),
        "b": torch.arange(6, dtype=torch.bfloat16).reshape(1, 2, 3).transpose(1, 2),
        "c": torch.tensor(7.0),
    }
    brought = dict(unpack_weights(pack_weights(weights), torch.device("cpu")))
    assert brought.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(brought[name], tensor.bfloat16()), name
