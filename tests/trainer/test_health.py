"""A dead model is noticed: what is not finite stops the trainer, and equal logits are counted."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from fos_rl.config import AlgorithmConfig, RolloutConfig, TrainerConfig
from fos_rl.model.hf import named_hf_weights, read_architecture
from fos_rl.model.log_probs import token_log_probs
from fos_rl.model.tiny import write_tiny_model
from fos_rl.spec import Bf16, ModelSpec
from fos_rl.trainer.checkpoint import load_checkpoint, save_checkpoint
from fos_rl.trainer.dead_model import DeadModel, at_step
from fos_rl.trainer.health import is_uniform
from fos_rl.trainer.step_metrics import is_sound
from fos_rl.trainer.trainer import GrpoTrainer
from fos_rl.types import TrainBatch
from tests.support.metric_keys import unknown_keys

Edit = Callable[[dict[str, torch.Tensor]], None]


@pytest.fixture(scope="module", params=["llama", "qwen3_moe"])
def folder(request, tmp_path_factory) -> Path:
    return write_tiny_model(request.param, tmp_path_factory.mktemp(request.param), seed=0)


def _trainer(folder: Path, algorithm: dict | None = None, **settings: object) -> GrpoTrainer:
    spec = ModelSpec(
        architecture=read_architecture(folder), precision=Bf16(compute_dtype="float32")
    )
    return GrpoTrainer(
        spec,
        folder,
        RolloutConfig(max_new_tokens=20),
        AlgorithmConfig(**(algorithm or {})),
        TrainerConfig(**{"lr": 1e-3, **settings}),
        torch.device("cpu"),
    )


def _batch(count: int = 4) -> TrainBatch:
    rng = np.random.default_rng(0)
    return TrainBatch(
        token_ids=[rng.integers(0, 256, 10) for _ in range(count)],
        prompt_lengths=[4] * count,
        generator_log_probs=[np.full(6, -5.5, np.float32) for _ in range(count)],
        advantages=np.array([1.0, -1.0] * (count // 2), np.float32),
    )


def _edited(folder: Path, out: Path, edit: Edit) -> Path:
    """A copy of the model with other weights."""
    out.mkdir()
    for path in folder.iterdir():
        (out / path.name).write_bytes(path.read_bytes())
    weights = load_file(out / "model.safetensors")
    edit(weights)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    return out


def _first(part: str, value: float) -> Edit:
    def edit(weights: dict[str, torch.Tensor]) -> None:
        name = next(name for name in sorted(weights) if part in name)
        weights[name].view(-1)[0] = value

    return edit


def _all(value: float) -> Edit:
    return lambda weights: [tensor.fill_(value) for tensor in weights.values()]  # type: ignore


@pytest.mark.parametrize(
    ("edit", "name"),
    [
        (_first("layers.1.self_attn.q_proj", math.nan), "model.layers.1.self_attn.q_proj.weight"),
        (_first("model.norm", math.inf), "model.norm.weight"),
        (_first("embed_tokens", -math.inf), "model.embed_tokens.weight"),
        (_all(math.nan), "model.embed_tokens.weight"),
        (_all(1e30), "model.embed_tokens.weight"),
    ],
    ids=["nan", "inf", "-inf", "all nan", "all 1e30"],
)
def test_broken_weights_do_not_load(folder: Path, tmp_path: Path, edit: Edit, name: str) -> None:
    broken = _edited(folder, tmp_path / "broken", edit)
    with pytest.raises(ValueError, match=rf"model.path: .*broken: {name} has \d+ of \d+ values"):
        _trainer(broken)


def test_an_experts_weight_is_named_by_its_expert(tmp_path: Path) -> None:
    folder = write_tiny_model("qwen3_moe", tmp_path / "moe", seed=0)
    broken = _edited(
        folder, tmp_path / "broken", _first("layers.2.mlp.experts.1.up_proj", math.nan)
    )
    with pytest.raises(ValueError, match=r"broken: model.layers.2.mlp.experts.1.up_proj.weight"):
        _trainer(broken)


@pytest.mark.parametrize("lr", [3e38, 1e25], ids=["overflows", "too large to square"])
def test_an_update_that_breaks_the_weights_stops_the_step(folder: Path, lr: float) -> None:
    trainer = _trainer(folder, lr=lr)
    version = trainer.policy_version
    with pytest.raises(DeadModel, match=r"^after an update model\.\S+ has .*trainer.lr"):
        trainer.step(_batch())
    assert trainer.policy_version == version


def test_the_step_of_the_run_is_named() -> None:
    with pytest.raises(DeadModel, match=r"^step 7: the norm is NaN$"), at_step(7):
        raise DeadModel("the norm is NaN")


def test_finite_weights_that_compute_nothing_are_not_saved(folder: Path, tmp_path: Path) -> None:
    """An update to 1e15: every weight has a finite square, and every log-prob is NaN."""
    trainer = _trainer(folder, lr=1e15)
    trainer.step(_batch())
    for save in (trainer.save_model, lambda path: save_checkpoint(trainer, path)):
        with pytest.raises(DeadModel, match="none of the 6 log-probs of the trainer is finite"):
            save(tmp_path / "000001")
        assert not list(tmp_path.iterdir())
    trainer = _trainer(folder)
    trainer.step(_batch())
    trainer.save_model(tmp_path / "good")
    assert (tmp_path / "good" / "model.safetensors").is_file()


def test_masters_that_only_bf16_cannot_hold_are_noticed(folder: Path) -> None:
    """The largest bf16 number is 3.3895e38, the largest fp32 one 3.4028e38."""
    trainer = _trainer(folder)
    master = trainer.masters.weights["model.norm.weight"]
    master[0] = 3.4e38
    assert master.isfinite().all()
    with pytest.raises(DeadModel, match=r"model.norm.weight has 1 of \d+ values that are infinite"):
        # A gradient of 0 moves nothing else.
        trainer._apply_gradients()


def test_a_checkpoint_with_broken_weights_does_not_load(folder: Path, tmp_path: Path) -> None:
    one = _trainer(folder)
    one.masters.weights["model.norm.weight"][0] = math.nan
    save_checkpoint(one, tmp_path / "000001")
    with pytest.raises(ValueError, match=r"000001: model.norm.weight has 1 of \d+ values"):
        load_checkpoint(_trainer(folder), tmp_path / "000001")


def _poisoned(batch: TrainBatch) -> TrainBatch:
    """Infinite advantages: a gradient that is not finite from a model that is."""
    return replace(batch, advantages=np.full(batch.num_sequences, np.inf, np.float32))


def test_gradients_that_stay_bad_stop_the_run(folder: Path) -> None:
    trainer, batch = _trainer(folder), _batch()
    before = [w.clone() for w in trainer.masters]
    for _ in range(2):
        assert trainer.step(_poisoned(batch)).metrics["trainer/skipped_updates"] == 1
    # A good one in between starts the count again.
    assert "trainer/skipped_updates" not in trainer.step(batch).metrics
    assert any(not torch.equal(a, b) for a, b in zip(before, trainer.masters, strict=True))
    before = [w.clone() for w in trainer.masters]
    for _ in range(2):
        trainer.step(_poisoned(batch))
    with pytest.raises(
        DeadModel, match=r"3 updates in a row .*the gradient of model.embed_tokens.weight has \d+"
    ):
        trainer.step(_poisoned(batch))
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.masters, strict=True))


def test_the_number_of_bad_updates_is_a_setting(folder: Path) -> None:
    with pytest.raises(DeadModel, match="1 updates in a row"):
        _trainer(folder, max_nonfinite_updates=1).step(_poisoned(_batch()))
    # Updates count, not steps.
    with pytest.raises(DeadModel, match="2 updates in a row"):
        _trainer(folder, {"minibatches": 2}, max_nonfinite_updates=2).step(_poisoned(_batch()))


def test_a_loss_that_is_not_finite_is_no_update_either() -> None:
    assert is_sound(0.5, 0.0)
    assert not is_sound(math.nan, 1.0)
    assert not is_sound(math.inf, 1.0)
    assert not is_sound(0.5, math.nan)


@pytest.mark.parametrize("learn", [True, False], ids=["step", "measure"])
def test_a_model_whose_activations_overflow_is_named(
    folder: Path, tmp_path: Path, learn: bool
) -> None:
    """Finite weights, no finite log-prob: the products of q and k are inf, and inf - inf NaN."""

    def edit(weights: dict[str, torch.Tensor]) -> None:
        for name, tensor in weights.items():
            if "layers.1.mlp" in name and "_proj" in name:
                tensor.mul_(1e16)

    trainer = _trainer(_edited(folder, tmp_path / "large", edit))
    with pytest.raises(
        DeadModel,
        match=r"none of the 24 log-probs of the trainer is finite; the first output that is not "
        r"finite is that of model.layers.1.mlp",
    ):
        (trainer.step if learn else trainer.measure)(_batch())


@pytest.mark.parametrize("learn", [True, False], ids=["step", "measure"])
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_generator_without_a_finite_log_prob_stops_the_step(
    folder: Path, learn: bool, value: float
) -> None:
    trainer = _trainer(folder)
    lost = replace(_batch(), generator_log_probs=[np.full(6, value, np.float32)] * 4)
    with pytest.raises(DeadModel, match="none of the 24 log-probs of the generator is finite"):
        (trainer.step if learn else trainer.measure)(lost)


def test_single_bad_tokens_of_the_generator_are_left_out_and_counted(folder: Path) -> None:
    """The gradient is that of the other tokens alone, not of tokens of another log-prob."""
    batch = _batch()
    bad = [values.copy() for values in batch.generator_log_probs]
    bad[0][1], bad[2][0], bad[3][5] = np.nan, -np.inf, np.inf
    trainer = _trainer(folder, {"aggregation": "sequence_sum", "ratio": "decoupled"})
    metrics = trainer.step(replace(batch, generator_log_probs=bad)).metrics
    assert metrics["mismatch/non_finite_tokens"] == 3
    assert metrics["mismatch/non_finite_frac"] == pytest.approx(3 / 24)
    assert not unknown_keys(metrics)
    json.dumps(metrics, allow_nan=False)
    other = [np.where(np.isfinite(v), v, np.nan).astype(np.float32) for v in bad]
    again = _trainer(folder, {"aggregation": "sequence_sum", "ratio": "decoupled"})
    again.step(replace(batch, generator_log_probs=other))
    pairs = zip(trainer.masters, again.masters, strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert "mismatch/non_finite_tokens" not in _trainer(folder).step(batch).metrics


def test_a_skipped_step_writes_no_number_that_is_none(folder: Path) -> None:
    metrics = _trainer(folder).step(_poisoned(_batch())).metrics
    json.dumps(metrics, allow_nan=False)
    assert "loss/policy" not in metrics
    assert metrics["policy/entropy"] > 0


@pytest.mark.parametrize("vocab", [2, 288, 49152, 151936])
@pytest.mark.parametrize("temperature", [0.01, 1.0, 2.0])
def test_equal_logits_are_uniform_and_others_not(vocab: int, temperature: float) -> None:
    """Whatever they are equal to; a spread of 0.02 is an entropy lower by 2e-4 nats."""

    def entropy(logits: torch.Tensor) -> torch.Tensor:
        logits = logits.reshape(1, vocab).float()
        targets = torch.zeros(1, dtype=torch.long)
        return token_log_probs(lambda rows: rows, logits, targets, temperature, 8)[1]

    for level in (0.0, 3.7, -1e4, 1e30):
        assert is_uniform(entropy(torch.full((vocab,), level)), vocab).all()
    spread = torch.linspace(-1, 1, vocab) * 0.02 * math.sqrt(3) * temperature
    assert not is_uniform(entropy(spread), vocab).any()
    assert not is_uniform(torch.tensor([math.nan]), vocab).any()


@pytest.mark.parametrize("learn", [True, False], ids=["step", "measure"])
def test_a_model_of_zeros_says_that_its_logits_are_uniform(
    folder: Path, tmp_path: Path, learn: bool
) -> None:
    dead = _trainer(_edited(folder, tmp_path / "zeros", _all(0.0)))
    metrics = (dead.step if learn else dead.measure)(_batch()).metrics
    assert metrics["policy/uniform_frac"] == 1
    assert metrics["policy/entropy"] == pytest.approx(
        math.log(dead.spec.architecture.vocab_size), rel=1e-6
    )
    assert not unknown_keys(metrics)
    alive = _trainer(folder)
    metrics = (alive.step if learn else alive.measure)(_batch()).metrics
    assert "policy/uniform_frac" not in metrics


def test_gradients_have_the_names_of_the_weights(folder: Path) -> None:
    trainer = _trainer(folder)
    named = dict(named_hf_weights(trainer.decoder, trainer.masters.weights))
    assert named.keys() == dict(named_hf_weights(trainer.decoder)).keys()
    one = {"model.norm.weight": torch.zeros(64)}
    assert [name for name, _ in named_hf_weights(trainer.decoder, one)] == ["model.norm.weight"]
