"""Plant the known arithmetic mistakes in fos_rl/quant, one at a time, and count which tests notice.

    make mutants                          all of them, as many at a time as there are cores
    python -m tests.mutants [name ...]    those whose names begin so

A mutant is a replacement in a module's text; each runs in a forked process that imports that text.
Each meets the golden vectors (test_golden.py, and those of test_mxfp8.py) and, if those pass, all
other tests of tests/quant. The first run is of the unchanged text and must pass. Exit status 1 if a
mutant survives. A change that no output shows is not listed: it would be no mistake.
"""

import contextlib
import importlib.machinery
import io
import multiprocessing
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
QUANT = ROOT / "fos_rl" / "quant"
TESTS = ROOT / "tests" / "quant"
GOLDEN = [TESTS / "test_golden.py", f"{TESTS / 'test_mxfp8.py'}::test_golden"]
OTHERS = sorted(
    set(TESTS.glob("test_*.py")) - {TESTS / "test_golden.py", TESTS / "test_mutants.py"}
)


@dataclass(frozen=True, slots=True)
class Mutant:
    """One mistake: in module.py, each old text becomes the new one."""

    name: str
    module: str
    edits: tuple[tuple[str, str], ...]


def mutant(name: str, module: str, *texts: str) -> Mutant:
    return Mutant(name, module, tuple(zip(texts[::2], texts[1::2], strict=True)))


# Texts of the modules that several mutants replace.
S_ENC = "(torch.full_like(amax, 6.0 * bound) / amax)"
BASE = "base = (block_amax / torch.full_like(block_amax, 6.0)) * encode_scale"
STD_BASE = "block_amax * (encode_scale * (1.0 / 6.0))"
SCALED = "magnitude * block_multiplier(scale, encode_scale)"
CLAMP = "scale = unrounded_scale.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)"
ERROR = "decoded.mul_(amax.unsqueeze(-1))"
DIVIDE = "decoded.div_(torch.full_like(amax, 6.0 * e4m3_scale_bound).unsqueeze(-1))"
SUM = "    for term in terms[1:]:\n        error += term\n"
TREE = "rows = rows[..., :half, :] + rows[..., half : 2 * half, :]"
ROUND = "    magnitude.clamp_(max=E2M1_MAX)\n"
MIDPOINTS = "torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])"
LOOKUP = "    return torch.tensor(E2M1_MAGNITUDES)[torch.bucketize(magnitude, {}, right={})]\n"
F32 = "scale.to(torch.float32)"

