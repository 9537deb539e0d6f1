"""Gold answers that nothing can match stop a run before it starts."""

import time

import pytest

from fos_rl.data import gold_check
from fos_rl.data.gold_check import check_golds

# A sentence in which no answer is marked has no value.
UNREADABLE = [f"He has 3+{i}=<<3+{i}>> apples." for i in range(9)]
NUMBERS = [str(i) for i in range(900)]


pytestmark = pytest.mark.usefixtures("golds_in_process")


def test_plain_answers_need_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gold_check, "VerifierPool", None)
    golds = ["34", "-5", "0.25", "1,007", "+3", "Yes", "the red one", "1/2", "5 km"]
    check = check_golds(golds, "data.path = 'x'")
    assert (check.sampled, check.scored, check.failed) == (9, 9, 0)
    assert str(check) == "tried 9 gold answers as responses, all score"


def test_one_in_a_hundred_may_fail() -> None:
    check = check_golds(NUMBERS + UNREADABLE, "data.path = 'x'")
    assert (check.scored, check.failed) == (909, 9)
    assert "9 cannot score: 'He has" in str(check)
    with pytest.raises(ValueError, match=r"^data\.path = 'x': 9 of 899 .* leave these") as error:
        check_golds(NUMBERS[:890] + UNREADABLE, "data.path = 'x'")
    # Five of the nine are shown.
    assert [example in str(error.value) for example in UNREADABLE].count(True) == 5


def test_a_text_that_equals_itself_is_no_value() -> None:
    assert check_golds([r"\frac{1}{2}", "x^2 + 1", "(1, 2)"], "").failed == 0
    with pytest.raises(ValueError, match="1 of 1 gold"):
        check_golds([UNREADABLE[0]], "data.path = 'x'")


def test_a_large_set_is_sampled_and_the_sample_is_fixed() -> None:
    golds = [str(i) for i in range(10_000)] + UNREADABLE
    assert check_golds(golds, "") == check_golds(golds, "")
    assert check_golds(golds, "").sampled == 1_000


def test_what_there_is_no_time_for_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 1000, 3))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    formulas = [f"x^{{{i}}} + 1" for i in range(2, 42)]
    check = check_golds([*formulas, "7"], "")
    # Two calls of four golds begin within 7 s of this clock, and the number needs none.
    assert (check.sampled, check.scored, check.failed) == (41, 9, 0)
    assert "tried 9 of 41 (no time for more)" in str(check)


@pytest.mark.parametrize("num_failed", [1, 4, 5])
def test_few_failures_among_few_tried_say_nothing(monkeypatch, num_failed: int) -> None:
    """One in nine may be bad luck; a load on the machine must not stop a run."""
    clock = iter(range(0, 1000, 3))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    golds = [*UNREADABLE[:num_failed], *(f"x^{{{i}}} + 1" for i in range(2, 42))]
    # The sample is all of them, in an order of its own.
    monkeypatch.setattr("random.Random.sample", lambda self, population, k: population)
    if num_failed < 5:
        check = check_golds(golds, "")
        assert (check.scored, check.failed) == (8, num_failed)
    else:
        with pytest.raises(ValueError, match="5 of 8 gold answers tried"):
            check_golds(golds, "")


def test_a_worker_decides_formulas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    golds = [r"\frac{\pi}{6}", r"x^2 - 1", r"\{1, 2\}", *NUMBERS[:400], *UNREADABLE[:1]]
    check = check_golds(golds, "")
    assert (check.scored, check.failed, check.examples) == (404, 1, (UNREADABLE[0],))
