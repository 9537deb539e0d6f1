"""What a text in a data set says: repaired LaTeX, and lists or chats that were written as text."""

import ast
import re
import warnings
from typing import Any

from fos_rl.data.table_files import parse_json


class RefusedRow(ValueError):
    """A row that holds no problem. Its text is the reason, the same for all rows of one kind."""


# A backslash command read as an escape: \f of \frac, \b of \beta, \a of \alpha, \v of \vec. These
# characters have no use in text, so the command is certain; \t and \r are whitespace, and only
# commands that cannot be words after it are taken back.
_EATEN = {"\x07": "a", "\x08": "b", "\x0b": "v", "\x0c": "f", "\t": "t", "\r": "r"}
_EATEN_COMMAND = re.compile(
    r"[\x07\x08\x0b\x0c](?=[a-z])|\t(?=frac\b|imes\b|heta\b|ext\{|riangle\b)|\r(?=ight\b|angle\b)"
)
# What remains then is beyond repair: control characters, the mark of undecodable bytes, half a
# surrogate pair, and a \frac without its first two characters.
_DAMAGED = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ufffd\ud800-\udfff]|(?<![A-Za-z\\])rac\{")
_VISIBLE = re.compile(r"[^\s\u200b-\u200f\u2060\ufeff]")


def clean_text(text: str | bytes, what: str) -> str:
    """The text with eaten LaTeX commands repaired; "" if nothing in it can be seen.

    Raises:
        RefusedRow: `what` (a prompt, an answer) is damaged beyond that.
    """
    if isinstance(text, bytes):
        try:
            text = text.decode()
        except UnicodeDecodeError:
            raise RefusedRow(f"{what} of bytes that are not UTF-8") from None
    text = _EATEN_COMMAND.sub(lambda match: "\\" + _EATEN[match.group()], text).strip()
    if _DAMAGED.search(text):
        raise RefusedRow(f"{what} with control characters, lost letters or undecodable bytes")
    return text if _VISIBLE.search(text) else ""


def parse_literal(text: str) -> Any:
    r"""What a JSON text or the text of a Python literal says; None if it is neither.

    A writer of either doubles the backslashes of LaTeX; where none is doubled they are its own.
    """
    if "\\\\" not in text:
        text = re.sub(r"\\(?![\"'])", r"\\\\", text)
    try:
        return parse_json(text)
    except ValueError:
        pass
    try:
        with warnings.catch_warnings(action="ignore"):
            return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
