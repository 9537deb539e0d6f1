"""What a call allocates and hands to a kernel, seen by a stand-in for the kernel. Needs no GPU."""

import itertools
import math

import pytest
import torch

from fos_rl.kernels import compile_cache, quantize_ops

SMS = 132


@pytest.fixture
def launches(monkeypatch):
    """Calls of kernels instead of launches: (kernel, constants, arguments)."""
    seen: list[tuple[str, tuple, tuple]] = []

    def load(kernel: str, constants: tuple, arch: str):
        return lambda *arguments: seen.append((kernel, constants, arguments))

    monkeypatch.setattr(compile_cache, "load", load)
    monkeypatch.setattr(quantize_ops, "architecture", lambda device: "sm_90a")
    monkeypatch.setattr(quantize_ops, "_sm_count", lambda device: SMS)
    caches = (
        quantize_ops._plan,
        quantize_ops.amax_launcher,
        quantize_ops._group_amax_launcher,
        quantize_ops._decode_launcher,
    )
    for cache in caches:
        cache.cache_clear()
    yield seen
    for cache in caches:
        cache.cache_clear()


# shape, row_scaled, columnwise, amax given, the amax's shape, whether an amax kernel runs first
CASES = {
    "rows": ((48, 64), True, False, False, (48,), False),
    "rows_given": ((48, 64), True, False, True, (48,), False),
    "stack_rows": ((3, 16, 64), True, False, False, (3, 16), False),
    "small_matrix": ((16, 64), False, False, False, (1,), False),
    "matrix": ((1024, 2048), False, False, False, (1,), True),
    "stack": ((3, 1024, 64), False, False, False, (3, 1), True),
    "stack_of_stacks": ((2, 3, 256, 64), False, False, False, (2, 3, 1), True),
    "columns": ((64, 4096), False, True, False, (1,), True),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("codes", "operand"), [(True, False), (False, True), (True, True)])
def test_quantize_allocates_what_is_asked_for(launches, case: str, codes: bool, operand: bool):
    shape, row_scaled, columnwise, given, amax_shape, has_amax_kernel = CASES[case]
    x = torch.zeros(shape, dtype=torch.bfloat16)
    amax = torch.ones(amax_shape) if given else None
    parts = quantize_ops.quantize(
        x, row_scaled=row_scaled, columnwise=columnwise, global_amax=amax, codes=codes,
        operand=operand,
    )  # fmt: skip
    *lead, rows, cols = shape if not columnwise else (*shape[:-2], shape[-1], shape[-2])
    expected = [
        ((*lead, rows, cols // 2), torch.uint8) if codes else None,
        ((*lead, rows, cols // 16), torch.float8_e4m3fn) if codes else None,
        (amax_shape, torch.float32),
        ((*lead, rows, cols), torch.bfloat16) if operand else None,
    ]
    for part, described in zip(parts, expected, strict=True):
        assert (part is None) == (described is None)
        if part is not None:
            assert (tuple(part.shape), part.dtype) == described
            assert part.is_contiguous()

    kernels = [kernel for kernel, _, _ in launches]
    assert kernels == (["partial_amax", "quantize"] if has_amax_kernel else ["quantize"])
    _, (_, _, plan, output), (matrix, amax_at, codes_at, scale_at, operand_at, share, stack, _) = (
        launches[-1]
    )
    assert output == (codes, operand)
    assert matrix.data_ptr() == x.data_ptr()
    assert matrix.dim() == 2
    found = [0 if part is None else part.data_ptr() for part in parts]
    assert [codes_at, scale_at, amax_at, operand_at] == found
    assert plan[1] == ("given" if given else "partials" if has_amax_kernel else "found")
    if has_amax_kernel:
        # The partial amaxes lie behind the amaxes, which the second kernel writes.
        room = launches[0][2][1]
        assert room.data_ptr() == amax_at
        assert room.numel() == stack * (1 + share)
        assert stack == math.prod(lead)


def test_stand_ins_are_of_contiguous_tensors() -> None:
    """Every shape of up to four dims of 1, 2 and 3, in each dtype of an output."""
    dtypes = (torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float32)
    for dtype, dims in itertools.product(dtypes, range(1, 5)):
        for shape in itertools.product((1, 2, 3), repeat=dims):
            made = torch.empty_like(quantize_ops.stand_in(shape, dtype, torch.device("cpu")))
            plain = torch.empty(shape, dtype=dtype)
            assert (made.shape, made.stride(), made.dtype) == (shape, plain.stride(), dtype)
            assert made.untyped_storage().nbytes() == plain.nbytes


def test_an_amax_elsewhere_is_refused_every_time(launches) -> None:
    x, amax = torch.zeros(16, 64, dtype=torch.bfloat16), torch.ones(1, device="meta")
    for _ in range(2):
        with pytest.raises(ValueError, match="global_amax is on meta, x on cpu"):
            quantize_ops.quantize(x, global_amax=amax)
    assert not launches


def test_amaxes_of_groups_start_at_zero(launches) -> None:
    x = torch.ones(48, 64, dtype=torch.bfloat16, requires_grad=True)
    group = torch.full((48,), 3)
    amax = quantize_ops.group_amax(x, group, 3)
    assert amax.tolist() == [0.0, 0.0, 0.0]
    ((kernel, constants, (matrix, group_at, amax_at)),) = launches
    assert (kernel, constants) == ("group_amax", ("bfloat16", 256))
    assert (matrix.data_ptr(), group_at, amax_at) == (
        x.data_ptr(),
        group.data_ptr(),
        amax.data_ptr(),
    )
    assert not matrix.requires_grad


@pytest.mark.parametrize("lead", [(48,), (3, 16)], ids=["matrix", "stack"])
def test_decode_sees_matrices(launches, lead: tuple[int, ...]) -> None:
    codes = torch.zeros(*lead, 32, dtype=torch.uint8)
    scale = torch.zeros(*lead, 4, dtype=torch.float8_e4m3fn)
    out = quantize_ops.decode(codes, scale, torch.ones(lead), 256, torch.bfloat16)
    assert out.shape == (*lead, 64)
    ((kernel, constants, (flat, scales, amax, target, rows_each, ctas)),) = launches
    assert (kernel, constants) == ("decode", ("value", 256, "bfloat16", True))
    assert [tuple(t.shape) for t in (flat, scales, amax, target)] == [
        (48, 32),
        (48, 4),
        (48,),
        (48, 64),
    ]
    assert target.data_ptr() == out.data_ptr()
    # 48 * 64 * 2 bytes, 16 per thread, 256 threads per CTA.
    assert (rows_each, ctas) == (1, 2)
