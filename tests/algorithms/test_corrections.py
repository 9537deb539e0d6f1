"""Each correction against a token-by-token loop and hand-worked numbers."""

import math

import pytest
import torch

from fos_rl.algorithms.corrections import correct
from fos_rl.algorithms.mismatch import MAX_LOG_RATIO
from fos_rl.config.algorithm import (
    Correction,
    GeometricMask,
    MaskedWeights,
    NoCorrection,
    TruncatedWeights,
)
from tests.algorithms.policy_batches import LENGTHS, policy_tokens, sequences

CORRECTIONS: dict[str, Correction] = {
    "none": NoCorrection(),
    "token": TruncatedWeights(max_weight=1.2),
    "sequence": TruncatedWeights(level="sequence", max_weight=1.5),
    "masked": MaskedWeights(low=0.8, high=1.3),
    "geometric": GeometricMask(low=0.9, high=1.1),
}


def loop(config: Correction, row: list[float]) -> tuple[list[float], list[bool], list[bool]]:
    """Weights, truncated and masked of one sequence's counted tokens, from their log-ratios."""
    n = len(row)
    match config:
        case NoCorrection():
            return [1.0] * n, [False] * n, [False] * n
        case TruncatedWeights(level="sequence"):
            rho = [math.prod(map(math.exp, row))] * n
        case GeometricMask():
            rho = [math.prod(map(math.exp, row)) ** (1 / n)] * n
            outside = [not config.low <= r <= config.high for r in rho]
            return [float(not o) for o in outside], [False] * n, outside
        case _:
            rho = [math.exp(d) for d in row]
    if isinstance(config, TruncatedWeights):
        cut = [r > config.max_weight for r in rho]
        return [min(r, config.max_weight) for r in rho], cut, [False] * n
    outside = [not config.low <= r <= config.high for r in rho]
    return [0.0 if o else r for r, o in zip(rho, outside, strict=True)], [False] * n, outside


@pytest.mark.parametrize("uncounted", [False, True], ids=["all count", "some do not count"])
@pytest.mark.parametrize("name", CORRECTIONS)
def test_equals_a_loop(name, uncounted):
    config, tokens = CORRECTIONS[name], policy_tokens(spread=0.3, uncounted=uncounted)
    factors = correct(
        config, tokens.log_probs, tokens.old_log_probs, tokens.counted, tokens.lengths
    )
    seen: set[bool] = set()
    for places in sequences(tokens):
        row = [float(tokens.log_probs[t] - tokens.old_log_probs[t]) for t in places]
        weights, truncated, masked = loop(config, row)
        # Each log-ratio is fp32 of size 4: off by 2.4e-7, and the exponential by as much.
        assert factors.weights[places].tolist() == pytest.approx(weights, rel=2e-6)
        if factors.truncated is not None:
            assert factors.truncated[places].tolist() == truncated
        if factors.masked is not None:
            assert factors.masked[places].tolist() == masked
        seen |= {t or m for t, m in zip(truncated, masked, strict=True)}
    assert seen == ({False} if name == "none" else {False, True}), "both cases occur"
    assert (factors.truncated is not None) == (config.type == "truncated")
    assert (factors.masked is not None) == (config.type in ("masked", "geometric"))
    assert factors.changes == (name != "none")
    assert factors.weights.isfinite().all(), "also of tokens that do not count"


@pytest.mark.parametrize("name", CORRECTIONS)
@pytest.mark.parametrize("cut", [[[0], [1, 2], [3]], [[3, 1], [2, 0]]], ids=str)
def test_a_sequences_factors_do_not_depend_on_its_microbatch(name, cut):
    tokens = policy_tokens(spread=0.3, uncounted=True)
    arguments = (tokens.log_probs, tokens.old_log_probs, tokens.counted)
    whole = correct(CORRECTIONS[name], *arguments, LENGTHS).weights.split(LENGTHS)
    for group in cut:
        lengths = [LENGTHS[i] for i in group]
        parts = [torch.cat([a.split(LENGTHS)[i] for i in group]) for a in arguments]
        got = correct(CORRECTIONS[name], *parts, lengths).weights.split(lengths)
        for i, values in zip(group, got, strict=True):
            assert torch.equal(values, whole[i])


@pytest.mark.parametrize(
    ("config", "ratios", "want"),
    [
        (TruncatedWeights(), [0.5, 2.0, 3.0], [0.5, 2.0, 2.0]),
        (TruncatedWeights(level="sequence"), [0.5, 2.0, 1.5], [1.5, 1.5, 1.5]),
        (TruncatedWeights(level="sequence"), [2.0, 2.0, 1.0], [2.0, 2.0, 2.0]),
        (MaskedWeights(), [0.4, 0.5, 6.0], [0.0, 0.5, 0.0]),
        (GeometricMask(low=0.9, high=1.1), [0.25, 4.0, 1.0], [1.0, 1.0, 1.0]),
        (GeometricMask(low=0.9, high=1.1), [1.5, 1.5, 1.0], [0.0, 0.0, 0.0]),
    ],
    ids=["token", "product below", "product above", "icepop", "mean inside", "mean outside"],
)
def test_hand_worked_sequence(config, ratios, want):
    ours = torch.tensor(ratios).log().requires_grad_()
    factors = correct(config, ours, torch.zeros(3), torch.ones(3, dtype=torch.bool), [3])
    assert factors.weights.tolist() == pytest.approx(want, rel=1e-6)
    assert not factors.weights.requires_grad


def test_a_product_beyond_fp32_stays_finite():
    """300 tokens of log-ratio 1: exp(300) is inf in fp32."""
    ours, theirs = torch.zeros(300), torch.full((300,), -1.0)
    config = TruncatedWeights(level="sequence", max_weight=1e30)
    factors = correct(config, ours, theirs, torch.ones(300, dtype=torch.bool), [300])
    assert factors.weights.tolist() == pytest.approx([math.exp(MAX_LOG_RATIO)] * 300, rel=1e-6)


def test_no_tokens():
    empty = torch.zeros(0)
    for config in CORRECTIONS.values():
        assert correct(config, empty, empty, empty.bool(), []).weights.shape == (0,)
