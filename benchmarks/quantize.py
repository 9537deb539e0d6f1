"""How fast the NVFP4 kernels are: beside a device copy, the eager reference and torch.compile.

    python -m benchmarks.quantize                       # everything, some minutes
    python -m benchmarks.quantize --only forms kinds    # parts: forms kinds shapes small linear
    python -m benchmarks.quantize --out benchmarks/results/quantize_h200

Share is the bandwidth of a kernel (input read once, outputs written once) over that of a copy of
the same input in the same run. The reference under torch.compile is not legal (it changes bits);
its time is shown for scale. Writes OUT.json, OUT.md and, where matplotlib is installed, OUT.png.
"""

import argparse
import datetime
import functools
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from fos_rl.kernels import quantize_ops
from fos_rl.kernels.layouts import num_partials
from fos_rl.quant import (
    NVFP4Quantizer,
    exact_operand,
    four_over_six_quantize,
    nvfp4_dequantize,
    nvfp4_quantize,
    prepare_weight,
    quantized_linear,
)
from fos_rl.quant.backend import Backend
from tests.kernels.kernel_data import make

BF16, FP32 = torch.bfloat16, torch.float32
FORMS = {
    "tensor, amax given": {"given": True},
    "tensor": {},
    "rows": {"row_scaled": True},
    "16x16, amax given": {"block": "16x16", "given": True},
    "columns, amax given": {"columnwise": True, "given": True},
}
KINDS = (
    "normal", "heavy", "half_zeros", "zeros", "ties", "wide", "wide_blocks", "ternary", "one_hot",
    "constant",
)  # fmt: skip
SHAPES = [(m, k) for k in (576, 2048, 4096, 8192) for m in (256, 4096, 65536)]


