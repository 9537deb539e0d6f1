"""Four-over-six: a second implementation, and properties that need no vectors."""

import numpy as np
import pytest
import torch

from fos_rl.quant import (
    NVFP4Tensor,
    four_over_six_quantize,
    nvfp4_dequantize,
    nvfp4_quantize,
)
from tests.quant import numpy_nvfp4
from tests.quant.numpy_nvfp4 import E4M3, fold, nearest, row_errors
from tests.quant.numpy_nvfp4 import quantize as numpy_quantize
from tests.quant.quant_goldens import assert_bytes

KNOBS = [
    pytest.param(block, bound, mode, row, id=f"{block}-{bound}-{mode}-{'row' if row else 'ten'}")
    for block in ("1x16", "16x16")
    for bound in (256, 448)
    for mode in ("mae", "mse")
    for row in (False, True)
    if not (row and block == "16x16")
]


def unpack(codes: torch.Tensor) -> torch.Tensor:
    return torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)


def sample(kind: str, rows: int = 48, cols: int = 64, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=generator)
    if kind == "wide":
        x *= torch.exp2(torch.randint(-40, 40, (rows, cols), generator=generator).float())
    elif kind == "grid":
        x = (x * 8).round() / 4
    elif kind == "rows":
        x *= torch.exp2(torch.randint(-30, 30, (rows, 1), generator=generator).float())
    elif kind == "subnormal":
        x *= 2.0**-135
    elif kind == "huge":
        x *= 2.0**125
    elif kind == "zeros":
        x[: rows // 2] = 0
        x[:, :32] *= -0.0
    return x


@pytest.mark.parametrize("kind", ["normal", "wide", "grid", "rows", "subnormal", "huge", "zeros"])
@pytest.mark.parametrize(("block", "bound", "mode", "row"), KNOBS)
def test_against_numpy(kind, block, bound, mode, row):
    """Traps 1-18 on fresh data: bytes equal to the slow NumPy form."""
    x = sample(kind)
    actual = four_over_six_quantize(x, block, mode, bound, row)
    amax = x.abs().amax(1) if row else x.abs().amax().reshape(1)
    codes, scales = numpy_quantize(x.numpy(), amax.numpy(), bound, mode, block)
    assert_bytes(actual.global_amax, amax, "amax")
    assert_bytes(actual.block_scale, torch.from_numpy(scales), "scales")
    assert_bytes(unpack(actual.codes), torch.from_numpy(codes), "codes")


def test_many_row_scales_against_true_division():
    """2048 random amaxes: a scale formed as reciprocal * constant is off in a quarter. Traps 1, 9,
    12."""
    x = sample("normal", 2048, 32) * torch.rand(2048, 1, generator=torch.Generator().manual_seed(1))
    actual = four_over_six_quantize(x, row_scaled=True)
    codes, scales = numpy_quantize(x.numpy(), x.abs().amax(1).numpy(), 256, "mse")
    assert_bytes(actual.block_scale, torch.from_numpy(scales), "scales")
    assert_bytes(unpack(actual.codes), torch.from_numpy(codes), "codes")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_input_is_widened_exactly(dtype):
    x = sample("normal").to(dtype)
    narrow, wide = four_over_six_quantize(x), four_over_six_quantize(x.float())
    assert_bytes(narrow.codes, wide.codes, "codes")
    assert_bytes(narrow.block_scale, wide.block_scale, "scales")
    assert_bytes(narrow.global_amax, wide.global_amax, "amax")


def test_amax_of_fp32_is_not_rounded_to_bf16():
    """Trap 31."""
    x = torch.zeros(16, 16)
    x[3, 4] = 1.0000001
    assert four_over_six_quantize(x).global_amax.item() == x[3, 4].item()


@pytest.mark.parametrize("mode", ["mae", "mse"])
@pytest.mark.parametrize("bound", [256, 448])
def test_selected_error_is_the_smaller(mode, bound):
    """Per block no worse than map-to-6 alone, in float64; and map-to-4 is picked somewhere."""
    x = sample("normal", 256, 64)
    actual = four_over_six_quantize(x, "1x16", mode, bound)
    forced = _map_to_six(x, bound)
    ours, six = (_block_errors(x, t, mode) for t in (actual, forced))
    # The fp32 sums that decide are within 16 roundings of the float64 ones.
    assert (ours <= six * (1 + 32 * 2.0**-24)).all()
    changed = actual.block_scale.view(torch.uint8) != forced.block_scale.view(torch.uint8)
    assert 0.2 < changed.float().mean() < 0.8


def _map_to_six(x: torch.Tensor, bound: int) -> NVFP4Tensor:
    amax = x.abs().amax()
    base = x.view(x.shape[0], -1, 16).abs().amax(-1).double() / 6 * (6 * bound / amax.double())
    scale = base.float().clamp(max=448).to(torch.float8_e4m3fn)
    step = scale.double() * amax.double() / (6 * bound)
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6]).double()
    scaled = x.double().view(x.shape[0], -1, 16) / step[..., None]
    index = (scaled.abs()[..., None] - grid).abs().argmin(-1)
    codes = (index + 8 * (scaled < 0)).flatten(1).to(torch.uint8)
    return NVFP4Tensor(codes[:, 0::2] | codes[:, 1::2] << 4, scale, amax.reshape(1), bound)


