"""Each loss against a loop over tokens, hand-worked numbers, differences and micro-batches."""

import math
from dataclasses import replace

import pytest
import torch

from fos_rl.algorithms.corrections import CorrectionFactors
from fos_rl.algorithms.losses import PolicyTokens, cispo_loss, gspo_loss, policy_loss, ppo_clip_loss
from fos_rl.algorithms.mismatch import MAX_LOG_RATIO
from fos_rl.config.algorithm import AlgorithmConfig
from tests.algorithms.policy_batches import LENGTHS, aggregate, policy_tokens, sequences, subset

AGGREGATIONS = ["sequence_mean", "token_mean", "sequence_sum", "constant"]
# Small ratios for gspo, whose band is 1e-3 wide, so that some sequences are outside, some inside.
ALGORITHMS = {
    "grpo": AlgorithmConfig(),
    "dapo": AlgorithmConfig(type="dapo"),
    "dr_grpo": AlgorithmConfig(type="dr_grpo"),
    "dual clip": AlgorithmConfig(clip_high=0.1, dual_clip=1.2),
    "gspo": AlgorithmConfig(type="gspo"),
    "cispo": AlgorithmConfig(type="cispo", clip_low=0.2, clip_high=0.3),
}
SPREAD = {"gspo": 1e-3}


def clipped(ratio: float, advantage: float, algorithm: AlgorithmConfig) -> float:
    """The clipped loss of one ratio."""
    bounded = min(max(ratio, 1 - algorithm.clip_low), 1 + algorithm.clip_high)
    gain = min(ratio * advantage, bounded * advantage)
    if advantage < 0 and algorithm.dual_clip is not None:
        gain = max(gain, algorithm.dual_clip * advantage)
    return -gain


def loop(tokens: PolicyTokens, algorithm: AlgorithmConfig) -> tuple[dict[int, float], list[int]]:
    """Each counted token's loss, and how many were clipped, out of the band and dual-clipped."""
    losses: dict[int, float] = {}
    counts = [0, 0, 0]
    floor, ceiling = 1 - algorithm.clip_low, 1 + algorithm.clip_high
    for row in sequences(tokens):
        difference = {t: float(tokens.log_probs[t] - tokens.old_log_probs[t]) for t in row}
        for t in row:
            advantage = float(tokens.advantages[t])
            if algorithm.type == "gspo":
                ratio = math.exp(sum(difference.values()) / len(row))
            else:
                ratio = math.exp(difference[t])
            counts[1] += not floor <= ratio <= ceiling
            if algorithm.type == "cispo":
                weight = min(max(ratio, floor), ceiling)
                losses[t] = -weight * advantage * float(tokens.log_probs[t])
                continue
            losses[t] = clipped(ratio, advantage, algorithm)
            counts[0] += ratio > ceiling if advantage > 0 else ratio < floor
            dual = algorithm.dual_clip
            counts[2] += dual is not None and advantage < 0 and ratio > dual
    return losses, counts


@pytest.mark.parametrize("uncounted", [False, True], ids=["all count", "some do not count"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_loss_equals_a_loop(name, aggregation, uncounted):
    algorithm = ALGORITHMS[name]
    tokens = policy_tokens(
        spread=SPREAD.get(name, 0.4), aggregation=aggregation, uncounted=uncounted
    )
    losses, (num_clipped, num_outside, num_dual) = loop(tokens, algorithm)
    result = policy_loss(tokens, algorithm)
    # fp32 sums of 11 terms of size 1 (cispo: 4): a few units of 1.2e-7.
    want = aggregate(losses, tokens, aggregation)
    assert float(result.loss) == pytest.approx(want, rel=1e-6, abs=1e-6)
    assert result.num_tokens == len(losses)
    assert result.num_clipped == num_clipped
    assert result.num_out_of_band == num_outside > 0
    if name == "dual clip":
        assert result.num_dual_clipped == num_dual > 0
    else:
        assert result.num_dual_clipped is None
    assert result.num_out_of_band < result.num_tokens, "some tokens are inside"


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name != "cispo"])
def test_gradient_equals_finite_differences_of_the_loop(name):
    algorithm = ALGORITHMS[name]
    tokens = policy_tokens(spread=SPREAD.get(name, 0.4), uncounted=True)
    tokens.log_probs.requires_grad_()
    (gradient,) = torch.autograd.grad(policy_loss(tokens, algorithm).loss, tokens.log_probs)
    step = 1e-6

    def at(t: int, shift: float) -> float:
        moved = tokens.log_probs.detach().double()
        moved[t] += shift
        doubled = replace(tokens, log_probs=moved, old_log_probs=tokens.old_log_probs.double())
        return aggregate(loop(doubled, algorithm)[0], tokens, "sequence_mean")

    for t in range(sum(LENGTHS)):
        want = (at(t, step) - at(t, -step)) / (2 * step)
        # The loop rounds in fp64 (1e-16 / 1e-6), the gradient in fp32.
        assert float(gradient[t]) == pytest.approx(want, rel=1e-5, abs=1e-7), t


