"""Accuracy of a policy on problem sets: avg@k, pass@k and greedy."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from fos_rl.algorithms.dealing import sample_groups
from fos_rl.config import EvalConfig, RunConfig
from fos_rl.data.eval_sets import EvalSet
from fos_rl.rewards.verifiers import VerifierPool
from fos_rl.types import Rollout, Sampler, Sampling, StepRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class SetResult:
    """Scores of one set: `sampled` is 1 or 0 per response, [problems, samples], `greedy`
    [problems]; None where that was not asked for."""

    name: str
    problem_ids: list[str]
    sampled: np.ndarray | None
    greedy: np.ndarray | None
    truncated_frac: float
    """Responses cut off at the limit of new tokens, of both kinds."""
    undecided: int = 0
    """Answers that the verifier gave up on, of both kinds; they score 0."""

    def metrics(self) -> dict[str, float]:
        """`eval/SET/...` metrics; what was not asked for has no key."""
        values: dict[str, float] = {"truncated_frac": self.truncated_frac}
        if self.sampled is not None:
            values |= accuracy_metrics(self.sampled)
        if self.greedy is not None:
            values["greedy"] = float(self.greedy.mean())
        if self.undecided:
            values["undecided"] = float(self.undecided)
        return {f"eval/{self.name}/{key}": value for key, value in values.items()}


class Evaluator:
    """Evaluates the policy of a run, with the run's own generators and seeds that do not change.

    Use as a context manager, so that no verifier outlives it.
    """

    def __init__(self, config: RunConfig, sets: Sequence[EvalSet]) -> None:
        self.config = config
        self.sets = sets
        self._verifiers = {s.rule: VerifierPool(config.reward, s.rule) for s in sets}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for verifier in self._verifiers.values():
            verifier.close()

    def add_to(self, record: StepRecord, generators: Sequence[Sampler]) -> StepRecord:
        """The record with `eval/` metrics, on the steps that have them."""
        done = record.step + 1
        settings = self.config.eval
        if settings is None or (done % settings.every and done != self.config.steps):
            return record
        metrics = dict(record.metrics)
        for result in self.results(settings, generators):
            metrics |= result.metrics()
        return StepRecord(step=record.step, metrics=metrics)

    def results(self, settings: EvalConfig, generators: Sequence[Sampler]) -> list[SetResult]:
        """One result per set."""
        return [self._evaluate(eval_set, settings, generators) for eval_set in self.sets]

    def _evaluate(
        self, eval_set: EvalSet, settings: EvalConfig, generators: Sequence[Sampler]
    ) -> SetResult:
        tokens = settings.max_new_tokens or self.config.rollout.max_new_tokens
        kinds = {"sampled": (settings.samples, settings.temperature), "greedy": (1, 0.0)}
        if not settings.samples:
            del kinds["sampled"]
        if not settings.greedy:
            del kinds["greedy"]
        scores: dict[str, np.ndarray] = {}
        cut: list[bool] = []
        undecided = 0
        for kind, (num_samples, temperature) in kinds.items():
            sampling = Sampling(
                num_samples=num_samples, temperature=temperature, max_new_tokens=tokens
            )
            groups = sample_groups(generators, eval_set.prompts, self.config.seed, sampling)
            scores[kind], given_up = self._score(eval_set, groups)
            undecided += given_up
            cut += [r.finish_reason == "length" for group in groups for r in group]
        return SetResult(
            name=eval_set.name,
            problem_ids=[prompt.id for prompt in eval_set.prompts],
            sampled=scores.get("sampled"),
            greedy=scores["greedy"][:, 0] if "greedy" in scores else None,
            truncated_frac=float(np.mean(cut)),
            undecided=undecided,
        )

    def _score(
        self, eval_set: EvalSet, groups: Sequence[Sequence[Rollout]]
    ) -> tuple[np.ndarray, int]:
        """1 or 0 for each response, [problems, samples], and how many could not be decided."""
        rollouts = [rollout for group in groups for rollout in group]
        answers = [
            prompt.answer
            for prompt, group in zip(eval_set.prompts, groups, strict=True)
            for _ in group
        ]
        scores, counts = self._verifiers[eval_set.rule].score(rollouts, answers)
        return scores.reshape(len(groups), -1), int(sum(counts.values()))


def accuracy_metrics(scores: np.ndarray) -> dict[str, float]:
    """avg@n, and pass@k for k = 2, 4, 8 ... below n and for n, of [problems, n] scores.

    Example: two problems of 2 samples, 1 of them right and none: avg@2 = 0.25, pass@2 = 0.5.
    """
    num_samples = scores.shape[1]
    correct = scores.sum(axis=1).astype(int)
    metrics = {f"avg@{num_samples}": float(scores.mean())}
    below = [2**i for i in range(1, num_samples.bit_length()) if 2**i < num_samples]
    for k in [*below, num_samples]:
        if k > 1:
            values = [pass_at_k(num_samples, int(c), k) for c in correct]
            metrics[f"pass@{k}"] = float(np.mean(values))
    return metrics


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k samples is right: 1 - C(n - c, k) / C(n, k).

    The share of the k-subsets of the n samples that hold a right one (arXiv:2107.03374, eq. 1).
    """
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)
