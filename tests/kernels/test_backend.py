"""The seam: which backend runs, and what it says when it cannot. Needs no GPU."""

import json
import subprocess
import sys

import pytest
import torch

from fos_rl.kernels import availability, compile_cache
from fos_rl.quant import exact_operand, four_over_six_quantize, nvfp4_dequantize, nvfp4_quantize


def test_auto_is_the_reference_on_the_cpu() -> None:
    x = torch.randn(32, 64)
    both = [four_over_six_quantize(x, backend=backend) for backend in ("auto", "reference")]
    assert torch.equal(both[0].codes, both[1].codes)


def test_cute_says_why_it_cannot_run() -> None:
    x = torch.randn(32, 64)
    t = four_over_six_quantize(x)
    reason = "quantizer 'cute' unavailable: device is cpu, needs cuda"
    for call in (
        lambda: four_over_six_quantize(x, backend="cute"),
        lambda: nvfp4_quantize(x, backend="cute"),
        lambda: nvfp4_dequantize(t, backend="cute"),
        lambda: exact_operand(t, backend="cute"),
    ):
        with pytest.raises(RuntimeError, match=reason):
            call()


@pytest.mark.wrong_types
def test_unknown_backend_lists_the_choices() -> None:
    with pytest.raises(ValueError, match="'auto', 'reference', 'cute'"):
        four_over_six_quantize(torch.randn(16, 16), backend="triton")


def test_input_is_checked_before_the_backend_every_time() -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match="divisible by 16"):
            four_over_six_quantize(torch.randn(16, 24), backend="cute")


@pytest.mark.parametrize(
    ("x", "reason"),
    [
        (torch.zeros(16, 32, dtype=torch.float16), "dtype is torch.float16"),
        (torch.zeros(32, 16, dtype=torch.bfloat16).t(), "not contiguous"),
        (torch.zeros(0, 16, dtype=torch.bfloat16), "empty"),
        (torch.zeros(4, 24, dtype=torch.bfloat16), "divisible by 16"),
    ],
    ids=["dtype", "strides", "empty", "columns"],
)
def test_reasons_about_the_input(monkeypatch, x: torch.Tensor, reason: str) -> None:
    monkeypatch.setattr(availability, "_device_reason", lambda device: None)
    assert reason in str(availability.unavailable_reason(x))


def test_kernels_are_imported_without_cutlass() -> None:
    """Neither the package nor the modules that choose a backend import the compiler."""
    code = (
        "import sys, json, fos_rl.quant, fos_rl.kernels.quantize_ops, fos_rl.kernels.availability\n"
        "print(json.dumps([m for m in sys.modules if m.split('.')[0] == 'cutlass']))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(out.stdout) == []


@pytest.mark.skipif(
    availability.missing_package() is not None, reason=str(availability.missing_package())
)
def test_cache_compiles_once_and_keys_on_everything(tmp_path, monkeypatch, caplog) -> None:
    """One file per key; a second process finds it; source, arch and constants are in the key."""
    monkeypatch.setattr(compile_cache, "_DIRECTORY", tmp_path)
    loaded: list[str] = []
    monkeypatch.setattr(compile_cache, "_load_file", lambda path: loaded.append(path.name))
    monkeypatch.setattr(compile_cache, "_memory", {})

    def files() -> set[str]:
        return {path.name for path in tmp_path.glob("*.o")}

    compile_cache.load("partial_amax", ("bfloat16", 128), "sm_90a")
    assert len(files()) == 1
    assert "compiling the partial_amax kernel for sm_90a" in caplog.text
    compile_cache._memory.clear()
    compile_cache.load("partial_amax", ("bfloat16", 128), "sm_90a")
    assert len(files()) == 1
    assert loaded[0] == loaded[1]
    compile_cache.load("partial_amax", ("float32", 128), "sm_90a")
    compile_cache.load("partial_amax", ("bfloat16", 128), "sm_100a")
    assert len(files()) == 3
    monkeypatch.setattr(compile_cache, "_fingerprint", lambda: "other sources")
    compile_cache._memory.clear()
    compile_cache.load("partial_amax", ("bfloat16", 128), "sm_90a")
    assert len(files()) == 4