def test_cispo_keeps_every_counted_tokens_gradient_and_limits_its_weight():
    algorithm = ALGORITHMS["cispo"]
    tokens = policy_tokens(uncounted=True)
    tokens.log_probs.requires_grad_()
    result = policy_loss(tokens, algorithm)
    (gradient,) = torch.autograd.grad(result.loss, tokens.log_probs)
    for t in range(sum(LENGTHS)):
        want = 0.0
        if tokens.weights[t] != 0:
            ratio = math.exp(float((tokens.log_probs[t] - tokens.old_log_probs[t]).detach()))
            weight = min(max(ratio, 0.8), 1.3)
            want = -float(tokens.weights[t]) * weight * float(tokens.advantages[t])
            assert want != 0
        assert float(gradient[t]) == pytest.approx(want, rel=1e-6), t
    assert result.num_clipped == 0


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("cut", [[[0, 1, 2, 3]], [[0], [1, 2], [3]], [[3, 1], [2, 0]]], ids=str)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_microbatches_add_up_to_the_batch(name, aggregation, cut):
    algorithm = ALGORITHMS[name]
    tokens = policy_tokens(spread=SPREAD.get(name, 0.4), aggregation=aggregation, uncounted=True)
    tokens.log_probs.requires_grad_()
    whole = policy_loss(tokens, algorithm)
    (whole_gradient,) = torch.autograd.grad(whole.loss, tokens.log_probs)
    parts = [policy_loss(subset(tokens, group), algorithm) for group in cut]
    total = sum((part.loss for part in parts), torch.zeros(()))
    (gradient,) = torch.autograd.grad(total, tokens.log_probs)
    torch.testing.assert_close(total, whole.loss, rtol=1e-6, atol=1e-6)
    assert torch.equal(gradient, whole_gradient), "a token's gradient is its sequence's alone"
    for count in ("num_tokens", "num_clipped", "num_out_of_band"):
        assert sum(float(getattr(part, count)) for part in parts) == getattr(whole, count)


def one_token(log_ratio: float, advantage: float) -> PolicyTokens:
    one = torch.ones(1)
    return PolicyTokens(
        log_probs=torch.tensor([log_ratio], requires_grad=True),
        old_log_probs=0 * one,
        advantages=advantage * one,
        weights=one,
        correction=CorrectionFactors(weights=one),
        lengths=[1],
    )


@pytest.mark.parametrize(
    ("ratio", "advantage", "dual_clip", "loss", "gradient", "counts"),
    [
        (1.0, 2.0, None, -2.0, -2.0, (0, 0)),
        (1.5, 1.0, None, -1.2, 0.0, (1, 1)),
        (1.5, -1.0, None, 1.5, 1.5, (0, 1)),
        (0.5, 1.0, None, -0.5, -0.5, (0, 1)),
        (0.5, -1.0, None, 0.8, 0.0, (1, 1)),
        (1.5, 0.0, None, 0.0, 0.0, (0, 1)),
        (2.0, -1.0, 3.0, 2.0, 2.0, (0, 1, 0)),
        (4.0, -1.0, 3.0, 3.0, 0.0, (0, 1, 1)),
        (4.0, 1.0, 3.0, -1.2, 0.0, (1, 1, 0)),
    ],
    ids=[
        *("on-policy", "up-good", "up-bad", "down-good", "down-bad", "no-advantage"),
        *("dual-in", "dual-out", "dual-good"),
    ],
)
def test_hand_worked_token(ratio, advantage, dual_clip, loss, gradient, counts):
    tokens = one_token(math.log(ratio), advantage)
    # A sequence of one token has its ratio: gspo is the same there.
    for loss_of in (ppo_clip_loss, gspo_loss):
        result = loss_of(tokens, (0.8, 1.2), dual_clip)
        (got,) = torch.autograd.grad(result.loss, tokens.log_probs)
        assert float(result.loss.detach()) == pytest.approx(loss, abs=1e-6)
        assert float(got) == pytest.approx(gradient, abs=1e-6)
        got_counts = (result.num_clipped, result.num_out_of_band, result.num_dual_clipped)
        assert tuple(int(c) for c in got_counts if c is not None) == counts


