"""What cannot work is listed, refused before any actor starts, and refused with the reason."""

from pathlib import Path
from typing import Any

import pytest
import torch

from fos_rl.cli import main
from fos_rl.config import parse_config
from fos_rl.config.explain import IMPOSSIBLE, explain
from fos_rl.model.families import FAMILIES
from fos_rl.runtime import launch
from fos_rl.runtime.launch import planned

ROOT = Path(__file__).parents[2]
FOUR_OVER_SIX = {"recipe": "nvfp4_four_over_six"}
EXACT = {"consistency": "exact"}


def plan(
    precision: dict[str, Any],
    consistency: str = "fast",
    family: str = "qwen3",
    **trainer: Any,
) -> list[str]:
    tree = {
        "model": {"path": f"random:{family}", "precision": precision, "consistency": consistency},
        "data": {"type": "vowels"},
        "trainer": {"device": "cpu", **trainer},
        "generator": {"device": "cpu"},
    }
    with planned(parse_config(tree)) as made:
        return made.notes


# One mistake for each entry of IMPOSSIBLE, in its order: what the widths of the tiny model become,
# the arguments of `plan`, and words of the refusal.
MISTAKES: list[tuple[dict[str, int], tuple[dict[str, Any], dict[str, Any]], list[str]]] = [
    ({}, ({"recipe": "bf16"}, {"backward_override": "dequantized"}), ["quantizes nothing"]),
    (
        {},
        (FOUR_OVER_SIX, {"backward_override": "quantized"}),
        ["trainer.backward_override = 'quantized'", "row_scaled_activation"],
    ),
    ({"intermediate_size": 72}, ({"recipe": "nvfp4", "weight_block": "1x16"}, {}), ["K = 72"]),
    ({"intermediate_size": 72}, (FOUR_OVER_SIX, {}), ["N = 72", "'1x16'"]),
    (
        {"intermediate_size": 48},
        ({"recipe": "mxfp8", "include": ["*.up_proj"]}, {}),
        ["N = 48", "'high_precision' or 'dequantized'"],
    ),
    ({}, ({**FOUR_OVER_SIX, "include": ["*.mlp.experts.*"]}, {}), ["no layer", "is dense"]),
    ({}, ({**FOUR_OVER_SIX, "first_layers_bf16": 3}, {}), ["none of 3 layers"]),
    ({}, ({**FOUR_OVER_SIX, "gemm": "native"}, {}), ["gemm = 'native'", "is cpu", "'emulated'"]),
    (
        {},
        ({**FOUR_OVER_SIX, "gemm": "native"}, {"family": "qwen3_moe"}),
        ["generator.cuda_graphs = true", "experts.down_proj", "generator.cuda_graphs = false"],
    ),
    ({}, ({"recipe": "nvfp4", "err_mode": "mse"}, {}), ["err_mode", "unknown key"]),
    ({}, ({"recipe": "mxfp8", "weight_block": "1x16"}, {}), ["weight_block", "unknown key"]),
    (
        {},
        ({"recipe": "nvfp4", "row_scaled_activation": False}, EXACT),
        ["row_scaled_activation = false", "'exact'", "set it to true"],
    ),
    ({}, ({"recipe": "mxfp8", "gemm": "native"}, EXACT), ["gemm = 'native'", "'exact'"]),
    (
        {},
        ({"recipe": "bf16"}, {**EXACT, "num_threads": 2}),
        ["trainer.num_threads = 2, generator.num_threads = None", "both the same"],
    ),
    ({}, ({"recipe": "bf16"}, {**EXACT, "device": "cuda"}), ["trainer.device", "the same value"]),
]


@pytest.mark.parametrize(
    ("combination", "mistake"), zip(IMPOSSIBLE, MISTAKES, strict=True), ids=lambda x: str(x)[:40]
)
def test_every_listed_combination_is_refused(
    combination: str,
    mistake: tuple[dict[str, int], tuple[dict[str, Any], dict[str, Any]], list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    widths, (precision, trainer), words = mistake
    for family in FAMILIES.values():
        for name, width in widths.items():
            monkeypatch.setitem(family.tiny, name, width)
    monkeypatch.setattr(launch, "count_gpus", lambda config: int(config.trainer.device == "cuda"))
    with pytest.raises(ValueError, match=r".") as error:
        plan(precision, **trainer)
    for word in words:
        assert word in str(error.value)
    assert combination in explain("model.precision")
    assert IMPOSSIBLE[combination] in explain()


def test_the_command_says_what_runs_here(capsys: pytest.CaptureFixture[str]) -> None:
    for section in ("model.precision", "model", ""):
        assert main(["explain", section]) == 0
        text = capsys.readouterr().out
        assert "what cannot work together" in text
        assert "gemm = 'emulated': runs" in text
        assert "quantizer 'reference': runs" in text
        if not torch.cuda.is_available():
            assert "gemm = 'native': unavailable, device is cpu, needs CUDA compute" in text
            assert "quantizer 'cute': unavailable, device is cpu" in text
    assert main(["explain", "trainer"]) == 0
    assert "this machine" not in capsys.readouterr().out


def test_a_dry_run_prints_the_refusal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The published base point is of experts; on a dense model its patterns match nothing."""
    monkeypatch.chdir(ROOT)
    arguments = ["train", "configs/tiny_moe.toml", "--recipe", "nvfp4_four_over_six", "--dry-run"]
    assert main(arguments) == 0
    assert "quantized  9 weights, backward high_precision" in capsys.readouterr().out
    dense = ["--set", "model.path=random:qwen3"]
    assert main([*arguments, *dense]) == 2
    message = capsys.readouterr().err
    assert "pattern '*.mlp.experts.*' matches no layer" in message
    assert "quantize its MLPs with '*.mlp.*'" in message
    assert main([*arguments, *dense, "--set", "model.precision.include=['*.mlp.*']"]) == 0


def test_no_actor_starts_without_the_tensor_core(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: object) -> None:
        raise AssertionError("the cluster was started")

    monkeypatch.setattr(launch, "Cluster", started)
    tree = {
        "model": {"path": "random:qwen3", "precision": {**FOUR_OVER_SIX, "gemm": "native"}},
        "data": {"type": "vowels"},
        "trainer": {"device": "cpu"},
        "generator": {"device": "cpu"},
    }
    with pytest.raises(ValueError, match=r"precision\.gemm = 'native': device is cpu.*set it"):
        launch.train(parse_config(tree), Path("never"))
    assert not Path("never").exists()


def test_per_tensor_activation_scales_warn() -> None:
    warning = "depends on the others of its batch"
    per_tensor = {"recipe": "nvfp4", "row_scaled_activation": False}
    assert any(warning in note for note in plan(per_tensor))
    assert any("backward quantized" in note for note in plan(per_tensor))
    assert not any(warning in note for note in plan({"recipe": "nvfp4"}))
    assert not any("quantized" in note for note in plan({"recipe": "bf16"}))