MUTANTS = [
    # Quantizer arithmetic, table A.
    mutant("1 S_enc as reciprocal times constant", "blocks", S_ENC, "(6.0 * bound / amax)"),
    mutant(
        "2 b/6 by reciprocal", "four_over_six", BASE, "base = block_amax * (1 / 6) * encode_scale"
    ),
    mutant("3 standard base in four-over-six", "four_over_six", BASE, f"base = {STD_BASE}"),
    mutant(
        "3 four-over-six base in standard", "nvfp4", STD_BASE, "(block_amax / 6.0 * encode_scale)"
    ),
    mutant("4 (b * S_enc) / 6", "four_over_six", BASE, "base = (block_amax * encode_scale) / 6.0"),
    mutant(
        "5 map-to-4 scale from the rounded map-to-6 scale",
        "four_over_six",
        "candidate(base * 1.5)",
        "candidate(base.clamp(max=448.0).to(torch.float8_e4m3fn).float() * 1.5)",
    ),
    mutant(
        "5 map-to-4 scale from b/4",
        "four_over_six",
        "candidate(base * 1.5)",
        "candidate((block_amax / 4.0) * encode_scale)",
    ),
    mutant("6 clamp at the bound", "four_over_six", "max=E4M3_MAX", "max=float(e4m3_scale_bound)"),
    mutant(
        "7 no saturation before the e4m3 cast",
        "four_over_six",
        "unrounded_scale.clamp(max=E4M3_MAX)",
        "unrounded_scale.masked_fill(unrounded_scale > 464, float('nan'))",
    ),
    mutant("8 scale floor 2^-9", "four_over_six", CLAMP, CLAMP.replace("max=", "min=2**-9, max=")),
    mutant("8 scale floor 2^-6", "four_over_six", CLAMP, CLAMP.replace("max=", "min=2**-6, max=")),
    mutant(
        "9 divide by the scale",
        "four_over_six",
        SCALED,
        f"(magnitude / ({F32} * (1.0 / encode_scale))).nan_to_num(0.0)",
    ),
    mutant(
        "9 multiply by S_enc / scale",
        "four_over_six",
        SCALED,
        f"magnitude * (encode_scale / {F32}).clamp(max=3.4e38)",
    ),
    mutant(
        "10 no FLT_MAX clamp of the multiplier",
        "blocks",
        "(torch.ones_like(product) / product).clamp_(max=FP32_MAX)",
        "torch.ones_like(product) / product",
    ),
    mutant(
        "11 codes forced to 0 where the scale is 0",
        "four_over_six",
        "packed = pack_magnitudes(values)",
        f"packed = pack_magnitudes(values) * ({F32} != 0)",
    ),
    mutant(
        "12 S_dec as amax / (6 * bound)",
        "four_over_six",
        SCALED,
        f"magnitude * (1.0 / ({F32} * (amax.unsqueeze(-1) / (6.0 * e4m3_scale_bound))))"
        ".clamp(max=3.4028234663852886e38)",
    ),
    mutant("13 ties away from zero", "e2m1", ROUND, LOOKUP.format(MIDPOINTS, True)),
    mutant("13 ties toward zero", "e2m1", ROUND, LOOKUP.format(MIDPOINTS, False)),
    mutant(
        "14 sign of -0 lost",
        "blocks",
        "pack_signs(blocks)",
        "pack_signs(torch.where(blocks == 0, 0.0, blocks))",
    ),
    mutant(
        "14 sign of what rounds to zero lost",
        "blocks",
        "packed.bitwise_or_(signs.bitwise_and_(keep))",
        "packed.bitwise_or_(signs.bitwise_and_(keep) & "
        "(((packed & 7) != 0) * 8 | ((packed & 0x70) != 0) * 128))",
    ),
    mutant("15 no saturation at 6", "e2m1", ROUND, ""),
    mutant(
        "16 nibbles swapped",
        "e2m1",
        "return codes[0::2] | (codes[1::2] << 4)",
        "return codes[1::2] | (codes[0::2] << 4)",
    ),
    mutant(
        "17 flush to zero",
        "e2m1",
        "E2M1_MAX = 6.0",
        "E2M1_MAX = 6.0\ntorch.set_flush_denormal(True)",
    ),
    # Selection, table B.
    mutant("18 <= instead of <", "four_over_six", "error4 < error6", "error4 <= error6"),
    mutant("19 torch.sum", "four_over_six", SUM, "    error = terms.sum(0)\n"),
    mutant(
        "19 pairwise sum",
        "four_over_six",
        SUM,
        "    while len(terms) > 1:\n        terms = terms[0::2] + terms[1::2]\n"
        "    error = terms[0]\n",
    ),
    mutant(
        "19 sum in float64", "four_over_six", SUM, "    error = terms.double().sum(0).float()\n"
    ),
    mutant(
        "19 mean",
        "four_over_six",
        SUM,
        "    error = terms[0] / 16\n    for term in terms[1:]:\n        error += term / 16\n",
    ),
    mutant(
        "20 fused multiply-add",
        "four_over_six",
        'terms = deviation.abs_() if err_mode == "mae" else deviation.mul_(deviation)',
        "terms = deviation.abs_()",
        SUM,
        "    power = 1 if err_mode == 'mae' else 2\n    error = terms[0] ** power\n"
        "    for term in terms[1:]:\n"
        "        error = (error.double() + term.double() ** power).float()\n",
    ),
    mutant(
        "21 error from the dequantize formula",
        "four_over_six",
        f"values.mul_({F32})",
        f"values.mul_({F32} * amax.unsqueeze(-1) * (1.0 / (6.0 * e4m3_scale_bound)))",
        ERROR,
        "pass",
        DIVIDE,
        "pass",
    ),
    mutant(
        "21 error by reciprocal",
        "four_over_six",
        DIVIDE,
        "decoded.mul_(1 / (6 * e4m3_scale_bound))",
    ),
    mutant(
        "21 error from S_dec", "four_over_six", ERROR, "decoded.div_(encode_scale)", DIVIDE, "pass"
    ),
    mutant(
        "21 error in bf16",
        "four_over_six",
        DIVIDE,
        f"{DIVIDE}; decoded = decoded.bfloat16().float()",
    ),
    mutant(
        "22 scaled-domain error",
        "four_over_six",
        'if err_domain == "input"',
        'if err_domain == "no"',
    ),
    mutant(
        "23 mae and mse swapped", "four_over_six", 'if err_mode == "mae"', 'if err_mode == "mse"'
    ),
    mutant("23 largest error", "four_over_six", SUM, "    error = terms.amax(0)\n"),
    mutant(
        "24 16x16 picks per row",
        "four_over_six",
        'if block == "1x16":\n        return',
        "if True:\n        return",
    ),
    mutant(
        "24 16x16 sums its rows in sequence",
        "four_over_six",
        TREE,
        "rows = sum(rows[..., i : i + 1, :] for i in range(16)); break",
    ),
    mutant(
        "24 16x16 tree of neighbours",
        "four_over_six",
        TREE,
        "rows = rows[..., 0::2, :] + rows[..., 1::2, :]",
    ),
    mutant(
        "26 row amax along the wrong axis",
        "blocks",
        "magnitude.amax(-1) if",
        "magnitude.amax(-2) if",
    ),
    mutant(
        "26 one amax for all rows",
        "blocks",
        "magnitude.amax(-1) if",
        "magnitude.amax((-2, -1), keepdim=True)[..., 0].expand(x.shape[:-1]) if",
    ),
    mutant("27 error with bound 448", "four_over_six", "6.0 * e4m3_scale_bound", "6.0 * 448"),
    # Global scale and metadata, table C.
    mutant("28 dequantize with 448", "nvfp4", "(6.0 * t.e4m3_scale_bound)", "(6.0 * 448)"),
    mutant(
        "28 dequantize by one factor",
        "nvfp4",
        "factor.mul_(1.0 / (6.0 * t.e4m3_scale_bound))",
        "factor.div_(6.0 * t.e4m3_scale_bound)",
    ),
    mutant("29 S_enc with 448", "blocks", S_ENC, S_ENC.replace("bound", "448")),
    mutant("29 alpha with 448", "gemm", "bounds[0] * bounds[1]", "448 * 448"),
    mutant(
        "30 tail rows enter the amax", "grouped_autograd", "x = x.masked_fill(", "x.masked_fill("
    ),
    mutant(
        "30 padding of ones",
        "linear_autograd",
        "-x.shape[0] % multiple))",
        "-x.shape[0] % multiple), value=1.0)",
    ),
    mutant(
        "31 amax in bf16",
        "blocks",
        "return amax.to(torch.float32)",
        "return amax.bfloat16().float()",
    ),
    mutant("32 scale padding not zero", "gemm", "-rows % 128))", "-rows % 128), value=0x7F)"),
    mutant(
        "33 S_enc of a zero tensor infinite",
        "blocks",
        "scale.masked_fill_((amax == 0) | (scale == 0), 1.0)",
        "scale",
    ),
    mutant(
        "33 zero amax stored as 1",
        "blocks",
        "return x, _amax(x, row_scaled) if global_amax is None else global_amax",
        "a = _amax(x, row_scaled) if global_amax is None else global_amax\n"
        "    return x, a.masked_fill(a == 0, 1.0)",
    ),
    mutant(
        "34 NaN dropped from the amax",
        "blocks",
        "magnitude = x.abs()",
        "magnitude = x.abs().nan_to_num(0.0)",
    ),
    mutant(
        "35 given amax ignored",
        "blocks",
        "    return x, _amax(x, row_scaled) if global_amax is None else global_amax",
        "    return x, _amax(x, row_scaled)",
    ),
    # GEMM and autograd, table D.
    mutant(
        "37 operands dequantized to bf16",
        "gemm",
        "    out = raw_gemm(a, b, gemm, b_operand)\n    if not isinstance(a, MXFP8Tensor):\n",
        "    from fos_rl.quant.nvfp4 import nvfp4_dequantize as deq\n"
        "    if isinstance(a, NVFP4Tensor):\n"
        "        out = fp32_mm(deq(a, torch.bfloat16).float(), deq(b, torch.bfloat16).float())\n"
        "    else:\n        out = raw_gemm(a, b, gemm, b_operand)\n    if False:\n",
    ),
    mutant(
        "38 bf16 before the row factor",
        "gemm",
        "sums.mul_(reciprocal).mul_(amax)",
        "sums.mul_(reciprocal).bfloat16().float().mul_(amax)",
    ),
    mutant(
        "39 alpha in another order",
        "gemm",
        "amax = (a_amax * b_amax).unsqueeze(-1)",
        "amax = (a_amax * reciprocal * b_amax / reciprocal).unsqueeze(-1)",
    ),
    mutant(
        "39 row and tensor conventions swapped",
        "gemm",
        "    if row_scaled:\n",
        "    if not row_scaled:\n",
    ),
    mutant(
        "40 dequantized uses column-wise tensors",
        "linear_autograd",
        "kept_x, kept_w = quantized_x, prepared.rowwise",
        "kept_x, kept_w = quantized_x, quantizer.weight(weight.t(), columnwise=True)",
    ),
    mutant(
        "41 dequantized keeps bf16 copies",
        "linear_autograd",
        "kept_x, kept_w = quantized_x, prepared.rowwise",
        "kept_x = quantizer.dequantize(quantized_x, x.dtype)\n"
        "                kept_w = quantizer.dequantize(prepared.rowwise, x.dtype)",
        "x = None if x is None else ctx.quantizer.dequantize(x, x_dtype)",
        "pass",
        "w = None if w is None else ctx.quantizer.dequantize(w, x_dtype)",
        "pass",
    ),
    mutant(
        "42 dequantized mode changes the forward",
        "linear_autograd",
        "        multiplied, quantized_x = quantizer.activation_for_gemm(x, forms=forms)\n",
        "        x_in = x\n"
        "        if call.backward == 'dequantized':\n"
        "            x_in = quantizer.dequantize(quantizer.activation(x), x.dtype)\n"
        "        multiplied, quantized_x = quantizer.activation_for_gemm(x_in, forms=forms)\n",
    ),
    mutant(
        "43 dY in blocks along M for dX",
        "linear_autograd",
        "quantizer.gradient(dy, amax=amax)",
        "quantizer.gradient(quantizer.dequantize(quantizer.gradient("
        "pad_rows(dy, quantizer.block), amax=amax, columnwise=True), dy.dtype).t()[: len(dy)], "
        "amax=amax)",
    ),
    mutant(
        "44 dW of an idle expert not zero",
        "grouped_autograd",
        "dy.new_zeros(ctx.w_shape,",
        "dy.new_ones(ctx.w_shape,",
    ),
    mutant(
        "45 offs not checked",
        "grouped_autograd",
        "    check_offs(offs, x.shape[0], weight.shape[0])\n",
        "",
    ),
    mutant(
        "45 groups shifted by a row",
        "grouped_gemm",
        "right=True)\n\n\ndef per_row",
        "right=False)\n\n\ndef per_row",
    ),
    mutant(
        "47 stack shares one amax",
        "blocks",
        "magnitude.amax((-2, -1)).unsqueeze(-1)",
        "magnitude.amax().expand(*x.shape[:-2], 1)",
    ),
    mutant(
        "48 bias after the rounding",
        "gemm",
        "        out = out.add_(bias.to(torch.float32))\n",
        "        out = out.to(out_dtype) + bias.to(out_dtype)\n",
    ),
    mutant(
        "48 bias gradient summed in bf16",
        "linear_autograd",
        "dy.to(torch.float32).sum(0)",
        "dy.cumsum(0)[-1]",
    ),
    mutant(
        "49 frozen operands kept",
        "linear_autograd",
        "kept_x = kept_x if for_wgrad else None",
        "pass",
    ),
    mutant(
        "50 default backward swapped",
        "quantizers",
        '"high_precision" if row_scaled',
        '"high_precision" if not row_scaled',
    ),
    mutant(
        "51 weight cast to x's dtype",
        "linear_autograd",
        "quantizer.weight(weight.detach())",
        "quantizer.weight(weight.detach().bfloat16())",
    ),
    mutant(
        "51 autocast reaches the GEMM",
        "gemm",
        "enabled=False",
        "enabled=torch.is_autocast_cpu_enabled()",
    ),
    mutant("54 double backward allowed", "linear_autograd", "    @once_differentiable\n", ""),
    # MXFP8, table E.
    mutant(
        "56 floor and rceil swapped",
        "mxfp8",
        'if scale_mode == "rceil"',
        'if scale_mode == "floor"',
    ),
    # b / 448 instead of b * fl(1/448) is none: the scale byte is the same for every fp32 b.
    mutant(
        "57 ceil(log2)",
        "mxfp8",
        "exponent = _ceil_exponent(amax * (1.0 / E4M3_MAX))",
        "exponent = (torch.log2(amax / 448.0).ceil() + 127).clamp(0, 254).to(torch.int32)",
    ),
    mutant(
        "58 exponent byte 0 zeroes the block",
        "mxfp8",
        "scaled = blocks * decode_e8m0(254 - scale)",
        "scaled = blocks * (decode_e8m0(254 - scale) * (scale != 0))",
    ),
    mutant("58 subnormal scales rounded up", "mxfp8", "0x400000, 0)", "0, 0)"),
    mutant("59 infinity gets scale 254", "mxfp8", "~amax.isfinite()", "amax.isnan()"),
    mutant(
        "60 no saturation before the e4m3 cast",
        "mxfp8",
        "scaled.clamp_(-E4M3_MAX, E4M3_MAX)",
        "scaled.masked_fill_(scaled.abs() > 464, float('nan'))",
    ),
    mutant(
        "61 column-wise as the row-wise transpose",
        "mxfp8",
        "    x = x.detach().transpose(-2, -1) if columnwise else x.detach()\n",
        "    x = x.detach()\n    if columnwise:\n"
        "        x = mxfp8_dequantize(mxfp8_quantize(x)).transpose(-2, -1)\n",
    ),
    # What the tensor core is handed.
    mutant("64 packed rows of 8 bytes", "gemm", "-num_bytes % 16", "-num_bytes % 8"),
    mutant("65 N not padded", "gemm", "zip(data, (1, 16), strict=True)", "zip(data, (1, 1))"),
    mutant("66 scales of another matrix", "gemm", "scale_b=swizzled[1]", "scale_b=swizzled[0]"),
    mutant("67 surplus outputs kept", "gemm", "out[:, :n].contiguous()", "out"),
]


