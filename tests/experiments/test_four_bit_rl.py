"""The study's text holds the figures of its files, and their statistics are those of the books."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

STUDY = Path(__file__).parents[2] / "experiments" / "four_bit_rl"
spec = importlib.util.spec_from_file_location("four_bit_rl_analyse", STUDY / "analyse.py")
assert spec is not None
assert spec.loader is not None
analyse = importlib.util.module_from_spec(spec)
spec.loader.exec_module(analyse)


def test_the_text_is_that_of_its_files() -> None:
    assert (STUDY / "results.md").read_text() == analyse.text(analyse.read_steps())


def test_p_value_is_students() -> None:
    """Five values of mean m and standard error s have t = m / s; tables give t(4) = 2.776 at 5 %
    and 4.604 at 1 % (two-sided)."""
    spread = np.array([-2.0, -1.0, 0.0, 1.0, 2.0])
    error = spread.std(ddof=1) / np.sqrt(5)
    assert analyse.p_value(spread + 2.776 * error) == pytest.approx(0.05, abs=1e-4)
    assert analyse.p_value(spread + 4.604 * error) == pytest.approx(0.01, abs=1e-4)


def test_holm_by_hand() -> None:
    """3 x 0.01, 2 x 0.02, and 1 x 0.03 raised to the one before it."""
    adjusted = analyse.holm({"c": 0.03, "a": 0.01, "b": 0.02})
    assert adjusted == pytest.approx({"a": 0.03, "b": 0.04, "c": 0.04})
