r"""The answer a response gives: `Answer: ...`, `#### ...`, `\boxed{...}` or `<answer>` tags."""

# Models write typographic quotes and full-width colons.
# ruff: noqa: RUF001

import re
from typing import NamedTuple

MAX_RESPONSE_CHARS = 10_000
"""Only the end of a response is read; an answer stands there."""
MAX_ANSWER_CHARS = 1_000
"""A longer answer counts as none."""
_MAX_ANSWER_LINES = 20

# Special tokens that came through as text end the line they stand on.
_SPECIAL_TOKEN = re.compile(
    r"<\|[^|<>\s]{1,40}\|>|<｜[^｜<>\s]{1,40}｜>|</?s>|<(?:eos|bos|pad|unk|end_of_turn)>"
    r"|\[(?:EOS|PAD|/?INST)\]"
)
# Tags are kept as single characters of a private use area; a line ends before each.
_TAG = re.compile(r"<(?P<end>/?)(?:final_?)?answer>", re.IGNORECASE)
_OPEN, _CLOSE = "\ue002", "\ue003"
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f]")
_MARKUP = r"[*_`#]*"
_MARKER = re.compile(
    rf"(?P<open>[\"'“‘`]?)(?<![A-Za-z])answers?\s*{_MARKUP}\s*(?:is\s*)?[:：](?P<close>[\"'”’`]?)"
    r"|答案\s*(?:是|为|為)?\s*[:：]|答案\s*(?:是|为|為)"
    # A heading of its own line needs no colon.
    rf"|^[ \t]*{_MARKUP}\s*final answer\s*{_MARKUP}[ \t]*$",
    re.IGNORECASE | re.MULTILINE,
)
_ANSWER_IS = re.compile(r"\banswer\s+(?:is|=)\s+", re.IGNORECASE)
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
# TeX boxes one digit of `\boxed 34`, its writer meant the number.
_UNBRACED = re.compile(r"[^\s{}$][^\s$]*(?:[ \t]+[-+*/^=\d\\(.][^\s$]*)*")
_HASHES = re.compile(r"^[ \t]*####(?!#)[ \t]*(?=\S)", re.MULTILINE)
# Four hashes are a heading too, if words or a numbered title follow and then more text.
_TITLE = re.compile(r"[*_`]*(?:[A-Za-z]{2}|\d+[.)]\s+[*_`]*[A-Za-z])")
# The prompts' own stand-in for an answer, when a response repeats them.
_PLACEHOLDER = re.compile(r"[\s*_`]*(?:\\boxed\s*)?[{<\[(]?\s*\$\s*answer\b", re.IGNORECASE)
_BEFORE_ANSWER = re.compile(r"[\s*_`#}]*(?:```\w*\s)?\s*")
_JOINED = re.compile(r"[\s$.]*(?:or|and|,|或|和)[\s$]*(?=[\d\\$.+-])", re.IGNORECASE)


class _Span(NamedTuple):
    """Where an answer stands, and whether something shows that it is finished."""

    start: int
    end: int
    closed: bool


def find_answer(response: str, *, complete: bool = True) -> str | None:
    r"""The text of the last answer in a response, or None.

    An answer is what follows `Answer:` (any case, in bold, as `Final Answer:` or in Chinese) up to
    the end of that line, or the next line with text if that line is empty; what follows `####` at
    the start of a line; the content of `\boxed{...}` or of `<answer>...</answer>`. The last of them
    counts, whichever kind it is; if nothing is in it, there is no answer. When there is none of
    them, a last line that says "the answer is ..." counts. The prompts' own `Answer: $Answer` and
    a quoted "Answer:" are not answers; neither is anything before a closing `</think>`.

    `complete=False` says that the response was cut off: its last answer then counts only if a line
    break, a closing bracket or a closing tag shows that it was finished.

    Example: "Answer: 12\nNo.\n**Answer:** $34$" gives "$34$".
    """
    text = _CONTROL.sub("", response[-MAX_RESPONSE_CHARS:])
    text = _SPECIAL_TOKEN.sub("\n", text.rpartition("</think>")[2])
    text = _TAG.sub(lambda tag: f"\n{_CLOSE}" if tag["end"] else _OPEN, text)
    span = _last_answer(text)
    if span is None or not (complete or span.closed):
        return None
    answer = text[span.start : span.end].replace(_OPEN, " ").strip()
    return answer if 0 < len(answer) <= MAX_ANSWER_CHARS else None


