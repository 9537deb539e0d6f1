"""Plain next-token training of a small Llama in four-over-six and in bf16, losses side by side.

    python experiments/sft_parity/run.py                 every arm and seed, then the report

50 steps of AdamW on bytes of GSM8K; a published run of this kind ends at 2.881 in four-over-six and
2.880 in bf16. Arms of one seed begin with the same weights and see the same bytes, so that their
losses can be subtracted step by step. Writes results.json, results.md and losses.svg beside this
file.

gsm8k_train_1000.jsonl holds the first 1,000 rows of GSM8K's train split (openai/grade-school-math,
MIT).
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fos_rl.compare.statistics import t_quantile
from fos_rl.model.convert import build_decoder, compute_dtype
from fos_rl.model.decoder import Decoder
from fos_rl.model.packed_attention import PackedSequences, packed_attention
from fos_rl.quant.quantizers import Backward
from fos_rl.run_folder.folder import describe_environment
from fos_rl.spec import Architecture, Bf16, ComputeDtype, FourOverSix, ModelSpec, Precision
from fos_rl.trainer.masters import Masters

HERE = Path(__file__).parent
SEQUENCES, LENGTH, WARMUP_STEPS = 8, 256, 5
LEARNING_RATE = 2e-3
ARCHITECTURE = Architecture(
    family="llama",
    vocab_size=256,
    hidden_size=256,
    intermediate_size=768,
    num_layers=6,
    num_heads=8,
    num_kv_heads=4,
    head_dim=32,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    max_position_embeddings=LENGTH,
)


def arms(dtype: ComputeDtype) -> dict[str, tuple[Precision, Backward | None]]:
    per_tensor = FourOverSix(compute_dtype=dtype, row_scaled_activation=False)
    row_scaled = FourOverSix(compute_dtype=dtype)
    return {
        "bf16": (Bf16(compute_dtype=dtype), None),
        "four_over_six, quantized backward": (per_tensor, "quantized"),
        "four_over_six, high_precision backward": (row_scaled, "high_precision"),
        "four_over_six, dequantized backward": (row_scaled, "dequantized"),
    }


def read_bytes() -> Tensor:
    """The corpus, as one row of byte ids."""
    rows = (HERE / "gsm8k_train_1000.jsonl").read_text().splitlines()
    texts = [f"{row['question']}\n{row['answer']}\n\n" for row in map(json.loads, rows)]
    return torch.frombuffer(bytearray("".join(texts).encode()), dtype=torch.uint8).long()


def batches(corpus: Tensor, steps: int, seed: int) -> Iterator[Tensor]:
    """[SEQUENCES, LENGTH + 1] bytes per step, the same for every arm of a seed."""
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        starts = rng.integers(0, len(corpus) - LENGTH - 1, SEQUENCES)
        yield torch.stack([corpus[start : start + LENGTH + 1] for start in starts])


def random_decoder(
    precision: Precision, backward: Backward | None, seed: int, device: torch.device
) -> tuple[Decoder, Masters]:
    spec = ModelSpec(architecture=ARCHITECTURE, precision=precision)
    attention = packed_attention(PackedSequences([LENGTH] * SEQUENCES))
    with torch.device(device):
        decoder = build_decoder(spec, attention, backward).to(torch.float32)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in decoder.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.ones_(parameter)
            continue
        residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        scale = 0.02 / (2 * ARCHITECTURE.num_layers) ** 0.5 if residual else 0.02
        noise = torch.randn(parameter.shape, generator=generator) * scale
        parameter.data.copy_(noise)
    return decoder, Masters(decoder, compute_dtype(spec))


def train(
    arm: str, dtype: ComputeDtype, steps: int, seed: int, device: torch.device
) -> list[float]:
    """The loss of every step, in nats per byte, before the step's update."""
    precision, backward = arms(dtype)[arm]
    decoder, masters = random_decoder(precision, backward, seed, device)
    optimizer = torch.optim.AdamW(list(masters), lr=LEARNING_RATE, betas=(0.9, 0.95))
    positions = torch.arange(LENGTH, device=device).repeat(SEQUENCES)
    losses = []
    for step, batch in enumerate(batches(read_bytes(), steps, seed)):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / WARMUP_STEPS)
        batch = batch.to(device)
        hidden = decoder(batch[:, :-1].reshape(-1), positions)
        loss = F.cross_entropy(decoder.logits(hidden), batch[:, 1:].reshape(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(masters), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        masters.publish()
        losses.append(float(loss.detach()))
    return losses


def report(results: dict[str, Any]) -> str:
    """A table of final losses and of paired differences to bf16, in Markdown."""
    losses = {arm: np.array(runs) for arm, runs in results["losses"].items()}  # [seeds, steps]
    baseline = losses["bf16"][:, -10:].mean(1)
    lines = [
        "# Next-token training, four-over-six against bf16",
        "",
        f"{results['steps']} steps, seeds {results['seeds']}, {results['tokens_per_step']} bytes "
        f"per step, {results['parameters'] / 1e6:.1f} M parameters; "
        f"{results['environment']['device']}"
        f", {results['compute_dtype']} activations, {results['environment']['started'][:10]}. "
        f"`python experiments/sft_parity/run.py`",
        "",
        "Loss in nats per byte. The difference is taken seed by seed over the last 10 steps; its",
        "interval is the 95 % t interval over seeds.",
        "",
        "| arm | loss, last step | loss, last 10 steps | minus bf16 | seconds per step |",
        "| --- | --- | --- | --- | --- |",
    ]
    for arm, values in losses.items():
        last = values[:, -10:].mean(1)
        difference = last - baseline
        shown = "" if arm == "bf16" else f"{difference.mean():+.4f} +- {_half_width(difference)}"
        seconds = np.mean(results["seconds"][arm]) / results["steps"]
        lines.append(
            f"| {arm} | {values[:, -1].mean():.3f} | {last.mean():.3f} | {shown} | {seconds:.2f} |"
        )
    return "\n".join([*lines, "", "![losses](losses.svg)", ""])


def _half_width(values: np.ndarray) -> str:
    """Of the 95 % t interval of their mean; unknown for one value."""
    n = len(values)
    return f"{t_quantile(n - 1) * values.std(ddof=1) / n**0.5:.4f}" if n > 1 else "?"


def plot(results: dict[str, Any], file: Path) -> None:
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "fos_rl"
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    losses = {arm: np.array(runs) for arm, runs in results["losses"].items()}
    for arm, values in losses.items():
        left.plot(values.mean(0), label=arm)
        if arm != "bf16":
            right.plot((values - losses["bf16"]).mean(0), label=arm)
    left.set(title="Training loss, mean of seeds", xlabel="step", ylabel="nats per byte")
    right.set(title="Difference to bf16, same seed", xlabel="step", ylabel="nats per byte")
    right.axhline(0, color="black", linewidth=0.8)
    left.legend()
    figure.savefig(file, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=HERE, metavar="DIR")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # A CPU without bf16 instructions emulates them; weights are bf16-rounded all the same.
    dtype: ComputeDtype = "bfloat16" if device.type == "cuda" else "float32"
    decoder, _ = random_decoder(Bf16(compute_dtype=dtype), None, 0, device)
    environment = describe_environment()
    # The folder it writes to says nothing to a reader of the results.
    del environment["command"]
    results: dict[str, Any] = {
        "environment": environment,
        "compute_dtype": dtype,
        "steps": args.steps,
        "seeds": args.seeds,
        "tokens_per_step": SEQUENCES * LENGTH,
        "parameters": sum(p.numel() for p in decoder.parameters()),
        "losses": {},
        "seconds": {},
    }
    args.out.mkdir(parents=True, exist_ok=True)
    for arm in arms(dtype):
        for seed in args.seeds:
            start = time.perf_counter()
            losses = train(arm, dtype, args.steps, seed, device)
            seconds = time.perf_counter() - start
            results["losses"].setdefault(arm, []).append(losses)
            results["seconds"].setdefault(arm, []).append(seconds)
            print(f"{arm}, seed {seed}: {losses[-1]:.3f} in {seconds:.0f} s", file=sys.stderr)
    results["finished"] = datetime.now(UTC).isoformat(timespec="seconds")
    (args.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    (args.out / "results.md").write_text(report(results))
    plot(results, args.out / "losses.svg")
    print(report(results))


if __name__ == "__main__":
    main()
