"""What a user watches, at the width of the terminal or file it goes to."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest

from fos_rl.run_folder.run_console import (
    RunConsole,
    eval_lines,
    heading,
    step_line,
    trouble_lines,
    verifier_lines,
)
from fos_rl.types import StepRecord

# The longest figures that a run has: 32 k tokens, a step of hours, ten million tokens/s.
LONGEST = {
    "step": 99999.0,
    "reward/mean": -10.125,
    "mismatch/log_prob_abs_diff/mean": 3.456e-05,
    "mismatch/log_prob_abs_diff/p50": 2.5e-07,
    "mismatch/log_prob_abs_diff/max": 1.25e-01,
    "loss/clip_frac": 0.125,
    "rollout/response_length/mean": 32768.0,
    "time/step_s": 12345.5,
    "throughput/generate_tokens_per_s": 10000000.0,
}
EVALUATED = {
    f"eval/{name}/{figure}": 0.125
    for name in ("math500", "held_out")
    for figure in ("truncated_frac", "avg@16", "pass@2", "pass@4", "pass@8", "pass@16", "greedy")
}


@pytest.mark.parametrize("metrics", [LONGEST, {"step": 0.0}], ids=["longest", "nothing measured"])
@pytest.mark.parametrize("width", [33, 40, 60, 79, 80, 200])
def test_a_step_line_fits(metrics: dict[str, float], width: int) -> None:
    line = step_line(metrics, width)
    assert len(line) <= width
    assert len(heading(width)) == len(line)


def test_eighty_columns_hold_every_figure() -> None:
    shown = step_line(LONGEST, 80).split()
    assert shown == [
        "99999",
        "-10.125",
        "3.46e-05",
        "2.50e-07",
        "1.25e-01",
        "0.125",
        "32768",
        "12345.5",
        "10000000",
    ]


def test_a_narrow_terminal_keeps_step_reward_mean_and_median() -> None:
    assert step_line(LONGEST, 20).split() == ["99999", "-10.125", "3.46e-05", "2.50e-07"]


@pytest.mark.parametrize("width", [40, 80, 200])
def test_evaluations_are_shown_whole(width: int) -> None:
    lines = eval_lines({**LONGEST, **EVALUATED}, width)
    assert max(map(len, lines)) <= width
    text = " ".join(" ".join(lines).split())
    assert text.startswith("eval math500: truncated_frac 0.125, avg@16 0.125, pass@2 0.125,")
    assert "eval held_out: truncated_frac 0.125," in text
    assert text.count("greedy 0.125") == 2
    assert eval_lines(LONGEST, width) == []


_STEPS = f"""
from fos_rl.run_folder.run_console import RunConsole
from fos_rl.types import StepRecord

console = RunConsole(2)
with console.live():
    console.step(StepRecord(step=99999, metrics={LONGEST!r}))
    console.step(StepRecord(step=99999, metrics={LONGEST | EVALUATED!r}))
console.summary([{LONGEST!r}, {LONGEST | EVALUATED!r}], "runs/demo")
"""


def test_a_terminal_of_80_columns_wraps_and_cuts_nothing() -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
    child = subprocess.Popen(
        [sys.executable, "-c", _STEPS],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**environment, "TERM": "xterm"},
    )
    os.close(theirs)
    written = b""
    while True:
        try:
            part = os.read(ours, 4096)
        except OSError:
            # Linux says so when the last writer has closed.
            break
        if not part:
            break
        written += part
    os.close(ours)
    assert child.wait() == 0
    # Without colours and cursor moves.
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.decode())
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", text)]
    assert max(map(len, lines)) <= 80
    assert "\u2026" not in text
    assert lines.count(step_line(LONGEST, 80)) == 4


def test_a_pipe_gets_plain_lines() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _STEPS], capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines.count(step_line(LONGEST, 80)) == 4
    assert lines[:2] == [heading(80), step_line(LONGEST, 80)]
    # At the step, and once more after the run's table.
    assert sum(line.startswith("  eval math500:") for line in lines) == 2


@pytest.mark.parametrize(
    ("metrics", "lines"),
    [
        ({"reward/mean": 0.5}, []),
        (
            {"reward/timeouts": 2.0, "reward/errors": 1.0},
            ["  verifier: 2 answers over the time limit, 1 failed; they scored 0"],
        ),
        ({"reward/errors": 3.0}, ["  verifier: 3 failed; they scored 0"]),
    ],
)
def test_answers_that_were_not_decided_are_shown(metrics, lines: list[str]) -> None:
    assert verifier_lines(metrics) == lines


@pytest.mark.parametrize(
    ("metrics", "lines"),
    [
        ({}, []),
        ({"trainer/skipped_updates": 1.0}, ["  not finite: 1 update skipped"]),
        ({"mismatch/non_finite_tokens": 1.0}, ["  not finite: 1 token left out"]),
        (
            {"trainer/skipped_updates": 2.0, "mismatch/non_finite_tokens": 3.0},
            ["  not finite: 2 updates skipped, 3 tokens left out"],
        ),
    ],
    ids=["none", "update", "token", "both"],
)
def test_what_was_not_finite_is_said(metrics: dict[str, float], lines: list[str]) -> None:
    assert trouble_lines(metrics) == lines


def test_uniform_logits_are_warned_of_once(capsys: pytest.CaptureFixture[str]) -> None:
    console = RunConsole(3)
    console.step(StepRecord(step=0, metrics={}))
    assert "uniform" not in capsys.readouterr().out
    for step in (1, 2):
        console.step(
            StepRecord(
                step=step, metrics={"policy/uniform_frac": 1.0, "mismatch/non_finite_tokens": 2.0}
            )
        )
    printed = capsys.readouterr().out
    assert printed.count("warning: for 100% of the tokens the logits are uniform") == 1
    assert printed.count("2 tokens left out") == 2
