"""The GEMM of two quantized matrices: raw fp32 products, one epilogue, three ways to multiply.

"emulated" multiplies exact operands: E2M1 * E4M3 (and E4M3 * E8M0) has few enough bits to be exact
in bf16, so what is multiplied is what the tensor core of "native" sees, and only the order of the
fp32 additions is open. Dequantizing to bf16 first would round the operands and change half of the
outputs. "fixed_tile" multiplies the same operands and adds in an order that does not depend on the
number of rows (`fos_rl.exact`); a backward takes "emulated" for it.

The output is rounded once, after the global scales and the bias.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Literal, get_args

import torch
from jaxtyping import Float, Float32, UInt8
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType, pad, scaled_mm

from fos_rl.exact.fixed_tiles import fixed_tile_mm
from fos_rl.kernels import quantize_ops
from fos_rl.kernels.arguments import check_choice
from fos_rl.quant.backend import takes_fused_epilogue
from fos_rl.quant.mxfp8 import MXFP8Tensor, mxfp8_dequantize
from fos_rl.quant.nvfp4 import NVFP4Operand, NVFP4Tensor, exact_operand

Gemm = Literal["emulated", "native", "fixed_tile"]
QuantizedTensor = NVFP4Tensor | MXFP8Tensor
# What a GEMM takes as its first operand: "native" needs codes.
GemmInput = QuantizedTensor | NVFP4Operand
NATIVE_CAPABILITIES = ((10, 0), (10, 3))
# On x86 an sgemm of very few rows takes another path, which would make a row depend on its batch.
_MIN_CPU_ROWS = 16


def check_gemm(gemm: Gemm, device: torch.device) -> None:
    """Raise unless gemm can run on device; RuntimeError carries the reason.

    Meta tensors stand for those of any device, so that torch can be asked for its shape rules.
    """
    check_choice("gemm", gemm, get_args(Gemm))
    if gemm != "native" or device.type == "meta":
        return
    if device.type != "cuda":
        raise RuntimeError(
            f"gemm 'native' unavailable: device is {device.type}, needs CUDA compute capability "
            "10.0 or 10.3"
        )
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) not in NATIVE_CAPABILITIES:
        raise RuntimeError(
            f"gemm 'native' unavailable: compute capability {major}.{minor}, needs 10.0 or 10.3"
        )


def backward_gemm(gemm: Gemm) -> Gemm:
    """What multiplies gradients: only the trainer computes them, so any order will do."""
    return "emulated" if gemm == "fixed_tile" else gemm


def gemm_operand(t: GemmInput) -> Float[Tensor, "*stack rows cols"]:
    """Return what the other GEMMs than "native" multiply: exact, fp32 on the CPU and bf16 on CUDA.

    An MXFP8 element below 2^-133 is not exact in bf16.
    """
    if isinstance(t, NVFP4Operand):
        return t.operand
    dtype = torch.float32 if t.device.type == "cpu" else torch.bfloat16
    return exact_operand(t, dtype) if isinstance(t, NVFP4Tensor) else mxfp8_dequantize(t, dtype)


def no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Autocast off, where the device has it: operands are multiplied in the dtype they come in."""
    if not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def fp32_mm(a: Float[Tensor, "m k"], b: Float[Tensor, "n k"]) -> Float32[Tensor, "m n"]:
    """Return a @ b.T with fp32 products, sums and output, for exact operands from gemm_operand.

    CUDA takes bf16 operands with fp32 output, so TF32 never applies.
    """
    with no_autocast(a.device):
        if a.device.type != "cpu":
            return torch.mm(a, b.t(), out_dtype=torch.float32)
        rows = a.shape[0]
        if 0 < rows < _MIN_CPU_ROWS:
            a = pad(a, (0, 0, 0, _MIN_CPU_ROWS - rows))
            # A copy, because autograd refuses in-place changes of an output that is a view.
            return torch.mm(a, b.t())[:rows].clone()
        return torch.mm(a, b.t())


def raw_gemm(
    a: GemmInput,
    b: QuantizedTensor,
    gemm: Gemm,
    b_operand: Tensor | None = None,
) -> Float32[Tensor, "m n"]:
    """Return the fp32 sums of products of a [M, K] and b [N, K] before any global scale."""
    if gemm == "native":
        assert not isinstance(a, NVFP4Operand)
        return _native_gemm(a, b)
    b_operand = gemm_operand(b) if b_operand is None else b_operand
    multiply = fixed_tile_mm if gemm == "fixed_tile" else fp32_mm
    return multiply(gemm_operand(a), b_operand)


def apply_global_scales(
    sums: Float32[Tensor, "m n"],
    a_amax: Float32[Tensor, "rows"],
    b_amax: Float32[Tensor, "one"],
    bounds: tuple[int, int],
    row_scaled: bool,
) -> Float32[Tensor, "m n"]:
    """Return sums times the global scales of NVFP4 operands, in place, in fp32.

    With r = fl(1 / (36 * bound_a * bound_b)), as TransformerEngine orders it:
    per tensor ``fl(sums * fl(fl(a_amax * b_amax) * r))`` (common/recipe/nvfp4.cu);
    row-scaled ``fl(fl(sums * r) * fl(a_amax[m] * b_amax))`` (pytorch/cpp_extensions/gemm.py).
    a_amax has one entry or one per row; b_amax one entry, or one per row where rows have their own
    b.
    """
    reciprocal = 1.0 / (36.0 * bounds[0] * bounds[1])
    amax = (a_amax * b_amax).unsqueeze(-1)
    if row_scaled:
        return sums.mul_(reciprocal).mul_(amax)
    return sums.mul_(amax * reciprocal)


