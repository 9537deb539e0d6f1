"""Whether the table of metrics explains what a run writes."""

import re
from collections.abc import Iterable

from fos_rl.config.metrics import METRICS


def _patterns() -> list[re.Pattern[str]]:
    """Regular expressions of the table's keys."""
    keys = [metric.key for metrics in METRICS.values() for metric in metrics]
    known: list[str] = []
    for key in keys:
        text = re.escape(key).replace(r"\{0\.\.9\}", "[0-9]").replace(r"\{0\.\.3\}", "[0-3]")
        text = re.sub(r"\\{(.*?)\\}", lambda m: "(" + m[1].replace(",", "|") + ")", text)
        text = re.sub("<(n|k)>", r"\\d+", text).replace("<set>", "[^/]+")
        known.append(text)
    above = [text for text in known if text.startswith("mismatch/") and "floor" not in text]
    floor = "mismatch/floor_(" + "|".join(text.removeprefix("mismatch/") for text in above) + ")"
    known = [text for text in known if "<any" not in text]
    return [re.compile(text) for text in [*known, floor]]


def unknown_keys(keys: Iterable[str]) -> set[str]:
    """Keys that the table does not explain."""
    return {key for key in keys if not any(p.fullmatch(key) for p in _patterns())}
