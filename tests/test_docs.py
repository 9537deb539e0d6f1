"""The documentation's links lead somewhere, and what the CPU tutorial shows is what is printed."""

import re
from pathlib import Path

import pytest

from fos_rl import quant
from fos_rl.cli import main

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("experiments/*/*.md")])
TUTORIAL = (ROOT / "docs" / "tutorial_cpu.md").read_text()


def anchors(page: Path) -> set[str]:
    """Those that GitHub gives the headings of a page: words in lower case, joined by hyphens."""
    headings = re.findall(r"^#+ (.*)", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{link}: there is no {target}"
        if anchor:
            assert anchor in anchors(target), f"{link}: {target.name} has no such heading"


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    for page in ROOT.glob("docs/*.md"):
        assert page.name == "index.md" or f"]({page.name}" in index, page.name


def block(after: str) -> str:
    """The fenced block that follows these words of the tutorial."""
    return TUTORIAL.split(after, 1)[1].split("```", 2)[1].partition("\n")[2]


def test_the_example_of_the_quantization_functions(capsys) -> None:
    page = (ROOT / "docs" / "quant_api.md").read_text()
    code, printed = re.findall(r"```(?:python)?\n(.*?)```", page, re.DOTALL)
    exec(code, {})
    assert capsys.readouterr().out == printed


def test_the_page_of_the_quantization_functions_has_all() -> None:
    page = (ROOT / "docs" / "quant_api.md").read_text()
    entry_points = [name for name in quant.__all__ if name.endswith(("_linear", "_mm", "quantize"))]
    assert [name for name in entry_points if f"`{name}" not in page] == []


def shown(text: str) -> list[str]:
    return [line for line in text.splitlines() if line != "..."]


def test_the_tutorials_dry_run(capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "tiny_moe", "--dry-run"]) == 0
    assert set(shown(block("starts nothing:"))) <= set(capsys.readouterr().out.splitlines())


def test_the_tutorials_own_problems(
    capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("problems.jsonl").write_text(block("`problems.jsonl`, one object per line"))
    Path("mine.toml").write_text(block("`mine.toml`:"))
    assert main(["train", "mine.toml", "--dry-run"]) == 0
    assert set(shown(block("as the model gets it:"))) <= set(capsys.readouterr().out.splitlines())
    assert main(["train", "mine.toml", "--dry-run", "--set", "data.prompt_column=qestion"]) == 2
    assert capsys.readouterr().err.splitlines() == shown(block('with `prompt_column = "qestion"`:'))
