"""Which implementation quantizes and decodes NVFP4: the eager reference or the CuTe kernels.

"auto" takes the kernels where they can run. They have the reference's bits, so the choice never
changes a result. A backend that cannot run says why, in the same words everywhere.
"""

import logging
from typing import Literal, get_args

import torch
from torch import Tensor

from fos_rl.kernels import quantize_ops
from fos_rl.kernels.arguments import check_choice
from fos_rl.kernels.availability import unavailable_reason

logger = logging.getLogger(__name__)

Backend = Literal["auto", "reference", "cute"]
_BACKENDS = get_args(Backend)
_logged: set[str] = set()


def use_cute(
    backend: Backend, x: Tensor, reason: str | None = None, dtype: torch.dtype | None = None
) -> bool:
    """Whether the kernels take x (codes, if dtype to decode to is given).

    reason is one the caller knows against them.

    Raises:
        RuntimeError: when backend is "cute" and they cannot, with the reason.
    """
    check_choice("backend", backend, _BACKENDS)
    if backend == "reference" or (backend == "auto" and x.device.type != "cuda"):
        return False
    reason = reason or unavailable_reason(x, dtype)
    if reason is None:
        return True
    if backend == "cute":
        raise RuntimeError(f"quantizer 'cute' unavailable: {reason}")
    if reason not in _logged:
        _logged.add(reason)
        logger.info("quantizing with the reference: 'cute' unavailable: %s", reason)
    return False


def cute_quantize(
    x: Tensor,
    scheme: str,
    block: str,
    err_mode: str,
    e4m3_scale_bound: int,
    row_scaled: bool,
    columnwise: bool,
    global_amax: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """codes, block_scale and global_amax of x by the kernels; an opaque op while compiling."""
    arguments = (x, scheme, block, err_mode, e4m3_scale_bound, row_scaled, columnwise, global_amax)
    if torch.compiler.is_compiling():
        from fos_rl.kernels import library

        codes, scale, amax = library.quantize(*arguments)
        return codes, scale.view(torch.float8_e4m3fn), amax
    codes, block_scale, amax = quantize_ops.quantize(*arguments)[:3]
    assert codes is not None
    assert block_scale is not None
    return codes, block_scale, amax


def cute_decode(
    codes: Tensor,
    block_scale: Tensor,
    global_amax: Tensor,
    e4m3_scale_bound: int,
    dtype: torch.dtype,
    what: Literal["value", "operand"],
) -> Tensor:
    """The values or the exact operand of an NVFP4 tensor by the kernels."""
    arguments = (codes, block_scale.view(torch.uint8), global_amax, e4m3_scale_bound, dtype, what)
    if torch.compiler.is_compiling():
        from fos_rl.kernels import library

        return library.decode(*arguments)
    return quantize_ops.decode(*arguments)


def cute_quantize_for_gemm(
    x: Tensor,
    scheme: str,
    err_mode: str,
    e4m3_scale_bound: int,
    row_scaled: bool,
    global_amax: Tensor | None,
    codes: bool,
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
    """The exact operand of 1x16 blocks, global_amax, and codes with block_scale if asked for."""
    out_codes, block_scale, amax, operand = quantize_ops.quantize(
        x,
        scheme,
        "1x16",
        err_mode,
        e4m3_scale_bound,
        row_scaled,
        global_amax=global_amax,
        codes=codes,
        operand=True,
    )
    assert operand is not None
    if out_codes is None or block_scale is None:
        return operand, amax, None
    return operand, amax, (out_codes, block_scale)


def takes_fused_epilogue(sums: Tensor, dtype: torch.dtype) -> bool:
    """Whether the kernel that scales the fp32 sums of a GEMM runs on them and rounds to dtype."""
    if sums.device.type != "cuda" or torch.compiler.is_compiling() or sums.shape[-1] % 8:
        return False
    return unavailable_reason(sums, dtype) is None