def _last_answer(text: str) -> _Span | None:
    found = [_marked(text), _tagged(text), _after_hashes(text)]
    span = max((s for s in found if s is not None), default=None)
    boxes = [m for m in _BOX.finditer(text) if not _PLACEHOLDER.match(text, m.end())]
    # A box on the marked line is part of that answer, one in tags is the answer.
    if boxes and (span is None or boxes[-1].start() >= span.end or text[span.start - 1] == _OPEN):
        box = _boxed(text, boxes[-1])
        return box if span is None else max(span, box)
    if span is None:
        line = text.rstrip().rfind("\n") + 1
        says = list(_ANSWER_IS.finditer(text, line))
        return _segment(text, says[-1].end()) if says else None
    return span


def _marked(text: str) -> _Span | None:
    """What follows the last `Answer:`."""
    markers = [
        match.end()
        for match in _MARKER.finditer(text)
        if not (match.group("open") and match.group("close"))
        and not _PLACEHOLDER.match(text, match.end())
    ]
    return _segment(text, markers[-1]) if markers else None


def _tagged(text: str) -> _Span | None:
    """The content of the last `<answer>`."""
    start = text.rfind(_OPEN) + 1
    if start == 0:
        return None
    end = text.find(_CLOSE, start)
    if end >= 0:
        return _Span(start, end, True)
    # Without its end, it is one at the start of a line alone.
    before = text[text.rfind("\n", 0, start) + 1 : start - 1]
    return None if before.strip() else _Span(start, _line_end(text, start), False)


def _after_hashes(text: str) -> _Span | None:
    """What follows the last `####`, as GSM8K writes answers."""
    for match in reversed(list(_HASHES.finditer(text))):
        span = _segment(text, match.end())
        if not (_TITLE.match(text, match.end()) and text[span.end :].strip()):
            return span
    return None


def _segment(text: str, start: int) -> _Span:
    """The rest of a line, or the next line with text; longer while LaTeX in it is open."""
    before = _BEFORE_ANSWER.match(text, start)
    start = before.end() if before else start
    first_end = end = _line_end(text, start)
    for _ in range(_MAX_ANSWER_LINES):
        if not _is_open(text[start:end]):
            return _Span(start, end, end < len(text) or _is_bracketed(text[start:end]))
        if end == len(text):
            break
        end = _line_end(text, end + 1)
    return _Span(start, first_end, first_end < len(text))


def _line_end(text: str, start: int) -> int:
    end = text.find("\n", start)
    return len(text) if end < 0 else end


def _is_open(text: str) -> bool:
    return (
        text.count("$$") % 2 == 1
        or text.count(r"\[") > text.count(r"\]")
        or text.count(r"\begin{") > text.count(r"\end{")
        or len(re.findall(r"(?<!\\)\{", text)) > len(re.findall(r"(?<!\\)\}", text))
    )


def _is_bracketed(text: str) -> bool:
    return bool(re.fullmatch(r"\$.+\$|\$?\\boxed\{.*\}\$?", text.rstrip(" .*"), re.DOTALL))


def _boxed(text: str, box: re.Match[str]) -> _Span:
    """The content of a box; with what follows on its line if that names a further answer."""
    start, end = _box_content(text, box)
    if end < 0:
        return _Span(start, start, False)
    after = end + 1 if text[start - 1] == "{" else end
    if not text[start:end].strip():
        return _Span(start, start, True)
    if _JOINED.match(text, after):
        return _Span(box.start(), _line_end(text, after), True)
    line = text.rfind("\n", 0, box.start()) + 1
    before = list(_BOX.finditer(text, line, box.start()))
    joined = _JOINED.match(text, _box_content(text, before[-1])[1] + 1) if before else None
    if joined and joined.end() == box.start():
        return _Span(before[0].start(), after, True)
    return _Span(start, end, after > end or end < len(text))


def _box_content(text: str, box: re.Match[str]) -> tuple[int, int]:
    """Start and end of what is boxed; end -1 if it is not closed."""
    start = box.end()
    if text[start : start + 1] != "{":
        match = _UNBRACED.match(text, start)
        return start, match.end() if match else -1
    closing = match_brace(text, start)
    return start + 1, closing - 1 if closing > 0 else -1


def match_brace(text: str, start: int) -> int:
    r"""The place after the brace that closes the one at `start`, blind to `\{` and `\}`; or -1."""
    depth, place = 0, start
    while place < len(text):
        if text[place] == "\\":
            place += 1
        elif text[place] == "{":
            depth += 1
        elif text[place] == "}":
            depth -= 1
            if depth == 0:
                return place + 1
        place += 1
    return -1