def quantized_gemm(
    a: GemmInput,
    b: QuantizedTensor,
    out_dtype: torch.dtype,
    *,
    gemm: Gemm = "emulated",
    row_scaled: bool = False,
    bias: Float[Tensor, "n"] | None = None,
    b_operand: Tensor | None = None,
) -> Float[Tensor, "m n"]:
    """Return a @ b.T (a [M, K], b [N, K]) in out_dtype: global scales and bias in fp32, one
    rounding. b_operand, if given, is gemm_operand(b)."""
    out = raw_gemm(a, b, gemm, b_operand)
    if not isinstance(a, MXFP8Tensor):
        assert isinstance(b, NVFP4Tensor)
        bounds = (a.e4m3_scale_bound, b.e4m3_scale_bound)
        amaxes = (a.global_amax.numel(), b.global_amax.numel())
        if amaxes != (out.shape[0] if row_scaled else 1, 1):
            raise ValueError(
                f"a and b have {amaxes[0]} and {amaxes[1]} amaxes with row_scaled={row_scaled}; "
                f"a must have {'one per row' if row_scaled else 'one'} and b one."
            )
        if takes_fused_epilogue(out, out_dtype):
            return quantize_ops.scale_sums(
                out, a.global_amax, b.global_amax, bounds, row_scaled, bias, out_dtype
            )
        out = apply_global_scales(out, a.global_amax, b.global_amax, bounds, row_scaled)
    if bias is not None:
        out = out.add_(bias.to(torch.float32))
    return out.to(out_dtype)


def swizzle_scales(scale: UInt8[Tensor, "rows cols"]) -> UInt8[Tensor, "bytes"]:
    """Return block scales in the layout SM100 GEMMs read (SWIZZLE_32_4_4), flat.

    Rows are padded to 128 and columns to 4 with zeros, so that a pad never multiplies as NaN. Byte
    (r, c) goes to ((r//128 * ceil(C/4) + c//4) * 32 + r%32) * 16 + r%128//32 * 4 + c%4 (cuBLAS
    documentation, "1D block scaling factors layout").
    """
    rows, cols = scale.shape
    padded = pad(scale, (0, -cols % 4, 0, -rows % 128))
    tiles = padded.unflatten(1, (-1, 4)).unflatten(0, (-1, 4, 32))
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)


def _native_gemm(a: QuantizedTensor, b: QuantizedTensor) -> Float32[Tensor, "m n"]:
    """The block-scaled tensor-core GEMM of SM100, without global scales, fp32 out.

    torch's scaled GEMM takes rows of whole 16 bytes (K % 32 in NVFP4) and N % 16 == 0, so both are
    padded with zero bytes: codes of 0 under scales of 0 add +0 to a sum, and surplus columns are
    cut off. It has no rule for M.
    """
    (m, k), n = a.shape, b.shape[0]
    if 0 in (m, n, k):
        return torch.zeros(m, n, dtype=torch.float32, device=a.device)
    if isinstance(a, NVFP4Tensor):
        assert isinstance(b, NVFP4Tensor)
        scaling, scale_dtype = ScalingType.BlockWise1x16, torch.float8_e4m3fn
        dtype, data = torch.float4_e2m1fn_x2, (a.codes, b.codes)
        scales = (a.block_scale, b.block_scale)
    else:
        assert isinstance(b, MXFP8Tensor)
        scaling, scale_dtype = ScalingType.BlockWise1x32, torch.float8_e8m0fnu
        dtype, data = torch.float8_e4m3fn, (a.data, b.data)
        scales = (a.scale, b.scale)
    rows, columns = (
        _pad_matrix(t.view(torch.uint8), multiple).view(dtype)
        for t, multiple in zip(data, (1, 16), strict=True)
    )
    swizzled = [swizzle_scales(scale.view(torch.uint8)).view(scale_dtype) for scale in scales]
    out = scaled_mm(
        rows,
        columns.t(),
        scale_a=swizzled[0],
        scale_recipe_a=scaling,
        scale_b=swizzled[1],
        scale_recipe_b=scaling,
        swizzle_a=SwizzleType.SWIZZLE_32_4_4,
        swizzle_b=SwizzleType.SWIZZLE_32_4_4,
        output_dtype=torch.float32,
    )
    return out[:, :n].contiguous()


def _pad_matrix(
    data: UInt8[Tensor, "rows bytes"], row_multiple: int
) -> UInt8[Tensor, "padded_rows padded_bytes"]:
    """Return data with zero bytes up to whole 16 bytes per row and a multiple of rows,
    contiguous."""
    rows, num_bytes = data.shape
    if num_bytes % 16 or rows % row_multiple:
        data = pad(data, (0, -num_bytes % 16, 0, -rows % row_multiple))
    return data.contiguous()
