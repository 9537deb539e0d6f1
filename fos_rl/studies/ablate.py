"""`fos-rl ablate`: check every arm of a study, run what is not finished, compare."""

from collections.abc import Sequence
from pathlib import Path

from fos_rl.compare import compare
from fos_rl.config import RunConfig
from fos_rl.config.study import StudyRun, config_differences, load_study
from fos_rl.files.whole import whole_file
from fos_rl.model.machine import machine_memory_gib
from fos_rl.run_folder.auto_values import with_values_of
from fos_rl.run_folder.folder import is_finished, read_config
from fos_rl.run_folder.preflight import check_output, size_text
from fos_rl.runtime.cluster import gpu_environments, runs_at_once
from fos_rl.runtime.launch import CHECKED, Plan, count_gpus, planned
from fos_rl.runtime.parallel import refuse_parallel
from fos_rl.studies.estimate import Estimate, estimate
from fos_rl.studies.run_queue import run_all
from fos_rl.studies.study_console import StudyConsole, plan_text, summary_text


def ablate(
    path: Path,
    *,
    arms: Sequence[str] = (),
    out: Path | None = None,
    parallel: int | None = None,
    dry_run: bool = False,
) -> int:
    """Run a study's arms under all its seeds and compare them.

    The exit status is 1 when a run failed, or when what must hold between arms does not.

    Nothing starts unless every arm passes every check that needs no actor. Runs that are finished
    are left alone, so the same call after an interruption continues where it stopped.

    Raises:
        ValueError: naming arm, field, value, rule and remedy.
    """
    study = load_study(path).only(arms)
    out = out or Path("runs") / study.name
    _refuse_other_configs(study.runs, out)
    console = StudyConsole(sum(run.config.steps for run in study.runs))
    estimates: dict[str, Estimate] = {}
    plans: dict[str, Plan] = {}
    for arm, config in study.arms.items():
        console.say(f"checking arm {arm}")
        estimates[arm], plans[arm] = _check(arm, config, out)
    placements = {arm: plan.placement for arm, plan in plans.items()}
    todo = [run.arm for run in study.runs if not is_finished(out / run.name)]
    space = sum(plans[arm].space.certain for arm in todo)
    free = check_output(out, space, "the models and checkpoints of all runs")
    # One that takes the most decides for all.
    arm = max(placements, key=lambda name: placements[name].num_gpus)
    config, placement = study.arms[arm], placements[arm]
    gpus = count_gpus(config)
    at_once = parallel or min(len(study.runs), runs_at_once(config, placement, gpus))
    local = config.cluster.address == "local"
    memory = machine_memory_gib("cuda" if placement.num_gpus else "cpu") if local else None
    console.say(plan_text(study, estimates, at_once, placement.describe(), memory))
    if dry_run:
        console.say(f"output     {out}: {size_text(space)} for models and checkpoints; {free}")
        unchecked = dict.fromkeys(item for plan in plans.values() for item in plan.unchecked)
        console.say(f"checked    of each arm: {', '.join(CHECKED)}")
        console.say(f"unchecked  {'; '.join(unchecked)}")
        console.say("dry run: nothing started")
        return 0
    for each in study.arms.values():
        refuse_parallel(each)
    out.mkdir(parents=True, exist_ok=True)
    with whole_file(out / "study.toml") as file:
        file.write(study.path.read_bytes())
    environments = gpu_environments(at_once, placement.num_gpus if local else 0, gpus)
    with console:
        queue = run_all(study.runs, out, environments, console.watch)
    broken = compare([out]) if any(item.steps_done for item in queue) else []
    console.say(summary_text(queue, f"fos-rl ablate {study.path} --out {out}"))
    return int(bool(broken) or any(item.state == "failed" for item in queue))


def _check(arm: str, config: RunConfig, out: Path) -> tuple[Estimate, Plan]:
    """Every check of a run that needs no actor; a seed changes none of them."""
    try:
        with planned(config, out=out) as plan:
            own = sorted(out.glob(f"{arm}/seed_*"))
            earlier = own if any(map(is_finished, own)) else sorted(out.glob("*/seed_*"))
            return estimate(plan.config, plan, filter(Path.is_dir, earlier)), plan
    except ValueError as error:
        raise ValueError(f"arm {arm!r}: {error}") from error


def _refuse_other_configs(runs: Sequence[StudyRun], out: Path) -> None:
    """ValueError for a run folder that an arm of other settings left: its figures are others."""
    for run in runs:
        folder = out / run.name
        earlier = read_config(folder)
        if earlier is None:
            continue
        config = with_values_of(run.config, earlier)
        if earlier == config:
            continue
        differences = "; ".join(
            f"{name}: {before!r} there, {now!r} now"
            for name, (before, now) in config_differences(earlier, config).items()
        )
        raise ValueError(
            f"arm {run.arm!r}: {folder} is a run of other settings ({differences}); give another "
            "folder with --out, or move this one away"
        )
