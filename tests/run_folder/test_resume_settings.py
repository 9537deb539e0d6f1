"""Every setting either may change at a resume, or is refused by name."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from fos_rl.config import RunConfig, load_config, section_models
from fos_rl.run_folder.resume_settings import (
    MAY_CHANGE,
    REFUSED,
    change_lines,
    check_resumed,
    rule_of,
)

TINY = Path(__file__).parents[2] / "configs" / "tiny_moe.toml"


def _fields(section: str = "") -> Iterator[str]:
    """Every setting's dotted name, in all types that a section can have."""
    for model in section_models(section):
        for name in model.model_fields:
            field = f"{section}.{name}".removeprefix(".")
            children = section_models(field)
            if children:
                yield from _fields(field)
            else:
                yield field


def test_every_field_is_in_one_of_the_tables() -> None:
    fields = set(_fields())
    assert {"steps", "seed", "data.split", "algorithm.correction.low", "eval.sets"} <= fields
    for field in fields:
        found = [
            name for name, rules in (("may", MAY_CHANGE), ("no", REFUSED)) if rule_of(field, rules)
        ]
        assert len(found) == 1, f"{field}: {found}; sort it into MAY_CHANGE or REFUSED"


def test_every_entry_of_the_tables_is_a_field_or_a_section() -> None:
    for name in [*MAY_CHANGE, *REFUSED]:
        *section, leaf = name.split(".")
        models: list[type[BaseModel]] = list(section_models(".".join(section)))
        assert any(leaf in model.model_fields for model in models), name


def _config(*overrides: str) -> RunConfig:
    return load_config(TINY, overrides)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("seed=7", "seed = 7: the run has 0, and prompts"),
        ("rollout.group_size=8", "rollout.group_size = 8: the run has 4"),
        ("rollout.prompts_per_step=2", "rollout.prompts_per_step = 2: the run has 4"),
        ("rollout.temperature=0.5", "rollout.temperature = 0.5: the run has 1.0"),
        ("data.type=arithmetic", "data.type = 'arithmetic': the run has 'vowels'"),
        ("data.num_problems=50", "data.num_problems = 50: the run has 100"),
        ("model.path=random:llama", "model.path = 'random:llama': the run has 'random:qwen3_moe'"),
        ("model.precision.compute_dtype=bfloat16", "model.precision.compute_dtype = 'bfloat16'"),
        ("model.precision.recipe=nvfp4", "model.precision.recipe = 'nvfp4': the run has 'bf16'"),
        ("model.consistency=exact", "model.consistency = 'exact': the run has 'fast'"),
        ("algorithm.type=dapo", "algorithm.type = 'dapo': the run has 'grpo'"),
        ("algorithm.correction.type=geometric", "algorithm.correction.type = 'geometric'"),
        ("algorithm.minibatches=2", "algorithm.minibatches = 2: the run has 1"),
        ("trainer.betas=[0.8, 0.99]", "trainer.betas = [0.8, 0.99]: the run has [0.9, 0.999]"),
    ],
)
def test_what_would_break_the_continuation_is_refused(override: str, words: str) -> None:
    with pytest.raises(ValueError, match="start another run") as error:
        check_resumed(_config(), _config(override), "runs/x")
    assert words in str(error.value)
    assert "--set model.path=runs/x/model" in str(error.value)


def test_what_may_change_is_said_with_both_values() -> None:
    changes = check_resumed(
        _config(),
        _config("steps=9", "trainer.lr=1e-2", "trainer.save_every=2", 'eval.sets=["aime24"]'),
        "runs/x",
    )
    lines = change_lines(changes)
    assert "steps: 3 until now, 9 from here" in lines
    assert "trainer.lr: 0.0001 until now, 0.01 from here" in lines
    assert "trainer.save_every: unset until now, 2 from here" in lines
    assert check_resumed(_config(), _config(), "runs/x") == {}
