"""Every golden vector bit for bit. The vectors come from upstream implementations:
tests/golden/README.md."""

import pytest
import torch

from fos_rl.quant import (
    NVFP4Tensor,
    four_over_six_quantize,
    nvfp4_dequantize,
    nvfp4_quantize,
)
from tests.quant.quant_goldens import (
    assert_bytes,
    inputs,
    load_golden,
    load_hand_cases,
    parse_combo,
)


def four_over_six_cases(name: str) -> list[str]:
    return sorted(k.removesuffix("/scales") for k in load_golden(name) if k.endswith("/scales"))


def expected_codes(golden: dict, case: str, suffix: str = "codes") -> torch.Tensor:
    """The kernel's codes where they differ from the Python reference (sign of exact -0)."""
    return golden.get(f"{case}/{suffix}_kernel", golden[f"{case}/{suffix}"])


@pytest.mark.parametrize("kind", sorted(inputs(load_golden("four_over_six_quantize"))))
def test_four_over_six_data_kinds(kind):
    """25 data kinds x 2 dtypes x 12 knob sets. Traps 1-18, 21-23, 27, 31, 33."""
    _check_four_over_six("four_over_six_quantize", kind)


@pytest.mark.parametrize("kind", sorted(inputs(load_golden("four_over_six_shapes"))))
def test_four_over_six_shapes(kind):
    """48x112 and 3x48: non-square, so a row scale on the wrong axis cannot broadcast. Trap 26."""
    _check_four_over_six("four_over_six_shapes", kind)


@pytest.mark.parametrize("kind", sorted(inputs(load_golden("four_over_six_scaled_domain_error"))))
def test_four_over_six_scaled_domain_error(kind):
    _check_four_over_six("four_over_six_scaled_domain_error", kind, err_domain="scaled")


