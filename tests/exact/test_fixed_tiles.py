"""Fixed-tile products: right, and a row's bits are a function of the row alone."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from fos_rl.exact import fixed_tiles
from fos_rl.exact.fixed_tiles import check_fixed_tiles, fixed_tile_grouped_mm, fixed_tile_mm

# (n, k): router, head, square; a K that is not a multiple of a vector; SmolLM2's MLP; K of 2048.
SHAPES = [(8, 64), (288, 64), (64, 64), (37, 36), (576, 1536), (49, 2048)]
ROWS = 70


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_same_rows(got: Tensor, want: Tensor) -> None:
    different = int((got != want).any(1).sum())
    assert not different, f"{different} of {len(want)} rows differ"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("rows", [0, 1, 15, 16, 17, 40])
def test_is_the_product(rows: int, dtype: torch.dtype) -> None:
    a, b = normal(rows, 48).to(dtype), normal(24, 48, seed=1).to(dtype)
    got = fixed_tile_mm(a, b)
    assert got.dtype == torch.float32
    # 48 terms of size 1 in fp32: 48 * 2^-24 = 3e-6 at worst.
    torch.testing.assert_close(got.double(), a.double() @ b.double().t(), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.usefixtures("threads")
def test_a_row_has_the_same_bits_in_every_batch(n: int, k: int) -> None:
    """Random subsets in random order: each row comes to lie in other tiles and places of them."""
    a, b = normal(ROWS, k), normal(n, k, seed=1)
    together = fixed_tile_mm(a, b)
    generator = torch.Generator().manual_seed(2)
    for size in (1, 2, 3, 5, 15, 16, 17, 33, 64, ROWS):
        chosen = torch.randperm(ROWS, generator=generator)[:size]
        assert_same_rows(fixed_tile_mm(a[chosen], b), together[chosen])


def test_an_ordinary_product_does_not_have_it() -> None:
    """Else the test above could not fail: on some shape, a batch of another size rounds otherwise.

    torch.mm of 1 row is a matrix-vector product."""
    pairs = [(normal(ROWS, k), normal(n, k, seed=1)) for n, k in SHAPES]
    assert any(not torch.equal(a[:1] @ b.t(), (a @ b.t())[:1]) for a, b in pairs)


@pytest.mark.parametrize(
    "sizes", [[3, 0, 17, 2], [0, 0, 0, 40], [16, 16, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]], ids=str
)
def test_grouped_rows_have_the_bits_of_their_own_product(sizes: list[int]) -> None:
    """Five more rows belong to no group and are 0."""
    a, b = normal(sum(sizes) + 5, 64), normal(4, 24, 64, seed=1)
    ends = torch.tensor(sizes).cumsum(0).to(torch.int32)
    got = fixed_tile_grouped_mm(a, b, ends)
    start = 0
    for expert, end in enumerate(ends.tolist()):
        assert_same_rows(got[start:end], fixed_tile_mm(a[start:end], b[expert]))
        start = end
    assert not got[start:].any()


def test_a_machine_that_breaks_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_fixed_tiles([(64, 64), (288, 64)])
    ordinary = torch.mm

    def last_row_otherwise(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
        """A GEMM whose edge has another order of additions: its last row sums backwards."""
        result = ordinary(a, b) if out is None else ordinary(a, b, out=out)
        result[-1] = (a[-1].flip(0)[:, None] * b.flip(0)).sum(0)
        return result

    monkeypatch.setattr(fixed_tiles.torch, "mm", last_row_otherwise)
    message = r"'exact' unavailable.*288 x 64.*depend on their place.*Try fewer.*num_threads"
    with pytest.raises(RuntimeError, match=message):
        check_fixed_tiles([(288, 64)])
