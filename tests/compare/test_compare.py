"""`fos-rl compare` from the command line, on runs of known content."""

import csv
import math
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from fos_rl.cli import main
from tests.compare.conftest import QUANTIZED

HEALTHY = {
    "reward/mean": 0.5,
    "mismatch/kl_k3": 0.001,
    "mismatch/log_prob_abs_diff/mean": 0.01,
    "loss/clip_frac": 0.0,
}


@pytest.fixture
def study(tmp_path, write_run) -> Path:
    """Two backward modes of one format, two seeds, three steps."""
    folder = tmp_path / "study"
    for mode, overrides in QUANTIZED.items():
        for seed in range(2):
            write_run(
                folder / mode / f"seed_{seed}",
                [HEALTHY, {**HEALTHY, "mismatch/kl_k3": 0.002}, {"reward/mean": 0.75}],
                rewards=[[0.0, 1.0]] * 3,
                overrides=overrides,
            )
    (folder / "study.toml").write_text('baseline = "high_precision"\n[arms.dequantized]\n')
    return folder


def test_a_healthy_study_exits_0_and_leaves_its_report(study: Path, capsys) -> None:
    assert main(["compare", str(study), "--fail-above", "mismatch/kl_k3=0.015"]) == 0
    printed = capsys.readouterr().out
    assert "baseline high_precision" in printed
    assert "FAILED" not in printed
    names = {path.name for path in (study / "comparison").iterdir()}
    assert names == {"report.html", "report.md", "report.csv", "plots"}


def test_plots_are_files_too(study: Path) -> None:
    main(["compare", str(study)])
    page = (study / "comparison/report.html").read_text()
    files = {path.stem: path for path in (study / "comparison/plots").iterdir()}
    assert files.keys() == set(re.findall(r'<figure id="plot-([^"]+)" class="plot(?! empty)', page))
    assert "first-step" in files
    for path in files.values():
        root = ElementTree.parse(path).getroot()
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert root.get("style") == "background: white"


def test_a_planted_mismatch_exits_1_and_is_named(study: Path, write_run, capsys) -> None:
    write_run(study / "planted" / "seed_0", [HEALTHY, {**HEALTHY, "mismatch/kl_k3": 0.5}])
    limit = ["--fail-above", "mismatch/kl_k3=0.015"]
    assert main(["compare", str(study), *limit]) == 1
    said = "planted/seed_0, step 1: mismatch/kl_k3 = 0.5 is above 0.015"
    assert said in capsys.readouterr().out
    assert said in (study / "comparison/report.html").read_text()
    assert f"**FAILED** {said}" in (study / "comparison/report.md").read_text()
    assert main(["compare", str(study), "--fail-above", "mismatch/kl_k3=0.5"]) == 0


def test_a_backward_mode_in_the_forward_exits_1(study: Path, capsys) -> None:
    file = study / "dequantized/seed_1/rollouts/000000.jsonl"
    file.write_text(file.read_text().replace('"log_probs": [-1.0]', '"log_probs": [-1.5]', 1))
    assert main(["compare", str(study)]) == 1
    printed = capsys.readouterr().out
    assert "FAILED dequantized/seed_1 and high_precision/seed_1 differ in the backward" in printed
    assert "generator log-probs differ in 1 of 4 responses" in printed
    assert 'id="failed"' in (study / "comparison/report.html").read_text()


def test_mistakes_exit_2(study: Path, capsys) -> None:
    assert main(["compare", str(study), "--fail-above", "mismatch/kl_k9=1"]) == 2
    assert "did you mean mismatch/kl_k3?" in capsys.readouterr().err
    assert main(["compare", str(study / "nothing")]) == 2


def test_csv_has_every_run_in_full_precision(study: Path, tmp_path) -> None:
    main(["compare", str(study), "--out", str(tmp_path / "out")])
    with (tmp_path / "out/report.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["arm"], row["seed"], row["steps"]) for row in rows] == [
        ("high_precision", "0", "3"),
        ("high_precision", "1", "3"),
        ("dequantized", "0", "3"),
        ("dequantized", "1", "3"),
    ]
    assert {float(row["mismatch/kl_k3:later:mean"]) for row in rows} == {0.002}
    assert {float(row["reward/mean:late:mean"]) for row in rows} == {0.75}
    # Not recorded is an empty cell, and no zero.
    assert {row["mismatch/over_floor:first:mean"] for row in rows} == {""}


def test_markdown_tables_are_rectangular(study: Path) -> None:
    main(["compare", str(study)])
    text = (study / "comparison/report.md").read_text()
    tables = [block for block in text.split("\n\n") if block.startswith("| ")]
    assert len(tables) == 4
    for table in tables:
        # A bar inside a cell is escaped.
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(widths) == 1
    # The mean over seeds and, in parentheses, the median.
    assert "| \\|d\\| mean | 1.00e-02 (1.00e-02) | 1.00e-02 (1.00e-02) |" in tables[0]


def test_runs_without_any_metric_or_rollout_are_shown_as_such(tmp_path, write_run) -> None:
    run = write_run(tmp_path / "bare", [{"policy/version": 1.0}])
    other = write_run(tmp_path / "odd", [{"trainer/grad_norm": math.nan}])
    assert main(["compare", str(run), str(other), "--out", str(tmp_path / "out")]) == 0
    page = (tmp_path / "out/report.html").read_text()
    assert page.count('class="no-data"') == len(re.findall("<figure", page))


def test_the_report_is_a_function_of_the_runs(study: Path, tmp_path) -> None:
    for name in ("one", "two"):
        main(["compare", str(study), "--out", str(tmp_path / name)])
    for file in ("report.html", "report.md", "report.csv"):
        assert (tmp_path / "one" / file).read_text() == (tmp_path / "two" / file).read_text()
