"""What `fos-rl rescore` prints."""

from rich.console import Console
from rich.table import Table

from fos_rl.diagnose.attribution import Attribution

# Hypotheses shown; the rest are worse.
ROWS = 8
_SHOWN = ("mean", "p50", "p99", "max")


def print_attribution(console: Console, found: Attribution) -> None:
    """Print how large the difference is, beside the noise, and what explains it."""
    console.print(
        f"{found.actor}'s log-probs against the configured arm: mean |d| {found.difference:.2e} "
        f"over {found.tokens} tokens (median response {found.found.typical:.2e}); kernel noise "
        f"{found.kernel_noise:.2e} ({found.noise.typical:.2e})"
    )
    if found.findings:
        table = Table("hypothesis", "what", "left, mean |d|", "explains")
        for row in found.findings[:ROWS]:
            share = f"{row.explained:.1%}" if row.explained > 0 else "nothing"
            table.add_row(row.cause, row.detail, f"{row.remaining:.2e}", share)
        console.print(table)
        if more := found.findings[ROWS:]:
            causes = ", ".join(dict.fromkeys(row.cause for row in more))
            console.print(f"also tested, and worse: {causes}", soft_wrap=True)
    for row in found.untested:
        console.print(f"not tested    {row.cause}: {row.reason}", soft_wrap=True)
    console.print(f"verdict       {found.verdict}", style="bold", soft_wrap=True)


def print_mismatches(console: Console, columns: dict[str, dict[str, float]]) -> None:
    """Statistics of several pairs of log-probs side by side."""
    table = Table("", *columns)
    names = [f"log_prob_abs_diff/{name}" for name in _SHOWN] + ["kl_k1", "kl_k3"]
    for name in [*names, "non_finite_frac"]:
        values = [metrics.get(f"mismatch/{name}") for metrics in columns.values()]
        if any(value is not None for value in values):
            table.add_row(name, *("" if v is None else f"{v:.3e}" for v in values))
    console.print(table)