def changed_text(mutation: Mutant) -> bytes:
    text = (QUANT / f"{mutation.module}.py").read_text()
    for old, new in mutation.edits:
        if old not in text:
            raise ValueError(
                f"mutant {mutation.name!r}: {mutation.module}.py no longer contains {old!r}; write "
                "the mistake against the new text"
            )
        text = text.replace(old, new)
    return text.encode()


def is_caught(mutation: Mutant, tests: list) -> bool:
    """Run tests on the changed text in a forked process; a failure or an error there is a catch."""
    pid = os.fork()
    if pid == 0:
        code = 1
        with contextlib.suppress(BaseException):
            code = _run_changed(mutation, tests)
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0


def _run_changed(mutation: Mutant, tests: list) -> int:
    import pytest

    target, text = str(QUANT / f"{mutation.module}.py"), changed_text(mutation)
    read = importlib.machinery.SourceFileLoader.get_data

    def get_data(loader, path):
        if path == target:
            return text
        if f"{mutation.module}." in Path(path).name and path.endswith(".pyc"):
            raise OSError("the changed text is not in the bytecode cache")
        return read(loader, path)

    importlib.machinery.SourceFileLoader.get_data = get_data
    sys.dont_write_bytecode = True
    options = ["-x", "-q", "-p", "no:cacheprovider", f"--rootdir={ROOT}"]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return int(pytest.main([*options, *map(str, tests)]))