def _block_errors(x: torch.Tensor, t: NVFP4Tensor, mode: str) -> torch.Tensor:
    deviation = (nvfp4_dequantize(t).double() - x.double()).view(x.shape[0], -1, 16)
    return deviation.abs().sum(-1) if mode == "mae" else (deviation**2).sum(-1)


@pytest.mark.parametrize("mode", ["mae", "mse"])
def test_16x16_near_ties_on_the_order_of_the_row_sums(mode):
    """Blocks assembled so that another summation tree picks the other candidate. Traps 19, 24.

    Rows share one peak and one given amax, so their errors can be computed once and combined: rows
    that favour map-to-4 with as many that favour map-to-6, the last one balancing the total.
    """
    peak, amax, bound = 3.75, np.float32(5), 256
    pool = torch.randn(4096, 16, generator=torch.Generator().manual_seed(5)).clamp(-3.5, 3.5)
    pool[:, 0] = peak
    blocks = pool.numpy()[:, None]
    encode_scale = np.float32(6 * bound) / amax
    base = np.full((len(pool), 1), np.float32(peak) / np.float32(6) * encode_scale)
    errors = []
    for scaled in (base * np.float32(1.5), base):
        encoded = numpy_nvfp4.encode(blocks, nearest(scaled, E4M3), 1 / np.float32(encode_scale))
        _, scale, values = encoded
        amaxes = np.full((len(pool), 1), amax)
        errors.append(row_errors(blocks, values, scale, amaxes, bound, mode)[:, 0])
    difference = (errors[0] - errors[1]).astype(np.float64)
    favour4 = np.nonzero(difference < 0)[0]
    favour6 = np.nonzero((difference > 0) & (difference < -difference.min()))[0]
    random = np.random.default_rng(0)
    rows = np.concatenate(
        [random.choice(favour4, (200_000, 8)), random.choice(favour6, (200_000, 7))], axis=1
    )
    order = np.argsort(difference)
    balance = np.searchsorted(difference[order], -difference[rows].sum(1)).clip(0, len(order) - 1)
    rows = np.concatenate([rows, order[balance][:, None]], axis=1)[:, random.permutation(16)]
    four, six = (error[rows] for error in errors)
    picks = fold(four) < fold(six)
    for other in (neighbours, sequence):
        tied = rows[picks != (other(four) < other(six))][:8]
        assert len(tied) > 0
        x = pool[torch.from_numpy(tied)].flatten(0, 1)
        given = torch.tensor([amax])
        actual = four_over_six_quantize(x, "16x16", mode, bound, global_amax=given)
        _, scales = numpy_quantize(x.numpy(), given.numpy(), bound, mode, "16x16")
        assert_bytes(actual.block_scale, torch.from_numpy(scales), f"scales, {other.__name__}")


def neighbours(errors: np.ndarray) -> np.ndarray:
    while errors.shape[1] > 1:
        errors = errors[:, 0::2] + errors[:, 1::2]
    return errors[:, 0]


def sequence(errors: np.ndarray) -> np.ndarray:
    return np.cumsum(errors, axis=1, dtype=np.float32)[:, -1]


