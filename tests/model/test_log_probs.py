"""Chunked log-probs against one plain log_softmax and gather over the whole batch."""

import numpy as np
import pytest
import torch

from fos_rl.model.log_probs import token_log_probs


@pytest.mark.parametrize("chunk", [1, 7, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_equals_plain_gather(chunk: int, temperature: float) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(23, 16, generator=generator, dtype=torch.float64, requires_grad=True)
    head = torch.randn(50, 16, generator=generator, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 50, (23,), generator=generator)
    upstream = torch.randn(23, generator=generator, dtype=torch.float64)

    # The temperature is an fp32 number on both sides.
    plain = (hidden @ head.T / float(np.float32(temperature))).log_softmax(-1)
    want = plain[torch.arange(23), targets]
    want_entropy = -(plain.exp() * plain).sum(-1)
    want_grads = torch.autograd.grad((want * upstream).sum(), [hidden, head])

    got, entropy = token_log_probs(lambda h: h @ head.T, hidden, targets, temperature, chunk)
    got_grads = torch.autograd.grad((got * upstream).sum(), [hidden, head])
    # fp64 throughout: values of size 30 and sums of 50 terms keep 13 digits.
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    torch.testing.assert_close(entropy, want_entropy, rtol=0, atol=1e-12)
    for a, b in zip(got_grads, want_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert not entropy.requires_grad


def test_no_logits_of_the_whole_batch() -> None:
    sizes: list[int] = []

    def logits(rows: torch.Tensor) -> torch.Tensor:
        sizes.append(rows.shape[0])
        return rows @ torch.ones(4, 9)

    token_log_probs(logits, torch.randn(10, 4), torch.zeros(10, dtype=torch.int64), 1.0, 4)
    assert max(sizes) == 4


def test_no_tokens() -> None:
    log_probs, entropy = token_log_probs(
        lambda h: h, torch.randn(0, 4), torch.zeros(0, dtype=torch.int64), 1.0, 4
    )
    assert log_probs.shape == entropy.shape == (0,)
