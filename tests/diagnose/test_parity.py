"""Parity names the operation that was changed in one decoder, whatever kind it is."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fos_rl.cli import main
from fos_rl.diagnose.operations import quantizer_inputs
from fos_rl.diagnose.parity import Parity, _flipped_codes, compare_forwards
from fos_rl.diagnose.parity_report import verdict
from fos_rl.generator.inspection import generator_decoder
from fos_rl.model.convert import build_decoder, prepare_weights
from fos_rl.model.decoder import Decoder
from fos_rl.model.hf import read_architecture
from fos_rl.model.packed_attention import PackedSequences, packed_attention
from fos_rl.model.tiny import write_tiny_model
from fos_rl.spec import FourOverSix, ModelSpec
from fos_rl.types import Rollout
from tests.support.pair import Pair, random_prompts, tiny_pair

TINY_MOE = str(Path(__file__).parents[2] / "configs" / "tiny_moe.toml")


@contextmanager
def _sampled(family: str, folder: Path, **settings: Any) -> Iterator[tuple[Pair, list[Rollout]]]:
    with tiny_pair(family, folder, **settings) as pair:
        pair.sync()
        yield pair, pair.generate(random_prompts(4))


@pytest.fixture(scope="module")
def dense(tmp_path_factory) -> Iterator[tuple[Pair, list[Rollout]]]:
    with _sampled("qwen3", tmp_path_factory.mktemp("dense")) as found:
        yield found


@contextmanager
def _scaled(tensor: Tensor, factor: float = 1.05) -> Iterator[None]:
    before = tensor.detach().clone()
    with torch.no_grad():
        tensor.copy_(before * factor)
    try:
        yield
    finally:
        with torch.no_grad():
            tensor.copy_(before)


def _parameter(name: str) -> Callable[[Pair], Tensor]:
    """A weight of the trainer's decoder."""
    return lambda pair: pair.trainer.decoder.get_parameter(name)


def _rope(pair: Pair) -> Tensor:
    """The generator's sines, from position 5 on."""
    return generator_decoder(pair.generator).model.rotary.on(torch.device("cpu"))[5:, 1]


DENSE = {
    "embed_tokens": _parameter("model.embed_tokens.weight"),
    "layers.1.input_layernorm": _parameter("model.layers.1.input_layernorm.weight"),
    "layers.2.q_proj": _parameter("model.layers.2.self_attn.q_proj.weight"),
    "layers.0.k_proj": _parameter("model.layers.0.self_attn.k_proj.weight"),
    "layers.1.v_proj": _parameter("model.layers.1.self_attn.v_proj.weight"),
    "layers.1.q_norm": _parameter("model.layers.1.self_attn.q_norm.weight"),
    "layers.2.k_norm": _parameter("model.layers.2.self_attn.k_norm.weight"),
    "layers.0.rope_q": _rope,
    "layers.2.o_proj": _parameter("model.layers.2.self_attn.o_proj.weight"),
    "layers.0.post_attention_layernorm": _parameter(
        "model.layers.0.post_attention_layernorm.weight"
    ),
    "layers.1.gate_proj": _parameter("model.layers.1.mlp.gate_proj.weight"),
    "layers.2.up_proj": _parameter("model.layers.2.mlp.up_proj.weight"),
    "layers.0.down_proj": _parameter("model.layers.0.mlp.down_proj.weight"),
    "norm": _parameter("model.norm.weight"),
}
MOE = {
    "layers.1.router": _parameter("model.layers.1.mlp.gate.weight"),
    # One expert of eight.
    "layers.2.experts": lambda pair: pair.trainer.decoder.get_parameter(
        "model.layers.2.mlp.experts.down_proj"
    )[3],
    "logits": _parameter("lm_head.weight"),
}


def test_an_equal_pair_differs_by_rounding_alone(dense: tuple[Pair, list[Rollout]]) -> None:
    pair, rollouts = dense
    found = compare_forwards(pair.trainer, pair.generator, rollouts)
    assert found.culprit is None
    assert "rounding" in verdict(found)[-1]
    assert found.weights_that_differ == []
    # The pair's one difference is the attention kernel.
    assert [op.name for op in found.operations if op.same_input_max > 0] == [
        f"layers.{n}.attention" for n in range(3)
    ]
    assert found.first_difference is not None
    assert found.first_difference.name == "layers.0.attention"
    assert found.sampled == sum(len(r.response_ids) for r in rollouts)
    fed = sum(len(r.prompt_ids) + len(r.response_ids) - 1 for r in rollouts)
    assert found.tokens == fed


@pytest.mark.parametrize("name", DENSE)
def test_names_the_changed_operation(dense: tuple[Pair, list[Rollout]], name: str) -> None:
    pair, rollouts = dense
    with _scaled(DENSE[name](pair)):
        found = compare_forwards(pair.trainer, pair.generator, rollouts)
    assert _culprit(found) == name
    assert name in verdict(found)[1]


