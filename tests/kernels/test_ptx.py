"""What can be checked of the kernels without a GPU: their PTX, its arithmetic, and their SASS.

The PTX of each kind of architecture is run on numpy and compared with the reference, byte for byte.
"""

import importlib.metadata
import importlib.util
import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from fos_rl.kernels.availability import ARCHITECTURES, missing_package
from fos_rl.quant import (
    exact_operand,
    four_over_six_quantize,
    nvfp4_dequantize,
    nvfp4_quantize,
)
from fos_rl.quant.grouped_gemm import group_amax, group_of_rows
from tests.kernels.kernel_data import KINDS, make, run_decoder, run_group_amax, run_quantizer

pytestmark = pytest.mark.skipif(missing_package() is not None, reason=str(missing_package()))

# name: layout, quantizer, plan, share. Each path of the kernels is in one of them; what is left out
# (the other bound, the other error) changes constants only and is compared on a GPU.
KERNELS = {
    "flat": (
        "quantize_matrix",
        ("bfloat16", "four_over_six", "mae", 256),
        (256, "given", "registers", 3, True),
        0,
    ),
    "flat_mse": (
        "quantize_matrix",
        ("bfloat16", "four_over_six", "mse", 448),
        (256, "given", "registers", 3, True),
        0,
    ),
    "rowwise": (
        "quantize_rows",
        ("bfloat16", "four_over_six", "mse", 256),
        (64, "found", "registers", 12, True),
        0,
    ),
    "square": (
        "quantize_squares",
        ("bfloat16", "four_over_six", "mae", 448),
        (128, "given", "", 4, True),
        0,
    ),
    "nvfp4": (
        "quantize_columns",
        ("bfloat16", "nvfp4", "mae", 448),
        (128, "given", "", 6, True),
        0,
    ),
    "columns_square_fp32": (
        "quantize_column_squares",
        ("float32", "four_over_six", "mse", 256),
        (128, "given", "", 3, True),
        0,
    ),
    "blocks": (
        "quantize_blocks",
        ("bfloat16", "four_over_six", "mse", 448),
        (128, "given", "", 1, False),
        0,
    ),
    "rows": (
        "quantize_short_rows",
        ("bfloat16", "four_over_six", "mae", 448),
        (64, "found", "", 3, False),
        7,
    ),
    "parts_fp32": (
        "quantize_split_rows",
        ("float32", "four_over_six", "mae", 256),
        (32, "found", "", 1, False),
        2,
    ),
}
# The arguments of signatures.decode.
DECODERS = {
    "decode": ("value", 256, "bfloat16", True),
    "decode_operand_fp32": ("operand", 448, "float32", False),
}
# Without conversions to 8 bits, with them, and with those to 4 bits.
ARCHS = ("sm_80", "sm_90a", "sm_100a")
# https://docs.nvidia.com/cuda/parallel-thread-execution/#release-notes-ptx-release-history
PTX_RELEASES = {"8.8": (12, 9), "9.4": (13, 4)}
FINDS_AMAX = ("quantize_rows", "quantize_short_rows", "quantize_split_rows")
BOTH = (True, True)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """A function from a kernel's name and an architecture to (PTX, path of the cubin)."""
    from fos_rl.kernels import compile_cache

    directory = tmp_path_factory.mktemp("compiled")
    found: dict[tuple[str, str], tuple[str, Path]] = {}

    def compile_once(name: str, arch: str) -> tuple[str, Path]:
        if (name, arch) not in found:
            if name in DECODERS:
                kernel, constants = "decode", DECODERS[name]
            elif name.startswith("group_amax"):
                kernel, constants = "group_amax", (name.removeprefix("group_amax_"), 64)
            else:
                kernel, constants = "quantize", (*KERNELS[name][:3], BOTH)
            built = compile_cache.compile_kernel(kernel, constants, arch, directory)
            path = directory / f"{name}_{arch}.cubin"
            path.write_bytes(built.__cubin__)
            found[name, arch] = built.__ptx__, path
        return found[name, arch]

    return compile_once


def test_the_ptx_is_of_the_cuda_version_that_the_driver_is_asked_for(compiled) -> None:
    """The PTX ISA's release history maps it, and the code is made by the very packages that
    locks/cuda.txt names."""
    import cutlass

    ptx, _ = compiled("flat", "sm_90a")
    release = PTX_RELEASES[re.search(r"^\.version (\S+)", ptx, re.MULTILINE)[1]]
    assert release == (cutlass.CUDA_VERSION.major, cutlass.CUDA_VERSION.minor)
    lock = (Path(__file__).parents[2] / "locks" / "cuda.txt").read_text()
    locked = dict(line.split(" ")[0].split("==") for line in lock.splitlines())
    for package in (p for p in locked if p.startswith(("nvidia-cutlass-dsl", "apache-tvm-ffi"))):
        assert importlib.metadata.version(package) == locked[package], package


def _reference(name: str, x: torch.Tensor):
    layout, (_, scheme, err_mode, bound), _, _ = KERNELS[name]
    block = "16x16" if "squares" in layout else "1x16"
    columnwise = layout.startswith("quantize_column")
    if scheme == "nvfp4":
        return nvfp4_quantize(x, block=block, columnwise=columnwise, backend="reference")
    return four_over_six_quantize(
        x, block, err_mode, bound, layout in FINDS_AMAX, columnwise=columnwise, backend="reference"
    )


