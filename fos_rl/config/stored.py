"""Configs that an earlier version wrote into run folders and checkpoints, as this version reads
them. A user's own file is not translated: its error says what to write."""

from pathlib import Path
from typing import Any

RENAMED = {f"{side}.num_gpus": f"{side}.device" for side in ("trainer", "generator")}
"""Settings of earlier versions by dotted name, and what they are called now."""


def is_stored(file: Path) -> bool:
    """Whether a run wrote this file, which is beside the description of where it ran."""
    return file.name == "config.toml" and (file.parent / "environment.json").is_file()


def translate_stored(tree: dict[str, Any]) -> dict[str, Any]:
    """The tree of a stored config under today's names; of one written today, the same.

    Example: {"trainer": {"num_gpus": 0}} is {"trainer": {"device": "cpu"}}.
    """
    translated = dict(tree)
    for old, new in RENAMED.items():
        section, key = old.split(".")
        values = translated.get(section)
        if isinstance(values, dict) and key in values:
            rest = {name: value for name, value in values.items() if name != key}
            translated[section] = {new.split(".")[1]: device_of(values[key]), **rest}
    return translated


def device_of(num_gpus: object) -> str:
    """What the old number of GPUs, or "auto", is as a device."""
    return {0: "cpu", 1: "cuda"}.get(num_gpus, "auto") if isinstance(num_gpus, int) else "auto"