def test_error_modes_differ_somewhere():
    """Trap 23."""
    x = sample("normal", 256, 64)
    mae, mse = (four_over_six_quantize(x, err_mode=mode).block_scale for mode in ("mae", "mse"))
    assert (mae.view(torch.uint8) != mse.view(torch.uint8)).any()


@pytest.mark.parametrize("power", [-20, 3, 17])
@pytest.mark.parametrize(("block", "bound", "mode", "row"), KNOBS)
def test_scaling_by_a_power_of_two_scales_the_amax_only(block, bound, mode, row, power):
    x = sample("normal")
    plain = four_over_six_quantize(x, block, mode, bound, row)
    scaled = four_over_six_quantize(x * 2.0**power, block, mode, bound, row)
    assert_bytes(scaled.codes, plain.codes, "codes")
    assert_bytes(scaled.block_scale, plain.block_scale, "scales")
    assert_bytes(scaled.global_amax, plain.global_amax * 2.0**power, "amax")


@pytest.mark.parametrize("quantize", [four_over_six_quantize, nvfp4_quantize])
@pytest.mark.parametrize("row", [False, True])
def test_row_permutation(quantize, row):
    x = sample("rows")
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(3))
    plain, permuted = quantize(x, row_scaled=row), quantize(x[order], row_scaled=row)
    assert_bytes(permuted.codes, plain.codes[order], "codes")
    assert_bytes(permuted.block_scale, plain.block_scale[order], "scales")
    if row:
        assert_bytes(permuted.global_amax, plain.global_amax[order], "amax")


@pytest.mark.parametrize("quantize", [four_over_six_quantize, nvfp4_quantize])
def test_row_scaled_is_each_row_alone(quantize):
    """M == K with distinct rows, so that an amax along the wrong axis shows; and M = 1. Trap 26."""
    x = sample("rows", 64, 64)
    whole = quantize(x, row_scaled=True)
    for row in range(len(x)):
        for alone in (quantize(x[row : row + 1]), quantize(x[row : row + 1], row_scaled=True)):
            assert_bytes(alone.codes[0], whole.codes[row], "codes")
            assert_bytes(alone.block_scale[0], whole.block_scale[row], "scales")
            assert_bytes(alone.global_amax[0], whole.global_amax[row], "amax")


@pytest.mark.parametrize(("block", "bound", "mode", "row"), KNOBS)
def test_negation_flips_sign_bits_only(block, bound, mode, row):
    x = sample("zeros")
    plain = four_over_six_quantize(x, block, mode, bound, row)
    negated = four_over_six_quantize(-x, block, mode, bound, row)
    assert_bytes(negated.codes, plain.codes ^ 0x88, "codes")
    assert_bytes(negated.block_scale, plain.block_scale, "scales")


@pytest.mark.parametrize(("block", "bound", "mode", "row"), KNOBS)
def test_zero_padding_of_columns_appends_blocks(block, bound, mode, row):
    x = sample("wide")
    plain = four_over_six_quantize(x, block, mode, bound, row)
    padded = four_over_six_quantize(torch.nn.functional.pad(x, (0, 16)), block, mode, bound, row)
    assert_bytes(padded.codes[:, :-8], plain.codes, "codes")
    assert_bytes(padded.block_scale[:, :-1], plain.block_scale, "scales")
    assert not padded.codes[:, -8:].any()
    assert not padded.block_scale[:, -1:].view(torch.uint8).any()


@pytest.mark.parametrize("kind", ["normal", "wide", "huge", "subnormal", "zeros"])
@pytest.mark.parametrize(("block", "bound", "mode", "row"), KNOBS)
def test_scale_bytes_of_finite_input(kind, block, bound, mode, row):
    """No sign bit, no NaN byte; 16x16 scales are constant over 16 rows. Traps 7, 24."""
    scale = four_over_six_quantize(sample(kind), block, mode, bound, row).block_scale
    byte = scale.view(torch.uint8)
    assert int(byte.max()) <= 0x7E
    if block == "16x16":
        groups = byte.view(-1, 16, byte.shape[1])
        assert (groups == groups[:, :1]).all()


