"""A study file becomes valid runs, or names arm, field and remedy before anything starts."""

import tomllib
from pathlib import Path

import pytest
import tomli_w
from transformers import AutoTokenizer

from fos_rl.cli import main
from fos_rl.config.study import config_differences, load_study, stated_differences
from fos_rl.data.problems import load_problems
from fos_rl.data.prompts import PromptSet
from fos_rl.model.tiny import write_tiny_model
from fos_rl.spec import Bf16, FourOverSix, Mxfp8

ROOT = Path(__file__).parents[2]
STUDIES = sorted(
    path
    for path in (ROOT / "experiments").rglob("*.toml")
    if "arms" in tomllib.loads(path.read_text())
)

BASE = {
    "model": {"path": "random:llama", "precision": {"compute_dtype": "float32"}},
    "data": {"type": "vowels", "num_problems": 7},
    "trainer": {"lr": 3e-6},
    "algorithm": {"clip_low": 0.1},
}
ARMS = {
    "bf16": {},
    "mxfp8": {"model": {"precision": {"recipe": "mxfp8"}}, "trainer": {"warmup_steps": 3}},
}


def _study(folder: Path, config: dict | None = None, **keys: object) -> Path:
    (folder / "base.toml").write_text(tomli_w.dumps(config or BASE))
    path = folder / "study.toml"
    tree = {"base": "base.toml", "seeds": [3, 5], "baseline": "bf16", "arms": ARMS, **keys}
    path.write_text(tomli_w.dumps(tree))
    return path


@pytest.mark.parametrize("path", STUDIES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_every_shipped_study_loads(path: Path) -> None:
    study = load_study(path)
    assert study.base_config == study.arms[study.baseline]


def test_every_toml_in_experiments_is_a_study_or_a_base_of_one() -> None:
    bases = {path.parent / _base_name(path) for path in STUDIES}
    found = {p.resolve() for p in (ROOT / "experiments").rglob("*.toml")}
    assert found == {p.resolve() for p in (*STUDIES, *bases)}


def _base_name(path: Path) -> str:
    return tomllib.loads(path.read_text())["base"]


def test_runs_are_arms_by_seeds(tmp_path: Path) -> None:
    study = load_study(_study(tmp_path))
    assert [run.name for run in study.runs] == [
        "bf16/seed_3",
        "mxfp8/seed_3",
        "bf16/seed_5",
        "mxfp8/seed_5",
    ]
    assert [run.config.seed for run in study.runs] == [3, 3, 5, 5]
    assert study.name == tmp_path.name
    assert [run.arm for run in study.only(["mxfp8"]).runs] == ["mxfp8", "mxfp8"]


def test_an_arm_is_a_partial_config(tmp_path: Path) -> None:
    """Tables are merged; another recipe or type replaces its table."""
    arms = {
        **ARMS,
        "same-recipe": {"model": {"precision": {"recipe": "bf16"}}},
        "gsm8k": {"data": {"type": "gsm8k", "path": "x.jsonl"}},
        "dapo": {"algorithm": {"type": "dapo"}},
        "grpo": {"algorithm": {"type": "grpo", "minibatches": 2}},
    }
    configs = load_study(_study(tmp_path, arms=arms)).arms
    assert configs["bf16"].model.precision == Bf16(compute_dtype="float32")
    # The base's compute_dtype belonged to the base's recipe.
    assert configs["mxfp8"].model.precision == Mxfp8()
    assert (configs["mxfp8"].trainer.lr, configs["mxfp8"].trainer.warmup_steps) == (3e-6, 3)
    assert configs["same-recipe"].model.precision == Bf16(compute_dtype="float32")
    assert not hasattr(configs["gsm8k"].data, "num_problems")
    # The base's algorithm is grpo without saying so.
    assert configs["dapo"].algorithm.clip_low == 0.2
    assert configs["grpo"].algorithm.clip_low == 0.1


def test_another_recipe_drops_the_backward_that_belonged_to_the_base(tmp_path: Path) -> None:
    precision = {"recipe": "nvfp4_four_over_six", "err_mode": "mae"}
    base = {
        **BASE,
        "model": {"path": "random:llama", "precision": precision},
        "trainer": {"backward_override": "dequantized"},
    }
    arms = {
        "bf16": {"model": {"precision": {"recipe": "bf16"}}},
        "mse": {"model": {"precision": {"err_mode": "mse"}}},
    }
    configs = load_study(_study(tmp_path, base, arms=arms)).arms
    assert configs["bf16"].trainer.backward_override is None
    assert configs["mse"].model.precision == FourOverSix(err_mode="mse")
    assert configs["mse"].trainer.backward_override == "dequantized"


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"arms": {**ARMS, "x": {"trainer": {"lr": -1}}}}, ["arm 'x'", "trainer.lr = -1", "> 0"]),
        ({"arms": {**ARMS, "x": {"modle": {}}}}, ["arm 'x'", "modle", "did you mean model?"]),
        ({"arms": {**ARMS, "x": {"model": 3}}}, ["arm 'x'", "model = 3"]),
        ({"arms": {**ARMS, "x": {"seed": 3}}}, ["arm 'x'", "seed = 3", "leave it out"]),
        (
            {"arms": {**ARMS, "x": {"trainer": {"backward_override": "quantized"}}}},
            ["arm 'x'", "trainer.backward_override", "bf16 quantizes nothing", "leave it out"],
        ),
        ({"arms": {**ARMS, "a/b": {}}}, ["arms.a/b", "rename it"]),
        ({"arms": {}}, ["baseline = 'bf16'"]),
        ({"baseline": "bf61"}, ["baseline = 'bf61'", "did you mean bf16?"]),
        ({"seeds": [1, 1]}, ["seeds = [1, 1]", "twice"]),
        ({"seeds": []}, ["seeds = []", "at least 1"]),
        ({"seed": 3}, ["seed = 3", "did you mean seeds?"]),
        ({"base": "none.toml"}, ["none.toml does not exist", "base = 'none.toml'"]),
    ],
    ids=lambda value: "" if isinstance(value, list) else str(value)[-40:],
)
def test_wrong_studies_are_explained(tmp_path: Path, capsys, keys: dict, words: list[str]) -> None:
    path = _study(tmp_path, **keys)
    assert main(["ablate", str(path), "--out", str(tmp_path / "out")]) == 2
    message = capsys.readouterr().err
    for word in words:
        assert word in message.replace("greater than 0", "> 0")
    assert not (tmp_path / "out").exists()


