"""What `fos-rl parity` prints."""

from collections import defaultdict

from rich.console import Console
from rich.table import Table

from fos_rl.diagnose.operations import COLUMNS
from fos_rl.diagnose.parity import OperationDifference, Parity
from fos_rl.spec import Precision

# Mean absolute log-prob difference that other projects report in public.
NORMAL = {
    "bf16": "0.005 to 0.02",
    "mxfp8": "about 0.025",
    "nvfp4": "0.03 to 0.05 (reported for four-over-six)",
    "nvfp4_four_over_six": "0.03 to 0.05",
}
_MEAN = "mismatch/log_prob_abs_diff/mean"


def print_parity(console: Console, parity: Parity, precision: Precision) -> None:
    """The verdict last, where a terminal shows it."""
    console.print(f"{parity.tokens} tokens through trainer and generator, {parity.sampled} sampled")
    for what, names in (
        ("weights", parity.weights_that_differ),
        ("weight codes", parity.codes_that_differ),
    ):
        console.print(f"{what:13} {'equal' if not names else 'differ: ' + ', '.join(names[:8])}")
    console.print("|trainer - generator| in place, mean over max; * computes something else")
    console.print(_operation_table(parity.operations))
    outside = [op for op in parity.operations if op.name.count(".") == 0]
    for op in outside:
        console.print(f"{op.name:13} mean {op.mean:.1e}  max {op.max:.1e}")
    console.print(f"{'log_softmax':13} max {parity.log_softmax_max:.1e} given the same logits")
    if parity.flipped_codes:
        console.print("activation codes and scales that differ, of a million, by what they enter")
        console.print(_flip_table(parity))
    for name, share in parity.routing_flips.items():
        console.print(f"{name.removeprefix('mismatch/'):32} {share:.2%}")
    _print_log_probs(console, parity, precision)
    for line in verdict(parity):
        console.print(line, style="bold", soft_wrap=True)


def verdict(parity: Parity) -> list[str]:
    """Where the difference begins, and whether an operation computes something else."""
    first, culprit = parity.first_difference, parity.culprit
    if first is None:
        return ["the two forwards are equal to the last bit"]
    lines = [f"first difference  {first.name}: max {first.max:.1e}"]
    if culprit is None:
        worst = max(parity.operations, key=lambda op: op.same_input_max)
        lines.append(
            "cause             rounding: given the same input, no operation differs by more than "
            f"its additions' order explains (most: {worst.name}, {worst.same_input_max:.1e})"
        )
        return lines
    lines.append(
        f"cause             {culprit.name} computes something else: max "
        f"{culprit.same_input_max:.1e} given the same input, {culprit.units:.0f} times eps"
    )
    others = [op.name for op in parity.operations if op.computes_other and op is not culprit]
    if others:
        more = f" and {len(others) - 4} more" if len(others) > 4 else ""
        lines.append(f"                  so do {', '.join(others[:4])}{more}")
    if parity.weights_that_differ:
        lines.append(f"                  its weight: {', '.join(parity.weights_that_differ[:4])}")
    return lines


def _operation_table(operations: list[OperationDifference]) -> Table:
    """A row per layer, a column per operation; a cell is mean over max of the in-place
    difference."""
    layers: dict[str, dict[str, OperationDifference]] = defaultdict(dict)
    for op in operations:
        if op.name.startswith("layers."):
            _, number, name = op.name.split(".")
            layers[number][name] = op
    columns = [name for name in COLUMNS if any(name in layer for layer in layers.values())]
    table = Table("layer")
    for name in columns:
        table.add_column(_SHORT.get(name, name.removesuffix("_proj")), justify="right")
    for number, ops in layers.items():
        table.add_row(number, *(_cell(ops.get(name)) for name in columns))
    return table


_SHORT = {
    "input_layernorm": "norm",
    "post_attention_layernorm": "norm",
    "attention": "attn",
    "rope_q": "q rope",
    "rope_k": "k rope",
    "q_norm": "q norm",
    "k_norm": "k norm",
}


def _cell(op: OperationDifference | None) -> str:
    if op is None:
        return ""
    mark = "*" if op.computes_other else ""
    return "0" if op.max == 0 else f"{op.mean:.0e}\n{op.max:.0e}{mark}"


def _flip_table(parity: Parity) -> Table:
    """Flips per million elements, a row per layer."""
    layers: dict[str, dict[str, str]] = defaultdict(dict)
    for site, (flipped, of) in parity.flipped_codes.items():
        _, number, name = site.split(".")
        layers[number][name] = f"{1e6 * flipped / of:.0f}"
    columns = list(dict.fromkeys(name for sites in layers.values() for name in sites))
    table = Table("layer", *columns)
    for number, sites in layers.items():
        table.add_row(number, *(sites.get(name, "") for name in columns))
    return table


def _print_log_probs(console: Console, parity: Parity, precision: Precision) -> None:
    d = parity.sampled_differences
    if _MEAN in d:
        of = "mismatch/log_prob_abs_diff/"
        values = "  ".join(f"{name} {d[of + name]:.2e}" for name in ("mean", "p99", "max"))
        console.print(f"log-probs     {values}  (trainer against the sampling)")
    if share := d.get("mismatch/non_finite_frac"):
        console.print(f"              {share:.2%} of the tokens are not finite")
    console.print(
        f"              mean {parity.prefill_mean:.2e} against the generator's prefill; "
        f"{parity.decode_mean:.2e} between its prefill and its decode"
    )
    console.print(f"KL            {parity.full_vocabulary_kl:.1e} nats, whole vocabulary")
    if precision.compute_dtype == "float32":
        normal = "with float32 activations the noise is near 1e-6, more where codes flip"
    else:
        normal = f"reported in public for {precision.recipe}: {NORMAL[precision.recipe]}"
    console.print(f"normal        {normal}; above 0.1, unless the cause below is")
    console.print("              rounding, look for weights, temperature or template")
