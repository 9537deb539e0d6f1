"""On a GPU: every kernel gives the bytes of the eager reference. 0 bytes may differ."""

import itertools
import warnings

import pytest
import torch

from fos_rl.quant import (
    NVFP4Tensor,
    exact_operand,
    four_over_six_quantize,
    nvfp4_dequantize,
    nvfp4_quantize,
)
from fos_rl.quant.grouped_gemm import group_of_rows, per_row
from tests.kernels.kernel_data import KINDS, make

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# block, row_scaled, columnwise
FORMS = {
    "tensor": ("1x16", False, False),
    "rows": ("1x16", True, False),
    "square": ("16x16", False, False),
    "columns": ("1x16", False, True),
    "columns_square": ("16x16", False, True),
}
# Several tiles; sizes that fill no tile; one block; more than one CTA per matrix with a remainder;
# many short rows; few long ones.
SHAPES = ((2048, 4096), (48, 576), (16, 16), (528, 1040), (2000, 208), (256, 32768))
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def assert_same(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Equal bits, any NaN being equal to any other."""
    assert found.shape == expected.shape, what
    assert found.dtype == expected.dtype, what
    word = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[found.element_size()]
    different = found.contiguous().view(word) != expected.contiguous().view(word)
    if found.dtype in (torch.float32, torch.bfloat16):
        different &= ~(found.isnan() & expected.isnan())
    count = int(different.sum())
    assert count == 0, f"{what}: {count} of {different.numel()} elements differ"


def assert_tensors_same(found: NVFP4Tensor, expected: NVFP4Tensor, what: str) -> None:
    assert found.e4m3_scale_bound == expected.e4m3_scale_bound
    assert_same(found.global_amax, expected.global_amax, f"{what} amax")
    scales = (t.block_scale.view(torch.uint8) for t in (found, expected))
    assert_same(*scales, f"{what} scales")
    assert_same(found.codes, expected.codes, f"{what} codes")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_quantize(form: str, dtype: str) -> None:
    block, rows, columns = FORMS[form]
    generator = torch.Generator("cuda").manual_seed(0)
    for shape, kind in itertools.product(SHAPES, KINDS):
        x = make(kind, shape, DTYPES[dtype], generator)
        for err_mode, bound in itertools.product(("mae", "mse"), (256, 448)):
            what = f"{shape} {kind} {err_mode} {bound}"
            both = [
                four_over_six_quantize(
                    x, block, err_mode, bound, rows, columnwise=columns, backend=backend
                )
                for backend in ("cute", "reference")
            ]
            assert_tensors_same(*both, what)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_standard_and_given_amax(form: str, dtype: str) -> None:
    """A given amax below the true one saturates scales, one far above loses them."""
    block, rows, columns = FORMS[form]
    generator = torch.Generator("cuda").manual_seed(1)
    for shape, kind in itertools.product(SHAPES[1:], KINDS):
        x = make(kind, shape, DTYPES[dtype], generator)
        both = [
            nvfp4_quantize(x, rows, block=block, columnwise=columns, backend=backend)
            for backend in ("cute", "reference")
        ]
        assert_tensors_same(*both, f"{shape} {kind} standard")
        for factor in (0.3, 1.0, 5.0, 1e5):
            amax = both[1].global_amax * factor
            both = [
                four_over_six_quantize(
                    x, block, "mae", 256, rows, columnwise=columns, global_amax=amax,
                    backend=backend,
                )
                for backend in ("cute", "reference")
            ]  # fmt: skip
            assert_tensors_same(*both, f"{shape} {kind} amax * {factor}")


@pytest.mark.parametrize("form", FORMS)
def test_decode(form: str) -> None:
    block, rows, columns = FORMS[form]
    generator = torch.Generator("cuda").manual_seed(2)
    for shape, kind in itertools.product(SHAPES, KINDS):
        x = make(kind, shape, torch.bfloat16, generator)
        for bound in (256, 448):
            t = four_over_six_quantize(x, block, "mse", bound, rows, columnwise=columns)
            for dtype in DTYPES.values():
                both = [nvfp4_dequantize(t, dtype, backend=b) for b in ("cute", "reference")]
                assert_same(*both, f"{shape} {kind} {bound} {dtype} values")
            both = [exact_operand(t, backend=backend) for backend in ("cute", "reference")]
            assert_same(*both, f"{shape} {kind} {bound} operand")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_fused_operand(form: str, dtype: str) -> None:
    from fos_rl.kernels import quantize_ops

    block, rows, columns = FORMS[form]
    generator = torch.Generator("cuda").manual_seed(3)
    for shape, kind in itertools.product(SHAPES, KINDS):
        x = make(kind, shape, DTYPES[dtype], generator)
        t = four_over_six_quantize(
            x, block, "mae", 256, rows, columnwise=columns, backend="reference"
        )
        expected = exact_operand(t, backend="reference")
        for codes in (True, False):
            parts = quantize_ops.quantize(
                x, "four_over_six", block, "mae", 256, rows, columns, codes=codes, operand=True
            )
            assert_same(parts[3], expected, f"{shape} {kind} operand")
            if codes:
                assert_tensors_same(NVFP4Tensor(*parts[:3], 256), t, f"{shape} {kind}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_stack(form: str, dtype: str) -> None:
    """Experts: an amax for each, one of them zero."""
    block, rows, columns = FORMS[form]
    generator = torch.Generator("cuda").manual_seed(4)
    x = torch.randn(5, 64, 320, device="cuda", generator=generator)
    x = (x * torch.tensor([1.0, 3.0, 1e-3, 0.0, 1e9], device="cuda").view(5, 1, 1)).to(
        DTYPES[dtype]
    )
    both = [
        four_over_six_quantize(x, block, "mae", 256, rows, columnwise=columns, backend=backend)
        for backend in ("cute", "reference")
    ]
    assert_tensors_same(*both, "stack")
    decoded = [nvfp4_dequantize(both[1], backend=backend) for backend in ("cute", "reference")]
    assert_same(*decoded, "stack values")


def test_groups_with_one_amax_each_row() -> None:
    """What grouped GEMMs do with a group's amax: a given amax for each row."""
    generator = torch.Generator("cuda").manual_seed(5)
    x = torch.randn(640, 1024, device="cuda", generator=generator).bfloat16()
    offs = torch.tensor([100, 100, 420, 640])
    amax = torch.empty(640, device="cuda")
    for start, end in zip([0, *offs[:-1].tolist()], offs.tolist(), strict=True):
        if end > start:
            amax[start:end] = x[start:end].abs().amax().float()
    both = [
        four_over_six_quantize(x, "1x16", "mse", 256, True, global_amax=amax, backend=backend)
        for backend in ("cute", "reference")
    ]
    assert_tensors_same(*both, "groups")


@pytest.mark.parametrize("dtype", DTYPES)
def test_amax_and_operand_of_groups(dtype: str) -> None:
    """The offsets stay on the device; some groups are empty, some rows belong to none."""
    from fos_rl.kernels import quantize_ops

    generator = torch.Generator("cuda").manual_seed(8)
    offs = torch.tensor([100, 100, 420, 640], dtype=torch.int32, device="cuda")
    for cols, kind in itertools.product((16, 208, 1024, 8192), KINDS):
        x = make(kind, (700, cols), DTYPES[dtype], generator)
        group = group_of_rows(offs, 700)
        ends = offs.tolist()
        amax = torch.zeros(4, device="cuda")
        for i, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
            if end > start:
                amax[i] = x[start:end].abs().amax().float()
        found = quantize_ops.group_amax(x, group, 4)
        assert_same(found, amax, f"{cols} {kind} amax")
        rows = per_row(amax, group)
        t = four_over_six_quantize(
            x, "1x16", "mse", 256, True, global_amax=rows, backend="reference"
        )
        parts = quantize_ops.quantize(
            x, "four_over_six", "1x16", "mse", 256, True, global_amax=rows, codes=False,
            operand=True,
        )  # fmt: skip
        expected = exact_operand(t, backend="reference")
        assert_same(parts[3], expected, f"{cols} {kind} operand")


def test_epilogue() -> None:
    from fos_rl.kernels import quantize_ops
    from fos_rl.quant.gemm import apply_global_scales

    generator = torch.Generator("cuda").manual_seed(6)
    sums = torch.randn(96, 520, device="cuda", generator=generator) * 1e4
    rows, one = (torch.rand(n, device="cuda", generator=generator) + 0.1 for n in (96, 1))
    bias = torch.randn(520, device="cuda", generator=generator).bfloat16()
    for row_scaled, added in itertools.product((True, False), (None, bias)):
        a_amax = rows if row_scaled else one
        for dtype in DTYPES.values():
            expected = apply_global_scales(sums.clone(), a_amax, one, (256, 448), row_scaled)
            if added is not None:
                expected = expected + added.float()
            found = quantize_ops.scale_sums(sums, a_amax, one, (256, 448), row_scaled, added, dtype)
            assert_same(found, expected.to(dtype), f"{row_scaled} {dtype}")


def test_compile_and_graph_capture() -> None:
    """torch.compile sees one op; a CUDA graph replays the kernels; both with the same bits."""
    x = torch.randn(64, 1024, device="cuda").bfloat16()
    expected = four_over_six_quantize(x, "1x16", "mae", 256, True, backend="reference")

    def parts(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        t = four_over_six_quantize(x, "1x16", "mae", 256, True)
        return t.codes, t.block_scale.view(torch.uint8), t.global_amax, nvfp4_dequantize(t)

    with warnings.catch_warnings():
        # What Inductor warns of is not ours.
        warnings.simplefilter("ignore")
        compiled = torch.compile(parts, fullgraph=True)(x)
    assert_same(compiled[0], expected.codes, "compiled codes")
    assert_same(compiled[2], expected.global_amax, "compiled amax")
    assert_same(compiled[3], nvfp4_dequantize(expected, backend="reference"), "compiled values")
    parts(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = parts(x)
    for tensor in captured:
        tensor.zero_()
    graph.replay()
    assert_same(captured[0], expected.codes, "replayed codes")
    assert_same(captured[2], expected.global_amax, "replayed amax")


def test_ops_pass_opcheck() -> None:
    from fos_rl.kernels import library

    x = torch.randn(32, 64, device="cuda").bfloat16()
    arguments = (x, "four_over_six", "1x16", "mae", 256, True, False, None)
    torch.library.opcheck(library.quantize, arguments)
    parts = library.quantize(*arguments)
    torch.library.opcheck(library.decode, (*parts, 256, torch.bfloat16, "value"))


def test_other_stream() -> None:
    """Kernels run on the current stream: after a long wait there, the input is what came last."""
    x = torch.zeros(256, 1024, device="cuda", dtype=torch.bfloat16)
    values = torch.randn(256, 1024, device="cuda").bfloat16()
    expected = four_over_six_quantize(values, backend="reference")
    four_over_six_quantize(x)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        x.copy_(values)
        found = four_over_six_quantize(x)
    stream.synchronize()
    assert_tensors_same(found, expected, "other stream")
