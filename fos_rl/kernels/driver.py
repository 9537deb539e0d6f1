"""Whether this machine's driver takes what the installed compiler makes, before a kernel runs.

nvidia-cutlass-dsl comes in flavours, each built for a CUDA release, and picks the newest one whose
major release the driver has. Imports cutlass, so it is itself imported only where a GPU is.
"""

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

_IMAGE_REFUSED = (
    "CUDA_ERROR_INVALID_IMAGE",
    "CUDA_ERROR_NO_BINARY_FOR_GPU",
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
    "CUDA_ERROR_INVALID_SOURCE",
)
"""What the driver says of machine code that it does not take."""


@functools.cache
def driver_reason(arch: str) -> str | None:
    """Why this machine's driver cannot run kernels compiled for arch, None if it can."""
    try:
        from cutlass import CUDA_VERSION
    except RuntimeError as error:
        # No flavour is of the driver's major release or an older one; the text names both.
        return str(error)
    return too_old((CUDA_VERSION.major, CUDA_VERSION.minor), _driver_cuda(), lambda: _loads(arch))


def too_old(
    compiler: tuple[int, int], driver: tuple[int, int], loads: Callable[[], bool]
) -> str | None:
    """Why a driver cannot run what a compiler makes, None if it can.

    Compiled kernels are machine code, which a driver of the same major release takes although it
    is older (https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html),
    "with limited feature-set": so there, the driver itself is asked.

    Args:
        compiler, driver: the CUDA release of each, as in (13, 0).
        loads: whether the driver loads a compiled kernel.
    """
    if driver >= compiler or (driver[0] == compiler[0] and loads()):
        return None
    major, minor = compiler
    remedy = f"update the driver to one for CUDA {major}.{minor} or newer"
    if major > 12:
        remedy += f", or pip uninstall nvidia-cutlass-dsl-libs-cu{major}, which leaves CUDA 12's"
    return (
        f"the driver is for CUDA {driver[0]}.{driver[1]}, nvidia-cutlass-dsl compiles for CUDA "
        f"{major}.{minor}; {remedy}"
    )


def _driver_cuda() -> tuple[int, int]:
    """The newest CUDA release that the driver supports."""
    version = torch._C._cuda_getDriverVersion()
    return version // 1000, version % 1000 // 10


def _loads(arch: str) -> bool:
    """Whether the driver takes machine code of the installed compiler; compiles a small kernel."""
    from cuda.bindings import driver

    from fos_rl.kernels.compile_cache import compile_kernel

    with tempfile.TemporaryDirectory() as folder:
        built = compile_kernel("group_amax", ("bfloat16", 64), arch, Path(folder))
    # A tensor is on the device, so this thread has a context.
    status, module = driver.cuModuleLoadData(built.__cubin__)
    if status.name in _IMAGE_REFUSED:
        return False
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"the CUDA driver cannot load a kernel: {status.name}")
    driver.cuModuleUnload(module)
    return True
