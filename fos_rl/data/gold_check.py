"""Whether gold answers can be matched at all, seen before a run rewards nothing for hours."""

import random
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from fos_rl.config import RewardConfig
from fos_rl.rewards.normalize import normalize_answer
from fos_rl.rewards.numerals import bare_number
from fos_rl.rewards.verifiers import VerifierPool, verify_by_value

_MAX_GOLDS = 1_000
_MAX_FAILED = 0.01
_MAX_EXAMPLES = 5
# Seconds. No answers are handed out after the first; then at most a few are still under theirs.
_LIMIT_S = 7.0
_ANSWER_LIMIT_S = 1.0
_WORKERS = 2
# Few, so that slow ones cannot take the check far beyond its time.
_GOLDS_PER_CALL = 2 * _WORKERS
_MAX_PLAIN_CHARS = 200
_WORDS = re.compile(r"[A-Za-z]{3,20}(?: [A-Za-z]{3,20})*")


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldCheck:
    """Of `sampled` gold answers, `scored` were tried within the time, and `failed` of those."""

    sampled: int
    scored: int
    failed: int
    examples: tuple[str, ...]

    def __str__(self) -> str:
        tried = f"tried {self.scored:,}"
        if self.scored < self.sampled:
            tried += f" of {self.sampled:,} (no time for more)"
        found = f"{tried} gold answer{'s' * (self.sampled != 1)} as responses"
        if not self.failed:
            return f"{found}, all score"
        return f"{found}, {self.failed:,} cannot score: {', '.join(map(repr, self.examples))}"


def check_golds(golds: Sequence[str], where: str) -> GoldCheck:
    """Scores up to 1,000 gold answers, each as the response `Answer: <gold>`, by value.

    The same ones at each call, in less than 10 s. A comparison of texts would pass all of them, so
    it is left out: a gold answer that has no value which can be read is matched by its own
    spelling at best.

    Raises:
        ValueError: more than 1 % of those tried score 0; it begins with `where`.
    """
    sample = random.Random(0).sample(list(golds), min(len(golds), _MAX_GOLDS))
    check = _check(tuple(sample))
    # A busy machine may try too few for one failure to say much of the rest.
    enough = check.scored == check.sampled or check.failed >= _MAX_EXAMPLES
    if enough and check.failed > _MAX_FAILED * check.scored:
        raise ValueError(
            f"{where}: {check.failed:,} of {check.scored:,} gold answers tried would not score "
            f"even if a response gave them as they are ({_MAX_FAILED:.0%} may), for example "
            f"{', '.join(map(repr, check.examples))}. Give the final answer alone (a number, LaTeX "
            "or words), or leave these rows out; fos-rl verify says how an answer is read"
        )
    return check


def _is_plain(gold: str) -> bool:
    """A number or words, which are compared at once and need no process that can be killed."""
    if len(gold) > _MAX_PLAIN_CHARS:
        return False
    return bool(_WORDS.fullmatch(gold)) or bare_number(normalize_answer(gold)) is not None


# The arms of a study load the same data.
@lru_cache(maxsize=8)
def _check(golds: tuple[str, ...]) -> GoldCheck:
    started = time.monotonic()
    verdicts = {
        gold: verify_by_value(f"Answer: {gold}", gold)
        for gold in dict.fromkeys(golds)
        if _is_plain(gold)
    }
    formulas = [gold for gold in dict.fromkeys(golds) if gold not in verdicts]
    if formulas:
        config = RewardConfig(workers=_WORKERS, timeout_s=_ANSWER_LIMIT_S)
        with VerifierPool(config, rule="math_by_value") as pool:
            for start in range(0, len(formulas), _GOLDS_PER_CALL):
                if time.monotonic() - started > _LIMIT_S:
                    break
                some = formulas[start : start + _GOLDS_PER_CALL]
                scores, _ = pool.score_texts([(f"Answer: {gold}", gold, "stop") for gold in some])
                verdicts.update(zip(some, scores.tolist(), strict=True))
    counts = Counter(golds)
    failed = [gold for gold in dict.fromkeys(golds) if verdicts.get(gold) == 0]
    return GoldCheck(
        sampled=len(golds),
        scored=sum(counts[gold] for gold in verdicts),
        failed=sum(counts[gold] for gold in failed),
        examples=tuple(
            gold if len(gold) < 80 else f"{gold[:77]}..." for gold in failed[:_MAX_EXAMPLES]
        ),
    )
