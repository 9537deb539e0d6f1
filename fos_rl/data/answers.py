r"""The answer that a response gives, found by two rules: a line `Answer: ...` and `\boxed{...}`."""

# Models write typographic quotes and full-width colons.
# ruff: noqa: RUF001

import re

MAX_RESPONSE_CHARS = 10_000
"""Only the end of a response is read; an answer stands there."""
MAX_ANSWER_CHARS = 1_000
"""A longer answer counts as none."""
_MAX_ANSWER_LINES = 20

# Special tokens that came through as text end the line they stand on, as do answer tags.
_SPECIAL_TOKEN = re.compile(
    r"<\|[^|<>\s]{1,40}\|>|<｜[^｜<>\s]{1,40}｜>|</?s>|<(?:eos|bos|pad|unk|end_of_turn)>"
    r"|\[(?:EOS|PAD|/?INST)\]|</?answer>"
)
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
_BOXED = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)")
# The prompts' own stand-in for an answer, when a response repeats them.
_PLACEHOLDER = re.compile(r"[\s*_`]*(?:\\boxed\s*)?[{<\[(]?\s*\$\s*answer\b", re.IGNORECASE)
_BEFORE_ANSWER = re.compile(r"[\s*_`#}]*(?:```\w*\s)?\s*")
_JOINED = re.compile(r"[\s$.]*(?:or|and|,|或|和)[\s$]*(?=[\d\\$.+-])", re.IGNORECASE)


def find_answer(response: str, *, complete: bool = True) -> str | None:
    r"""The text of the last answer in a response, or None.

    An answer is what follows `Answer:` (any case, in bold, as `Final Answer:` or in Chinese) up to
    the end of that line, or the next line with text if that line is empty, or the content of a
    `\boxed{...}`. The last of them counts, whichever kind it is. When there is none, a last line
    that says "the answer is ..." counts. The prompts' own `Answer: $Answer` and a quoted "Answer:"
    are not answers; neither is anything before a closing `</think>`.

    `complete=False` says that the response was cut off: its last answer then counts only if a line
    break or a closing bracket shows that it was finished.

    Example: "Answer: 12\nNo.\n**Answer:** $34$" gives "$34$".
    """
    text = _CONTROL.sub("", response[-MAX_RESPONSE_CHARS:])
    text = _SPECIAL_TOKEN.sub("\n", text.rpartition("</think>")[2])
    start, end, closed = _last_answer(text)
    if start < 0 or not (complete or closed):
        return None
    answer = text[start:end].strip()
    return answer if 0 < len(answer) <= MAX_ANSWER_CHARS else None


def _last_answer(text: str) -> tuple[int, int, bool]:
    """Start and end of the last answer and whether something closes it; start -1 for none."""
    markers = [
        match.end()
        for match in _MARKER.finditer(text)
        if not (match.group("open") and match.group("close"))
        and not _PLACEHOLDER.match(text, match.end())
    ]
    marked = _segment(text, markers[-1]) if markers else (-1, -1, False)
    boxes = [m for m in _BOXED.finditer(text) if not _PLACEHOLDER.match(text, m.end())]
    # A box on the marked line is part of that answer.
    if boxes and boxes[-1].start() >= marked[1]:
        return _boxed(text, boxes[-1])
    if not markers:
        line = text.rstrip().rfind("\n") + 1
        says = list(_ANSWER_IS.finditer(text, line))
        return _segment(text, says[-1].end()) if says else (-1, -1, False)
    return marked


def _segment(text: str, start: int) -> tuple[int, int, bool]:
    """The rest of a line, or the next line with text; longer while LaTeX in it is open."""
    before = _BEFORE_ANSWER.match(text, start)
    start = before.end() if before else start
    first_end = end = _line_end(text, start)
    for _ in range(_MAX_ANSWER_LINES):
        if not _is_open(text[start:end]):
            return start, end, end < len(text) or _is_bracketed(text[start:end])
        if end == len(text):
            break
        end = _line_end(text, end + 1)
    return start, first_end, first_end < len(text)


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


def _boxed(text: str, match: re.Match[str]) -> tuple[int, int, bool]:
    """The content of a box; with what follows on its line if that names a further answer."""
    end = match_brace(text, match.end())
    if end < 0:
        return match.end(), match.end(), False
    if _JOINED.match(text, end):
        return match.start(), _line_end(text, end), True
    line = text.rfind("\n", 0, match.start()) + 1
    before = list(_BOXED.finditer(text, line, match.start()))
    joined = _JOINED.match(text, match_brace(text, before[-1].end())) if before else None
    if joined and joined.end() == match.start():
        return before[0].start(), end, True
    return match.end() + 1, end - 1, True


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
