"""What quantizers and decoders take: one check for the Python entries and for the registered ops.

Here rather than in `fos_rl.quant`, which the kernels do not import.
"""

import functools
from collections.abc import Callable
from typing import Literal, TypeVarTuple, get_args

import torch
from torch import Tensor

BLOCK = 16
BOUNDS = (256, 448)
BlockShape = Literal["1x16", "16x16"]
INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
Arguments = TypeVarTuple("Arguments")


def check_once(check: Callable[[*Arguments], None]) -> Callable[[*Arguments], None]:
    """Run a check of hashable arguments once for equal ones: a call is as short as a kernel.

    An error is raised every time. torch.compile would look through the cache and warn.
    """
    once = functools.lru_cache(maxsize=4096)(check)

    @functools.wraps(check)
    def run(*arguments: *Arguments) -> None:
        (check if torch.compiler.is_compiling() else once)(*arguments)

    return run


def check_choice(field: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise a ValueError that lists the choices unless value is one of them."""
    if value not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{field} is {value!r}; it must be one of {listed}.")


def check_matrix(shape: torch.Size, dtype: torch.dtype) -> None:
    """Raise unless a tensor of this shape and dtype can be widened to fp32 and cut into blocks."""
    if len(shape) < 2 or dtype not in INPUT_DTYPES:
        raise ValueError(
            f"x is {dtype} of shape {tuple(shape)}; quantization needs floating point bfloat16, "
            "float16 or float32 of shape [..., rows, cols]. Cast other dtypes. Flatten leading "
            "dims, or add a row dim with x.unsqueeze(0)."
        )


def check_input(
    x: Tensor,
    block: str,
    row_scaled: bool,
    columnwise: bool,
    global_amax: Tensor | None,
    *,
    once: bool = True,
) -> None:
    """Raise a ValueError unless x, the knobs and a given amax fit together.

    once=False is for symbolic shapes, which cannot be remembered.
    """
    amax = None
    if global_amax is not None:
        amax = (global_amax.shape, global_amax.dtype)
        if global_amax.device != x.device:
            raise ValueError(
                f"global_amax is on {global_amax.device}, x on {x.device}; move it there."
            )
    check = _check_shapes_once if once else _check_shapes
    check(x.shape, x.dtype, block, row_scaled, columnwise, amax)


def _check_shapes(
    shape: torch.Size,
    dtype: torch.dtype,
    block: str,
    row_scaled: bool,
    columnwise: bool,
    amax: tuple[torch.Size, torch.dtype] | None,
) -> None:
    check_choice("block", block, get_args(BlockShape))
    check_matrix(shape, dtype)
    if row_scaled and block == "16x16":
        raise ValueError(
            "row_scaled=True with block='16x16': a block would mix rows of different scale. "
            "Use block='1x16'."
        )
    if row_scaled and columnwise:
        raise ValueError(
            "row_scaled=True with columnwise=True: blocks along the rows would mix row scales. "
            "Quantize columnwise with one amax, or quantize x.T row-scaled."
        )
    rows, cols = shape[-2:]
    if columnwise:
        rows, cols = cols, rows
    if cols % BLOCK or (block == "16x16" and rows % BLOCK):
        side = "columnwise " if columnwise else ""
        raise ValueError(
            f"{side}block {block!r} needs dims divisible by 16 along its blocks; the matrix is "
            f"[{rows}, {cols}]. Pad with zeros, or keep this layer in bf16."
        )
    if amax is None:
        return
    expected = (*shape[:-2], rows if row_scaled else 1)
    if amax[1] != torch.float32 or tuple(amax[0]) != expected:
        raise ValueError(
            f"global_amax is {amax[1]} of shape {tuple(amax[0])}; it must be "
            f"float32 of shape {expected} ({'one per row' if row_scaled else 'one per matrix'})."
        )


_check_shapes_once = check_once(_check_shapes)


def check_encoding(scheme: str, err_mode: str, e4m3_scale_bound: int) -> None:
    """Raise a ValueError unless these name an encoding that the kernels have."""
    check_choice("scheme", scheme, ("four_over_six", "nvfp4"))
    check_choice("err_mode", err_mode, ("mae", "mse"))
    check_choice(
        "e4m3_scale_bound", e4m3_scale_bound, BOUNDS if scheme == "four_over_six" else (448,)
    )


def check_decoding(e4m3_scale_bound: int, dtype: torch.dtype, what: str) -> None:
    """Raise a ValueError unless the kernels can decode to this."""
    check_choice("e4m3_scale_bound", e4m3_scale_bound, BOUNDS)
    check_choice("dtype", dtype, (torch.bfloat16, torch.float32))
    check_choice("what", what, ("value", "operand"))


def check_parts(
    codes: Tensor,
    block_scale: Tensor,
    global_amax: Tensor,
    e4m3_scale_bound: int,
    *,
    once: bool = True,
) -> None:
    """Raise a ValueError unless the tensors are the parts of one NVFP4 matrix, or of a stack.

    block_scale is float8_e4m3fn or its bytes; once as in check_input.
    """
    parts = tuple((t.dtype, t.shape) for t in (codes, block_scale, global_amax))
    (_check_layouts_once if once else _check_layouts)(parts, e4m3_scale_bound)
    if not codes.device == block_scale.device == global_amax.device:
        raise ValueError(
            f"codes are on {codes.device}, block_scale is on {block_scale.device}, global_amax on "
            f"{global_amax.device}; they must be on one device."
        )


def _check_layouts(
    parts: tuple[tuple[torch.dtype, torch.Size], ...], e4m3_scale_bound: int
) -> None:
    (codes_dtype, codes), (scale_dtype, scale), (amax_dtype, amax) = parts
    if e4m3_scale_bound not in BOUNDS:
        raise ValueError(f"e4m3_scale_bound is {e4m3_scale_bound!r}; NVFP4 knows 256 and 448.")
    scale_dtypes = (torch.float8_e4m3fn, torch.uint8)
    if codes_dtype != torch.uint8 or scale_dtype not in scale_dtypes or amax_dtype != torch.float32:
        raise ValueError(
            f"codes are {codes_dtype}, block_scale is {scale_dtype}, global_amax is {amax_dtype}; "
            "they must be uint8, float8_e4m3fn and float32. Reinterpret bytes with .view(dtype)."
        )
    if len(codes) < 2 or 2 * codes[-1] % BLOCK:
        raise ValueError(
            f"codes have shape {tuple(codes)}; they must be [..., rows, cols / 2] of whole blocks "
            "of 16 columns."
        )
    *stack, rows, half_cols = codes
    if tuple(scale) != (*stack, rows, half_cols * 2 // BLOCK):
        raise ValueError(
            f"block_scale has shape {tuple(scale)}; codes of shape {tuple(codes)} need "
            f"{(*stack, rows, half_cols * 2 // BLOCK)}."
        )
    if tuple(amax) not in ((*stack, 1), (*stack, rows)):
        raise ValueError(
            f"global_amax has shape {tuple(amax)}; it must be {(*stack, 1)} (per tensor) or "
            f"{(*stack, rows)} (row-scaled)."
        )


_check_layouts_once = check_once(_check_layouts)
