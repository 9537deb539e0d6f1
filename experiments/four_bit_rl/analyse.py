"""Every figure of results.md, from files in this folder.

    python experiments/four_bit_rl/analyse.py
    python experiments/four_bit_rl/analyse.py --collect runs/four_bit_rl

The first makes results.md and results/curves.svg of results/*.csv; the second takes the CSV files
out of a study's runs before. results.md is text.md with each {name} replaced by a figure.
"""

import argparse
import csv
import json
import math
from pathlib import Path

import numpy as np
from mpmath import betainc

from fos_rl.compare.statistics import t_quantile
from fos_rl.run_folder.folder import read_metrics

HERE = Path(__file__).parent
RESULTS = HERE / "results"
ARMS = {
    "four_over_six": "four-over-six, fast",
    "truncated": "four-over-six, fast, truncated weights",
    "exact": "four-over-six, exact",
    "bf16": "bf16, fast",
}
BASELINE = "four_over_six"
# The plan's primary metric: the mean of the last three evaluations.
LATE_EVALUATIONS = 3
COLUMNS = {
    "reward": "reward/mean",
    "abs_mean": "mismatch/log_prob_abs_diff/mean",
    "abs_max": "mismatch/log_prob_abs_diff/max",
    "clip_frac": "loss/clip_frac",
    "entropy": "policy/entropy",
    "length": "rollout/response_length/mean",
    "avg4": "eval/held_out/avg@4",
    "greedy": "eval/held_out/greedy",
    "step_s": "time/step_s",
}
Table = dict[tuple[str, int], list[dict[str, float]]]


def collect(study: Path) -> None:
    """results/steps.csv (or pilot.csv), a row per step, and bf16.csv, a row per run, of a study."""
    RESULTS.mkdir(exist_ok=True)
    runs = sorted((p.parent.name, int(p.name[5:]), p) for p in study.glob("*/seed_?"))
    steps = RESULTS / ("pilot.csv" if study.name == "pilot" else "steps.csv")
    with steps.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["arm", "seed", "step", *COLUMNS])
        for arm, seed, run in runs:
            for metrics in read_metrics(run):
                values = [metrics.get(key) for key in COLUMNS.values()]
                shown = ["" if v is None else f"{v:.5g}" for v in values]
                writer.writerow([arm, seed, int(metrics["step"]), *shown])
    evaluated = [(arm, seed, run / "eval_bf16.json") for arm, seed, run in runs]
    if not all(path.is_file() for _, _, path in evaluated):
        return
    with (RESULTS / "bf16.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["arm", "seed", "avg4", "greedy"])
        for arm, seed, path in evaluated:
            found = json.loads(path.read_text())
            writer.writerow(
                [arm, seed, found["eval/held_out/avg@4"], found["eval/held_out/greedy"]]
            )


def read_steps(name: str = "steps.csv") -> Table:
    """Steps of each (arm, seed), in order; a figure that a step does not have is absent."""
    table: Table = {}
    with (RESULTS / name).open() as file:
        for row in csv.DictReader(file):
            key = (row.pop("arm"), int(row.pop("seed")))
            table.setdefault(key, []).append({k: float(v) for k, v in row.items() if v})
    return table


def late(table: Table, column: str) -> dict[str, np.ndarray]:
    """Per arm, one value for each seed: the mean of the last evaluations."""
    return {
        arm: np.array(
            [
                np.mean([step[column] for step in steps if column in step][-LATE_EVALUATIONS:])
                for (name, _), steps in table.items()
                if name == arm
            ]
        )
        for arm in ARMS
    }


def half_width(values: np.ndarray) -> float:
    """Of the 95 % t interval of the mean."""
    return float(t_quantile(values.size - 1) * values.std(ddof=1) / math.sqrt(values.size))


def p_value(values: np.ndarray) -> float:
    """Two-sided, of a one-sample t test against 0, by the incomplete beta function."""
    degrees = values.size - 1
    t = values.mean() / (values.std(ddof=1) / math.sqrt(values.size))
    share = degrees / (degrees + t * t)
    return float(betainc(degrees / 2, 0.5, 0, share, regularized=True))


def holm(p_values: dict[str, float]) -> dict[str, float]:
    """Adjusted p-values (Holm 1979): of the k-th smallest of m, (m - k + 1) p, never decreasing."""
    adjusted, largest = {}, 0.0
    for k, name in enumerate(sorted(p_values, key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - k) * p_values[name]))
        adjusted[name] = largest
    return adjusted


