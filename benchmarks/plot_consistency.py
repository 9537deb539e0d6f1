"""The picture of results/consistency_h200.json: mismatch and its noise floor, for every precision.

python -m benchmarks.plot_consistency
"""

import json

import matplotlib

from benchmarks.quantized_linear import RESULTS

NAMES = {"bf16": "bf16", "mxfp8": "MXFP8", "nvfp4": "NVFP4", "four_over_six": "four-over-six"}
MODELS = {"SmolLM2-135M-Instruct": "SmolLM2-135M", "SmolLM2-8x135M": "mixture of 8 experts"}


def main() -> None:
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "fos_rl"
    import matplotlib.pyplot as plt

    rows = json.loads((RESULTS / "consistency_h200.json").read_text())["consistency"]
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True, layout="constrained")
    for axis, (model, title) in zip(axes, MODELS.items(), strict=True):
        fast = [r for r in rows if r["model"] == model and r["consistency"] == "fast"]
        places = range(len(fast))
        floors = [r["floor"] for r in fast]
        axis.bar([p - 0.2 for p in places], [r["mean"] for r in fast], 0.4, label="trainer - vLLM")
        axis.bar([p + 0.2 for p in places], floors, 0.4, color="0.7", label="vLLM - vLLM")
        axis.set_xticks(places, [NAMES[r["recipe"]] for r in fast])
        axis.set(title=f"{title} (exact mode: 0)", yscale="log")
    axes[0].set_ylabel("mean |log-prob difference|")
    axes[0].legend(loc="upper left")
    figure.savefig(RESULTS / "consistency_h200.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
