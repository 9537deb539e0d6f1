"""Which settings `fos-rl resume --set` may change, and why the others may not. No torch import.

What a run learns, and from which samples, is what it is a run of: its figures would be one run's by
name and two runs' in fact. How far, how fast, where and with how much memory it continues may
change. Every field of RunConfig is below one of these names; a test checks it.
"""

from typing import Any

from fos_rl.config import RunConfig
from fos_rl.config.study import config_differences

_PACE = "how fast it learns, from the next update on"
_PLACE = "where it runs, and with how much memory"
_LOSS = "it is the loss that the run is a run of"

MAY_CHANGE = {
    "steps": "how far the run goes",
    "reward.workers": "processes that verify",
    "reward.timeout_s": "how long they may take for an answer",
    "reward.batch_timeout_s": "how long they may take for a step's slow answers",
    "algorithm.max_zero_variance_steps": "when a run without a signal is given up",
    "trainer.lr": _PACE,
    "trainer.eps": _PACE,
    "trainer.weight_decay": _PACE,
    "trainer.warmup_steps": _PACE,
    "trainer.max_grad_norm": _PACE,
    "trainer.max_nonfinite_updates": "when a run with broken gradients is given up",
    "trainer.microbatch_tokens": _PLACE,
    "trainer.log_prob_chunk_tokens": _PLACE,
    "trainer.save_every": "how much a crash can cost",
    "trainer.device": _PLACE,
    "trainer.num_threads": _PLACE,
    "trainer.parallel": _PLACE,
    "generator": _PLACE,
    "cluster": _PLACE,
    "logging": "where else the metrics are logged",
    "eval": "what is measured beside the training",
}

REFUSED = {
    "model": "the checkpoint holds this model's weights, and every log-prob is this precision's",
    "data": "step n takes the n-th batch of this data's order",
    "seed": "prompts and samples are a function of seed and step",
    "rollout": "it decides the prompts of each step, and how their responses are sampled",
    "algorithm.type": _LOSS,
    "algorithm.clip_low": _LOSS,
    "algorithm.clip_high": _LOSS,
    "algorithm.dual_clip": _LOSS,
    "algorithm.normalize_advantages": _LOSS,
    "algorithm.aggregation": _LOSS,
    "algorithm.ratio": _LOSS,
    "algorithm.correction": _LOSS,
    "algorithm.router_replay": _LOSS,
    "algorithm.minibatches": _LOSS,
    "trainer.betas": "the optimizer's moments are averages with the earlier ones",
    "trainer.backward_override": "the gradient is part of what the run is a run of",
}


def rule_of(field: str, rules: dict[str, str]) -> str | None:
    """What one of the two tables says of a field's dotted name."""
    parts = field.split(".")
    sections = (".".join(parts[:n]) for n in range(1, len(parts) + 1))
    return next((rules[name] for name in sections if name in rules), None)


def check_resumed(before: RunConfig, now: RunConfig, run: str) -> dict[str, tuple[Any, Any]]:
    """The settings that differ, by dotted name, as (before, now); a resumed run may change each.

    Args:
        run: its folder, for the remedy.

    Raises:
        ValueError: naming each that it may not, both values, the reason and the remedy.
    """
    changes = config_differences(before, now)
    mistakes = [
        f"{name} = {shown(new)}: the run has {shown(old)}, and {rule_of(name, REFUSED)}"
        for name, (old, new) in changes.items()
        if rule_of(name, MAY_CHANGE) is None
    ]
    if not mistakes:
        return changes
    mistakes.append(
        "resume without that, and it continues as it was; or start another run from what this one "
        f"has learned: fos-rl train {run}/config.toml --set model.path={run}/model, with the "
        "changes and --out FOLDER"
    )
    raise ValueError("\n".join(mistakes))


def change_lines(changes: dict[str, tuple[Any, Any]]) -> list[str]:
    """A line per change, for the console."""
    return [
        f"{name}: {shown(old)} until now, {shown(new)} from here"
        for name, (old, new) in changes.items()
    ]


def shown(value: object) -> str:
    """A setting's value as messages show it."""
    return "unset" if value is None else repr(value)
