"""Changed gold answers by the thousand: none of another value scores, nearly all equal ones do."""

import random
from collections import Counter

import pytest

from fos_rl.rewards.verifiers import verify
from tests.rewards.answer_changes import equal, unequal

SIZES = [500, pytest.param(5_000, marks=pytest.mark.long)]


@pytest.mark.parametrize("size", SIZES)
def test_no_answer_of_another_value_scores(size: int) -> None:
    rng = random.Random(size)
    scored = [
        (gold, response)
        for gold, response in (unequal(rng) for _ in range(size))
        if verify(response, gold)
    ]
    assert scored == []


@pytest.mark.parametrize("size", SIZES)
def test_nearly_all_answers_of_the_same_value_score(size: int) -> None:
    rng = random.Random(size)
    verdicts = Counter()
    missed = []
    for gold, response in (equal(rng) for _ in range(size)):
        right = verify(response, gold) == 1.0
        verdicts[right] += 1
        if not right:
            missed.append((gold, response))
    assert verdicts[True] >= 0.98 * size, missed[:20]
