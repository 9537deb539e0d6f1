"""Every number of every settings model has limits, and what no number can be is refused."""

import math
import re
import types
import typing
from collections.abc import Iterator
from typing import Annotated, Any, get_args, get_origin

import pytest

from fos_rl.cli import main
from fos_rl.compare.checks import Limit
from fos_rl.config import RunConfig, load_config, parse_config, section_models
from fos_rl.config.evaluation import eval_config
from fos_rl.config.study import StudyFile, load_study
from fos_rl.spec import Frozen

# Why a number has no limit on one side.
UNLIMITED = {
    ("TrainerConfig", "lr"): "every finite rate is defined; one that breaks the weights stops the "
    "run when it does",
}
RUN = {"model": {"path": "random:llama"}, "data": {"type": "vowels"}}


def _models(model: type[Frozen] = Frozen) -> Iterator[type[Frozen]]:
    for child in model.__subclasses__():
        yield child
        yield from _models(child)


def _numbers(annotation: Any, metadata: tuple[Any, ...] = ()) -> Iterator[tuple[type, list[Any]]]:
    """The int and float leaves of an annotation, each with what is laid on it."""
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *own = get_args(annotation)
        yield from _numbers(inner, (*metadata, *own))
    elif origin in (typing.Union, types.UnionType, tuple, list):
        for part in get_args(annotation):
            yield from _numbers(part)
    elif annotation in (int, float):
        flat = [m for item in metadata for m in (getattr(item, "metadata", None) or [item])]
        yield annotation, flat


def _limits(metadata: list[Any]) -> dict[str, float]:
    return {k: getattr(m, k) for m in metadata for k in ("gt", "ge", "lt", "le") if hasattr(m, k)}


FIELDS = [
    pytest.param(model, name, id=f"{model.__name__}.{name}")
    for model in sorted(set(_models()), key=lambda m: m.__name__)
    for name, info in model.model_fields.items()
    if any(True for _ in _numbers(info.annotation, tuple(info.metadata)))
]


@pytest.mark.parametrize(("model", "name"), FIELDS)
def test_every_number_has_a_lower_and_an_upper_limit(model: type[Frozen], name: str) -> None:
    info = model.model_fields[name]
    for _, metadata in _numbers(info.annotation, tuple(info.metadata)):
        limits = _limits(metadata)
        assert limits.keys() & {"gt", "ge"}
        assert bool(limits.keys() & {"lt", "le"}) != ((model.__name__, name) in UNLIMITED)


def test_the_models_are_found() -> None:
    """The walk sees plain, optional, union, tuple and list fields, in every module."""
    found = {param.id for param in FIELDS}
    assert len(found) > 50
    assert found >= {
        "RunConfig.steps",
        "TrainerConfig.lr",
        "TrainerConfig.save_every",
        "TrainerConfig.betas",
        "StudyFile.seeds",
        "Mxfp8.first_layers_bf16",
        "Architecture.rope_theta",
        "MaskedWeights.low",
    }


def _settings(section: str = "") -> Iterator[tuple[str, type[Frozen], str]]:
    """(section, model, field) of every number that a TOML file can hold."""
    for model in section_models(section):
        for name, info in model.model_fields.items():
            below = f"{section}.{name}".removeprefix(".")
            if section_models(below):
                yield from _settings(below)
            elif any(True for _ in _numbers(info.annotation, tuple(info.metadata))):
                yield section, model, name


def _tree(section: str, model: type[Frozen], name: str, value: Any) -> dict[str, Any]:
    """A run that is right but for one number."""
    tree: dict[str, Any] = {"model": {"path": "random:llama"}, "data": {"type": "vowels"}}
    table = tree
    for part in filter(None, section.split(".")):
        table = table.setdefault(part, {})
    for key in ("type", "recipe"):
        if key in model.model_fields:
            table[key] = model.model_fields[key].default
    if section == "eval":
        table["sets"] = ["held_out"]
    if model.__name__ in ("TruncatedWeights", "MaskedWeights"):
        tree["algorithm"]["ratio"] = "decoupled"
    if model.__name__ == "DatasetData":
        table["path"] = "x.jsonl"
    table[name] = value
    return tree


SETTINGS = list(_settings())


