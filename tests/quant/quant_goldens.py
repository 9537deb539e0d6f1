"""Access to the golden vectors of tests/golden and byte-wise comparison."""

import functools
import json
from pathlib import Path

import torch
from safetensors.torch import load_file

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


@functools.cache
def load_golden(name: str) -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / f"{name}.safetensors")


def load_hand_cases() -> list[dict]:
    return json.loads((GOLDEN / "hand_cases.json").read_text())


def assert_bytes(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Compare bits, so that -0 != +0; in floats any NaN equals any NaN (payloads are
    unspecified)."""
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape} != {expected.shape}"
    if actual.dtype in (torch.float32, torch.bfloat16):
        actual, expected = (t.masked_fill(t.isnan(), float("nan")) for t in (actual, expected))
    left, right = (t.contiguous().reshape(-1).view(torch.uint8) for t in (actual, expected))
    differ = int((left != right).sum())
    assert differ == 0, f"{what}: {differ}/{left.numel()} bytes differ"


def inputs(golden: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Inputs by their key prefix, such as "normal.bf16"."""
    return {key.rsplit("/", 1)[0]: value for key, value in golden.items() if key.endswith("/x")}


def parse_combo(combo: str) -> dict:
    """'b1x16.e256.mae.row' -> keyword arguments of four_over_six_quantize."""
    block, bound, err_mode, scaling = combo.split(".")
    return {
        "block": block[1:],
        "e4m3_scale_bound": int(bound[1:]),
        "err_mode": err_mode,
        "row_scaled": scaling == "row",
    }
