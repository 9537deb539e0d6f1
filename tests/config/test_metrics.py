"""One table of metrics: what the docs show, what the command prints, what a run writes."""

import re
from pathlib import Path

import pytest

from fos_rl.cli import main
from fos_rl.config.metrics import TOOLKITS, metric_tables
from tests.support.metric_keys import unknown_keys

ROOT = Path(__file__).parents[2]


def test_the_docs_hold_the_table_letter_for_letter() -> None:
    assert metric_tables() in (ROOT / "docs" / "metrics.md").read_text(), (
        "replace the tables by the output of fos_rl.config.metrics.metric_tables()"
    )


def test_the_command_prints_every_cell_of_the_docs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "metrics"]) == 0
    printed = capsys.readouterr().out
    for line in metric_tables().splitlines():
        cells = [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if not cells or cells[0] in ("key", "---"):
            continue
        for cell in cells:
            assert cell.strip("`") in printed
    assert all(f"{toolkit}: " in printed for toolkit in TOOLKITS.values())


def test_patterns_match_their_keys_alone() -> None:
    assert not unknown_keys(
        {
            "mismatch/log_prob_abs_diff/p90",
            "mismatch/floor_outside_1e-6_frac",
            "mismatch/floor_by_length/3",
            "mismatch/routing_flip_frac/layer_11",
            "eval/gsm8k/pass@4",
            "time/sync_s",
        }
    )
    assert unknown_keys({"mismatch/kl", "mismatch/by_length/4", "loss/clip"}) == {
        "mismatch/kl",
        "mismatch/by_length/4",
        "loss/clip",
    }
