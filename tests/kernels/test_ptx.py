"""What can be checked of the kernels without a GPU: their PTX, its arithmetic, and their SASS.

The PTX of sm_90a and sm_100a is run on numpy and compared with the reference, byte for byte.
"""

import importlib.util
import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from kernel_data import KINDS, make, run_decoder, run_group_amax, run_quantizer

from fos_rl.kernels.availability import missing_package
from fos_rl.quant import (
    exact_operand,
    four_over_six_quantize,
    nvfp4_dequantize,
    nvfp4_quantize,
)
from fos_rl.quant.grouped_gemm import group_amax, group_of_rows

pytestmark = pytest.mark.skipif(missing_package() is not None, reason=str(missing_package()))

# name: layout, recipe, plan, share. Each path of the kernels is in one of them; what is left out
# (the other bound, the other error) changes constants only and is compared on a GPU.
KERNELS = {
    "flat": (
        "flat",
        ("bfloat16", "four_over_six", "mae", 256),
        (256, "given", "registers", 3, True),
        0,
    ),
    "flat_mse": (
        "flat",
        ("bfloat16", "four_over_six", "mse", 448),
        (256, "given", "registers", 3, True),
        0,
    ),
    "rowwise": (
        "rowwise",
        ("bfloat16", "four_over_six", "mse", 256),
        (64, "found", "registers", 12, True),
        0,
    ),
    "square": (
        "square",
        ("bfloat16", "four_over_six", "mae", 448),
        (128, "given", "", 4, True),
        0,
    ),
    "standard": (
        "columnwise",
        ("bfloat16", "standard", "mae", 448),
        (128, "given", "", 6, True),
        0,
    ),
    "blocks": (
        "blocks",
        ("bfloat16", "four_over_six", "mse", 448),
        (128, "given", "", 1, False),
        0,
    ),
    "rows": (
        "rows",
        ("bfloat16", "four_over_six", "mae", 448),
        (64, "found", "", 3, False),
        7,
    ),
    "parts_fp32": (
        "parts",
        ("float32", "four_over_six", "mae", 256),
        (32, "found", "", 1, False),
        2,
    ),
}
FINDS_AMAX = ("rowwise", "rows", "parts")
BOTH = (True, True)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """A function from a kernel's name and an architecture to (PTX, path of the cubin)."""
    from fos_rl.kernels import compile_cache

    directory = tmp_path_factory.mktemp("compiled")
    found: dict[tuple[str, str], tuple[str, Path]] = {}

    def compile_once(name: str, arch: str) -> tuple[str, Path]:
        if (name, arch) not in found:
            if name.startswith("decode"):
                kernel, constants = "decode", ("value", 256, "bfloat16", True)
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


def _reference(name: str, x: torch.Tensor):
    layout, (_, method, err_mode, bound), _, _ = KERNELS[name]
    block = "16x16" if "square" in layout else "1x16"
    columnwise = layout.startswith("columnwise")
    if method == "standard":
        return nvfp4_quantize(x, block=block, columnwise=columnwise, backend="reference")
    return four_over_six_quantize(
        x, block, err_mode, bound, layout in FINDS_AMAX, columnwise=columnwise, backend="reference"
    )


# Every kernel for Hopper; for Blackwell one of a tensor's amax and one of a row's stand for all.
@pytest.mark.parametrize(
    ("name", "arch"),
    [*((name, "sm_90a") for name in KERNELS), ("flat", "sm_100a"), ("rowwise", "sm_100a")],
)
def test_ptx_gives_the_reference(compiled, name: str, arch: str) -> None:
    layout, (dtype, *_), (threads, *_), share = KERNELS[name]
    text, _ = compiled(name, arch)
    generator = torch.Generator().manual_seed(7)
    for kind in KINDS:
        # Rows of 6 blocks, seven in a CTA; of 36, for two CTAs of 32 threads each.
        x = make(kind, (48, 576 if layout == "parts" else 96), getattr(torch, dtype), generator)
        expected = _reference(name, x)
        amax = expected.global_amax
        amax = torch.zeros_like(amax) if layout in FINDS_AMAX else amax
        codes, scale, found_amax, operand = run_quantizer(text, layout, threads, share, x, amax)
        wrong = (codes != expected.codes.numpy()).sum()
        assert wrong == 0, f"{kind}: codes differ in {wrong} of {codes.size} bytes"
        wrong = (scale != expected.block_scale.view(torch.uint8).numpy()).sum()
        assert wrong == 0, f"{kind}: scales differ in {wrong} of {scale.size} bytes"
        assert np.array_equal(found_amax, expected.global_amax.numpy(), equal_nan=True), kind
        exact = exact_operand(expected, backend="reference")
        found = torch.from_numpy(operand.view(np.int16)).view(torch.bfloat16)
        same = (found.view(torch.int16) == exact.view(torch.int16)) | (
            found.isnan() & exact.isnan()
        )
        assert same.all(), f"{kind}: operands differ in {(~same).sum()} of {same.numel()}"


def test_decoding_ptx_gives_the_reference(compiled) -> None:
    text, _ = compiled("decode", "sm_90a")
    generator = torch.Generator().manual_seed(3)
    for kind in ("normal", "wide", "huge", "subnormal", "nan"):
        x = make(kind, (32, 96), torch.bfloat16, generator)
        t = four_over_six_quantize(x, row_scaled=True, backend="reference")
        found = run_decoder(text, t.codes, t.block_scale, t.global_amax, 2)
        values = torch.from_numpy(found.view(np.int16).reshape(32, 96)).view(torch.bfloat16)
        expected = nvfp4_dequantize(t, torch.bfloat16, backend="reference")
        same = values.view(torch.int16) == expected.view(torch.int16)
        assert (same | (values.isnan() & expected.isnan())).all(), kind


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


def test_roundings_are_pinned_in_the_ptx(compiled) -> None:
    """No approximate or flushing instruction, and arithmetic only with an explicit rounding."""
    for arch in ("sm_90a", "sm_100a"):
        text, _ = compiled("flat", arch)
        assert f".target {arch}" in text
        assert not re.findall(r"\b(?:fma|mul|add|sub|div|rcp|sqrt)\.(?:approx|full|ftz)\S*", text)
        assert not re.findall(r"\.ftz", text)
        loose = set(re.findall(r"\b(?:add|sub|mul|fma|mad|div)\.f32", text))
        assert not loose, f"contractible instructions {loose}"
        for instruction in (
            "cvt.rn.satfinite.e4m3x2.f32",
            "cvt.rn.satfinite.e5m2x2.f32",
            "div.rn.f32",
            "rcp.rn.f32",
            "fma.rn.f32",
            "mul.rn.f32",
            "add.rn.f32",
        ):
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