def test_given_amax_makes_shards_slices_of_the_whole():
    """Shards along either dim with the full amax; without it the codes differ. Trap 35."""
    x = sample("normal", 64, 128)
    whole = four_over_six_quantize(x, "16x16")
    shard = four_over_six_quantize(x[:, 64:], "16x16", global_amax=whole.global_amax)
    assert_bytes(shard.codes, whole.codes[:, 32:], "codes of a column shard")
    shard = four_over_six_quantize(x[:32], "16x16", global_amax=whole.global_amax)
    assert_bytes(shard.codes, whole.codes[:32], "codes of a row shard")
    assert_bytes(shard.block_scale, whole.block_scale[:32], "scales of a row shard")
    rows = four_over_six_quantize(x, row_scaled=True)
    shard = four_over_six_quantize(x[:, :64], row_scaled=True, global_amax=rows.global_amax)
    assert_bytes(shard.codes, rows.codes[:, :32], "codes of a row-scaled column shard")
    pieces = [four_over_six_quantize(part).block_scale for part in x.chunk(2, 1)]
    alone = torch.cat([piece.view(torch.uint8) for piece in pieces], 1)
    row_whole = four_over_six_quantize(x).block_scale.view(torch.uint8)
    assert (alone != row_whole).any()


def test_separate_and_fused_gate_up_differ():
    """One amax for w1 and w3 together gives other codes: the caller must choose. Trap 36."""
    gate, up = sample("normal", 32, 64, seed=1), 0.3 * sample("normal", 32, 64, seed=2)
    fused = four_over_six_quantize(torch.cat([gate, up]))
    alone = four_over_six_quantize(up)
    assert (fused.codes[32:] != alone.codes).any()
    shared = four_over_six_quantize(up, global_amax=fused.global_amax)
    assert_bytes(shared.codes, fused.codes[32:], "codes with the fused amax")


def test_columnwise_is_the_form_of_the_transpose():
    x = sample("wide", 32, 48)
    for block in ("1x16", "16x16"):
        columnwise = four_over_six_quantize(x, block, columnwise=True)
        transposed = four_over_six_quantize(x.T.contiguous(), block)
        assert columnwise.shape == (48, 32)
        assert_bytes(columnwise.codes, transposed.codes, "codes")
        assert_bytes(columnwise.block_scale, transposed.block_scale, "scales")


def test_stack_equals_each_matrix():
    """A stack has one amax per matrix. Trap 47."""
    x = torch.stack([sample("normal", 32, 32, seed) * 2**seed for seed in range(3)])
    for columnwise in (False, True):
        for block in ("1x16", "16x16"):
            stacked = four_over_six_quantize(x, block, columnwise=columnwise)
            assert stacked.global_amax.shape == (3, 1)
            for index in range(3):
                alone = four_over_six_quantize(x[index], block, columnwise=columnwise)
                assert_bytes(stacked.codes[index], alone.codes, "codes")
                assert_bytes(stacked.block_scale[index], alone.block_scale, "scales")
                assert_bytes(stacked.global_amax[index], alone.global_amax, "amax")


@pytest.mark.parametrize("layout", ["transposed", "strided", "expanded"])
def test_memory_layout_does_not_matter(layout):
    x = {
        "transposed": sample("normal", 64, 48).T,
        "strided": sample("normal", 96, 128)[::2, ::2],
        "expanded": sample("normal", 1, 64).expand(32, 64),
    }[layout]
    plain, packed = (four_over_six_quantize(t, "16x16") for t in (x, x.contiguous()))
    assert_bytes(plain.codes, packed.codes, "codes")
    assert_bytes(plain.block_scale, packed.block_scale, "scales")


def test_zero_tensor_and_zero_rows():
    """S_enc is 1 and the amax stays 0: no NaN, no floor on the scale. Traps 8, 10, 33."""
    for row in (False, True):
        t = four_over_six_quantize(torch.zeros(16, 32), row_scaled=row)
        assert not t.codes.any()
        assert not t.block_scale.view(torch.uint8).any()
        assert t.global_amax.tolist() == [0.0] * (16 if row else 1)
        assert not nvfp4_dequantize(t).any()
    x = sample("normal", 16, 32)
    x[5] = 0
    t = four_over_six_quantize(x, row_scaled=True)
    assert t.global_amax[5] == 0
    assert not nvfp4_dequantize(t)[5].any()