def test_gspo_gives_every_token_its_sequences_ratio():
    """Ratios 2 and 1/2 cancel in the geometric mean: no token is out of a band of 1e-3."""
    tokens = replace(
        one_token(0.0, 1.0),
        **{name: torch.zeros(2) for name in ("old_log_probs",)},
        log_probs=torch.tensor([math.log(2), -math.log(2)], requires_grad=True),
        advantages=torch.ones(2),
        weights=torch.full((2,), 0.5),
        correction=CorrectionFactors(weights=torch.ones(2)),
        lengths=[2],
    )
    result = gspo_loss(tokens, (0.999, 1.001))
    result.loss.backward()
    assert float(result.loss.detach()) == pytest.approx(-1.0, rel=1e-6)
    # d/dx of -exp((x + y) / 2), for both tokens alike.
    assert tokens.log_probs.grad.tolist() == pytest.approx([-0.5, -0.5], rel=1e-6)
    assert float(result.num_out_of_band) == 0
    assert float(ppo_clip_loss(tokens, (0.999, 1.001)).num_out_of_band) == 2


@pytest.mark.parametrize("name", ALGORITHMS)
def test_correction_factors_multiply_a_tokens_share_and_are_not_counted_out(name):
    algorithm = ALGORITHMS[name]
    tokens = policy_tokens(spread=SPREAD.get(name, 0.4), uncounted=True)
    factors = torch.linspace(0, 2, sum(LENGTHS))
    losses, _ = loop(tokens, algorithm)
    want = sum(float(tokens.weights[t] * factors[t]) * loss for t, loss in losses.items())
    plain = policy_loss(tokens, algorithm)
    got = policy_loss(replace(tokens, correction=CorrectionFactors(weights=factors)), algorithm)
    assert float(got.loss) == pytest.approx(want, rel=1e-6, abs=1e-6)
    assert got.num_tokens == plain.num_tokens
    assert got.ratio_sum == plain.ratio_sum


@pytest.mark.parametrize("missing", [math.nan, -math.inf], ids=str)
@pytest.mark.parametrize("side", ["new", "old"])
@pytest.mark.parametrize("loss_of", [ppo_clip_loss, gspo_loss, cispo_loss])
def test_a_token_of_weight_0_leaves_loss_gradient_and_sums(loss_of, side, missing):
    tokens = PolicyTokens(
        log_probs=torch.tensor([-1.0, missing if side == "new" else -2.0], requires_grad=True),
        old_log_probs=torch.tensor([-1.0, missing if side == "old" else -2.0]),
        advantages=torch.ones(2),
        weights=torch.tensor([0.5, 0.0]),
        correction=CorrectionFactors(weights=torch.ones(2)),
        lengths=[2],
    )
    result = loss_of(tokens, (0.8, 1.2))
    result.loss.backward()
    # cispo: -0.5 * 1 * 1 * log_prob.
    assert float(result.loss.detach()) == (0.5 if loss_of is cispo_loss else -0.5)
    assert tokens.log_probs.grad.tolist() == [-0.5, 0.0]
    assert (float(result.num_tokens), float(result.ratio_sum)) == (1.0, 1.0)
    assert (float(result.num_clipped), float(result.num_out_of_band)) == (0.0, 0.0)


@pytest.mark.parametrize("loss_of", [ppo_clip_loss, gspo_loss])
def test_unrelated_policies_give_a_finite_loss(loss_of):
    result = loss_of(one_token(200.0, -1.0), (0.8, 1.2))
    assert float(result.loss.detach()) == pytest.approx(math.exp(MAX_LOG_RATIO), rel=1e-6)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_no_tokens(name):
    empty = torch.zeros(0)
    tokens = PolicyTokens(
        log_probs=empty,
        old_log_probs=empty,
        advantages=empty,
        weights=empty,
        correction=CorrectionFactors(weights=empty),
        lengths=[],
    )
    result = policy_loss(tokens, ALGORITHMS[name])
    assert float(result.loss) == 0
    assert float(result.num_tokens) == 0
