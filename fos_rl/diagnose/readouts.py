"""Causes after the model: what may be made of right hidden states, and how it may be recorded."""

import json
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fos_rl.diagnose.hypotheses import Hypothesis, Question, Untested, from_readout, remaining
from fos_rl.diagnose.scorer import Readout, Rows, Scored, target_log_probs

# A parameter is fitted on so many tokens, spread over the records.
FIT_TOKENS = 128
_TEMPERATURES = np.geomspace(0.1, 4.0, 25)
_TOP_P = (*np.arange(0.1, 0.995, 0.01).round(2).tolist(), 0.995, 0.999)
_TOP_K = (1, 2, 5, 10, 20, 40, 50, 64, 100, 200, 256, 500, 512, 1000, 1024)
_MIN_P = (0.01, 0.02, 0.05, 0.1, 0.2)
_PENALTIES = (1.01, 1.02, 1.03, 1.05, 1.1, 1.15, 1.2, 1.3, 1.5)


def temperature(question: Question) -> Iterator[Hypothesis]:
    """Fitted: ignored (1), another value, or applied twice."""
    configured = question.scored.temperature
    best = _fit(question, _at_temperature, _TEMPERATURES)
    step = _TEMPERATURES[1] / _TEMPERATURES[0]
    for _ in range(6):
        # Each round looks closer around the best of the last.
        best = _fit(question, _at_temperature, best * np.geomspace(1 / step, step, 9))
        step **= 0.25
    if math.isclose(best, configured, rel_tol=2e-3):
        return
    for known in (1.0, configured**2, round(best, 3)):
        if math.isclose(best, known, rel_tol=2e-3):
            best = known
            break
    notes = {1.0: ", that is, no temperature", configured**2: ", that is, the configured one twice"}
    yield from_readout(
        "temperature",
        f"the log-probs are those of temperature {best:.4g}, not {configured:g}"
        + notes.get(best, ""),
        question.scored,
        _at_temperature(best),
    )


def head_precision(question: Question) -> Iterator[Hypothesis]:
    """Logits, or what follows them, in 16 bits."""
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16")):

        def logits(rows: Rows, dtype: torch.dtype = dtype) -> Tensor:
            return target_log_probs(rows.logits.to(dtype).float() / rows.temperature, rows.targets)

        def log_softmax(rows: Rows, dtype: torch.dtype = dtype) -> Tensor:
            return target_log_probs((rows.logits / rows.temperature).to(dtype), rows.targets)

        def head(rows: Rows, dtype: torch.dtype = dtype) -> Tensor:
            return target_log_probs(
                (rows.logits.to(dtype) / rows.temperature).float(), rows.targets
            )

        for detail, readout in (
            (f"the head's logits were rounded to {name}", logits),
            (f"logits and log-softmax in {name}", log_softmax),
            (f"the head's logits and their division in {name}", head),
        ):
            yield from_readout("head precision", detail, question.scored, readout)
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16")):
        yield _recorded(
            "stored precision",
            f"the log-probs were stored in {name}",
            question,
            lambda x, dtype=dtype: torch.from_numpy(x).to(dtype).double().numpy(),
        )


def truncation(question: Question) -> Iterator[Hypothesis]:
    """Renormalised over a nucleus, the k likeliest, or those above a share of the likeliest."""
    for name, filtered, values in (
        ("top-p", _top_p, _TOP_P),
        ("top-k", _top_k, _TOP_K),
        ("min-p", _min_p, _MIN_P),
    ):
        best = _fit(question, filtered, values)
        detail = f"the log-probs are renormalised over {name} = {best:g}"
        yield from_readout(f"{name} renormalisation", detail, question.scored, filtered(best))