def outcome_of(mutation: Mutant) -> str:
    if is_caught(mutation, GOLDEN):
        return "golden vectors"
    return "other tests" if is_caught(mutation, OTHERS) else "survived"


def main(names: list[str]) -> int:
    # Imported before the forks, once for all mutants; fos_rl.quant must not be.
    import numpy  # noqa: F401
    import torch

    torch.set_num_threads(1)
    chosen = [m for m in MUTANTS if not names or any(m.name.startswith(n) for n in names)]
    for mutation in chosen:
        changed_text(mutation)
    start = time.monotonic()
    if is_caught(Mutant("unchanged", "blocks", ()), [*GOLDEN, *OTHERS]):
        raise SystemExit("the unchanged text fails its tests")
    outcomes: list[str] = []
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        for mutation, outcome in zip(chosen, pool.imap(outcome_of, chosen), strict=True):
            outcomes.append(outcome)
            print(f"{mutation.name:<52} {outcome}", flush=True)
    survivors = [m.name for m, o in zip(chosen, outcomes, strict=True) if o == "survived"]
    print(
        f"\n{len(chosen) - len(survivors)} of {len(chosen)} mutants caught, "
        f"{outcomes.count('golden vectors')} of them by golden vectors "
        f"({time.monotonic() - start:.0f} s)"
    )
    for name in survivors:
        print(f"survived: {name}")
    return 1 if survivors else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
