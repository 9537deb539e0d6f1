"""Errors of quantized products by layer: against fp64 products, one linear or one token's expert at
a time, of what entered them."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fos_rl.config import AlgorithmConfig, RolloutConfig, TrainerConfig
from fos_rl.diagnose.capture import capture
from fos_rl.model.convert import quantizer_of
from fos_rl.model.hf import read_architecture
from fos_rl.model.tiny import write_tiny_model
from fos_rl.spec import Bf16, Consistency, FourOverSix, ModelSpec, Mxfp8, Nvfp4, Precision
from fos_rl.trainer.layer_errors import MAX_TOKENS, first_tokens
from fos_rl.trainer.trainer import GrpoTrainer
from fos_rl.types import TrainBatch

# Layer 0 stays in bf16.
WINDOW = {"compute_dtype": "float32", "include": ["*"], "first_layers_bf16": 1}
RECIPES = {
    "mxfp8": Mxfp8(**WINDOW),
    "nvfp4": Nvfp4(**WINDOW),
    "four_over_six": FourOverSix(**WINDOW, weight_block="1x16"),
}


@pytest.fixture(scope="module", params=["qwen3", "qwen3_moe"])
def folder(request, tmp_path_factory) -> Path:
    return write_tiny_model(request.param, tmp_path_factory.mktemp(request.param), seed=0)


def _trainer(
    folder: Path, precision: Precision, consistency: Consistency = "fast", **config: object
) -> GrpoTrainer:
    spec = ModelSpec(
        architecture=read_architecture(folder), precision=precision, consistency=consistency
    )
    return GrpoTrainer(
        spec,
        folder,
        RolloutConfig(max_new_tokens=20),
        AlgorithmConfig(),
        TrainerConfig(lr=1e-3, **config),
        torch.device("cpu"),
    )


def _batch(lengths: list[int]) -> TrainBatch:
    rng = np.random.default_rng(0)
    return TrainBatch(
        token_ids=[rng.integers(0, 256, n) for n in lengths],
        prompt_lengths=[2] * len(lengths),
        generator_log_probs=[np.full(n - 2, -5.0, np.float32) for n in lengths],
        advantages=rng.standard_normal(len(lengths)).astype(np.float32),
    )


def _expected(trainer: GrpoTrainer, batch: TrainBatch) -> dict[str, float]:
    """The definition, spelled out; rows are quantized one at a time where experts part them."""
    quantizer = quantizer_of(trainer.spec.precision)
    lengths = [len(ids) for ids in batch.token_ids]
    trainer._sequences.set(lengths)
    with torch.no_grad(), capture(trainer.decoder) as trace:
        trainer.decoder(
            torch.from_numpy(np.concatenate(batch.token_ids)),
            torch.cat([torch.arange(n) for n in lengths]),
        )

    def both(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        x_q, w_q = quantizer.activation(x), quantizer.weight(weight.detach())
        operands = (quantizer.dequantize(t, torch.float32).double() for t in (x_q, w_q))
        return next(operands) @ next(operands).T, x.double() @ weight.detach().double().T

    def mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        yield (gated := both(x, gate))
        yield (upped := both(x, up))
        yield both(F.silu(gated[0].float()) * upped[0].float(), down)

    def products(number: int) -> Iterator[tuple[Tensor, Tensor]]:
        layer, at = trainer.decoder.model.layers[number], f"layers.{number}."
        for name in ("q_proj", "k_proj", "v_proj"):
            yield both(trace[f"{at}input_layernorm"], getattr(layer.self_attn, name).weight)
        yield both(trace[f"{at}attention"].flatten(-2), layer.self_attn.o_proj.weight)
        x = trace[f"{at}post_attention_layernorm"]
        if not trainer.spec.architecture.num_experts:
            weights = (getattr(layer.mlp, f"{p}_proj").weight for p in ("gate", "up", "down"))
            yield from mlp(x, *weights)
            return
        stacks = [getattr(layer.mlp.experts, f"{p}_proj") for p in ("gate", "up", "down")]
        for token, expert in trace[f"{at}router"].nonzero().tolist():
            yield from mlp(x[token : token + 1], *(stack[expert] for stack in stacks))

    def error(number: int) -> float:
        pairs = list(products(number))
        wrong = sum(float((quantized - exact).square().sum()) for quantized, exact in pairs)
        return math.sqrt(wrong / sum(float(exact.square().sum()) for _, exact in pairs))

    return {"layers.0": 0.0, "layers.1": error(1), "layers.2": error(2)}


@pytest.mark.parametrize("consistency", ["fast", "exact"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_errors_are_those_of_the_definition(
    folder: Path, recipe: str, consistency: Consistency
) -> None:
    trainer = _trainer(folder, RECIPES[recipe], consistency)
    batch = _batch([9, 14, 5])
    want = _expected(trainer, batch)
    got = trainer.layer_errors(batch)
    assert list(got) == ["layers.0", "layers.1", "layers.2"]
    # The input of a down projection, recomputed here from fp64 sums, may round to other codes: some
    # in ten thousand.
    assert got == pytest.approx(want, rel=2e-3)
    assert all(0.01 < got[name] < 0.3 for name in ("layers.1", "layers.2"))


def test_a_part_of_the_projections_counts_alone(folder: Path) -> None:
    """Only what is quantized enters: of experts, too, where their hook sees all three."""
    errors = {
        part: _trainer(
            folder, Nvfp4(compute_dtype="float32", include=[f"*mlp*{p}_proj" for p in part])
        ).layer_errors(_batch([12, 8]))["layers.0"]
        for part in (("gate",), ("up",), ("gate", "up"))
    }
    gate, up, both = errors.values()
    assert min(gate, up) < both < max(gate, up)


def test_rounded_activations_have_nearly_the_same_errors(folder: Path) -> None:
    """bf16 sums are rounded to 2^-9, against errors of 0.1."""
    batch = _batch([40, 25])
    wide, narrow = (
        _trainer(folder, Nvfp4(compute_dtype=dtype, include=["*"])).layer_errors(batch)
        for dtype in ("float32", "bfloat16")
    )
    assert narrow == pytest.approx(wide, rel=0.05)


def test_bf16_is_a_line_at_zero(folder: Path) -> None:
    trainer = _trainer(folder, Bf16())
    errors = trainer.layer_errors(_batch([9]))
    assert errors == {"layers.0": 0.0, "layers.1": 0.0, "layers.2": 0.0}


@pytest.mark.parametrize("recipe", RECIPES)
def test_training_is_the_same_to_the_last_bit(folder: Path, recipe: str) -> None:
    """Also of a mixture of experts that replays the generator's routing."""
    batch = _batch([9, 14, 5])
    architecture = read_architecture(folder)
    if architecture.num_experts:
        shape = (architecture.num_layers, architecture.num_experts_per_token)
        routing = [np.broadcast_to(np.arange(shape[1]), (n - 1, *shape)) for n in (9, 14, 5)]
        batch = replace(batch, experts=[r.astype(np.int16) for r in routing])
    results = []
    for measured in (False, True):
        trainer = _trainer(folder, RECIPES[recipe])
        if trainer.routing is not None:
            trainer.routing.replay = True
        if measured:
            state = torch.get_rng_state()
            assert trainer.layer_errors(batch)
            assert torch.equal(torch.get_rng_state(), state)
        result = trainer.step(batch)
        del result.metrics["memory/trainer_peak_gib"]
        results.append((result, list(trainer.masters)))
    (plain, ours), (after, theirs) = results
    assert plain.metrics == after.metrics
    assert all(map(np.array_equal, plain.log_probs, after.log_probs))
    assert all(map(torch.equal, ours, theirs))


def test_a_few_tokens_are_enough() -> None:
    lengths = [4, 3, 5]
    kept = first_tokens([np.arange(n) for n in lengths], 6)
    assert [k.tolist() for k in kept] == [[0, 1, 2, 3], [0, 1]]
    assert [len(k) for k in first_tokens([np.arange(n) for n in lengths], 7)] == [4, 3]
    assert [len(k) for k in first_tokens([np.arange(n) for n in lengths], 100)] == lengths


def test_only_the_first_tokens_are_computed(folder: Path) -> None:
    trainer = _trainer(folder, Mxfp8())
    seen: list[int] = []
    trainer.decoder.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    trainer.layer_errors(_batch([700, 700]))
    assert seen == [MAX_TOKENS]