@pytest.mark.parametrize(
    "value",
    [math.inf, -math.inf, math.nan, True, "3", 10**40, -(10**40)],
    ids=["inf", "-inf", "nan", "bool", "text", "huge", "huge negative"],
)
def test_no_setting_takes_what_is_no_number_for_it(value: Any) -> None:
    """One number of the config at a time; the answer names it, as the file spells it."""
    spelled = {math.inf: "inf", -math.inf: "-inf", True: "true"}.get(value, "")
    for section, model, name in SETTINGS:
        if (model.__name__, name) in UNLIMITED and type(value) is int and value > 0:
            continue
        dotted = f"{section}.{name}".removeprefix(".")
        wrong = [value, 0.5] if name == "betas" else value
        with pytest.raises(ValueError, match=re.escape(dotted) + ".* = .*" + spelled):
            parse_config(_tree(section, model, name, wrong))


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("trainer.betas=[1.5, 2]", ["trainer.betas.0 = 1.5", "trainer.betas.1 = 2", "less than 1"]),
        ("trainer.betas=[0.9, 1.0]", ["trainer.betas.1 = 1.0", "less than 1", "explain trainer"]),
        ("trainer.betas=[-0.1, 0.9]", ["trainer.betas.0 = -0.1", "equal to 0"]),
        ("trainer.betas=[0.9]", ["trainer.betas", "required"]),
        ("trainer.betas=[0.9, 0.9, 0.9]", ["trainer.betas", "at most 2"]),
        ("trainer.eps=0", ["trainer.eps = 0"]),
        # In fp32 it is 0.
        ("trainer.eps=1e-60", ["trainer.eps = 1e-60"]),
        ("trainer.weight_decay=-0.1", ["trainer.weight_decay = -0.1"]),
        ("trainer.max_grad_norm=0", ["trainer.max_grad_norm = 0"]),
        ("trainer.lr=0", ["trainer.lr = 0"]),
        ("trainer.lr=1e999", ["trainer.lr = inf", "finite"]),
        ("algorithm.clip_low=1.1", ["algorithm.clip_low = 1.1"]),
        ("algorithm.clip_high=0", ["algorithm.clip_high = 0"]),
        ("algorithm.dual_clip=1", ["algorithm.dual_clip = 1"]),
        ("rollout.temperature=0.0099", ["rollout.temperature = 0.0099", "vLLM", "0.01 to 2"]),
        ("rollout.temperature=0", ["rollout.temperature = 0", "0.01 to 2"]),
        ("rollout.temperature=2.01", ["rollout.temperature = 2.01", "0.01 to 2"]),
        ("eval.temperature=0.001", ["eval.temperature = 0.001", "0.01 to 2", "eval.greedy"]),
        ("eval.temperature=3", ["eval.temperature = 3", "0.01 to 2"]),
        ("seed=-1", ["seed = -1"]),
        ("seed=4611686018427387904", ["seed = 4611686018427387904"]),
        ("trainer.device=true", ["trainer.device = true", "'cpu'"]),
        ("eval.greedy=1", ["eval.greedy = 1", "boolean"]),
    ],
)
def test_a_setting_that_cannot_work_is_named(setting: str, words: list[str]) -> None:
    with pytest.raises(ValueError, match=r".") as error:
        load_config("configs/tiny_moe.toml", ['eval.sets=["held_out"]', setting])
    for word in words:
        assert word in str(error.value)
    assert "literal" not in str(error.value)


def test_what_files_and_flags_hand_on_is_checked_too(tmp_path, capsys) -> None:
    with pytest.raises(ValueError, match=r"rollout.temperature = 0.001: .*0.01 to 2"):
        eval_config(
            "m", sets=["x"], samples=1, greedy=False, overrides=["rollout.temperature=0.001"]
        )
    with pytest.raises(ValueError, match=r"eval.temperature = 0.001: .*0.01 to 2"):
        eval_config("m", sets=["x"], samples=1, greedy=False, overrides=["eval.temperature=0.001"])
    (tmp_path / "base.toml").write_text('[model]\npath = "random:llama"\n[data]\ntype = "vowels"\n')
    study = tmp_path / "s.toml"
    head = 'base = "base.toml"\nbaseline = "a"\n'
    study.write_text(f"{head}seeds = [0]\n[arms.a.trainer]\nlr = inf\n")
    with pytest.raises(ValueError, match=r"arm 'a': trainer.lr = inf: .*finite"):
        load_study(study)
    for seeds in ("[true]", "[-1]", "[nan]", "[18446744073709551616]"):
        study.write_text(f"{head}seeds = {seeds}\n[arms.a]\n")
        with pytest.raises(ValueError, match=r"seeds.0 = "):
            load_study(study)
    for limit in ("inf", "-inf", "nan", "1e999"):
        with pytest.raises(ValueError, match="--fail-above"):
            Limit.parse(f"mismatch/kl_k3={limit}")
        with pytest.raises(SystemExit):
            main(["parity", "configs/tiny_moe.toml", f"--fail-above={limit}"])
        assert "give a number of at least 0" in capsys.readouterr().err
    assert Limit.parse("mismatch/kl_k1=-0.5").value == -0.5


def test_whole_numbers_serve_as_fractions_and_arrays_as_tuples() -> None:
    """What TOML cannot say otherwise stays possible; a resolved config loads again."""
    tree = {**RUN, "trainer": {"lr": 1, "betas": [0, 0.5]}}
    config = parse_config(tree)
    assert config.trainer.lr == 1.0
    assert isinstance(config.trainer.lr, float)
    assert config.trainer.betas == (0.0, 0.5)
    assert parse_config(config.model_dump(mode="json", exclude_none=True)) == config
    assert RunConfig.model_validate(config.model_dump()) == config
    assert StudyFile(base="b", baseline="a", seeds=[0, 2**40], arms={}).seeds == [0, 2**40]