def _assert_same(found: np.ndarray, expected: torch.Tensor, what: str) -> None:
    """Equal bits in every matrix of the stack of KINDS, any NaN being equal to any other."""
    bits = torch.from_numpy(found.view(f"i{found.itemsize}"))
    same = bits == expected.contiguous().view(bits.dtype)
    if expected.is_floating_point() and expected.itemsize > 1:
        same |= bits.view(expected.dtype).isnan() & expected.isnan()
    wrong = {kind: int((~part).sum()) for kind, part in zip(KINDS, same, strict=True)}
    wrong = {kind: count for kind, count in wrong.items() if count}
    assert not wrong, f"{what} differ, of {same[0].numel()}: {wrong}"


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", KERNELS)
def test_ptx_gives_the_reference(compiled, name: str, arch: str) -> None:
    layout, (dtype, *_), (threads, *_), share = KERNELS[name]
    text, _ = compiled(name, arch)
    generator = torch.Generator().manual_seed(7)
    # Rows of 6 blocks, seven in a CTA; of 36, for two CTAs of 32 threads each.
    shape = (16 if layout in FINDS_AMAX else 48, 576 if layout == "quantize_split_rows" else 96)
    x = torch.stack([make(kind, shape, getattr(torch, dtype), generator) for kind in KINDS])
    expected = _reference(name, x)
    amax = expected.global_amax
    amax = torch.zeros_like(amax) if layout in FINDS_AMAX else amax
    codes, scale, amax, operand = run_quantizer(text, layout, threads, share, x, amax)
    _assert_same(codes, expected.codes, "codes")
    _assert_same(scale, expected.block_scale, "scales")
    _assert_same(amax, expected.global_amax, "amaxes")
    _assert_same(operand, exact_operand(expected, backend="reference"), "operands")


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", DECODERS)
def test_decoding_ptx_gives_the_reference(compiled, name: str, arch: str) -> None:
    what, bound, dtype, _ = DECODERS[name]
    text, _ = compiled(name, arch)
    generator = torch.Generator().manual_seed(3)
    x = torch.cat([make(kind, (16, 96), torch.bfloat16, generator) for kind in KINDS])
    t = four_over_six_quantize(x, e4m3_scale_bound=bound, row_scaled=True, backend="reference")
    out = getattr(torch, dtype)
    found = run_decoder(text, t.codes, t.block_scale, t.global_amax, out.itemsize)
    decoder = nvfp4_dequantize if what == "value" else exact_operand
    expected = decoder(t, out, backend="reference").reshape(len(KINDS), 16, 96)
    found = found.view(f"i{out.itemsize}").reshape(expected.shape)
    _assert_same(found, expected, "values")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_group_amax_ptx_gives_the_reference(compiled, dtype: str) -> None:
    """Empty groups, rows of no group, and fewer rows than the last CTA has warps."""
    text, _ = compiled(f"group_amax_{dtype}", "sm_90a")
    generator = torch.Generator().manual_seed(5)
    group = group_of_rows(torch.tensor([5, 5, 14, 17], dtype=torch.int32), 19)
    for kind in KINDS:
        x = make(kind, (19, 96), getattr(torch, dtype), generator)
        found = run_group_amax(text, 64, x, group, 4)
        assert np.array_equal(found, group_amax(x, group, 4).numpy(), equal_nan=True), kind


def _conversions(capability: tuple[int, int]) -> set[str]:
    """Those to and from small formats that a quantizing kernel has on an architecture."""
    if capability < (8, 9):
        return set()
    e4m3 = {"cvt.rn.satfinite.e4m3x2.f32", "cvt.rn.f16x2.e4m3x2"}
    if capability < (10, 0):
        return e4m3 | {"cvt.rn.satfinite.e5m2x2.f32"}
    return e4m3 | {"cvt.rn.satfinite.e2m1x2.f32", "cvt.rn.f16x2.e2m1x2"}


@pytest.mark.parametrize("capability", ARCHITECTURES, ids=ARCHITECTURES.values())
def test_roundings_are_pinned_in_the_ptx(compiled, capability: tuple[int, int]) -> None:
    """No approximate or flushing instruction, and arithmetic only with an explicit rounding."""
    arch = ARCHITECTURES[capability]
    text, _ = compiled("flat", arch)
    assert f".target {arch}" in text
    assert not re.findall(r"\b(?:fma|mul|add|sub|div|rcp|sqrt)\.(?:approx|full|ftz)\S*", text)
    assert not re.findall(r"\.ftz", text)
    loose = set(re.findall(r"\b(?:add|sub|mul|fma|mad|div)\.f32", text))
    assert not loose, f"contractible instructions {loose}"
    assert set(re.findall(r"cvt\.\S*e[245]m[123]\S*", text)) == _conversions(capability)
    for instruction in ("div.rn.f32", "rcp.rn.f32", "fma.rn.f32", "mul.rn.f32", "add.rn.f32"):
        assert instruction in text, instruction


def _disassembler() -> Path | None:
    found = importlib.util.find_spec("nvidia.cu13") if importlib.util.find_spec("nvidia") else None
    if found is None or not found.submodule_search_locations:
        return None
    path = Path(next(iter(found.submodule_search_locations))) / "bin" / "cuobjdump"
    return path if path.exists() else None


@pytest.mark.skipif(_disassembler() is None, reason="package nvidia-cuda-cuobjdump is missing")
@pytest.mark.parametrize(("name", "most"), [("flat", 32), ("rowwise", 32), ("square", 64)])
def test_registers_hold_the_work(compiled, name: str, most: int) -> None:
    """Bytes of stack: a few loop constants at the most, in code outside the inner arithmetic."""
    _, cubin = compiled(name, "sm_90a")
    tool = _disassembler()
    environment = os.environ | {"PATH": f"{tool.parent}:{os.environ['PATH']}"}
    report = subprocess.run(
        [tool, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True,
        env=environment,
    ).stdout  # fmt: skip
    stack = max(int(size) for size in re.findall(r"STACK:(\d+)", report))
    assert stack <= most, report