def logit_changes(question: Question) -> Iterator[Hypothesis | Untested]:
    """Penalties, caps, padding and masks applied to the logits on one side."""
    scored = question.scored
    best = _fit(question, _repetition_penalty, _PENALTIES)
    detail = f"a repetition penalty of {best:g} was applied"
    yield from_readout("repetition penalty", detail, scored, _repetition_penalty(best))
    for cap in (30.0, 50.0):
        yield from_readout(
            "logit cap",
            f"logits were capped softly at {cap:g}",
            scored,
            lambda rows, cap=cap: _scaled(rows, cap * torch.tanh(rows.logits / cap)),
        )
    vocab = question.forward.spec.architecture.vocab_size
    for multiple in (64, 128, 256, 512, 1024):
        if padding := -vocab % multiple:
            yield from_readout(
                "padded vocabulary",
                f"the softmax covers {padding} padding entries of logit 0 (multiple of {multiple})",
                scored,
                lambda rows, n=padding: _scaled(rows, F.pad(rows.logits, (0, n))),
            )
    ends = _end_tokens(question.forward.model_folder)
    if ends:
        yield from_readout(
            "masked end of text",
            f"the end tokens {ends} were masked, as min_tokens and ignore_eos do",
            scored,
            lambda rows: _scaled(rows, _masked(rows.logits, ends)),
        )


def wrong_token(question: Question) -> Iterator[Hypothesis]:
    """Log-probs that belong to another token, another response, or no token at all."""
    responses = _split(question)
    for shift, side in ((-1, "next"), (1, "previous")):
        yield _recorded(
            "shifted log-probs",
            f"each log-prob is that of the {side} token of its response",
            question,
            lambda x, shift=shift: np.concatenate([_shift(r, shift) for r in _cut(x, responses)]),
        )
        yield from_readout(
            "another token's log-prob",
            f"the {side} token's log-prob was gathered",
            question.scored,
            _gather_neighbour(question.scored, -shift),
        )
    yield from_readout(
        "another token's log-prob",
        "the likeliest token's log-prob was taken",
        question.scored,
        lambda rows: _scaled(rows, rows.logits, rows.logits.argmax(-1)),
    )
    yield _recorded(
        "another response's log-probs",
        "responses of the batch were permuted",
        question,
        lambda x: _best_permutation(_cut(x, responses), _cut(question.recorded, responses)),
    )


def units(question: Question) -> Iterator[Hypothesis]:
    """Recorded in another form: base 2 or 10, negated, probabilities, means."""
    forms: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "the log-probs are base 2": lambda x: x / math.log(2),
        "the log-probs are base 10": lambda x: x / math.log(10),
        "the log-probs are negated": lambda x: -x,
        "probabilities were recorded": np.exp,
    }
    for detail, form in forms.items():
        yield _recorded("units", detail, question, form)
    lengths = _split(question)
    for detail, reduce in (
        ("each token has the mean of its response", np.mean),
        ("each token has the sum of its response", np.sum),
    ):
        yield _recorded(
            "units",
            detail,
            question,
            lambda x, reduce=reduce: np.concatenate(
                [np.full(len(r), reduce(r)) for r in _cut(x, lengths)]
            ),
        )


