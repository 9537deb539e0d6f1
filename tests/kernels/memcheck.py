"""Every kernel on shapes that fill no tile, for compute-sanitizer to watch its accesses.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer python -m tests.kernels.memcheck

Without the caching allocator every tensor is an allocation of its own, so that an access past its
end is one that memcheck sees. Run it once without the tool before, which compiles the kernels.
Their bits are compared by test_bitwise.py.
"""

import itertools

import torch
from torch import Tensor

from fos_rl.kernels import compile_cache, quantize_ops
from tests.kernels.kernel_data import make

LAYOUTS = {
    "quantize_blocks",
    "quantize_short_rows",
    "quantize_split_rows",
    "quantize_matrix",
    "quantize_squares",
    "quantize_rows",
    "quantize_columns",
    "quantize_column_squares",
}
OTHERS = {"partial_amax", "group_amax", "decode", "epilogue"}
# block, row_scaled, columnwise
FORMS = (
    ("1x16", False, False),
    ("1x16", True, False),
    ("16x16", False, False),
    ("1x16", False, True),
    ("16x16", False, True),
)
# One block; two CTAs per row; few whole rows in a CTA; a row and more than all SMs hold at once.
SHAPES = ((16, 16), (16, 2064), (2000, 208), (1104, 2064))
# Each takes another path: no, some or all blocks undecided; an amax out of range; no scale.
KINDS = ("normal", "ties", "huge", "subnormal", "zeros")
DTYPES = (torch.bfloat16, torch.float32)
ERROR, BOUND = "mae", 256


def quantize_and_decode(x: Tensor, block: str, row_scaled: bool, columnwise: bool) -> None:
    form = ("four_over_six", block, ERROR, BOUND, row_scaled, columnwise)
    codes, scale, amax, _ = quantize_ops.quantize(x, *form)
    quantize_ops.quantize(x, *form, codes=False, operand=True)
    quantize_ops.quantize(x, *form, amax, operand=True)
    assert codes is not None
    assert scale is not None
    for what, dtype in itertools.product(("value", "operand"), DTYPES):
        quantize_ops.decode(codes, scale, amax, BOUND, dtype, what)


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    for shape, dtype, kind in itertools.product(SHAPES, DTYPES, KINDS):
        x = make(kind, shape, dtype, generator).cuda()
        for form in FORMS:
            quantize_and_decode(x, *form)
        group = (torch.arange(shape[0]) // 7).clamp(max=3).cuda()
        quantize_ops.group_amax(x, group, 3)
    for dtype in DTYPES:
        stack = torch.randn(5, 48, 208, generator=generator).to(dtype).cuda()
        for form in FORMS:
            quantize_and_decode(stack, *form)
    sums = torch.randn(37, 520, generator=generator).cuda()
    rows, one, bias = torch.ones(37).cuda(), torch.ones(1).cuda(), torch.ones(520).cuda()
    for row_scaled, added, dtype in itertools.product((True, False), (None, bias), DTYPES):
        amax = rows if row_scaled else one
        quantize_ops.scale_sums(sums, amax, one, (256, 256), row_scaled, added, dtype)
    torch.cuda.synchronize()
    ran = {constants[0] if kernel == "quantize" else kernel for kernel, constants, _ in
           compile_cache._memory}  # fmt: skip
    assert ran == LAYOUTS | OTHERS, ran
    print(f"ran {len(compile_cache._memory)} kernels of {len(ran)} kinds")


if __name__ == "__main__":
    main()
