"""Layouts over several GPUs are checked against the model, and refused where a run would start."""

import json
from pathlib import Path

import pytest

from fos_rl.cli import main
from fos_rl.config import load_config, parse_config
from fos_rl.model.hf import parse_architecture
from fos_rl.model.tiny import tiny_config
from fos_rl.runtime.parallel import check_parallel
from fos_rl.spec import ModelSpec
from fos_rl.studies.estimate import num_parameters

CONFIGS = Path(__file__).parents[2] / "configs"
ARCHITECTURES = CONFIGS / "architectures"
PAIRS = {"qwen3_4b_dapo": "qwen3_4b", "qwen3_30b_a3b_four_over_six": "qwen3_30b_a3b"}


def _check(family: str, precision: dict | None = None, **layout: int) -> list[str]:
    """Tiny models: 4 heads of 32, 2 key-value heads, MLP width 128, 8 experts."""
    config = parse_config(
        {
            "model": {"path": "x", "precision": precision or {}},
            "data": {"type": "vowels"},
            "trainer": {"parallel": layout},
        }
    )
    spec = ModelSpec(
        architecture=parse_architecture(tiny_config(family)), precision=config.model.precision
    )
    return check_parallel(config, spec)


@pytest.mark.parametrize(("config", "architecture"), PAIRS.items())
def test_shipped_layouts_fit_their_models(capsys, config: str, architecture: str) -> None:
    command = ["train", str(CONFIGS / f"{config}.toml"), "--dry-run", "--architecture"]
    assert main([*command, str(ARCHITECTURES / f"{architecture}.json")]) == 0
    shown = capsys.readouterr().out
    for words in (
        "contract",
        "fits the model, but is not runnable yet",
        "unchecked  weights, tokenizer",
    ):
        assert words in shown


def test_architectures_are_those_of_the_published_models() -> None:
    """Parameters, counted by the formula of the layers: 4.02 and 30.5 billion are published."""
    counts = {}
    for path in ARCHITECTURES.glob("*.json"):
        spec = ModelSpec(architecture=parse_architecture(json.loads(path.read_text())))
        counts[path.stem] = num_parameters(spec), num_parameters(spec, active=True)
    assert counts["qwen3_4b"][0] == pytest.approx(4.02e9, rel=0.005)
    assert counts["qwen3_30b_a3b"] == pytest.approx((30.5e9, 3.3e9), rel=0.02)


def test_one_gpu_a_host_needs_no_note() -> None:
    assert _check("llama") == []


@pytest.mark.parametrize(
    ("family", "precision", "layout", "words"),
    [
        ("llama", None, {"tensor": 3}, ["trainer.parallel.tensor = 3", "num_attention_heads = 4"]),
        ("llama", None, {"tensor": 4}, ["tensor = 4", "num_key_value_heads = 2"]),
        ("llama", None, {"expert": 2, "data": 2}, ["expert = 2", "num_experts = 0", "use 1"]),
        ("qwen3_moe", None, {"expert": 3, "data": 3}, ["expert = 3", "num_experts = 8"]),
        ("qwen3_moe", None, {"expert": 4, "data": 2}, ["expert = 4", "tensor x data = 2"]),
    ],
)
def test_layouts_that_do_not_fit(
    family: str, precision: dict | None, layout: dict, words: list[str]
) -> None:
    with pytest.raises(ValueError, match=r".") as error:
        _check(family, precision, **layout)
    for word in words:
        assert word in str(error.value)


def test_a_cut_must_not_part_a_block() -> None:
    """Width 96 in two parts is 48: three blocks of 16, but one and a half of 32."""
    architecture = parse_architecture({**tiny_config("llama"), "intermediate_size": 96})
    tree = {"model": {"path": "x"}, "data": {"type": "vowels"}}
    for recipe, fits in (("bf16", True), ("nvfp4", True), ("mxfp8", False)):
        config = parse_config(
            {
                **tree,
                "model": {"path": "x", "precision": {"recipe": recipe}},
                "generator": {"parallel": {"tensor": 2}},
            }
        )
        spec = ModelSpec(architecture=architecture, precision=config.model.precision)
        if fits:
            assert "generator on 2 GPUs" in check_parallel(config, spec)[0]
            continue
        with pytest.raises(ValueError, match=r"size = 96 in parts of a multiple of 32"):
            check_parallel(config, spec)


def test_a_run_is_refused_and_an_unreachable_model_explained(capsys, tmp_path, monkeypatch) -> None:
    config = str(CONFIGS / "tiny_moe.toml")
    assert main(["train", config, "--set", "trainer.parallel.data=2"]) == 2
    assert "runs on one GPU so far; leave the section out" in capsys.readouterr().err
    file = str(ARCHITECTURES / "qwen3_4b.json")
    assert main(["train", config, "--architecture", file]) == 2
    assert "add --dry-run" in capsys.readouterr().err
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert main(["train", str(CONFIGS / "qwen3_4b_dapo.toml"), "--dry-run"]) == 2
    message = capsys.readouterr().err
    assert "model.path = 'Qwen/Qwen3-4B'" in message
    assert "--architecture" in message
    assert load_config(CONFIGS / "qwen3_4b_dapo.toml").trainer.parallel.num_gpus == 4
