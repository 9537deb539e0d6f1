"""Why a CuTe kernel cannot run on given arguments, in one sentence, or nothing if it can.

The same text is the error of ``backend="cute"``, the reason of a skipped test and the line that
``fos-rl explain`` prints.
"""

import functools
import importlib.util
import math

import torch
from torch import Tensor

# Where compiled, and where the PTX was checked for its kind: without conversions to 8 bits (below
# 8.9), with them, with those to 4 bits (from 10.0). bf16 pairs need 8.0.
ARCHITECTURES = {
    (8, 0): "sm_80",
    (8, 6): "sm_86",
    (8, 9): "sm_89",
    (9, 0): "sm_90a",
    (10, 0): "sm_100a",
    (10, 3): "sm_103a",
    (12, 0): "sm_120a",
}
_DTYPES = (torch.bfloat16, torch.float32)


@functools.cache
def missing_package() -> str | None:
    """The first package that the kernels need and Python does not find, with its remedy."""
    for module, package in (("cutlass", "nvidia-cutlass-dsl"), ("tvm_ffi", "apache-tvm-ffi")):
        if importlib.util.find_spec(module) is None:
            return f"package {package} is not installed (pip install 'fos-rl[kernels]')"
    return None


@functools.cache
def _cached_device_reason(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"device is {device.type}, needs cuda"
    capability = torch.cuda.get_device_capability(device)
    if capability not in ARCHITECTURES:
        known = ", ".join(f"{major}.{minor}" for major, minor in ARCHITECTURES)
        return f"compute capability {capability[0]}.{capability[1]}, needs one of {known}"
    if reason := missing_package():
        return reason
    # Imports cutlass.
    from fos_rl.kernels.driver import driver_reason

    return driver_reason(ARCHITECTURES[capability])


# Dynamo does not look into this; it would trace through the cache.
@torch.compiler.assume_constant_result
def _device_reason(device: torch.device) -> str | None:
    return _cached_device_reason(device)


@functools.cache
def architecture(device: torch.device) -> str:
    """The name the compiler gives the device's architecture.

    Raises:
        RuntimeError: with the reason, where no kernel can be compiled for it.
    """
    if reason := _cached_device_reason(device):
        raise RuntimeError(f"quantizer 'cute' unavailable: {reason}")
    return ARCHITECTURES[torch.cuda.get_device_capability(device)]


def unavailable_reason(x: Tensor, dtype: torch.dtype | None = None) -> str | None:
    """Why the kernels cannot take x, None if they can.

    x is a matrix or a stack of matrices to quantize; or, with the dtype to decode to, codes.
    """
    reason = _device_reason(x.device)
    if reason is not None:
        return reason
    compiling = torch.compiler.is_compiling()
    of_shape = shape_reason if compiling else _cached_shape_reason
    reason = of_shape(x.shape, x.dtype if dtype is None else dtype, dtype is not None)
    if reason is not None:
        return reason
    if dtype is not None:
        unaligned = not compiling and x.data_ptr() % 8
        return "the codes are not aligned to 8 bytes" if unaligned else None
    # While compiling there is no address; the op copies what is not aligned.
    return layout_reason(x, None if compiling else x.data_ptr())


def layout_reason(x: Tensor, address: int | None = None) -> str | None:
    """Why the kernels cannot read x in place, None if they can; its address may be unknown."""
    if not x.is_contiguous() or (address is not None and address % 16):
        return "the input is not contiguous and aligned to 16 bytes"
    return None


def shape_reason(shape: torch.Size, dtype: torch.dtype, is_codes: bool) -> str | None:
    """Why the kernels cannot take this much of this dtype (of codes: the dtype to decode to)."""
    size = math.prod(shape)
    if size == 0:
        return "the input is empty"
    if dtype not in _DTYPES:
        return f"dtype is {dtype}, needs bfloat16 or float32"
    if not is_codes and (shape[-1] % 16 or size >= 2**35):
        return f"shape is {tuple(shape)}, needs a last dim divisible by 16 and < 2^35 elements"
    return None


_cached_shape_reason = functools.lru_cache(maxsize=4096)(shape_reason)
