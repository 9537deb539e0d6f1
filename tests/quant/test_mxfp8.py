"""MXFP8 against upstream vectors and against a brute-force choice of scale."""

import numpy as np
import pytest
import torch

from fos_rl.quant import MXFP8Tensor, mxfp8_dequantize, mxfp8_quantize
from tests.quant.quant_goldens import assert_bytes, inputs, load_golden


@pytest.mark.parametrize("mode", ["floor", "rceil"])
@pytest.mark.parametrize("kind", sorted(inputs(load_golden("mxfp8"))))
def test_golden(kind, mode):
    """Data kinds x dtypes and single-value probes. Traps 56, 58, 60."""
    golden = load_golden("mxfp8")
    actual = mxfp8_quantize(golden[f"{kind}/x"], mode)
    assert_bytes(actual.scale, golden[f"{kind}/{mode}/scales"], f"{kind} {mode} scales")
    assert_bytes(
        actual.data.view(torch.uint8), golden[f"{kind}/{mode}/data"], f"{kind} {mode} data"
    )
    if kind != "probe":
        expected = golden[f"{kind}/{mode}/deq_bf16"]
        actual_bf16 = mxfp8_dequantize(actual, torch.bfloat16)
        assert_bytes(actual_bf16, expected, f"{kind} {mode} dequantized")


def one_value_blocks(values: np.ndarray) -> torch.Tensor:
    x = torch.zeros(len(values), 32)
    x[:, 5] = torch.from_numpy(values)
    return x


def test_rceil_at_every_power_of_two_edge():
    """b = 448 * 2^k and its fp32 neighbours, all k: log2/ceil and b/448 go wrong here. Trap 57.

    The brute force looks for the least e with 2^(e-127) >= fl(b * fl(1/448)) in float64.
    """
    edges = np.float32(448) * np.exp2(np.arange(-149 - 8, 120)).astype(np.float32)
    edges = edges[np.isfinite(edges)]
    edges = np.concatenate(
        [np.nextafter(edges, np.float32(0)), edges, np.nextafter(edges, np.float32(np.inf))]
    )
    target = (edges * np.float32(1 / 448)).astype(np.float64)
    powers = np.exp2(np.arange(255) - 127.0)
    expected = np.searchsorted(powers, target, side="left")
    actual = mxfp8_quantize(one_value_blocks(edges), "rceil").scale[:, 0].numpy()
    np.testing.assert_array_equal(actual, expected)


def test_floor_saturates_where_rceil_does_not():
    """449..511 lose up to 12.5 % under floor only. Trap 56."""
    values = np.array([448, 449, 464, 480, 511.9, 512], dtype=np.float32)
    floor = mxfp8_dequantize(mxfp8_quantize(one_value_blocks(values), "floor"))[:, 5]
    assert floor.tolist() == [448, 448, 448, 448, 448, 512]
    rceil = mxfp8_dequantize(mxfp8_quantize(one_value_blocks(values), "rceil"))[:, 5]
    assert rceil.tolist() == [448, 448, 448, 480, 512, 512]


@pytest.mark.parametrize("mode", ["floor", "rceil"])
def test_extreme_scale_bytes(mode):
    """Zero blocks keep byte 0 and zeros; FLT_MAX and the smallest subnormal survive. Trap 58."""
    biggest, smallest = np.float32(3.4028235e38), np.float32(1e-45)
    x = one_value_blocks(np.array([0, smallest, biggest, -biggest], dtype=np.float32))
    t = mxfp8_quantize(x, mode)
    assert t.scale[0].item() == 0
    assert t.scale[1].item() == 0
    values = mxfp8_dequantize(t)
    assert values[0].abs().max() == 0
    # 2^-149 * 2^127 = 2^-22 rounds to zero in E4M3 (least subnormal 2^-9).
    assert values[1].abs().max() == 0
    # E4M3 keeps 3 mantissa bits: FLT_MAX becomes 448 * 2^119 (floor saturates) or 2^128 = inf.
    expected = 448.0 * 2.0**119 if mode == "floor" else np.inf
    assert values[2, 5].item() == expected
    assert values[3, 5].item() == -expected


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("mode", ["floor", "rceil"])
def test_non_finite_marks_its_block_only(bad, mode):
    """The policy is torchao main's: scale 255. Trap 59."""
    x = torch.randn(2, 64)
    x[1, 3] = bad
    t = mxfp8_quantize(x, mode)
    assert t.scale[1, 0].item() == 255
    values = mxfp8_dequantize(t)
    assert values[1, :32].isnan().all()
    assert_bytes(values[0], mxfp8_dequantize(mxfp8_quantize(x[:1], mode))[0], "other row")
    assert values[1, 32:].isfinite().all()


def test_columnwise_is_the_form_of_the_transpose():
    """And not the transpose of the row-wise form. Trap 61."""
    x = torch.randn(64, 96)
    columnwise = mxfp8_quantize(x, columnwise=True)
    transposed = mxfp8_quantize(x.T.contiguous())
    assert_bytes(columnwise.data, transposed.data, "data")
    assert_bytes(columnwise.scale, transposed.scale, "scale")
    x[0, 0] = 1e4
    columnwise = mxfp8_quantize(x, columnwise=True)
    assert not torch.equal(mxfp8_dequantize(columnwise), mxfp8_dequantize(mxfp8_quantize(x)).T)


def test_dequantize_every_byte_pair():
    """All 256 scales x 256 data bytes against float64."""
    data = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).repeat(256, 1)
    scale = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 8)
    actual = mxfp8_dequantize(MXFP8Tensor(data, scale))
    powers = np.append(np.exp2(np.arange(255) - 127.0), np.nan)[:, None]
    with np.errstate(over="ignore"):
        expected = (data.double().numpy() * powers).astype(np.float32)
    np.testing.assert_array_equal(actual.numpy(), expected)


def test_stack_equals_each_matrix():
    x = torch.randn(3, 8, 64)
    for columnwise in (False, True):
        source = x.repeat(1, 4, 1)
        stacked = mxfp8_quantize(source, columnwise=columnwise)
        for index in range(3):
            alone = mxfp8_quantize(source[index], columnwise=columnwise)
            assert_bytes(stacked.data[index], alone.data, "data")
            assert_bytes(stacked.scale[index], alone.scale, "scale")


@pytest.mark.wrong_types
def test_errors_name_field_and_remedy():
    with pytest.raises(ValueError, match=r"scale_mode is 'ceil'; .*'rceil', 'floor'"):
        mxfp8_quantize(torch.zeros(2, 32), "ceil")
    with pytest.raises(ValueError, match="divisible by 32"):
        mxfp8_quantize(torch.zeros(2, 48))
    with pytest.raises(ValueError, match="needs one byte per 32 columns"):
        MXFP8Tensor(
            torch.zeros(2, 64).to(torch.float8_e4m3fn), torch.zeros(2, 4, dtype=torch.uint8)
        )
