"""The rows of the verdict table, and their Markdown as docs/verifier.md has it."""

import json
from itertools import groupby
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def verdict_rows(name: str) -> list[dict[str, Any]]:
    """The rows of a file of verdicts beside this one, each whole."""
    return [{"finish_reason": "stop", **json.loads(line)} for line in (HERE / name).open("rb")]


def verdict_table() -> str:
    lines = ["| kind | gold answer | response | verdict |", "| --- | --- | --- | --- |"]
    for kind, rows in groupby(verdict_rows("verdicts.jsonl"), key=lambda row: row["kind"]):
        for row in rows:
            cut = " (cut off there)" if row["finish_reason"] != "stop" else ""
            cells = (kind, _code(row["gold"]), _code(row["response"]) + cut, str(row["verdict"]))
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _code(text: str) -> str:
    shown = text.replace("\n", "⏎").replace("|", "\\|")
    return f"`{shown}`" if shown else "(empty)"
