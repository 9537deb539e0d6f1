"""What `fos-rl eval` prints: accuracies with what their problems resolve, whole at 80 columns."""

import numpy as np
import pytest
from rich.console import Console

from fos_rl.compare.statistics import bootstrap_interval
from fos_rl.evaluation.command import _table, problem_scores
from fos_rl.evaluation.evaluate import SetResult


def _result(right: list[int], name: str = "held_out") -> SetResult:
    """Problems of two samples each, so many of them right; the greedy response is right for 2."""
    sampled = np.array([[1] * n + [0] * (2 - n) for n in right])
    return SetResult(
        name=name,
        problem_ids=[str(number) for number in range(len(right))],
        sampled=sampled,
        greedy=np.array([n == 2 for n in right]),
        truncated_frac=0.0,
    )


def _lines(found: dict[str, list[SetResult]], width: int = 80) -> list[str]:
    console = Console(width=width, force_terminal=False, record=True, file=None)
    with console.capture() as captured:
        console.print(_table("models/SmolLM2-135M-Instruct", found))
    return captured.get().splitlines()


def test_an_accuracy_has_the_interval_of_its_problems() -> None:
    scores = problem_scores(_result([2, 1, 0, 1]))
    assert scores["avg@2"].tolist() == [1.0, 0.5, 0.0, 0.5]
    assert scores["greedy"].tolist() == [1.0, 0.0, 0.0, 0.0]
    # t(3) s / sqrt(n) = 3.1824 * 0.40825 / 2, by bootstrap known to 1.1 %, four of those.
    interval = bootstrap_interval(scores["avg@2"].tolist(), "problems")
    assert interval is not None
    assert interval.half_width == pytest.approx(3.1824 * 0.408248 / 2, rel=0.045)


def test_two_precisions_are_paired_by_problem() -> None:
    """The same problems are hard for both: the difference is known better than either."""
    found = {"nvfp4": [_result([2, 2, 0, 1])], "bf16": [_result([2, 2, 1, 1])]}
    (line,) = [x for x in _lines(found, 120) if "nvfp4 - bf16" in x and "avg@2" in x]
    # (0 + 0 - 0.5 + 0) / 4
    assert "-0.1250" in line
    lines = _lines(found, 120)
    (place,) = [n for n, x in enumerate(lines) if "nvfp4 - bf16" in x and "greedy" in x]
    assert "+0.0000" in lines[place]
    assert "[0.000, 0.000]" in lines[place]
    assert "4 equal problems" in lines[place + 1]


def test_80_columns_cut_nothing() -> None:
    name = "a_long_name_of_a_set_of_problems_in_a_file_of_ones_own"
    found = {recipe: [_result([2, 1, 0], name)] for recipe in ("nvfp4_four_over_six", "bf16")}
    lines = _lines(found)
    assert max(map(len, lines)) <= 80
    assert "\u2026" not in "".join(lines)
    assert len([line for line in lines if "0.5000" in line]) == 2
