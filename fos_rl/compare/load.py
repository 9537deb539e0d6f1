"""Run folders and study folders, read into arms: one arm, its runs under several seeds."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from fos_rl.config import read_toml
from fos_rl.config.stored import translate_stored
from fos_rl.files.json_lines import JsonLines, read_run_lines, torn_tail
from fos_rl.files.reading import read_json_object
from fos_rl.run_folder.folder import read_metrics_lines
from fos_rl.spec import flatten

_SEED_FOLDER = re.compile(r"seed_(\d+)")

# By (group, prompt id).
GroupRewards = dict[tuple[int, str], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run folder. `settings` is its resolved config by dotted name, `steps` its metrics."""

    path: Path
    arm: str
    seed: int
    settings: Mapping[str, object]
    steps: list[dict[str, float]]
    _group_rewards: dict[int, GroupRewards] = field(default_factory=dict, repr=False)

    @property
    def name(self) -> str:
        """`ARM/seed_SEED`, as in messages and tables."""
        return f"{self.arm}/seed_{self.seed}"

    @property
    def backward(self) -> str | None:
        """The backward mode; None where nothing is quantized."""
        if self.settings.get("model.precision.recipe") == "bf16":
            return None
        row_scaled = self.settings.get("model.precision.row_scaled_activation", False)
        default = "high_precision" if row_scaled else "quantized"
        return str(self.settings.get("trainer.backward_override", default))

    def rollouts(self, step: int) -> list[dict]:
        """A step's samples as runs.py wrote them; empty when the file is gone."""
        return _read_rows(
            self.path / "rollouts" / f"{step:06d}.jsonl", ("group", "prompt_id", "reward")
        )

    def group_rewards(self, step: int) -> GroupRewards:
        """Mean reward of each prompt's responses. Read once: a step's samples can be large."""
        if step not in self._group_rewards:
            rewards: dict[tuple[int, str], list[float]] = {}
            for row in self.rollouts(step):
                rewards.setdefault((row["group"], row["prompt_id"]), []).append(row["reward"])
            means = {prompt: float(np.mean(values)) for prompt, values in rewards.items()}
            self._group_rewards[step] = means
        return self._group_rewards[step]

    def log_probs(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """(generator, trainer) log-probs of a step's trained tokens, each [tokens]."""
        sides = ("generator_log_probs", "trainer_log_probs")
        rows = _read_rows(self.path / "rollouts" / f"{step:06d}.trainer.jsonl", sides)
        generator = [value for row in rows for value in row["generator_log_probs"]]
        trainer = [value for row in rows for value in row["trainer_log_probs"]]
        return np.asarray(generator), np.asarray(trainer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One setting under its seeds; `runs` are ordered by seed."""

    name: str
    runs: list[Run]

    @property
    def whole(self) -> list[Run]:
        """The runs with the most steps: the late steps of a shorter one are other steps."""
        most = max(len(run.steps) for run in self.runs)
        return [run for run in self.runs if len(run.steps) == most]

    def run_of(self, seed: int) -> Run | None:
        """The arm's run with that seed; None where there is none."""
        return next((run for run in self.runs if run.seed == seed), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The arms, the baseline first. `notes` name what was asked for and is not there."""

    title: str
    arms: list[Arm]
    notes: list[str]

    @property
    def baseline(self) -> Arm:
        """The first arm, which the others are compared with."""
        return self.arms[0]

    @property
    def runs(self) -> list[Run]:
        """All runs, arm by arm."""
        return [run for arm in self.arms for run in arm.runs]


def load(paths: Sequence[Path], baseline: str | None = None) -> Comparison:
    """The runs at `paths`, each a run folder, an arm's folder or a study's.

    A run in `ARM/seed_N` belongs to ARM; any other run is an arm of its own, named after its
    folder. Arms that would share a name take their parent folder's into it.

    Args:
        baseline: an arm's name; by default the study's, else the first arm.

    Raises:
        ValueError: when a path holds no run, or no arm has the baseline's name.
    """
    found: dict[Path, list[Run]] = {}
    notes: list[str] = []
    for folder in dict.fromkeys(f for path in paths for f in _run_folders(path.resolve())):
        lines = _read_steps(folder)
        files = sorted((folder / "rollouts").glob("[0-9]*.jsonl"))
        notes += [f"Torn: {words}." for words in (lines.torn, *map(torn_tail, files)) if words]
        steps = lines.rows
        if steps:
            arm = folder.parent if _SEED_FOLDER.fullmatch(folder.name) else folder
            found.setdefault(arm, []).append(_read_run(folder, steps))
        else:
            notes.append(f"Missing: {folder.parent.name}/{folder.name} has no finished step.")
    if not found:
        raise ValueError(
            f"{', '.join(str(path) for path in paths)}: no finished step in any run there; "
            "run fos-rl train or fos-rl ablate first"
        )
    names = _short_names(list(found))
    arms = [_arm(names[folder], runs) for folder, runs in found.items()]
    study = _study_of(paths)
    wanted = baseline or study.get("baseline")
    missing = [name for name in study.get("arms", {}) if name not in names.values()]
    notes += [f"Missing: arm {name} of the study has not been run." for name in missing]
    notes += [note for arm in arms for run in arm.runs for note in _changed(run)]
    notes += [note for arm in arms for run in arm.runs for note in _unfinished(run)]
    title = paths[0].resolve().name if len(paths) == 1 else f"{len(arms)} arms"
    return Comparison(title=title, arms=_baseline_first(arms, wanted, baseline), notes=notes)


def _run_folders(path: Path) -> list[Path]:
    """The run folders at or below a path, a study's arms in the study file's order."""
    if not path.is_dir():
        raise ValueError(f"{path} is not a folder; give a run folder or a study's, as in runs/NAME")
    if (path / "config.toml").is_file() or (path / "metrics.jsonl").is_file():
        return [path]
    # ARM/seed_N of a study, or seed_N of an arm; what ablate moved aside has another name.
    below = [p for pattern in ("seed_*", "*/seed_*") for p in path.glob(pattern)]
    folders = [p for p in below if _SEED_FOLDER.fullmatch(p.name) and p.is_dir()]
    order = list(_study_of([path]).get("arms", {}))

    def place(folder: Path) -> tuple[int, str, int]:
        arm = folder.parent.name
        rank = order.index(arm) if arm in order else len(order)
        return rank, arm, int(folder.name.removeprefix("seed_"))

    return sorted(folders, key=place)


def _study_of(paths: Sequence[Path]) -> dict:
    """The study file's keys when one study is compared, else nothing."""
    file = paths[0] / "study.toml"
    if len(paths) != 1 or not file.is_file():
        return {}
    study = read_toml(file, "restore it, or move it away")
    for key, kind in (("arms", dict), ("baseline", str)):
        if not isinstance(study.get(key, kind()), kind):
            raise ValueError(f"{file}: {key} = {study[key]!r}; write it as a study file has it")
    return study


def _read_steps(folder: Path) -> JsonLines:
    there = (folder / "metrics.jsonl").is_file()
    return read_metrics_lines(folder) if there else JsonLines(rows=[])


def _read_run(folder: Path, steps: list[dict[str, float]]) -> Run:
    file = folder / "config.toml"
    if not file.is_file():
        raise ValueError(f"{folder} has metrics but no config.toml; restore it or leave it out")
    settings = flatten(translate_stored(read_toml(file, "restore it, or leave the run out")))
    seed = settings.get("seed", 0)
    return Run(
        path=folder,
        arm="",
        seed=seed if isinstance(seed, int) else 0,
        settings=settings,
        steps=steps,
    )


def _arm(name: str, runs: list[Run]) -> Arm:
    named = [replace(run, arm=name) for run in runs]
    return Arm(name=name, runs=sorted(named, key=lambda run: run.seed))


def _short_names(folders: list[Path]) -> dict[Path, str]:
    """The last parts of each path, as few as tell them all apart."""
    depth = 1
    while len({folder.parts[-depth:] for folder in folders}) < len(folders):
        depth += 1
    return {folder: "/".join(folder.parts[-depth:]) for folder in folders}


def _baseline_first(arms: list[Arm], wanted: str | None, asked: str | None) -> list[Arm]:
    names = [arm.name for arm in arms]
    if wanted in names:
        return sorted(arms, key=lambda arm: arm.name != wanted)
    if asked is not None:
        raise ValueError(f"--baseline {asked!r}: no such arm; one of {', '.join(names)}")
    return arms


def _changed(run: Run) -> list[str]:
    """Settings that a resume changed in the middle of the run."""
    file = run.path / "environment.json"
    started = read_json_object(file, "restore it, or move it away") if file.is_file() else {}
    return [
        f"Changed: {run.name} has {name} = {values['now']!r} from step {resumed['step']} on, "
        f"{values['before']!r} before."
        for resumed in started.get("resumed", [])
        for name, values in resumed.get("settings", {}).items()
        if name != "steps"
    ]


def _unfinished(run: Run) -> list[str]:
    wanted = run.settings.get("steps")
    if isinstance(wanted, int) and len(run.steps) < wanted:
        return [f"Unfinished: {run.name} has {len(run.steps)} of {wanted} steps."]
    return []


def _read_rows(path: Path, keys: Sequence[str]) -> list[dict]:
    if not path.is_file():
        return []
    return read_run_lines(path, "restore it, or leave the run out", keys).rows
