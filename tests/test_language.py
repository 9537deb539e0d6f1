"""The language of what a user reads: patterns that must not occur, each with what to write instead.

Read: README, CONTRIBUTING, CHANGELOG, docs/, configs/, and every string and comment of fos_rl,
which are its docstrings, errors, the command line's help and the meaning of settings and metrics.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Plural nouns after which "a" can only mean "per": "tokens a step".
_COUNTED = (
    "tokens|seconds|minutes|steps|responses|bytes|GiB|GB|nats|copies|problems|workers|sequences|"
    "samples|rows|columns|lines|blocks|threads|updates|experts|prompts|operations|amaxes|codes|GPUs"
)
_UNIT = (
    "token|row|step|tensor|second|layer|prompt|problem|group|response|matrix|query|arm|line|element"
)

FORBIDDEN = {
    rf"\b({_COUNTED}) an? [a-z]+": "per: 'tokens per step'",
    rf"\b(one|once|amax|factor|ratio|entry|s|min) an? ({_UNIT})\b": "per: 'one per row'",
    r"\b[Hh]osts\b": "trainer and generator, or GPUs, or machines",
    r"\b([Tt]he two|[Bb]oth|[Ee]ach|[Ee]ither|[Oo]ther|[Ii]dle|[Bb]usy) hosts?\b": "as above",
    r"\b(precision|quantized|configured|numeric) recipes?\b": (
        "precision; a recipe is a ready-made partial config file"
    ),
    r"\b(is|are|be) done for\b": "plain words",
    r"\b(is|are|was|were) told\b": "plain words: gets, is recognised by",
    r"\b(go|goes|gone|went) on (from|where|with)\b": "continue",
    r"\bat hand\b": "available",
    r"\b(is|are) no (JSON|run folder|number|object|token|multiple)\b": "is not a",
    r"behind .{1,12}'s back\b|\bmend\b": "plain words",
    r"\b(trainer|generator)\.num_gpus\b": "device = 'auto' | 'cpu' | 'cuda'",
}

# Where a pattern is right: (part of the file's path, the words that it finds).
ALLOWED = {
    ("CHANGELOG.md", "trainer.num_gpus"),
    ("CHANGELOG.md", "generator.num_gpus"),
    # A verb, and a relative clause.
    ("generator/compat.py", "samples a token"),
    ("kernels/encode.py", "blocks a warp"),
}


def _strings(text: str) -> Iterator[str]:
    """The strings of a module, implicitly joined ones as one, and its comments, by paragraph."""
    tree = ast.parse(text)
    inside = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in node.values
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(p.value if isinstance(p, ast.Constant) else "{}" for p in node.values)
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in inside
        ):
            yield node.value
    comments = [
        t
        for t in tokenize.generate_tokens(io.StringIO(text).readline)
        if t.type == tokenize.COMMENT
    ]
    yield from _paragraphs(comments)


def _paragraphs(comments: list[tokenize.TokenInfo]) -> Iterator[str]:
    words: list[str] = []
    for before, comment in zip([None, *comments], comments, strict=False):
        if before is not None and comment.start[0] != before.start[0] + 1:
            yield " ".join(words)
            words = []
        words.append(comment.string.lstrip("# "))
    yield " ".join(words)


def found(text: str) -> list[str]:
    """What is forbidden in a text, with what to write."""
    text = " ".join(text.split())
    return [
        f"{match[0]!r}: {remedy}"
        for pattern, remedy in FORBIDDEN.items()
        for match in re.finditer(pattern, text)
    ]


def _texts() -> Iterator[tuple[str, str]]:
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("configs/**/*.toml")]:
        yield str(path.relative_to(ROOT)), path.read_text()
    for path in sorted(ROOT.glob("fos_rl/**/*.py")):
        for text in _strings(path.read_text()):
            yield str(path.relative_to(ROOT)), text


def test_no_forbidden_pattern_occurs() -> None:
    wrong = {
        f"{name}: {words}": None
        for name, text in _texts()
        for words in found(text)
        if not any(part in name and f"'{right}'" in words for part, right in ALLOWED)
    }
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "text",
    [
        "about 300 tokens a step",
        "one row: two blocks\n    a row of x",
        "one amax a token",
        "once a row",
        "12 s a step",
        "Both hosts run it",
        "the idle host",
        "another quantized recipe",
        "resume goes on from it",
        "runs/x is no run folder",
        "which trainer.num_gpus says",
    ],
)
def test_each_kind_is_found(text: str) -> None:
    assert found(text)


def test_what_is_right_is_not_found() -> None:
    right = (
        "A step of 300 tokens; the rows of a batch; it needs a row; which rows each expert gets is "
        "read on the host; a recipe in configs/recipes; the weight is a token's; one of a kind"
    )
    assert found(right) == []


def test_strings_and_comments_of_a_module_are_read() -> None:
    module = '"""Doc."""\n# a comment\n# of two lines\nx = f"one {x} " "two"\n'
    assert list(_strings(module)) == ["Doc.", "one {} two", "a comment of two lines"]
