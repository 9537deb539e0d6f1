"""Every block of a matrix has a thread. Needs no GPU."""

import itertools

import pytest
import torch

from fos_rl.kernels.layouts import matrix_layout, row_layout

SMS = 132
# 1 to 2^16 rows of 1 to 1792 blocks: sizes of models, and sizes just above and below a limit.
ROWS = (1, 16, 64, 131, 264, 265, 528, 1056, 1057, 4096, 65536)
BLOCKS = (1, 2, 31, 36, 64, 95, 96, 97, 128, 129, 256, 512, 1792)


@pytest.mark.parametrize("given", [True, False], ids=["given", "found"])
def test_row_layouts_cover_every_block(given: bool) -> None:
    names = set()
    for rows, blocks in itertools.product(ROWS, BLOCKS):
        layout = row_layout(rows, blocks, torch.bfloat16, SMS, given)
        threads, amax = layout.plan[:2]
        names.add(layout.name)
        assert amax == ("given" if given else "found")
        what = f"{rows} rows of {blocks} blocks: {layout}"
        match layout.name:
            case "quantize_blocks":
                needless = layout.ctas * threads - rows * blocks
                assert 0 <= needless < threads, what
            case "quantize_split_rows":
                assert layout.ctas == rows * layout.share, what
                assert 0 <= layout.share * threads - blocks < threads, what
            case "quantize_short_rows":
                assert layout.share * blocks <= threads, what
                assert 0 <= layout.ctas * layout.share - rows < layout.share, what
            case name:
                assert name == "quantize_rows", what
    assert names == (
        {"quantize_blocks", "quantize_rows"}
        if given
        else {"quantize_split_rows", "quantize_short_rows", "quantize_rows"}
    )


def test_matrix_layouts_have_ctas_for_all_or_loop() -> None:
    """A kernel that loops over its share runs with any number of CTAs, "quantize_blocks" does
    not."""
    names = set()
    for rows, blocks, stack in itertools.product(ROWS, BLOCKS, (1, 8)):
        for given in (True, False):
            layout = matrix_layout(
                rows, 16 * blocks, stack, False, False, torch.bfloat16, SMS, given
            )
            names.add(layout.name)
            assert layout.plan[1] == ("given" if given else "partials")
            assert (layout.share == 0) == given
            if layout.name == "quantize_blocks":
                assert given or stack == 1
                assert layout.ctas * layout.plan[0] >= rows * blocks * stack
            else:
                assert 1 <= layout.ctas <= 12 * SMS
    assert names == {"quantize_blocks", "quantize_matrix"}
