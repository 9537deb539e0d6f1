"""Compiled kernels, kept in memory and on disk.

``cute.compile`` takes seconds and caches nothing. An entry is an object file named by a hash of
all that decides its contents: the sources of the kernels, the compiler's version, the GPU
architecture, and the constants of the kernel. Processes share the directory: one compiles under a
file lock while the others wait, and a file appears by an atomic rename.
"""

import fcntl
import functools
import hashlib
import importlib.metadata
import logging
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger(__name__)

_PACKAGES = (
    "nvidia-cutlass-dsl",
    "nvidia-cutlass-dsl-libs-base",
    "nvidia-cutlass-dsl-libs-cu12",
    "nvidia-cutlass-dsl-libs-cu13",
    "apache-tvm-ffi",
)
_FUNCTION = "fos_rl_kernel"
_memory: dict[tuple, Callable] = {}
_DIRECTORY = Path.home() / ".cache" / "fos_rl" / "kernels"


@functools.cache
def _fingerprint() -> str:
    """Hash of the kernels' sources and the versions of what compiles them."""
    import cutlass

    # Of several flavours, cutlass takes the one that the machine's driver allows.
    digest = hashlib.sha256(f"{cutlass.CUDA_VERSION};".encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    for package in _PACKAGES:
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            version = "absent"
        digest.update(f"{package}={version};".encode())
    digest.update(f"python={sys.version_info[:2]}".encode())
    return digest.hexdigest()


def load(kernel: str, constants: tuple, arch: str) -> Callable:
    """Return the compiled kernel, from memory, from disk, or by compiling it now.

    kernel names a function of ``signatures``; constants are its arguments, whose repr must say all
    of their value.
    """
    key = (kernel, constants, arch)
    found = _memory.get(key)
    if found is None:
        found = _memory[key] = _load_or_compile(kernel, constants, arch)
    return found


def _load_or_compile(kernel: str, constants: tuple, arch: str) -> Callable:
    text = f"{_fingerprint()} {kernel} {constants!r} {arch}"
    name = hashlib.sha256(text.encode()).hexdigest()[:32]
    _DIRECTORY.mkdir(parents=True, exist_ok=True)
    path = _DIRECTORY / f"{name}.o"
    if not path.exists():
        with (_DIRECTORY / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                _compile_to(path, kernel, constants, arch)
    return _load_file(path)


def _load_file(path: Path) -> Callable:
    import cutlass.cute as cute

    return cute.runtime.load_module(str(path), enable_tvm_ffi=True)[_FUNCTION]


def _compile_to(path: Path, kernel: str, constants: tuple, arch: str) -> None:
    logger.warning("compiling the %s kernel for %s, once for this machine: %s", kernel, arch, path)
    compiled = compile_kernel(kernel, constants, arch)
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".o")
    os.close(handle)
    compiled.export_to_c(object_file_path=temporary, function_name=_FUNCTION)
    os.replace(temporary, path)


def compile_kernel(kernel: str, constants: tuple, arch: str, dump: Path | None = None):
    """Compile without any cache; with dump, keep the ``.__ptx__`` and the ``.__cubin__``."""
    import cutlass.cute as cute

    from fos_rl.kernels import signatures

    launch, arguments = getattr(signatures, kernel)(*constants)
    options = f"--gpu-arch {arch} --enable-tvm-ffi"
    if dump is not None:
        options += f" --keep-ptx --keep-cubin --dump-dir {dump}"
    return cute.compile(launch, *arguments, options=options)
