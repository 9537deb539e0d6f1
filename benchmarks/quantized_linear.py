"""Time forward and backward of a quantized linear against a bf16 linear.

    python benchmarks/quantized_linear.py

Prints a table and writes benchmarks/results/quantized_linear_<device type>.json. The best of
several runs counts: other processes only ever add time.
"""

import argparse
import datetime
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch

from fos_rl.quant import (
    MXFP8Quantizer,
    NVFP4Quantizer,
    four_over_six_quantize,
    mxfp8_quantize,
    nvfp4_dequantize,
    nvfp4_quantize,
    prepare_weight,
    quantized_linear,
)

M, K, N = 512, 1024, 1024
RESULTS = Path(__file__).resolve().parent / "results"


def best_ms(function: Callable[[], object], device: torch.device, repeats: int) -> float:
    best = float("inf")
    for repeat in range(repeats + 1):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize()
        # The first run warms caches and lazy initialisation.
        if repeat:
            best = min(best, time.perf_counter() - start)
    return best * 1e3


def describe(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = (line.split(":", 1) for line in cpuinfo.read_text().splitlines() if ":" in line)
        model = next((value.strip() for key, value in lines if key.startswith("model name")), model)
    return (
        f"{model}, {torch.get_num_threads()} thread(s), {torch.backends.cpu.get_cpu_capability()}"
    )


def linear_rows(device: torch.device, repeats: int) -> list[dict[str, object]]:
    generator = torch.Generator().manual_seed(0)
    x, w, dy = (
        torch.randn(shape, generator=generator).to(device, torch.bfloat16)
        for shape in ((M, K), (N, K), (M, N))
    )
    x.requires_grad_()
    w.requires_grad_()

    def both(forward: Callable[[], torch.Tensor]) -> float:
        return best_ms(lambda: torch.autograd.grad(forward(), (x, w), dy), device, repeats)

    bf16 = both(lambda: torch.nn.functional.linear(x, w))
    rows: list[dict[str, object]] = [{"name": "bf16", "ms": bf16, "times_bf16": 1.0}]

    def fp32() -> object:
        leaves = x.detach().float().requires_grad_(), w.detach().float().requires_grad_()
        return torch.autograd.grad(torch.nn.functional.linear(*leaves), leaves, dy.float())

    ms = best_ms(fp32, device, repeats)
    rows.append({"name": "fp32", "ms": ms, "times_bf16": ms / bf16})
    quantizers = {
        "four_over_six row-scaled": NVFP4Quantizer("four_over_six"),
        "four_over_six per tensor": NVFP4Quantizer("four_over_six", row_scaled_activation=False),
        "nvfp4 per tensor": NVFP4Quantizer("nvfp4", row_scaled_activation=False),
        "mxfp8": MXFP8Quantizer(),
    }
    for name, quantizer in quantizers.items():
        for mode in ("quantized", "high_precision", "dequantized"):
            if mode == "quantized" and quantizer.row_scaled_activation:
                continue
            prepared = prepare_weight(w, quantizer, columnwise=mode == "quantized")
            for kind, weight in (("", None), (", prepared weight", prepared)):
                ms = both(
                    lambda r=quantizer, m=mode, q=weight: quantized_linear(
                        x, w, quantizer=r, backward=m, quantized_weight=q
                    )
                )
                row = {"name": f"{name}, {mode}{kind}", "ms": ms, "times_bf16": ms / bf16}
                rows.append(row)
    return rows


def quantizer_rows(device: torch.device, repeats: int) -> list[dict[str, object]]:
    w = torch.randn(N, K, generator=torch.Generator().manual_seed(1)).to(device, torch.bfloat16)
    packed = four_over_six_quantize(w)
    functions = {
        "four_over_six_quantize 1x16": lambda: four_over_six_quantize(w),
        "four_over_six_quantize 16x16": lambda: four_over_six_quantize(w, "16x16"),
        "nvfp4_quantize": lambda: nvfp4_quantize(w),
        "mxfp8_quantize": lambda: mxfp8_quantize(w),
        "nvfp4_dequantize to bf16": lambda: nvfp4_dequantize(packed, torch.bfloat16),
    }
    rows: list[dict[str, object]] = []
    for name, function in functions.items():
        ms = best_ms(function, device, repeats)
        rows.append(
            {"name": f"{name} [{N}, {K}]", "ms": ms, "ns_per_element": ms * 1e6 / w.numel()}
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="folder of the JSON file", default=RESULTS)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    torch.set_num_threads(arguments.threads)
    linears = linear_rows(device, arguments.repeats)
    quantizers = quantizer_rows(device, arguments.repeats)
    print(f"{describe(device)}, torch {torch.__version__}")
    print(f"\nforward + backward, M {M}, K {K}, N {N}, bf16\n")
    for row in linears:
        print(f"{row['name']:<58}{row['ms']:>10.2f} ms{row['times_bf16']:>8.2f}x")
    print()
    for row in quantizers:
        print(f"{row['name']:<58}{row['ms']:>10.2f} ms{row['ns_per_element']:>8.1f} ns/element")
    result = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": describe(device),
        "torch": torch.__version__,
        "command": f"python benchmarks/quantized_linear.py --device {arguments.device} "
        f"--threads {arguments.threads} --repeats {arguments.repeats}",
        "shape": {"M": M, "K": K, "N": N},
        "forward_and_backward": linears,
        "quantizers": quantizers,
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"quantized_linear_{device.type}.json"
    path.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
