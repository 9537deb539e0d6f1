"""Study files: one base config, several arms, several seeds. No torch import.

    base = "base.toml"          # a config, relative to the study file
    seeds = [0, 1, 2]
    baseline = "bf16"           # the arm that others are compared with

    [arms.bf16]                 # the base as it is
    [arms.mxfp8.model.precision]
    recipe = "mxfp8"

An arm is a partial config. As with `--recipe`, another precision takes the place of the
base's, and with it goes the base's `trainer.backward_override`; another `type` replaces its table;
all else is merged key by key. Paths in a config are relative to the current directory.
"""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, StringConstraints, ValidationError

from fos_rl.config import RunConfig, Seed, merge_config, parse_config, read_toml, with_recipe
from fos_rl.spec import Frozen, flatten

ArmName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.+-]*$")]


class StudyFile(Frozen):
    """The keys of a study file."""

    base: str
    """Config file, relative to the study file."""
    baseline: ArmName
    """The arm that others are compared with."""
    seeds: Annotated[list[Seed], Field(min_length=1)]
    """Every arm runs once under each; runs of one seed see the same prompts."""
    arms: dict[ArmName, dict[str, Any]]
    """Partial configs; a name is also a folder's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRun:
    """One arm under one seed."""

    arm: str
    seed: int
    config: RunConfig

    @property
    def name(self) -> str:
        """Its place in the study's folder, as in bf16/seed_0."""
        return f"{self.arm}/seed_{self.seed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A study whose every run has a valid config; runs are ordered seed by seed, arm by arm, so
    that the first complete comparison is there early."""

    name: str
    path: Path
    baseline: str
    base_config: RunConfig
    """The baseline arm under the first seed."""
    runs: list[StudyRun]

    @property
    def arms(self) -> dict[str, RunConfig]:
        """Each arm's config under its first seed."""
        first: dict[str, RunConfig] = {}
        for run in self.runs:
            first.setdefault(run.arm, run.config)
        return first

    def only(self, arms: Sequence[str]) -> "Study":
        """The study with some of its arms; with all for an empty sequence.

        Raises:
            ValueError: for an arm that the study does not have.
        """
        known = list(dict.fromkeys(run.arm for run in self.runs))
        for arm in arms:
            if arm not in known:
                raise ValueError(
                    f"--arm {arm!r}: the study has no such arm; one of {', '.join(known)}"
                )
        runs = [run for run in self.runs if not arms or run.arm in arms]
        return replace(self, runs=runs)


def load_study(path: str | Path) -> Study:
    """The study of a TOML file, each arm's config resolved and validated.

    Raises:
        ValueError: naming each wrong field of the study or of an arm, its value, the rule and the
            remedy; the mistakes of all arms at once.
    """
    path = Path(path)
    file = _parse(read_toml(path, "see experiments/ for examples"), path)
    base = read_toml(path.parent / file.base, f"it is base = {file.base!r} of {path}")
    configs: dict[tuple[str, int], RunConfig] = {}
    mistakes: list[str] = []
    for arm, changes in file.arms.items():
        try:
            tree = _with_arm(base, changes)
            for seed in file.seeds:
                configs[arm, seed] = parse_config({**tree, "seed": seed})
        except ValueError as error:
            mistakes += [f"{path}: arm {arm!r}: {line}" for line in str(error).splitlines()]
    if mistakes:
        raise ValueError("\n".join(mistakes))
    return Study(
        name=path.parent.resolve().name if path.stem == "study" else path.stem,
        path=path,
        baseline=file.baseline,
        base_config=configs[file.baseline, file.seeds[0]],
        runs=[
            StudyRun(arm=arm, seed=seed, config=configs[arm, seed])
            for seed in file.seeds
            for arm in file.arms
        ],
    )


def config_differences(ours: RunConfig, theirs: RunConfig) -> dict[str, tuple[Any, Any]]:
    """The settings in which two configs differ, by dotted name, as (ours, theirs); a setting that
    one of them does not have is None there."""
    left, right = flatten(ours.model_dump(mode="json")), flatten(theirs.model_dump(mode="json"))
    names = [*left, *(name for name in right if name not in left)]
    pairs = {name: (left.get(name), right.get(name)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def stated_differences(ours: RunConfig, theirs: RunConfig) -> dict[str, tuple[Any, Any]]:
    """`config_differences` without the defaults that come with another type or recipe."""
    dumps = (c.model_dump(mode="json", exclude_unset=True) for c in (ours, theirs))
    stated = {name for dump in dumps for name in flatten(dump)}
    return {name: p for name, p in config_differences(ours, theirs).items() if name in stated}


def _parse(tree: dict[str, Any], path: Path) -> StudyFile:
    try:
        file = StudyFile.model_validate(tree)
    except ValidationError as error:
        lines = [f"{path}: {_explain(details)}" for details in error.errors()]
        raise ValueError("\n".join(lines)) from None
    if file.baseline not in file.arms:
        close = difflib.get_close_matches(file.baseline, file.arms, n=1)
        raise ValueError(
            f"{path}: baseline = {file.baseline!r}: no such arm; "
            + (f"did you mean {close[0]}?" if close else f"one of {', '.join(file.arms)}")
        )
    if len(set(file.seeds)) < len(file.seeds):
        raise ValueError(f"{path}: seeds = {file.seeds}: a seed occurs twice; name each once")
    return file


def _explain(details: Any) -> str:
    """One validation error as `field = value: rule; remedy`."""
    name = ".".join(str(part) for part in details["loc"] if part != "[key]")
    known = sorted(StudyFile.model_fields)
    if details["type"] == "missing":
        return f"{name}: required; a study has the keys {', '.join(known)}"
    if details["type"] == "extra_forbidden":
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = (
            f"did you mean {close[0]}?" if close else "a config's keys go into an arm or the base"
        )
        return f"{name} = {details['input']!r}: unknown key; {hint}"
    rule = details["msg"][0].lower() + details["msg"][1:]
    if details["type"] == "string_pattern_mismatch":
        rule = "an arm is named with letters, digits, '_', '.', '+' and '-'; rename it"
    return f"{name} = {details['input']!r}: {rule}"


def _with_arm(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    if "seed" in changes:
        raise ValueError(
            f"seed = {changes['seed']!r}: the study's seeds apply to every arm; leave it out here"
        )
    wanted, current = (_precision(tree).get("recipe") for tree in (changes, base))
    if wanted is not None and wanted != (current or "bf16"):
        return with_recipe(base, changes)
    return merge_config(base, changes)


def _precision(tree: dict[str, Any]) -> dict[str, Any]:
    """The precision table; empty where the file has something else in its place."""
    for key in ("model", "precision"):
        tree = tree.get(key, {})
        if not isinstance(tree, dict):
            return {}
    return tree