def _fit(question: Question, readout: Callable[[float], Readout], values: Iterable[float]) -> float:
    """The value whose readout is nearest to what was recorded."""
    finite = np.flatnonzero(np.isfinite(question.recorded))
    rows = finite[:: max(1, len(finite) // FIT_TOKENS)]

    def left(value: float) -> float:
        some = question.scored.read(readout(value), rows.tolist())
        return remaining(some, question.recorded[rows])

    return float(min(values, key=left))


def _at_temperature(value: float) -> Readout:
    return lambda rows: target_log_probs(rows.logits / value, rows.targets)


def _scaled(rows: Rows, logits: Tensor, targets: Tensor | None = None) -> Tensor:
    return target_log_probs(logits / rows.temperature, rows.targets if targets is None else targets)


def _masked(logits: Tensor, tokens: list[int]) -> Tensor:
    return logits.index_fill(1, torch.tensor(tokens, device=logits.device), -math.inf)


def _top_p(p: float) -> Readout:
    def readout(rows: Rows) -> Tensor:
        logits = rows.logits / rows.temperature
        probs, order = logits.softmax(-1).sort(-1, descending=True)
        # The token that crosses p is kept.
        dropped = probs.cumsum(-1) - probs >= p
        return _without(logits, torch.zeros_like(dropped).scatter(1, order, dropped), rows)

    return readout


def _top_k(k: float) -> Readout:
    def readout(rows: Rows) -> Tensor:
        smallest = rows.logits.topk(min(int(k), rows.logits.shape[1]), -1).values[:, -1:]
        return _without(rows.logits / rows.temperature, rows.logits < smallest, rows)

    return readout


def _min_p(share: float) -> Readout:
    def readout(rows: Rows) -> Tensor:
        logits = rows.logits / rows.temperature
        floor = logits.amax(-1, keepdim=True) + math.log(share)
        return _without(logits, logits < floor, rows)

    return readout


def _without(logits: Tensor, dropped: Tensor, rows: Rows) -> Tensor:
    return target_log_probs(logits.masked_fill(dropped, -math.inf), rows.targets)


def _repetition_penalty(penalty: float) -> Readout:
    """As in CTRL (arXiv:1909.05858): positive logits of seen tokens are divided, negative ones
    multiplied."""

    def readout(rows: Rows) -> Tensor:
        logits = rows.logits
        punished = torch.where(logits > 0, logits / penalty, logits * penalty)
        return _scaled(rows, torch.where(rows.seen, punished, logits))

    return readout


def _gather_neighbour(scored: Scored, offset: int) -> Readout:
    def readout(rows: Rows) -> Tensor:
        wanted = [_neighbour(scored, sequence, index + offset) for sequence, index in rows.places]
        targets = torch.tensor([0 if t is None else t for t in wanted], device=rows.targets.device)
        values = _scaled(rows, rows.logits, targets)
        silent = torch.tensor([t is None for t in wanted], device=values.device)
        return values.masked_fill(silent, math.nan)

    return readout


def _neighbour(scored: Scored, sequence: int, index: int) -> int | None:
    ids, prompt = scored.batch.token_ids[sequence], scored.batch.prompt_lengths[sequence]
    place = prompt + index
    return int(ids[place]) if 0 <= place < len(ids) else None


def _recorded(
    cause: str, detail: str, question: Question, form: Callable[[np.ndarray], np.ndarray]
) -> Hypothesis:
    """A hypothesis about how right log-probs were written down."""
    scored = question.scored
    return Hypothesis(cause=cause, detail=detail, log_probs=lambda: form(scored.log_probs))


def _split(question: Question) -> list[int]:
    batch = question.scored.batch
    return [len(ids) - p for ids, p in zip(batch.token_ids, batch.prompt_lengths, strict=True)]


def _cut(values: np.ndarray, lengths: list[int]) -> list[np.ndarray]:
    return np.split(values, np.cumsum(lengths)[:-1])


def _shift(values: np.ndarray, by: int) -> np.ndarray:
    moved = np.roll(values, by)
    moved[0 if by > 0 else -1] = np.nan
    return moved


def _best_permutation(ours: list[np.ndarray], recorded: list[np.ndarray]) -> np.ndarray:
    """For each response, the nearest of the others of its length; NaN where there is none."""
    chosen = []
    for number, wanted in enumerate(recorded):
        others = [x for i, x in enumerate(ours) if i != number and len(x) == len(wanted)]
        silent = np.full(len(wanted), np.nan)
        chosen.append(min(others, key=lambda x, w=wanted: remaining(x, w), default=silent))
    return np.concatenate(chosen)


def _end_tokens(folder: Path) -> list[int]:
    ends: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            found = json.loads((folder / name).read_text()).get("eos_token_id")
            ends |= set(found if isinstance(found, list) else [found]) - {None}
    return sorted(ends)


KINDS = (temperature, head_precision, truncation, logit_changes, wrong_token, units)