def mean_text(values: np.ndarray) -> str:
    h = half_width(values)
    return f"{values.mean():.3f} [{values.mean() - h:.3f}, {values.mean() + h:.3f}]"


def difference_text(values: np.ndarray) -> str:
    h = half_width(values)
    return f"{values.mean():+.3f} [{values.mean() - h:+.3f}, {values.mean() + h:+.3f}]"


def figures(table: Table) -> dict[str, str]:
    """Each figure of the text by its name."""
    found: dict[str, str] = {}
    own, greedy = late(table, "avg4"), late(table, "greedy")
    with (RESULTS / "bf16.csv").open() as file:
        rows = list(csv.DictReader(file))
    in_bf16 = {
        arm: np.array([float(row["avg4"]) for row in rows if row["arm"] == arm]) for arm in ARMS
    }
    others = [arm for arm in ARMS if arm != BASELINE]
    adjusted = holm({arm: p_value(own[arm] - own[BASELINE]) for arm in others})
    lines = header("arm", "held-out avg@4", "minus fast", "p (Holm)", "greedy", "in bf16")
    for arm, title in ARMS.items():
        cells = [title, mean_text(own[arm])]
        if arm == BASELINE:
            cells += ["", "", mean_text(greedy[arm]), mean_text(in_bf16[arm])]
        else:
            cells += [difference_text(own[arm] - own[BASELINE]), f"{adjusted[arm]:.2g}"]
            cells += [difference_text(x[arm] - x[BASELINE]) for x in (greedy, in_bf16)]
        lines.append("| " + " | ".join(cells) + " |")
    found["table"] = "\n".join(lines)
    for arm in ARMS:
        found[f"late_{arm}"] = mean_text(own[arm])
        found[f"late_bf16_{arm}"] = mean_text(in_bf16[arm])
    for arm in others:
        found[f"gain_{arm}"] = difference_text(own[arm] - own[BASELINE])
        found[f"p_{arm}"] = f"{adjusted[arm]:.2g}"
    found["half_width"] = f"{half_width(own['exact'] - own[BASELINE]):.3f}"
    found["exact_over_truncated"] = difference_text(own["exact"] - own["truncated"])
    gap, gained = own["bf16"] - own[BASELINE], own["exact"] - own[BASELINE]
    found["share_of_gap"] = f"{100 * gained.mean() / gap.mean():.0f} %"
    truncated = own["truncated"] - own[BASELINE]
    found["share_of_gap_truncated"] = f"{100 * truncated.mean() / gap.mean():.0f} %"
    found["pairs_won"] = f"{int((gained > 0).sum())} of {gained.size}"
    lines = header(
        "arm",
        "clipped, steps 0-19",
        "clipped, 180-199",
        r"mean \|d\|, 0-19",
        r"mean \|d\|, 180-199",
        r"largest \|d\|",
        "entropy, 180-199",
        "steps to avg@4 of 0.2",
        "s per step",
    )
    for arm, title in ARMS.items():
        first, last = (window(table, arm, *w) for w in ((0, 20), (180, 200)))
        largest = max(
            s.get("abs_max", 0.0) for (a, _), steps in table.items() if a == arm for s in steps
        )
        seconds = np.median(
            [s["step_s"] for (a, _), steps in table.items() if a == arm for s in steps]
        )
        cells = [
            title,
            *(f"{100 * w['clip_frac']:.1f} %" for w in (first, last)),
            *(f"{w['abs_mean']:.3f}" for w in (first, last)),
            f"{largest:.2g}" if largest else "0",
            f"{last['entropy']:.2f}",
            f"{reached(table, arm, 0.2):.0f}",
            f"{seconds:.2f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
        found[f"clip_first_{arm}"], found[f"clip_last_{arm}"] = cells[1:3]
        found[f"abs_first_{arm}"], found[f"abs_last_{arm}"] = cells[3:5]
        found[f"reached_{arm}"] = cells[7]
        found[f"step_s_{arm}"] = cells[8]
    found["how"] = "\n".join(lines)
    zero = [
        s["abs_max"]
        for (a, _), steps in table.items()
        if a == "exact"
        for s in steps
        if "abs_max" in s
    ]
    found["exact_steps"] = f"{len(zero):,}"
    found["exact_largest"] = f"{max(zero):g}"
    found |= pilot_figures(read_steps("pilot.csv"))
    found["num_steps"] = f"{sum(map(len, table.values())):,}"
    return found


def header(*titles: str) -> list[str]:
    """The first two lines of a Markdown table."""
    return ["| " + " | ".join(titles) + " |", "| " + " | ".join("---" for _ in titles) + " |"]


def pilot_figures(table: Table) -> dict[str, str]:
    """Held-out avg@4 of the pilot's arms at each evaluation, and what a step took."""
    lines = header("arm", "avg@4 after 20, 40, 60, 80, 100 steps", "s per step")
    found = {}
    for (arm, _), steps in table.items():
        values = [f"{s['avg4']:.2f}" for s in steps if "avg4" in s]
        seconds = np.median([s["step_s"] for s in steps])
        lines.append(f"| {arm} | {', '.join(values)} | {seconds:.2f} |")
        found[f"pilot_{arm}"] = values[-1]
    return {"pilot": "\n".join(lines), **found}


def window(table: Table, arm: str, start: int, end: int) -> dict[str, float]:
    """Means over an arm's steps start .. end - 1 of all seeds."""
    steps = [s for (a, _), steps in table.items() if a == arm for s in steps[start:end]]
    return {
        column: float(np.mean([s[column] for s in steps if column in s]))
        for column in ("clip_frac", "abs_mean", "entropy")
    }


def reached(table: Table, arm: str, accuracy: float) -> float:
    """Mean over seeds of the first evaluated step (counted from 1) at that accuracy."""
    firsts = [
        next(s["step"] + 1 for s in steps if s.get("avg4", 0.0) >= accuracy)
        for (a, _), steps in table.items()
        if a == arm
    ]
    return float(np.mean(firsts))


def draw(table: Table) -> None:
    """Held-out accuracy and clipped share over steps: mean and 95 % t interval over seeds."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "four_bit_rl"
    import matplotlib.pyplot as plt

    plots = [
        ("avg4", "held-out avg@4"),
        ("clip_frac", "clipped tokens, share"),
        ("entropy", "entropy, nats per token"),
    ]
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    for axis, (column, title) in zip(axes, plots, strict=True):
        for (arm, name), color in zip(
            ARMS.items(), ("tab:red", "tab:orange", "tab:blue", "tab:gray"), strict=True
        ):
            steps, means, halves = curve(table, arm, column)
            axis.plot(steps, means, label=name, color=color, linewidth=1.5)
            axis.fill_between(
                steps, means - halves, means + halves, color=color, alpha=0.2, linewidth=0
            )
        axis.set(title=title, xlabel="step")
        axis.set_ylim(bottom=0)
    axes[0].legend(fontsize=8, frameon=False)
    figure.savefig(RESULTS / "curves.svg", metadata={"Date": None})
    plt.close(figure)


def curve(table: Table, arm: str, column: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Steps, means and half widths over seeds; a column of every step is averaged over twenty."""
    runs = [steps for (a, _), steps in table.items() if a == arm]
    if column == "avg4":
        values = np.array([[s[column] for s in steps if column in s] for steps in runs])
        places = np.array([s["step"] + 1 for s in runs[0] if column in s])
    else:
        values = np.array(
            [
                [
                    np.mean([s[column] for s in steps[i : i + 20] if column in s])
                    for i in range(0, len(steps), 20)
                ]
                for steps in runs
            ]
        )
        places = np.arange(values.shape[1]) * 20 + 10
    halves = np.array([half_width(column_values) for column_values in values.T])
    return places, values.mean(axis=0), halves


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--collect", type=Path, metavar="STUDY_FOLDER")
    if study := parser.parse_args().collect:
        collect(study)
    table = read_steps()
    draw(table)
    (HERE / "results.md").write_text(text(table))


def text(table: Table) -> str:
    """results.md."""
    return (HERE / "text.md").read_text().format(**figures(table))


if __name__ == "__main__":
    main()
