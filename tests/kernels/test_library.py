"""The registered ops on a CPU: what they refuse, and that the fakes describe what they return.

Their host code runs as it is; the kernels are stand-ins that fill the outputs with zeros.
"""

import ctypes

import pytest
import torch
from torch import Tensor

from fos_rl.kernels import compile_cache, library, quantize_ops
from fos_rl.quant import NVFP4Tensor, four_over_six_quantize, nvfp4_quantize

OPS = {"quantize_nvfp4": library.quantize, "decode_nvfp4": library.decode}


def load(kernel: str, constants: tuple, arch: str):
    """A stand-in for each kernel that a registered op launches."""

    def quantize(x: Tensor, amax: int, codes: int, scales: int, _: int, *rest: int) -> None:
        _share, stack, _ctas = rest
        ctypes.memset(codes, 0, x.numel() // 2)
        ctypes.memset(scales, 0, x.numel() // 16)
        plan = constants[2]
        if plan[1] != "given":
            ctypes.memset(amax, 0, 4 * stack)

    def decode(codes: Tensor, scales: Tensor, amax: Tensor, out: Tensor, *rest: int) -> None:
        out.zero_()

    return {"quantize": quantize, "decode": decode, "partial_amax": lambda *_: None}[kernel]


@pytest.fixture
def on_the_cpu(monkeypatch):
    """The ops' own host functions for CPU tensors, as long as the test runs."""
    monkeypatch.setattr(compile_cache, "load", load)
    monkeypatch.setattr(quantize_ops, "architecture", lambda device: "sm_90a")
    monkeypatch.setattr(quantize_ops, "_sm_count", lambda device: 132)
    caches = (quantize_ops._plan, quantize_ops.amax_launcher, quantize_ops._decode_launcher)
    for cache in caches:
        cache.cache_clear()
    registration = torch.library.Library("fos_rl", "FRAGMENT")
    for name, op in OPS.items():
        registration.impl(name, op._init_fn, "CPU")
    yield
    registration._destroy()
    for cache in caches:
        cache.cache_clear()


def quantize_arguments(x: Tensor, **changes) -> tuple:
    named = {
        "x": x,
        "scheme": "four_over_six",
        "block": "1x16",
        "err_mode": "mse",
        "e4m3_scale_bound": 256,
        "row_scaled": False,
        "columnwise": False,
        "global_amax": None,
    }
    return tuple((named | changes).values())


def decode_arguments(t: NVFP4Tensor, **changes) -> tuple:
    named = {
        "codes": t.codes,
        "block_scale": t.block_scale.view(torch.uint8),
        "global_amax": t.global_amax,
        "e4m3_scale_bound": t.e4m3_scale_bound,
        "dtype": torch.bfloat16,
        "what": "value",
    }
    return tuple((named | changes).values())


X = torch.zeros(48, 64, dtype=torch.bfloat16)
STACK = torch.zeros(3, 32, 64)
T = four_over_six_quantize(X.float(), row_scaled=True)
STACKED = nvfp4_quantize(STACK)

GOOD = {
    "tensor": quantize_arguments(X),
    "rows": quantize_arguments(X, row_scaled=True),
    "given": quantize_arguments(X, global_amax=torch.ones(1)),
    "rows given": quantize_arguments(X, row_scaled=True, global_amax=torch.ones(48)),
    "a slice of others": quantize_arguments(X, row_scaled=True, global_amax=torch.ones(96)[::2]),
    "columns": quantize_arguments(X, columnwise=True),
    "squares": quantize_arguments(X, block="16x16", err_mode="mae", e4m3_scale_bound=448),
    "nvfp4": quantize_arguments(X, scheme="nvfp4", e4m3_scale_bound=448),
    "stack": quantize_arguments(STACK),
    "stack of rows": quantize_arguments(STACK, row_scaled=True),
    "stack of columns": quantize_arguments(STACK, columnwise=True, block="16x16"),
    "two kernels": quantize_arguments(torch.zeros(1024, 64, dtype=torch.bfloat16)),
    "values": decode_arguments(T),
    "operand": decode_arguments(T, what="operand", dtype=torch.float32),
    "stacked values": decode_arguments(STACKED, dtype=torch.float32),
    "strided codes": decode_arguments(
        NVFP4Tensor(T.codes[::2], T.block_scale[::2], T.global_amax[::2], T.e4m3_scale_bound)
    ),
}


def op_of(arguments: tuple):
    return library.quantize if len(arguments) == 8 else library.decode


@pytest.mark.parametrize("case", GOOD)
def test_fakes_describe_what_the_ops_return(on_the_cpu, case: str) -> None:
    """opcheck: schema, fake against real (shapes, dtypes, strides), static and symbolic shapes."""
    arguments = GOOD[case]
    checked = torch.library.opcheck(op_of(arguments), arguments)
    assert set(checked.values()) == {"SUCCESS"}, checked


BAD_INPUTS = {
    "dtype int": (quantize_arguments(X.int()), "needs floating point"),
    "dtype double": (quantize_arguments(X.double()), "x is torch.float64"),
    "dtype half": (quantize_arguments(X.half()), "dtype is torch.float16"),
    "a vector": (quantize_arguments(X[0]), "rows, cols"),
    "columns": (quantize_arguments(X[:, :24].contiguous()), "divisible by 16"),
    "rows of columns": (quantize_arguments(X[:40], columnwise=True), "divisible by 16"),
    "rows of squares": (quantize_arguments(X[:40], block="16x16"), "divisible by 16"),
    "not contiguous": (quantize_arguments(X[:, :32]), "not contiguous"),
    "transposed": (quantize_arguments(X.t()), "not contiguous"),
    "empty": (quantize_arguments(X[:0]), "empty"),
    "scheme": (quantize_arguments(X, scheme="fp4"), "scheme is 'fp4'"),
    "block": (quantize_arguments(X, block="16x1"), "block is '16x1'"),
    "error": (quantize_arguments(X, err_mode="max"), "err_mode is 'max'"),
    "bound": (quantize_arguments(X, e4m3_scale_bound=300), "bound is 300"),
    "nvfp4 bound": (quantize_arguments(X, scheme="nvfp4"), "e4m3_scale_bound is 256"),
    "row-scaled squares": (quantize_arguments(X, row_scaled=True, block="16x16"), "row_scaled"),
    "row-scaled columns": (quantize_arguments(X, row_scaled=True, columnwise=True), "row_scaled"),
    "few amaxes": (
        quantize_arguments(X, row_scaled=True, global_amax=torch.ones(47)),
        r"global_amax is torch.float32 of shape \(47,\)",
    ),
    "one amax for rows": (
        quantize_arguments(X, row_scaled=True, global_amax=torch.ones(1)),
        "global_amax",
    ),
    "amaxes for one": (quantize_arguments(X, global_amax=torch.ones(48)), "global_amax"),
    "an amax for three": (quantize_arguments(STACK, global_amax=torch.ones(1)), "global_amax"),
    "amax dtype": (
        quantize_arguments(X, global_amax=torch.ones(1, dtype=torch.bfloat16)),
        "must be float32",
    ),
    "codes dtype": (decode_arguments(T, codes=T.codes.int()), "codes are torch.int32"),
    "scale dtype": (decode_arguments(T, block_scale=T.block_scale.float()), "block_scale is"),
    "amax dtype of codes": (
        decode_arguments(T, global_amax=T.global_amax.double()),
        "global_amax is torch.float64",
    ),
    "few scales": (decode_arguments(T, block_scale=T.block_scale[:47]), "block_scale has shape"),
    "narrow scales": (decode_arguments(T, block_scale=T.block_scale[:, :3]), "block_scale has"),
    "few amaxes of codes": (
        decode_arguments(T, global_amax=T.global_amax[:5]),
        "global_amax has shape",
    ),
    "half blocks": (
        decode_arguments(T, codes=T.codes[:, :4], block_scale=T.block_scale[:, :0]),
        "whole blocks",
    ),
    "a vector of codes": (
        decode_arguments(T, codes=T.codes[0], block_scale=T.block_scale[0]),
        "codes have shape",
    ),
    "bound of codes": (decode_arguments(T, e4m3_scale_bound=0), "bound is 0"),
    "dtype to decode to": (decode_arguments(T, dtype=torch.float16), "dtype is torch.float16"),
    "what": (decode_arguments(T, what="codes"), "what is 'codes'"),
    "no codes": (
        decode_arguments(
            T, codes=T.codes[:0], block_scale=T.block_scale[:0], global_amax=T.global_amax[:1]
        ),
        "empty",
    ),
}


@pytest.mark.parametrize("case", BAD_INPUTS)
def test_op_and_fake_refuse_before_a_kernel_runs(on_the_cpu, monkeypatch, case: str) -> None:
    def launched(*arguments) -> None:
        raise AssertionError("a kernel was launched")

    monkeypatch.setattr(compile_cache, "load", lambda *arguments: launched)
    arguments, words = BAD_INPUTS[case]
    on_meta = tuple(a.to("meta") if isinstance(a, Tensor) else a for a in arguments)
    if case not in ("not contiguous", "transposed"):  # .to("meta") keeps only some strides
        with pytest.raises((ValueError, RuntimeError), match=words):
            op_of(arguments)(*on_meta)
    with pytest.raises((ValueError, RuntimeError), match=words):
        op_of(arguments)(*arguments)


def test_tensors_on_two_devices_are_refused(on_the_cpu) -> None:
    elsewhere = torch.ones(1, device="meta")
    for call in (
        lambda: library.quantize(*quantize_arguments(X, global_amax=elsewhere)),
        lambda: library.decode(*decode_arguments(T, global_amax=elsewhere)),
        lambda: NVFP4Tensor(T.codes, T.block_scale, elsewhere, T.e4m3_scale_bound),
        lambda: four_over_six_quantize(X, global_amax=elsewhere),
    ):
        with pytest.raises((ValueError, RuntimeError), match=r"global_amax (is )?on meta"):
            call()


def test_slices_at_odd_addresses_are_copied(on_the_cpu, monkeypatch) -> None:
    """A kernel reads 16 bytes of x, and 8 of codes, at a time."""
    seen = []
    monkeypatch.setattr(
        compile_cache, "load", lambda *arguments: lambda *parts: seen.append(parts[0].data_ptr())
    )
    x = torch.zeros(48 * 64 + 1, dtype=torch.bfloat16)[1:].view(48, 64)
    codes = torch.zeros(48 * 32 + 1, dtype=torch.uint8)[1:].view(48, 32)
    assert x.data_ptr() % 16
    assert codes.data_ptr() % 8
    library.quantize(*quantize_arguments(x, row_scaled=True))
    library.decode(*decode_arguments(T, codes=codes))
    assert [address % 8 for address in seen] == [0, 0]
    assert seen[0] % 16 == 0
