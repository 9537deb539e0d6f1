"""The smoke run's task: any vowel earns 1, finished or not."""

import pytest

from fos_rl.config import VowelsData
from fos_rl.data.problems import load_problems
from fos_rl.rewards.verifiers import RULES


@pytest.mark.parametrize(
    ("response", "reward"), [("xyz", 0.0), ("xAz", 1.0), ("", 0.0), ("ö", 0.0), ("bcd u", 1.0)]
)
def test_rule(response: str, reward: float) -> None:
    for finish in ("stop", "length"):
        assert RULES["has_letter_of"](response, "aeiou", finish) == reward


def test_problems() -> None:
    problems = load_problems(VowelsData(num_problems=3), seed=0)
    assert problems.verifier == "has_letter_of"
    assert len({problem.id for problem in problems.rows}) == 3
