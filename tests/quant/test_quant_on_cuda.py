"""CUDA equals the CPU on bits: divisions by scalars and flushed denormals show only here."""

import pytest
import torch

from fos_rl.quant import (
    exact_operand,
    four_over_six_grouped_mm,
    four_over_six_linear,
    four_over_six_quantize,
    mxfp8_grouped_mm,
    mxfp8_linear,
    mxfp8_quantize,
    nvfp4_dequantize,
    nvfp4_grouped_mm,
    nvfp4_linear,
    nvfp4_quantize,
)
from tests.quant.quant_goldens import assert_bytes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LINEARS = [four_over_six_linear, nvfp4_linear, mxfp8_linear]
GROUPED = [four_over_six_grouped_mm, nvfp4_grouped_mm, mxfp8_grouped_mm]


def sample(kind: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 512, generator=generator)
    if kind == "wide":
        x *= torch.exp2(torch.randint(-40, 40, x.shape, generator=generator).float())
    elif kind == "rows":
        x *= torch.rand(256, 1, generator=generator)
    elif kind == "subnormal":
        x *= 2.0**-135
    elif kind == "grid":
        x = (x * 8).round() / 4
    return x


@pytest.mark.parametrize("kind", ["normal", "wide", "rows", "subnormal", "grid"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantize_and_dequantize(kind, dtype):
    """Trap 2: on CUDA tensor / scalar multiplies by the reciprocal. Trap 17."""
    x = sample(kind).to(dtype)
    for bound in (256, 448):
        for mode in ("mae", "mse"):
            for block, row, columnwise in (
                ("1x16", False, False),
                ("1x16", True, False),
                ("1x16", False, True),
                ("16x16", False, False),
                ("16x16", False, True),
            ):
                knobs = (block, mode, bound, row)
                compare(
                    four_over_six_quantize(x, *knobs, columnwise=columnwise),
                    four_over_six_quantize(x.cuda(), *knobs, columnwise=columnwise),
                )
    for columnwise in (False, True):
        compare(
            nvfp4_quantize(x, columnwise=columnwise),
            nvfp4_quantize(x.cuda(), columnwise=columnwise),
        )
        for mode in ("rceil", "floor"):
            host = mxfp8_quantize(x, mode, columnwise=columnwise)
            device = mxfp8_quantize(x.cuda(), mode, columnwise=columnwise)
            assert_bytes(device.scale.cpu(), host.scale, "scale")
            assert_bytes(device.data.cpu(), host.data, "data")


def compare(host, device) -> None:
    assert_bytes(device.codes.cpu(), host.codes, "codes")
    assert_bytes(device.block_scale.cpu(), host.block_scale, "scales")
    assert_bytes(device.global_amax.cpu(), host.global_amax, "amax")
    for dtype in (torch.float32, torch.bfloat16):
        assert_bytes(nvfp4_dequantize(device, dtype).cpu(), nvfp4_dequantize(host, dtype), "values")
        assert_bytes(exact_operand(device, dtype).cpu(), exact_operand(host, dtype), "operand")


def modes(function):
    rows = (False,) if function in (mxfp8_linear, mxfp8_grouped_mm) else (False, True)
    for row in rows:
        knobs = {} if len(rows) == 1 else {"row_scaled_activation": row}
        for mode in ("quantized", "high_precision", "dequantized"):
            if not (row and mode == "quantized"):
                yield knobs | {"backward": mode}


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """fp32 GEMMs in another order: 1e-5 of the mean magnitude."""
    tolerance = 1e-5 * expected.abs().mean() * 8
    assert (actual.cpu() - expected).abs().max() <= tolerance


@pytest.mark.parametrize("linear", LINEARS)
def test_linear(linear):
    """fp32 outputs and gradients; TF32 would be off by 1e-3."""
    assert not torch.backends.cuda.matmul.allow_tf32
    for knobs in modes(linear):
        results = []
        for device in ("cpu", "cuda"):
            x = sample("normal").to(device).requires_grad_()
            w = sample("rows")[:96].to(device).requires_grad_()
            out = linear(x, w, **knobs)
            out.backward(sample("grid")[:, :96].to(device))
            results.append((out.detach(), x.grad, w.grad))
        for expected, actual in zip(*results, strict=True):
            close(actual, expected)


@pytest.mark.parametrize("grouped", GROUPED)
def test_grouped(grouped):
    for knobs in modes(grouped):
        results = []
        for device in ("cpu", "cuda"):
            x = sample("normal").to(device)
            x[240:] = torch.nan
            x.requires_grad_()
            w = sample("rows")[:192].view(3, 64, 512).to(device).requires_grad_()
            offs = torch.tensor([100, 100, 240], dtype=torch.int32, device=device)
            out = grouped(x, w, offs, **knobs)
            out.backward(sample("grid")[:, :64].to(device))
            results.append((out.detach(), x.grad, w.grad))
        for expected, actual in zip(*results, strict=True):
            close(actual, expected)


@pytest.mark.parametrize("grouped", GROUPED)
def test_grouped_forward_is_captured_in_a_graph(grouped):
    """No host read of offs: a replay with other offsets equals an eager call."""
    x, w = sample("normal").bfloat16().cuda(), sample("rows")[:192].view(3, 64, 512).cuda()
    offs = torch.tensor([100, 100, 240], dtype=torch.int32, device="cuda")
    with torch.no_grad():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            grouped(x, w, offs)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = grouped(x, w, offs)
        offs.copy_(torch.tensor([7, 200, 256], dtype=torch.int32))
        graph.replay()
        assert_bytes(out.cpu(), grouped(x, w, offs).cpu(), "outputs")


def test_native_is_refused_off_sm100():
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) in ((10, 0), (10, 3)):
        pytest.skip("this device has it")
    with pytest.raises(RuntimeError, match=rf"compute capability {major}\.{minor}, needs 10\.0"):
        four_over_six_linear(
            torch.zeros(16, 32, device="cuda"), torch.zeros(16, 32, device="cuda"), gemm="native"
        )


@pytest.mark.sm100
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 10,
    reason="needs compute capability 10.0 or 10.3",
)
@pytest.mark.parametrize("linear", LINEARS)
def test_native_against_emulated(linear):
    for knobs in modes(linear):
        results = []
        for gemm in ("emulated", "native"):
            x = sample("normal").cuda().requires_grad_()
            w = sample("rows")[:96].cuda().requires_grad_()
            out = linear(x, w, gemm=gemm, **knobs)
            out.backward(sample("grid")[:, :96].cuda())
            results.append((out.detach().cpu(), x.grad.cpu(), w.grad.cpu()))
        for expected, actual in zip(*results, strict=True):
            # The tensor core's accumulator width is not specified.
            assert (actual - expected).abs().max() <= 1e-3 * expected.abs().mean()
