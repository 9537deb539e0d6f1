"""The clipped loss against a token-by-token loop, hand-worked numbers and its micro-batches."""

import math

import numpy as np
import pytest
import torch

from fos_rl.trainer.losses import MAX_LOG_RATIO, policy_loss, token_weights

AGGREGATIONS = ["sequence_mean", "token_mean", "constant"]
LENGTHS = [3, 1, 5, 2]


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probs, old log-probs (ratios from about 0.5 to 2) and advantages of LENGTHS' tokens."""
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(sum(LENGTHS), generator=generator) * 4
    new = old + 0.4 * torch.randn(sum(LENGTHS), generator=generator)
    per_sequence = torch.randn(len(LENGTHS), generator=generator)
    return new, old, per_sequence.repeat_interleave(torch.tensor(LENGTHS))


def weights_of(aggregation: str) -> list[torch.Tensor]:
    masks = [np.ones(length, dtype=bool) for length in LENGTHS]
    weights = token_weights(masks, aggregation=aggregation, max_new_tokens=8)
    return [torch.from_numpy(w) for w in weights]


@pytest.mark.parametrize(
    ("aggregation", "want"),
    [
        ("sequence_mean", [[1 / 4, 1 / 4, 0], [1 / 2], [0]]),
        ("token_mean", [[1 / 3, 1 / 3, 0], [1 / 3], [0]]),
        ("constant", [[1 / 8, 1 / 8, 0], [1 / 8], [0]]),
    ],
    ids=AGGREGATIONS,
)
def test_hand_worked_weights(aggregation, want):
    masks = [np.array([True, True, False]), np.array([True]), np.array([False])]
    got = token_weights(masks, aggregation=aggregation, max_new_tokens=4)
    for weights, row in zip(got, want, strict=True):
        np.testing.assert_array_equal(weights, np.array(row, dtype=np.float32))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_loss_equals_a_loop(aggregation):
    new, old, advantages = batch()
    low, high = 0.2, 0.28
    sequences: list[list[float]] = []
    clipped = outside = start = 0
    for length in LENGTHS:
        losses = []
        for t in range(start, start + length):
            ratio, advantage = math.exp(float(new[t] - old[t])), float(advantages[t])
            bounded = min(max(ratio, 1 - low), 1 + high)
            losses.append(-min(ratio * advantage, bounded * advantage))
            clipped += losses[-1] == -bounded * advantage and bounded != ratio
            outside += bounded != ratio
        sequences.append(losses)
        start += length
    flat = [loss for losses in sequences for loss in losses]
    want = {
        "sequence_mean": sum(sum(s) / len(s) for s in sequences) / len(sequences),
        "token_mean": sum(flat) / len(flat),
        "constant": sum(flat) / (len(sequences) * 8),
    }[aggregation]
    result = policy_loss(
        new, old, advantages, torch.cat(weights_of(aggregation)), clip_low=low, clip_high=high
    )
    # fp32 sum of 11 terms of size 1: a few units of 1.2e-7.
    assert float(result.loss) == pytest.approx(want, abs=1e-6)
    assert result.num_tokens == len(flat)
    assert result.num_clipped == clipped
    assert result.num_out_of_band == outside
    assert 0 < clipped < outside


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("cut", [[[0, 1, 2, 3]], [[0], [1, 2], [3]], [[3, 1], [2, 0]]], ids=str)
def test_microbatches_add_up_to_the_batch(aggregation, cut):
    new, old, advantages = batch()
    new.requires_grad_()
    whole = policy_loss(
        new, old, advantages, torch.cat(weights_of(aggregation)), clip_low=0.2, clip_high=0.2
    ).loss
    (whole_gradient,) = torch.autograd.grad(whole, new)
    parts = [*(x.split(LENGTHS) for x in (new, old, advantages)), weights_of(aggregation)]
    total = torch.zeros(())
    for sequences in cut:
        inputs = [torch.cat([part[i] for i in sequences]) for part in parts]
        total = total + policy_loss(*inputs, clip_low=0.2, clip_high=0.2).loss
    (gradient,) = torch.autograd.grad(total, new)
    torch.testing.assert_close(total, whole, rtol=0, atol=1e-6)
    assert torch.equal(gradient, whole_gradient)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped", "outside"),
    [
        (1.0, 2.0, -2.0, -2.0, 0, 0),
        (1.5, 1.0, -1.2, 0.0, 1, 1),
        (1.5, -1.0, 1.5, 1.5, 0, 1),
        (0.5, 1.0, -0.5, -0.5, 0, 1),
        (0.5, -1.0, 0.8, 0.0, 1, 1),
        (1.5, 0.0, 0.0, 0.0, 0, 1),
    ],
    ids=["on-policy", "up-good", "up-bad", "down-good", "down-bad", "no-advantage"],
)
def test_hand_worked_token(ratio, advantage, loss, gradient, clipped, outside):
    new = torch.tensor([math.log(ratio)], requires_grad=True)
    one = torch.ones(1)
    result = policy_loss(new, 0 * one, advantage * one, one, clip_low=0.2, clip_high=0.2)
    result.loss.backward()
    assert float(result.loss.detach()) == pytest.approx(loss, abs=1e-6)
    assert float(new.grad) == pytest.approx(gradient, abs=1e-6)
    assert (int(result.num_clipped), int(result.num_out_of_band)) == (clipped, outside)


@pytest.mark.parametrize("missing", [math.nan, -math.inf], ids=str)
@pytest.mark.parametrize("side", ["new", "old"])
def test_a_token_of_weight_0_leaves_loss_gradient_and_sums(side, missing):
    new = torch.tensor([-1.0, missing if side == "new" else -2.0], requires_grad=True)
    old = torch.tensor([-1.0, missing if side == "old" else -2.0])
    weights = torch.tensor([0.5, 0.0])
    result = policy_loss(new, old, torch.ones(2), weights, clip_low=0.2, clip_high=0.2)
    result.loss.backward()
    assert float(result.loss.detach()) == -0.5
    assert new.grad.tolist() == [-0.5, 0.0]
    assert (float(result.num_tokens), float(result.ratio_sum)) == (1.0, 1.0)
    assert (float(result.num_clipped), float(result.num_out_of_band)) == (0.0, 0.0)


def test_unrelated_policies_give_a_finite_loss():
    result = policy_loss(
        torch.zeros(1),
        torch.full((1,), -200.0),
        -torch.ones(1),
        torch.ones(1),
        clip_low=0.2,
        clip_high=0.2,
    )
    assert float(result.loss) == pytest.approx(math.exp(MAX_LOG_RATIO), rel=1e-6)


def test_no_tokens():
    empty = torch.zeros(0)
    assert token_weights([], aggregation="token_mean", max_new_tokens=8) == []
    result = policy_loss(empty, empty, empty, empty, clip_low=0.2, clip_high=0.2)
    assert float(result.loss) == 0
    assert float(result.num_tokens) == 0
