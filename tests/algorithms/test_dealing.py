"""Prompts dealt to several generators give what one generator gives, at the same time."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from fos_rl.algorithms.dealing import deal, sample_groups
from fos_rl.types import Prompt, Rollout, Sampling

PROMPTS = [Prompt(id=str(i), token_ids=[i], text="", answer="") for i in range(8)]
SAMPLING = Sampling(num_samples=2, temperature=0.5, max_new_tokens=3)


@dataclass
class Fake:
    """Responds with the seed, the prompt's place and the member's number."""

    together: threading.Barrier | None = None
    asked: list[list[str]] = field(default_factory=list)

    def generate(
        self,
        prompts: Sequence[Prompt],
        seed: int,
        sampling: Sampling | None = None,
        first_index: int = 0,
    ) -> list[list[Rollout]]:
        if self.together is not None:
            self.together.wait(timeout=30)
        assert sampling == SAMPLING
        self.asked.append([prompt.id for prompt in prompts])
        return [
            [
                Rollout(
                    prompt_id=prompt.id,
                    prompt_ids=prompt.token_ids,
                    response_ids=[seed, index, member],
                    log_probs=[0.0] * 3,
                    finish_reason="stop",
                    policy_version=0,
                    text="",
                )
                for member in range(sampling.num_samples)
            ]
            for index, prompt in enumerate(prompts, first_index)
        ]


@pytest.mark.parametrize(
    ("num_generators", "parts"),
    [
        (1, ["01234567"]),
        (2, ["0123", "4567"]),
        (3, ["012", "345", "67"]),
        (9, [*"01234567", ""]),
    ],
)
def test_parts_are_contiguous_and_answers_in_order(num_generators: int, parts: list[str]) -> None:
    assert deal(8, num_generators) == [
        range(int(p[0]), int(p[-1]) + 1) if p else range(8, 8) for p in parts
    ]
    generators = [Fake() for _ in range(num_generators)]
    groups = sample_groups(generators, PROMPTS, 5, SAMPLING)
    assert groups == Fake().generate(PROMPTS, 5, SAMPLING)
    # A generator without prompts is not asked.
    assert [g.asked for g in generators] == [[list(part)] if part else [] for part in parts]


def test_generators_sample_at_the_same_time() -> None:
    """Each waits until all three have been asked."""
    together = threading.Barrier(3)
    sample_groups([Fake(together) for _ in range(3)], PROMPTS, 0, SAMPLING)


class Broken(Fake):
    def generate(self, *_: object, **__: object) -> list[list[Rollout]]:
        raise RuntimeError("generator died")


def test_an_error_does_not_wait_for_the_other_generators() -> None:
    never = threading.Barrier(2)
    try:
        with pytest.raises(RuntimeError, match="generator died"):
            sample_groups([Fake(never), Broken()], PROMPTS, 0, SAMPLING)
    finally:
        never.abort()


@pytest.mark.parametrize("num_generators", [1, 2])
def test_no_prompts_are_no_groups(num_generators: int) -> None:
    fakes = [Fake() for _ in range(num_generators)]
    assert sample_groups(fakes, [], 7, SAMPLING) == []
    assert not any(fake.asked for fake in fakes)