def with_kernel_signs(codes: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Set the sign bit of a zero code whose element is negative, -0 included.

    The standard columnwise vectors have no kernel codes, and the Python reference drops the sign
    of a scaled value that is exactly -0.
    """
    negative = torch.signbit(x)
    low, high = codes & 0x0F, codes >> 4
    low = torch.where((low == 0) & negative[:, 0::2], 8, low)
    high = torch.where((high == 0) & negative[:, 1::2], 8, high)
    return (low | (high << 4)).to(torch.uint8)


def _check_four_over_six(name: str, kind: str, **knobs) -> None:
    golden = load_golden(name)
    cases = [c for c in four_over_six_cases(name) if c.startswith(f"{kind}/")]
    assert cases
    for case in cases:
        combo = case.rsplit("/", 1)[1]
        actual = four_over_six_quantize(golden[f"{kind}/x"], **parse_combo(combo), **knobs)
        assert_bytes(actual.block_scale, golden[f"{case}/scales"], f"{case} scales")
        assert_bytes(actual.codes, expected_codes(golden, case), f"{case} codes")
        scaling = combo.rsplit(".", 1)[1]
        assert_bytes(actual.global_amax, golden[f"{kind}/amax.{scaling}"], f"{case} amax")


@pytest.mark.parametrize("kind", sorted(inputs(load_golden("four_over_six_columnwise"))))
def test_four_over_six_columnwise(kind):
    """Row-wise and column-wise forms, near ties that a flat 256-sum gets wrong. Traps 24, 25."""
    golden = load_golden("four_over_six_columnwise")
    cases = [c for c in four_over_six_cases("four_over_six_columnwise") if c.startswith(f"{kind}/")]
    assert cases
    for case in cases:
        knobs = parse_combo(case.rsplit("/", 1)[1])
        x = golden[f"{kind}/x"]
        rowwise = four_over_six_quantize(x, **knobs)
        assert_bytes(rowwise.block_scale, golden[f"{case}/scales"], f"{case} scales")
        assert_bytes(rowwise.codes, expected_codes(golden, case), f"{case} codes")
        columnwise = four_over_six_quantize(x, **knobs, columnwise=True)
        assert_bytes(columnwise.block_scale, golden[f"{case}/scales_t"], f"{case} scales_t")
        assert_bytes(columnwise.codes, expected_codes(golden, case, "codes_t"), f"{case} codes_t")
        assert_bytes(columnwise.global_amax, golden[f"{kind}/amax.ten"], f"{case} amax")


@pytest.mark.parametrize("case", four_over_six_cases("adversarial_row_scaled"))
def test_adversarial_rows(case):
    """Rows on which one plausible mistake changes a byte. Traps 3-5, 9, 12, 19-22."""
    golden = load_golden("adversarial_row_scaled")
    actual = four_over_six_quantize(golden[f"{case}/x"], **parse_combo(case.rsplit("/", 1)[1]))
    assert_bytes(actual.block_scale, golden[f"{case}/scales"], f"{case} scales")
    assert_bytes(actual.codes, expected_codes(golden, case), f"{case} codes")
    assert_bytes(actual.global_amax, golden[f"{case}/amax"], f"{case} amax")


@pytest.mark.parametrize("kind", sorted(inputs(load_golden("nvfp4_standard_quantize"))))
def test_nvfp4_standard(kind):
    """The gradient quantizer, both directions; its base formula is not four-over-six's. Trap 3."""
    golden = load_golden("nvfp4_standard_quantize")
    for columnwise, suffix in ((False, ""), (True, "_t")):
        actual = nvfp4_quantize(golden[f"{kind}/x"], columnwise=columnwise)
        assert_bytes(actual.block_scale, golden[f"{kind}/scales{suffix}"], f"{kind} scales{suffix}")
        codes = expected_codes(golden, kind, f"codes{suffix}")
        if columnwise:
            codes = with_kernel_signs(codes, golden[f"{kind}/x"].T)
        assert_bytes(actual.codes, codes, f"{kind} codes{suffix}")
        assert_bytes(actual.global_amax, golden[f"{kind}/amax"], f"{kind} amax")


@pytest.mark.parametrize("bound", [256, 448])
@pytest.mark.parametrize("index", range(9))
def test_dequantize_table(bound, index):
    """All scale bytes x all codes, NaN scales and overflow included, in fp32 and bf16. Trap 28."""
    golden = load_golden("nvfp4_dequantize")
    tensor = NVFP4Tensor(
        golden["table/codes"],
        golden["table/scales"].view(torch.float8_e4m3fn),
        golden[f"table/amax{index}"],
        bound,
    )
    for dtype, suffix in ((torch.float32, "f32"), (torch.bfloat16, "bf16")):
        expected = golden[f"table/e{bound}.amax{index}/{suffix}"]
        actual = nvfp4_dequantize(tensor, dtype)
        # NaN payloads and signs are not part of the contract, NaN-ness is.
        assert torch.equal(actual.isnan(), expected.isnan())
        finite = (
            torch.where(expected.isnan(), 0, actual),
            torch.where(expected.isnan(), 0, expected),
        )
        assert_bytes(*finite, f"e{bound}.amax{index} {suffix}")


@pytest.mark.parametrize(
    "case",
    sorted(
        key.removesuffix("/amax")
        for key in load_golden("nvfp4_dequantize")
        if key.endswith("/amax")
    ),
)
def test_dequantize_tensors(case):
    golden = load_golden("nvfp4_dequantize")
    bound = int(case.split("/")[1].split(".")[0][1:])
    tensor = NVFP4Tensor(
        golden[f"{case}/codes"],
        golden[f"{case}/scales"].view(torch.float8_e4m3fn),
        golden[f"{case}/amax"],
        bound,
    )
    assert_bytes(nvfp4_dequantize(tensor), golden[f"{case}/f32"], f"{case} f32")
    bf16 = nvfp4_dequantize(tensor, torch.bfloat16)
    assert_bytes(bf16, golden[f"{case}/bf16"], f"{case} bf16")


@pytest.mark.parametrize("case", load_hand_cases(), ids=lambda case: case["name"])
def test_hand_cases(case):
    """Cases small enough to check by hand; each carries its arithmetic in 'why'. Traps 11, 14, 16,
    18."""
    x = torch.tensor(case["x"], dtype=torch.float32)
    if case.get("four_over_six", True):
        rows, cols = case["block"]
        actual = four_over_six_quantize(
            x, f"{rows}x{cols}", case["err"].lower(), case["bound"], case["row_scaled"]
        )
    else:
        actual = nvfp4_quantize(x, case["row_scaled"])
    assert actual.e4m3_scale_bound == case["bound"]
    assert actual.block_scale.view(torch.uint8).tolist() == case["scale_bytes"]
    assert actual.codes.tolist() == case["bytes_te_kernel_text"]
    assert actual.global_amax.tolist() == case["amax"]
    assert nvfp4_dequantize(actual).tolist() == case["dequant_f32"]
