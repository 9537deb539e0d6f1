"""The published table of verdicts, and a larger one of the same kinds."""

from itertools import groupby
from pathlib import Path

import pytest

from fos_rl.rewards.verifiers import verify
from tests.rewards.verdict_tables import verdict_rows, verdict_table

DOCS = Path(__file__).parents[2] / "docs" / "verifier.md"
VARIANTS = {
    kind: list(rows)
    for kind, rows in groupby(verdict_rows("verdict_variants.jsonl"), key=lambda row: row["kind"])
}


@pytest.mark.parametrize("row", verdict_rows("verdicts.jsonl"), ids=lambda row: row["response"])
def test_the_published_table(row) -> None:
    assert verify(row["response"], row["gold"], row["finish_reason"]) == row["verdict"]


@pytest.mark.parametrize("kind", VARIANTS)
def test_more_of_each_kind(kind: str) -> None:
    wrong = [
        (row["gold"], row["response"], row["verdict"])
        for row in VARIANTS[kind]
        if verify(row["response"], row["gold"]) != row["verdict"]
    ]
    assert wrong == []


def test_the_docs_have_the_table_letter_for_letter() -> None:
    assert verdict_table() in DOCS.read_text()
