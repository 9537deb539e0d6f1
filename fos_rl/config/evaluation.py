"""What `fos-rl eval` evaluates, as a run's settings. No torch import."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from fos_rl.config import OUTDATED_MODEL, RunConfig, load_config, resolve_config, run_config_file
from fos_rl.spec import Bf16, Precision


def is_run(model: str) -> bool:
    """Whether a path is a run folder rather than a model's."""
    return (Path(model) / "metrics.jsonl").is_file()


def eval_config(
    model: str,
    *,
    sets: Sequence[str],
    samples: int,
    greedy: bool,
    overrides: Sequence[str] = (),
    recipe: str | None = None,
) -> RunConfig:
    """The settings under which a model is evaluated: a run's own, with its trained model, or the
    defaults; then the recipe and the overrides.

    Raises:
        ValueError: as `load_config`; and for a run that has written no model.
    """
    folder = Path(model) / "model" if is_run(model) else Path(model)
    if is_run(model) and not folder.is_dir():
        raise ValueError(
            f"{model} has no trained model yet, which a run writes at its end; continue it "
            f"(fos-rl resume {model}), or give a model's folder"
        )
    if is_run(model) and (Path(model) / OUTDATED_MODEL).exists():
        raise ValueError(
            f"{model} has continued since its model was written (fos-rl resume); let it finish, or "
            f"give {folder} to evaluate the earlier one"
        )
    settings = [
        f"model.path={json.dumps(str(folder) if is_run(model) else model)}",
        f"eval.sets={json.dumps(list(sets))}",
        f"eval.samples={samples}",
        f"eval.greedy={json.dumps(greedy)}",
        *overrides,
    ]
    if is_run(model):
        return load_config(run_config_file(Path(model)), settings, recipe)
    # No prompts are drawn from `data`, which a run cannot be without.
    tree = {"model": {}, "data": {"type": "vowels"}, "rollout": {"max_new_tokens": 1024}}
    return resolve_config(tree, settings, recipe)


def eval_precisions(config: RunConfig, which: Literal["arm", "bf16", "both"]) -> list[Precision]:
    """The config's own precision, bf16 with its compute dtype, or both where they differ."""
    own = config.model.precision
    plain = Bf16(compute_dtype=own.compute_dtype)
    return {"arm": [own], "bf16": [plain], "both": [own] if own == plain else [own, plain]}[which]