def test_scaled_value_past_six_stays_code_seven():
    """S_enc 1 and base 1.45 * 2^-9, which rounds down to 2^-9: the scaled amax is 8.7. Trap 15."""
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 16], x[0, 17] = 1536.0, 6 * 1.45 * 2.0**-9, -6 * 1.45 * 2.0**-9
    t = nvfp4_quantize(x * 1.75)
    assert t.codes[0, 8].item() == 0xF7
    codes, scales = numpy_quantize(x.numpy(), np.array([1536], np.float32), 256, "mse")
    t = four_over_six_quantize(x)
    assert unpack(t.codes).tolist() == codes.tolist()
    assert t.block_scale.view(torch.uint8).tolist() == scales.tolist()


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("row", [False, True])
def test_nan_poisons_what_shares_its_amax(row, sign):
    """A NaN stays visible: every scale of the tensor (of the row) is 0x7F and codes are +6. Trap
    34."""
    x = sample("normal", 16, 64)
    clean = four_over_six_quantize(x, row_scaled=row)
    x[3, 20] = sign * torch.nan
    for quantize in (four_over_six_quantize, nvfp4_quantize):
        t = quantize(x, row_scaled=row)
        poisoned = t.block_scale.view(torch.uint8) == 0x7F
        expected = torch.ones_like(poisoned)
        if row:
            expected = torch.arange(16)[:, None].expand_as(poisoned) == 3
        assert torch.equal(poisoned, expected)
        assert (t.codes[3] == 0x77).all()
        assert nvfp4_dequantize(t)[3].isnan().all()
    if row:
        t = four_over_six_quantize(x, row_scaled=True)
        others = torch.arange(16) != 3
        assert_bytes(t.codes[others], clean.codes[others], "other rows")


def test_infinity_saturates():
    """amax inf: S_enc is 1, the element is +-6 times 448, the others keep base b/6. Trap 34."""
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 1], x[0, 16] = torch.inf, -torch.inf, 6.0
    t = four_over_six_quantize(x)
    assert t.global_amax.item() == torch.inf
    assert t.codes[0, 0].item() == 0xF7
    assert t.block_scale[0].float().tolist() == [448.0, 1.0]
    assert t.codes[0, 8].item() == 0x07


def test_denormals_are_not_flushed():
    """The process must not run with flush-to-zero. Trap 17."""
    assert torch.tensor(2.0**-140) * 2 == 2.0**-139
    x = torch.full((1, 16), 2.0**-149)
    t = four_over_six_quantize(x)
    # 1/S_enc is subnormal too; 2^-149 * FLT_MAX = 2^-21, far below the least scale 2^-9 * 6.
    assert t.global_amax.item() == 2.0**-149
    assert t.block_scale.view(torch.uint8).item() == 0


@pytest.mark.parametrize("shape", [(0, 32), (0, 16), (2, 0, 32)])
def test_no_rows(shape):
    for row in (False, True):
        t = four_over_six_quantize(torch.zeros(shape), row_scaled=row)
        assert t.shape == shape
        assert nvfp4_dequantize(t).shape == shape


@pytest.mark.wrong_types
@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"block": "16"}, r"block is '16'; it must be one of '1x16', '16x16'"),
        ({"err_mode": "MSE"}, r"err_mode is 'MSE'; it must be one of 'mae', 'mse'"),
        ({"e4m3_scale_bound": 384}, r"e4m3_scale_bound is 384; it must be one of 256, 448"),
        ({"block": "16x16", "row_scaled": True}, r"Use block='1x16'"),
        ({"row_scaled": True, "columnwise": True}, r"columnwise=True"),
        ({"global_amax": torch.ones(2)}, r"global_amax .* shape \(1,\)"),
        ({"err_domain": "log"}, r"err_domain is 'log'"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_errors_name_field_value_and_rule(knobs, message):
    with pytest.raises(ValueError, match=message):
        four_over_six_quantize(torch.zeros(16, 32), **knobs)


@pytest.mark.wrong_types
@pytest.mark.parametrize("shape", [(16, 24), (32,)])
def test_bad_shapes(shape):
    with pytest.raises(ValueError, match=r"Pad with zeros|Flatten leading dims"):
        four_over_six_quantize(torch.zeros(shape))
    with pytest.raises(ValueError, match="divisible by 16"):
        four_over_six_quantize(torch.zeros(24, 16), "16x16")
