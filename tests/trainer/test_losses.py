"""The clipped loss against a token-by-token loop, hand-worked numbers and its micro-batches."""

import math

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


def weights_of(lengths: list[int], aggregation: str) -> torch.Tensor:
    return token_weights(
        lengths, aggregation, num_sequences=len(LENGTHS), num_tokens=sum(LENGTHS), max_tokens=8
    )


def test_hand_worked_weights():
    sizes = {"num_sequences": 2, "num_tokens": 3, "max_tokens": 4}
    assert token_weights([2, 1], "sequence_mean", **sizes).tolist() == [0.25, 0.25, 0.5]
    assert token_weights([2, 1], "constant", **sizes).tolist() == [0.125, 0.125, 0.125]
    torch.testing.assert_close(
        token_weights([2, 1], "token_mean", **sizes), torch.full((3,), 1 / 3)
    )


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
    loss, sums = policy_loss(
        new, old, advantages, weights_of(LENGTHS, aggregation), clip_low=low, clip_high=high
    )
    # fp32 sum of 11 terms of size 1: a few units of 1.2e-7.
    assert float(loss) == pytest.approx(want, abs=1e-6)
    assert sums["tokens"] == len(flat)
    assert sums["loss/clip_frac"] == clipped
    assert sums["loss/out_of_band_frac"] == outside
    assert 0 < clipped < outside


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("cut", [[[0, 1, 2, 3]], [[0], [1, 2], [3]], [[3, 1], [2, 0]]], ids=str)
def test_microbatches_add_up_to_the_batch(aggregation, cut):
    new, old, advantages = batch()
    new.requires_grad_()
    whole, _ = policy_loss(
        new, old, advantages, weights_of(LENGTHS, aggregation), clip_low=0.2, clip_high=0.2
    )
    (whole_gradient,) = torch.autograd.grad(whole, new)
    parts = [x.split(LENGTHS) for x in (new, old, advantages)]
    total = torch.zeros(())
    for sequences in cut:
        inputs = [torch.cat([part[i] for i in sequences]) for part in parts]
        weights = weights_of([LENGTHS[i] for i in sequences], aggregation)
        total = total + policy_loss(*inputs, weights, clip_low=0.2, clip_high=0.2)[0]
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
    got, sums = policy_loss(new, 0 * one, advantage * one, one, clip_low=0.2, clip_high=0.2)
    got.backward()
    assert float(got.detach()) == pytest.approx(loss, abs=1e-6)
    assert float(new.grad) == pytest.approx(gradient, abs=1e-6)
    assert (int(sums["loss/clip_frac"]), int(sums["loss/out_of_band_frac"])) == (clipped, outside)


@pytest.mark.parametrize("old", [math.nan, -math.inf], ids=str)
def test_a_token_without_a_finite_old_log_prob_leaves_everything(old):
    new = torch.tensor([-1.0, -2.0], requires_grad=True)
    loss, sums = policy_loss(
        new,
        torch.tensor([-1.0, old]),
        torch.ones(2),
        torch.full((2,), 0.5),
        clip_low=0.2,
        clip_high=0.2,
    )
    loss.backward()
    assert float(loss.detach()) == -0.5
    assert new.grad.tolist() == [-0.5, 0.0]
    assert {name: float(value) for name, value in sums.items()} == {
        "tokens": 1,
        "loss/clip_frac": 0,
        "loss/out_of_band_frac": 0,
        "loss/ratio_mean": 1,
    }


def test_a_masked_nan_reaches_neither_loss_nor_gradient():
    new = torch.tensor([-1.0, math.nan], requires_grad=True)
    weights = torch.tensor([1.0, 0.0])
    loss, _ = policy_loss(
        new, torch.full((2,), -1.0), torch.ones(2), weights, clip_low=0.2, clip_high=0.2
    )
    loss.backward()
    assert float(loss.detach()) == -1.0
    assert new.grad.tolist() == [-1.0, 0.0]


def test_unrelated_policies_give_a_finite_loss():
    loss, _ = policy_loss(
        torch.zeros(1),
        torch.full((1,), -200.0),
        -torch.ones(1),
        torch.ones(1),
        clip_low=0.2,
        clip_high=0.2,
    )
    assert float(loss) == pytest.approx(math.exp(MAX_LOG_RATIO), rel=1e-6)


def test_no_tokens():
    empty = torch.zeros(0)
    weights = token_weights([], "token_mean", num_sequences=0, num_tokens=0, max_tokens=8)
    loss, sums = policy_loss(empty, empty, empty, weights, clip_low=0.2, clip_high=0.2)
    assert float(loss) == 0
    assert float(sums["tokens"]) == 0
