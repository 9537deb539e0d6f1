"""Elementwise functions and row sums: right, and independent of the batch."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fos_rl.exact.rows import mean_square, silu, sum_last

# 100 is not a multiple of a vector of 8 or 16 numbers, so rows begin anywhere in one.
WIDTHS = [32, 64, 100, 576]


def normal(*shape: int) -> Tensor:
    return 3 * torch.randn(shape, generator=torch.Generator().manual_seed(0))


def log_softmax(x: Tensor) -> Tensor:
    return x.log_softmax(dim=-1)


def softmax(x: Tensor) -> Tensor:
    return x.softmax(dim=-1)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("function", [mean_square, silu, sum_last, log_softmax, softmax])
def test_a_row_has_the_same_bits_in_every_batch(function, width: int) -> None:
    """The softmaxes are torch's own, in trainer and generator: they must have it, too."""
    x = normal(400, width)
    together = function(x)
    for size in (1, 2, 3, 7, 16, 33, 100):
        for first in (0, 1, 5, 300):
            rows = slice(first, first + size)
            assert torch.equal(function(x[rows].clone()), together[rows])


def test_torchs_silu_does_not_have_it() -> None:
    """Why there is another: the elements past its last whole vector have another exp."""
    x = normal(400, 100)
    together = F.silu(x)
    assert any(not torch.equal(F.silu(x[i : i + 1].clone()), together[i : i + 1]) for i in range(9))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_silu(dtype: torch.dtype) -> None:
    x = torch.cat([normal(1000), torch.tensor([0.0, -0.0, 100, -100, -1e4, float("inf")])]).to(
        dtype
    )
    want = x.double() * x.double().sigmoid()
    # exp, sum and quotient each round once, by 2^-24; then one rounding to the dtype, 2^-8 in bf16.
    rtol = 1e-6 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(silu(x).double(), want, rtol=rtol, atol=1e-37)


def test_mean_square_and_sum_last() -> None:
    x = normal(50, 64)
    want = x.double().square().mean(-1, keepdim=True)
    torch.testing.assert_close(mean_square(x).double(), want, rtol=1e-6, atol=0)
    three = torch.tensor([[1.0, 2**-24, 2**-24]])
    # In their order each is rounded away; the other way round they would be 2^-23.
    assert sum_last(three).tolist() == [[1.0]]