def test_mistakes_of_all_arms_are_reported_at_once(tmp_path: Path) -> None:
    arms = {**ARMS, "x": {"steps": 0}, "y": {"trainer": {"lr": -1, "eps": -1}}}
    with pytest.raises(ValueError, match=r"arm 'x'.*\n.*arm 'y'.*lr.*\n.*arm 'y'.*eps"):
        load_study(_study(tmp_path, arms=arms))


def test_unknown_arm(tmp_path: Path, capsys) -> None:
    assert main(["ablate", str(_study(tmp_path)), "--arm", "nvfp4"]) == 2
    assert "--arm 'nvfp4': the study has no such arm; one of bf16, mxfp8" in capsys.readouterr().err


def test_differences_name_both_values(tmp_path: Path) -> None:
    configs = load_study(_study(tmp_path)).arms
    stated = stated_differences(configs["bf16"], configs["mxfp8"])
    assert stated == {
        "model.precision.recipe": ("bf16", "mxfp8"),
        "model.precision.compute_dtype": ("float32", "bfloat16"),
        "trainer.warmup_steps": (0, 3),
    }
    every = config_differences(configs["bf16"], configs["mxfp8"])
    assert every["model.precision.scale_mode"] == (None, "rceil")


def test_arms_of_one_seed_see_the_same_prompts(tmp_path: Path) -> None:
    """Pairing needs it; sampling seeds are config.seed * 1_000_003 + step in every run."""
    tokenizer = AutoTokenizer.from_pretrained(write_tiny_model("llama", tmp_path / "model"))
    streams: dict[int, list] = {}
    for run in load_study(_study(tmp_path)).runs:
        problems = load_problems(run.config.data, run.config.seed)
        prompts = PromptSet(problems, tokenizer, run.config)
        seen = [[prompt.id for prompt in prompts.batch(step)] for step in range(4)]
        assert streams.setdefault(run.seed, seen) == seen
    assert streams[3] != streams[5]
