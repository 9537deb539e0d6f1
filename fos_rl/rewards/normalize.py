r"""Answers in one spelling: no delimiters, markup, fonts or unit words around the mathematics."""

# Models write typographic symbols.
# ruff: noqa: RUF001

import re

from fos_rl.rewards.answers import match_brace

_SYMBOLS = str.maketrans(
    {
        **{code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)},
        **dict.fromkeys("−–—‐‑﹣", "-"),
        **dict.fromkeys("\u00a0\u2009\u202f\u2007", "\\,"),
        "￥": "¥",
        "、": ",",
        "。": ".",
        "×": r"\times ",
        "·": r"\cdot ",
        "⋅": r"\cdot ",
        "÷": "/",
        "⁄": "/",
        "≈": r"\approx ",
        "π": r"\pi ",
        "∞": r"\infty ",
        "≤": r"\leq ",
        "≥": r"\geq ",
        "≠": r"\neq ",
        "±": r"\pm ",
        "∪": r"\cup ",
        "∅": r"\emptyset ",
        "°": r"^\circ ",
        "²": "^2",
        "³": "^3",
        "½": r"\frac{1}{2}",
        "¼": r"\frac{1}{4}",
        "¾": r"\frac{3}{4}",
        "ℝ": r"\mathbb{R}",
    }
)
_FONTS = re.compile(
    r"\\(?:boxed|fbox|text|textbf|textit|textrm|texttt|mathrm|mathbf|mathit|mathsf|mbox|bm"
    r"|boldsymbol|displaystyle)\s*(?=\{)"
)
_REPLACEMENTS = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:left|right)\s*\.", ""),
        (r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|limits)(?![a-zA-Z])", ""),
        (r"\\\$", "¤"),
        (r"\\[()\[\]]|\$", " "),
        # Thin spaces are thousands separators between groups of three digits.
        (r"(?<=\d)(?:\\[,;:!]|\{,\}|\\ )(?=\d{3}(?!\d))", ","),
        (r"\{,\}", ","),
        (r"\\!", ""),
        (r"\\(?:[,;: ~]|q?quad(?![a-zA-Z]))|~", " "),
        (r"\\(?:[dtc]|nice|s)frac(?![a-zA-Z])", r"\\frac"),
        (r"\\[dt]binom(?![a-zA-Z])", r"\\binom"),
        (r"\{\s*([^{}]*?)\s*\\choose(?![a-zA-Z])\s*([^{}]*?)\s*\}", r"\\binom{\1}{\2}"),
        (r"\\varnothing", r"\\emptyset"),
        (r"\\(?:leqslant|le)(?![a-zA-Z])|<=", r"\\leq"),
        (r"\\(?:geqslant|ge)(?![a-zA-Z])|>=", r"\\geq"),
        (r"\\ne(?![a-zA-Z])|!=", r"\\neq"),
        (r"\\lbrace(?![a-zA-Z])", r"\\{"),
        (r"\\rbrace(?![a-zA-Z])", r"\\}"),
        (r"\\langle(?![a-zA-Z])", "("),
        (r"\\rangle(?![a-zA-Z])", ")"),
        (r"\\[lr]vert(?![a-zA-Z])", "|"),
        (r"\\(?:backslash|smallsetminus)(?![a-zA-Z])", r"\\setminus"),
        (r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![a-z]))|\\degree(?![a-zA-Z])", "°"),
        (r"°\s*(?=[CF](?![A-Za-z]))", "°"),
        (r"\\%", "%"),
        (r"\*\*|__|`|</?(?:b|i|em|strong|code)>", ""),
        # Check marks and emoji.
        (r"[\u2600-\u27bf\ufe0f\U0001f300-\U0001faff]", ""),
        (r"\s*\^\s*", "^"),
        (r"\s+", " "),
    )
]
# Of a private use area, so that no pattern takes it for a space or a command.
_ROW_BREAK = "\ue000"
_LEAD = re.compile(
    r"^(?:(?:so|thus|hence|therefore|and|then)[, ]+)?(?:(?:the|my|our|its|a|final|correct|answer|"
    r"value|result|solution|sum|number|total|it|this|that|which)\s+)*"
    r"(?:(?:is|are|equals|be)\s+(?:equal to\s+)?|=\s*|\\approx\s*|:\s*)(?:equal to\s+)?",
    re.IGNORECASE,
)
# A letter in roman type after a value is a unit, one in italics a variable.
_LONG_NAMES = {"m": "meter", "s": "second", "g": "gram", "h": "hour", "L": "liter"}
_UNIT_LETTER = re.compile(r"(?<![A-Za-z])[msghL](?![A-Za-z])")
_AFTER_VALUE = re.compile(r"(?:[\d})/°]|\\pi)(?:\s|\\[,;:! ])*$")
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d*)?")
_REPEATING = re.compile(
    r"(?<![\d.])(?P<whole>\d{0,20})\.(?P<start>\d{0,20})(?:"
    r"\\(?:overline|bar|dot)\s*(?:\{\s*(?P<a>\d{1,20})\s*\}|(?P<b>\d))|\((?P<c>\d{1,20})\)"
    r"|(?P<d>\d{1,2}?)(?P=d){1,20}(?P=d)\s*(?:\.{3}|…|\\[lc]?dots(?![a-z])))"
)
_ARGUMENTS = re.compile(r"\\(?P<name>frac|binom|sqrt)(?![a-zA-Z])")
_REASON = r"since|because|as|by|using|from|i\.e\.|that is|namely|exact(?:ly)?|simplified|note"
_REMARK = re.compile(
    r"(?<=\S)\s*(?:\((?P<inner>[^()]*(?:\([^()]*\)[^()]*)*)\)|[,;]?\s(?P<tail>(?:since|because)\s.*))$",
    re.IGNORECASE | re.DOTALL,
)
_REASON_START = re.compile(rf"\s*(?:{_REASON})(?![a-z])", re.IGNORECASE)
_DOUBT = re.compile(r"\b(?:or|maybe|perhaps|if|unless|wrong|instead)\b|或", re.IGNORECASE)
_TRAIL = re.compile(r"[.\s]*\bi hope (?:it|this) is correct\.?$", re.IGNORECASE)