def test_names_a_changed_attention_scale(
    dense: tuple[Pair, list[Rollout]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, rollouts = dense
    attention: Any = generator_decoder(pair.generator).model.layers[1].self_attn.inner
    monkeypatch.setattr(attention.attn.impl, "scale", attention.attn.impl.scale * 1.05)
    found = compare_forwards(pair.trainer, pair.generator, rollouts)
    assert _culprit(found) == "layers.1.attention"


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_exact_pair_do_not_differ_at_all(family: str, tmp_path: Path) -> None:
    """Every operation, in place and given the same input, in bf16 under four-over-six.

    From here on each test closes an engine, which ends all others of this process.
    """
    settings = {"precision": FourOverSix(), "consistency": "exact"}
    with _sampled(family, tmp_path, **settings) as (pair, rollouts):
        found = compare_forwards(pair.trainer, pair.generator, rollouts)
    assert [op.name for op in found.operations if op.max or op.same_input_max] == []
    assert verdict(found) == ["the two forwards are equal to the last bit"]
    assert {flipped for flipped, _ in found.flipped_codes.values()} == {0}
    assert found.sampled_differences["mismatch/log_prob_abs_diff/max"] == 0


def test_names_a_changed_weight_once_however_many_codes(tmp_path: Path) -> None:
    """A quantized weight changed in one decoder: its codes are listed, its operation is named."""
    precision = FourOverSix(compute_dtype="float32")
    with _sampled("qwen3", tmp_path, precision=precision) as (pair, rollouts):
        decoder: Decoder = pair.trainer.decoder
        equal = compare_forwards(pair.trainer, pair.generator, rollouts)
        with _scaled(decoder.get_parameter("model.layers.1.mlp.up_proj.weight")):
            prepare_weights(decoder)
            found = compare_forwards(pair.trainer, pair.generator, rollouts)
    assert equal.culprit is None
    assert equal.codes_that_differ == []
    assert _culprit(found) == "layers.1.up_proj"
    assert found.weights_that_differ == ["model.layers.1.mlp.up_proj.weight"]
    assert {name.rpartition(".")[0] for name in found.codes_that_differ} == {
        "model.layers.1.mlp.up_proj.weight"
    }
    # Everything before it is as it was, codes included.
    assert found.flipped_codes["layers.1.q/k/v_proj"] == equal.flipped_codes["layers.1.q/k/v_proj"]
    assert (
        found.flipped_codes["layers.1.down_proj"][0] > equal.flipped_codes["layers.1.down_proj"][0]
    )


def test_names_router_expert_and_head(tmp_path: Path) -> None:
    with _sampled("qwen3_moe", tmp_path) as (pair, rollouts):
        equal = compare_forwards(pair.trainer, pair.generator, rollouts)
        found = {}
        for name, tensor in MOE.items():
            with _scaled(tensor(pair), 1.2):
                found[name] = compare_forwards(pair.trainer, pair.generator, rollouts)
    assert equal.culprit is None
    assert set(equal.routing_flips.values()) == {0.0}
    assert {name: _culprit(parity) for name, parity in found.items()} == {n: n for n in found}
    # A change at layer 1 can move a choice only after it.
    assert found["layers.1.router"].routing_flips["mismatch/routing_flip_frac/layer_0"] == 0
    assert found["layers.2.experts"].weights_that_differ == [
        "model.layers.2.mlp.experts.3.down_proj.weight"
    ]
    # The head's whole distribution: KL is zero when equal, and no rounding when the head differs.
    assert equal.full_vocabulary_kl < 1e-10 < 1e-3 < found["logits"].full_vocabulary_kl


def test_flipped_codes_are_those_of_the_two_inputs(tmp_path: Path) -> None:
    """Counted against a loop over elements, in bf16, where the pair's activations differ."""
    spec = ModelSpec(
        architecture=read_architecture(write_tiny_model("qwen3", tmp_path)), precision=FourOverSix()
    )
    decoder = build_decoder(spec, packed_attention(PackedSequences()))
    rng = np.random.default_rng(0)
    ours = {
        f"layers.{n}.{name}": torch.from_numpy(rng.normal(size=(5, width))).float()
        for n in range(3)
        for name, width in {
            "input_layernorm": 64,
            "post_attention_layernorm": 64,
            "attention": 128,
            "gate_proj": 128,
            "up_proj": 128,
        }.items()
    }
    theirs = {name: x + 0.01 * torch.randn_like(x) for name, x in ours.items()}
    for name in ours:
        if name.endswith("attention"):
            ours[name] = ours[name].unflatten(-1, (4, 32))
            theirs[name] = theirs[name].unflatten(-1, (4, 32))
    found = _flipped_codes(decoder, ours, theirs)
    modules = dict(decoder.named_modules())
    for site, module, read in quantizer_inputs(decoder):
        a, b = (modules[module].quantizer.activation(read(t)) for t in (ours, theirs))
        pairs = zip(a.codes.flatten().tolist(), b.codes.flatten().tolist(), strict=True)
        count = sum((x % 16 != y % 16) + (x // 16 != y // 16) for x, y in pairs)
        scales = (a.block_scale.float() != b.block_scale.float()).sum()
        assert found[site] == (count + int(scales), read(ours).numel())
        assert count > 0


def test_command(capsys, tmp_path: Path) -> None:
    """The command prints its verdict, writes its figures, and fails above the limit."""
    out = tmp_path / "parity.json"
    arguments = ["parity", TINY_MOE, "--tokens", "32", "--json", str(out)]
    assert main([*arguments, "--fail-above", "1e-4"]) == 0
    shown = capsys.readouterr().out
    for word in ("contract", "router", "log-probs", "rounding", "layers.0.attention"):
        assert word in shown
    figures = json.loads(out.read_text())
    mean = figures["sampled_differences"]["mismatch/log_prob_abs_diff/mean"]
    assert 0 < mean < 1e-5
    assert main([*arguments, "--fail-above", str(mean / 2)]) == 1
    assert "failed" in capsys.readouterr().out


def _culprit(found: Parity) -> str | None:
    return None if found.culprit is None else found.culprit.name