def milliseconds(call: Callable[[], object], calls: int = 10, repeats: int = 5) -> float:
    """Device time of a call among others in the queue: nothing waits for the host. A median."""
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / calls)
    return sorted(times)[len(times) // 2]


def graph_microseconds(call: Callable[[], object], calls: int = 50) -> float:
    """Time of a call in a CUDA graph of many."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    return milliseconds(graph.replay, 1, 20) / calls * 1e3


def host_microseconds(call: Callable[[], object], calls: int = 500) -> float:
    for _ in range(20):
        call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    elapsed = time.perf_counter() - start
    torch.cuda.synchronize()
    return elapsed / calls * 1e6


def normal(shape: tuple[int, int], dtype: torch.dtype = BF16, kind: str = "normal") -> Tensor:
    return make(kind, shape, dtype, torch.Generator("cuda").manual_seed(0))


def amax_of(x: Tensor) -> Tensor:
    return x.abs().amax().float().view(1)


def quantizer(x: Tensor, err_mode: str, bound: int, form: dict) -> Callable[[], object]:
    given = amax_of(x) if form.get("given") else None
    rest = {name: value for name, value in form.items() if name != "given"}
    return lambda: quantize_ops.quantize(
        x, err_mode=err_mode, e4m3_scale_bound=bound, global_amax=given, **rest
    )


def four_over_six_caller(
    x: Tensor, err_mode: str, bound: int, form: dict, backend: Backend = "auto"
) -> Callable[[], object]:
    """The public function, with its checks."""
    rest = {name: value for name, value in form.items() if name != "given"}
    return functools.partial(
        four_over_six_quantize,
        x,
        err_mode=err_mode,
        e4m3_scale_bound=bound,
        global_amax=amax_of(x) if form.get("given") else None,
        backend=backend,
        **rest,
    )


def copy_bandwidth(x: Tensor) -> float:
    """Bytes a millisecond, read and written."""
    target = torch.empty_like(x)
    return 2 * x.nbytes / milliseconds(lambda: target.copy_(x))


def bench_forms() -> list[dict]:
    """Every form at 16384 x 8192, with the eager reference for bf16."""
    return [*_forms_of(BF16), *_forms_of(FP32)]


def _forms_of(dtype: torch.dtype) -> list[dict]:
    x = normal((16384, 8192), dtype)
    bandwidth = copy_bandwidth(x)
    out_bytes = x.numel() * 9 // 16
    rows: list[dict] = []

    def add(what: str, error: str, moved: float, ms: float, eager: float | None = None) -> None:
        rows.append(
            {
                "form": what,
                "dtype": str(dtype)[6:],
                "error": error,
                "ms": ms,
                "share": moved / ms / bandwidth,
                "over_eager": eager and eager / ms,
            }
        )

    add("copy", "", 2 * x.nbytes, 2 * x.nbytes / bandwidth)
    amax_pass = quantize_ops.amax_launcher(x.device, dtype)
    sms = torch.cuda.get_device_properties(x.device).multi_processor_count
    room = torch.empty(1 + num_partials(x.nbytes, 1, sms), device="cuda")
    add("amax pass", "", x.nbytes, milliseconds(lambda: amax_pass(x, room, 1)))
    for name, form in FORMS.items():
        for err_mode, bound in (("mae", 448), ("mse", 256)):
            ms = milliseconds(quantizer(x, err_mode, bound, form))
            reference = four_over_six_caller(x, err_mode, bound, form, "reference")
            eager = milliseconds(reference, 1, 3)
            add(name, f"{err_mode} {bound}", x.nbytes + out_bytes, ms, eager)
    given = amax_of(x)
    standard = milliseconds(
        lambda: quantize_ops.quantize(x, "nvfp4", e4m3_scale_bound=448, global_amax=given)
    )
    add("standard NVFP4, amax given", "", x.nbytes + out_bytes, standard)
    operand = milliseconds(
        lambda: quantize_ops.quantize(x, row_scaled=True, codes=False, operand=True)
    )
    add("rows to operand", "mse 256", x.nbytes + 2 * x.numel(), operand)
    if dtype == BF16:
        t = nvfp4_quantize(x)
        for what, out in (("value", BF16), ("value", FP32), ("operand", BF16)):
            call = functools.partial(
                quantize_ops.decode, t.codes, t.block_scale, t.global_amax, 448, out, what
            )
            decode = exact_operand if what == "operand" else nvfp4_dequantize
            eager = milliseconds(functools.partial(decode, t, out, backend="reference"), 1, 3)
            moved = out_bytes + x.numel() * out.itemsize
            add(f"decode to {what} {str(out)[6:]}", "", moved, milliseconds(call), eager)
    return rows


def bench_compiled() -> list[dict]:
    """The reference under torch.compile, which changes bits, at 4096 x 4096."""
    x = normal((4096, 4096))
    amax = amax_of(x)

    def reference(x: Tensor) -> tuple[Tensor, ...]:
        t = four_over_six_quantize(x, global_amax=amax, backend="reference")
        return t.codes, t.block_scale.view(torch.uint8)

    compiled = torch.compile(reference)
    calls = {
        "eager reference": lambda: reference(x),
        "reference under torch.compile": lambda: compiled(x),
        "kernel": lambda: quantize_ops.quantize(x, global_amax=amax),
    }
    return [{"what": what, "ms": milliseconds(call)} for what, call in calls.items()]


def bench_kinds() -> list[dict]:
    """Data kinds at 16384 x 8192 bf16, against normal data."""
    rows, base = [], {}
    for kind in KINDS:
        x = normal((16384, 8192), BF16, kind)
        for name in ("tensor, amax given", "rows", "16x16, amax given"):
            for err_mode, bound in (("mae", 256), ("mae", 448), ("mse", 256)):
                ms = milliseconds(quantizer(x, err_mode, bound, FORMS[name]))
                first = base.setdefault((name, err_mode, bound), ms)
                rows.append(
                    {
                        "kind": kind,
                        "form": name,
                        "error": f"{err_mode} {bound}",
                        "ms": ms,
                        "over_normal": ms / first,
                    }
                )
    return rows


def bench_shapes() -> list[dict]:
    rows = []
    for shape in SHAPES:
        x = normal(shape)
        bandwidth = copy_bandwidth(x)
        for name in ("tensor, amax given", "rows", "16x16, amax given"):
            call = quantizer(x, "mse", 256, FORMS[name])
            large = x.numel() >= 2**24
            ms = milliseconds(call) if large else graph_microseconds(call) / 1e3
            share = (x.nbytes + x.numel() * 9 / 16) / ms / bandwidth
            rows.append(
                {"rows": shape[0], "cols": shape[1], "form": name, "ms": ms, "share": share}
            )
    return rows


def bench_small() -> list[dict]:
    """Decode shapes in a CUDA graph, beside the least a kernel takes and a strided copy, and the
    host's time."""
    one = torch.zeros(1, device="cuda")
    floor, host_floor = (f(lambda: one.add_(1)) for f in (graph_microseconds, host_microseconds))
    rows = [{"form": "one-element add", "us": floor, "host_us": host_floor}]
    for m in (1, 16, 64):
        for k in (576, 4096, 8192):
            rows += _small_of(normal((m, k)))
    return [{**row, "over_floor": row["us"] / floor} for row in rows]


def _small_of(x: Tensor) -> list[dict]:
    m, k = x.shape
    half = torch.empty(m, k // 2, dtype=torch.uint8, device="cuda")
    copy = graph_microseconds(lambda: half.copy_(x.view(torch.uint8)[:, ::4]))
    rows = []
    for name in ("tensor, amax given", "tensor", "rows"):
        form = FORMS[name]
        call = quantizer(x, "mse", 256, form)
        public = four_over_six_caller(x, "mse", 256, form)
        rows.append(
            {
                "form": name,
                "rows": m,
                "cols": k,
                "us": graph_microseconds(call),
                "copy_us": copy,
                "host_us": host_microseconds(call),
                "public_host_us": host_microseconds(public),
            }
        )
    return rows


def bench_linear() -> list[dict]:
    """Forward, and forward with backward, of a quantized linear against a bf16 one."""
    return [row for err_mode in ("mae", "mse") for row in _linear_of(err_mode)]


def _linear_of(err_mode: str) -> list[dict]:
    x = normal((8192, 4096)).requires_grad_()
    w = (normal((4096, 4096)) * 0.02).requires_grad_()
    dy = normal((8192, 4096), BF16, "heavy")
    quantizer = NVFP4Quantizer("four_over_six", err_mode=err_mode)
    prepared = prepare_weight(w, quantizer)

    def quantized() -> Tensor:
        return quantized_linear(
            x, w, quantizer=quantizer, backward="dequantized", quantized_weight=prepared
        )

    def plain() -> Tensor:
        return x @ w.t()

    def both(forward: Callable[[], Tensor]) -> None:
        torch.autograd.grad(forward(), (x, w), dy)

    with torch.no_grad():
        times = [milliseconds(quantized), milliseconds(plain)]
    times += [milliseconds(lambda: both(quantized)), milliseconds(lambda: both(plain))]
    return [
        {"what": what, "error": err_mode, "ms": ours, "bf16_ms": bf16, "ratio": ours / bf16}
        for what, ours, bf16 in (
            ("forward", *times[:2]),
            ("forward and backward", *times[2:]),
        )
    ]


PARTS = {
    "forms": bench_forms,
    "compiled": bench_compiled,
    "kinds": bench_kinds,
    "shapes": bench_shapes,
    "small": bench_small,
    "linear": bench_linear,
}


def table(rows: list[dict]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row))

    def cell(value: object) -> str:
        return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)

    lines = [names, ["---"] * len(names), *([cell(row.get(n)) for n in names] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def plot(results: dict[str, list[dict]], path: Path) -> None:
    """Share of the copy bandwidth of the bf16 forms."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [r for r in results["forms"] if r["dtype"] == "bfloat16" and r["form"] != "copy"]
    figure, axes = pyplot.subplots(figsize=(8, 5))
    axes.barh([f"{r['form']} {r['error']}" for r in rows], [100 * r["share"] for r in rows])
    axes.invert_yaxis()
    axes.set_xlabel("% of the copy bandwidth, 16384 x 8192 bf16")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip
    about = {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "driver": driver,
        "torch": torch.__version__,
        "command": " ".join(["python -m benchmarks.quantize", *sys.argv[1:]]),
    }
    results: dict[str, list[dict]] = {}
    text = " · ".join(f"{name} {value}" for name, value in about.items()) + "\n"
    for part in arguments.only:
        results[part] = PARTS[part]()
        section = f"\n## {part}\n\n{table(results[part])}\n"
        print(section, flush=True)
        text += section
    if arguments.out:
        arguments.out.with_suffix(".json").write_text(json.dumps({**about, **results}, indent=1))
        arguments.out.with_suffix(".md").write_text(f"# benchmarks/quantize.py\n\n{text}")
        try:
            plot(results, arguments.out.with_suffix(".png"))
        except (ImportError, KeyError) as reason:
            print(f"no plot: {reason!r}")


if __name__ == "__main__":
    main()