def normalize_answer(text: str) -> str:
    r"""One spelling for one answer, still LaTeX.

    Example: `**$\text{x} = \dfrac12$.**` becomes `x = \frac{1}{2}`.
    """
    text = _unwrap(text.translate(_SYMBOLS))
    # The row break of a matrix is not the start of a command.
    text = text.replace("\\\\", _ROW_BREAK)
    for pattern, replacement in _REPLACEMENTS:
        text = pattern.sub(replacement, text)
    text = text.replace(_ROW_BREAK, "\\\\")
    text = _with_fractions(_brace_arguments(text))
    text = _TRAIL.sub("", text.strip())
    before = None
    while before != text:
        before = text
        text = text.strip(" \n\"'“”‘’*:").rstrip(".,;?").strip()
        # Words stay if nothing is behind them.
        text = _LEAD.sub("", text, count=1) or text
        if text.startswith("_") or text.endswith("_"):
            text = text.strip("_")
        text = _without_remark(text)
    return text.replace(",", "") if _THOUSANDS.fullmatch(text) else text


def _unwrap(text: str) -> str:
    r"""`\text{34}` as ` 34 `: fonts and boxes say nothing about a value."""
    for _ in range(100):
        match = _FONTS.search(text)
        if match is None:
            return text
        end = match_brace(text, match.end())
        if end < 0:
            return text[: match.start()] + text[match.end() + 1 :]
        inner = text[match.end() + 1 : end - 1]
        if _AFTER_VALUE.search(text[: match.start()]):
            inner = _UNIT_LETTER.sub(lambda m: _LONG_NAMES[m[0]], inner)
        text = f"{text[: match.start()]} {inner} {text[end:]}"
    return text


def _brace_arguments(text: str) -> str:
    r"""`\frac\pi6` as `\frac{\pi}{6}`: TeX takes the next letter, digit or command.

    `\sqrt12` is left alone: TeX reads the root of 1, its writer meant that of 12.
    """
    place = 0
    while (match := _ARGUMENTS.search(text, place)) is not None:
        place = match.end()
        if match["name"] == "sqrt":
            index = re.compile(r"\s*\[[^\[\]]*\]").match(text, place)
            place = index.end() if index else place
            if re.compile(r"\s*\d\d").match(text, place):
                continue
        first = place
        for _ in range(1 if match["name"] == "sqrt" else 2):
            argument = re.compile(r"\s*(?:\{|(\\[A-Za-z]+|[^\s\\{}^_]))").match(text, place)
            if argument is None:
                break
            if argument[1] is None:
                place = match_brace(text, argument.end() - 1)
                if place < 0:
                    return text
            else:
                text = f"{text[:place]}{{{argument[1]}}}{text[argument.end() :]}"
                place += len(argument[1]) + 2
        # Arguments may hold commands of their own.
        place = first
    return text


def _with_fractions(text: str) -> str:
    r"""Repeating decimals as fractions: `0.1\overline{6}`, `0.1(6)` and `0.1666...` are 15/90."""
    return _REPEATING.sub(_fraction, text)


def _fraction(match: re.Match[str]) -> str:
    start = match["start"]
    period = match["a"] or match["b"] or match["c"] or match["d"]
    digits = (match["whole"] or "0") + start
    top = int(digits + period) - int(digits)
    return rf"\frac{{{top}}}{{{(10 ** len(period) - 1) * 10 ** len(start)}}}"


def _without_remark(text: str) -> str:
    """`34 (since 2*17=34)` as `34`; a remark that takes something back stays."""
    match = _REMARK.search(text)
    if match is None or _DOUBT.search(match[0]):
        return text
    before, inner = text[: match.start()], match["inner"]
    if inner is None or _REASON_START.match(inner) or inner.rpartition("=")[2].strip() == before:
        return before
    return text
