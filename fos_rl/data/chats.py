"""Prompts in the shapes that data sets have them in: a question, or a chat of messages."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fos_rl.data.row_text import RefusedRow, clean_text, parse_literal

Messages = tuple[tuple[str, str], ...]
"""A chat as (role, content) pairs."""

# ShareGPT's names and those of its exports beside the usual ones.
_ROLES = {
    **{role: role for role in ("system", "user", "assistant")},
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
}
_CHATS = ("messages", "conversations", "conversation")
_LOST = (
    *("tools", "functions", "tool_calls", "function_call"),
    *("image", "images", "audio", "audios", "video", "videos"),
)
_BEGINS_AS_CHAT = re.compile(
    r"[\[{(\s]*\{\s*['\"](?:role|from|content|value|messages|conversations)['\"]\s*:"
)


def read_prompt(value: Any) -> str | Messages:
    """A question's text, or the messages of a chat.

    A chat is a list of `{"role", "content"}` or ShareGPT's `{"from", "value"}`, one such message,
    an object with `messages` or `conversations`, an object of two lists, or any of these as JSON
    or Python text. Content is a text or a list of text parts, which are joined by line breaks. A
    list of one text is that question. An empty system message stays: it keeps a chat template from
    writing its own.

    Raises:
        RefusedRow: for anything else, with the reason; nothing is turned into text by force.
    """
    if isinstance(value, str | bytes):
        text = clean_text(value, "a prompt")
        chat = _chat_in_text(text)
        if chat is not None:
            return read_prompt(chat)
        if not text:
            raise RefusedRow("an empty prompt")
        return text
    if isinstance(value, Mapping):
        return _read_object(value)
    if isinstance(value, list | tuple):
        return _read_list(value)
    if value is None:
        raise RefusedRow("no prompt")
    raise RefusedRow(f"a prompt of type {type(value).__name__}; give a text or a chat")


def _chat_in_text(text: str) -> Any:
    """The chat or the list of texts that a text spells out; None for an ordinary question."""
    if text[:1] not in ("[", "{"):
        return None
    value = parse_literal(text)
    if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        return value
    items = value if isinstance(value, list) else [value]
    if items and all(isinstance(item, Mapping) for item in items):
        keys = {key for item in items for key in item}
        if keys & {"role", "from", *_CHATS} or _are_parts(items):
            return value
        if isinstance(value, Mapping) and value:
            raise RefusedRow("a text that is a JSON object; store the question alone")
    if value is None and _BEGINS_AS_CHAT.match(text):
        raise RefusedRow("a text that begins as a chat but is not JSON; store the chat itself")
    return None


def _read_object(value: Mapping[str, Any]) -> str | Messages:
    entries = {name: entry for name, entry in value.items() if entry is not None}
    _refuse_lost(entries)
    for name in _CHATS:
        if name in entries:
            return read_prompt(entries[name])
    for role, content in (("role", "content"), ("from", "value")):
        roles, contents = entries.get(role), entries.get(content)
        if isinstance(roles, list) and isinstance(contents, list) and len(roles) == len(contents):
            pairs = zip(roles, contents, strict=True)
            return _read_chat([{"role": r, "content": c} for r, c in pairs])
    if "role" in entries or "from" in entries:
        return _read_chat([entries])
    raise RefusedRow(
        f"a prompt with the entries {', '.join(map(str, value)) or '(none)'}; name one of them "
        "with a dot in data.prompt_column, as in prompt.text"
    )


def _read_list(value: Sequence[Any]) -> str | Messages:
    if not value:
        raise RefusedRow("an empty chat")
    if len(value) == 1 and not isinstance(value[0], Mapping):
        return read_prompt(value[0])
    if all(isinstance(item, Mapping) for item in value):
        if _are_parts(value) and (text := _read_content(list(value))):
            return text
        return _read_chat(value)
    if all(isinstance(item, str) for item in value):
        raise RefusedRow(
            "a list of texts, which does not say who speaks; give messages with role and content"
        )
    raise RefusedRow("a list that is not a chat; give messages with role and content")


def _are_parts(items: Sequence[Mapping[str, Any]]) -> bool:
    return all(("text" in i or "type" in i) and not {"role", "from"} & set(i) for i in items)


def _read_chat(messages: Sequence[Mapping[str, Any]]) -> Messages:
    chat = tuple(_read_message(message) for message in messages)
    if chat[-1][0] == "assistant":
        raise RefusedRow(
            "a chat that ends with the assistant's answer, so nothing is left to sample; leave "
            "that message out"
        )
    if not any(role == "user" for role, _ in chat):
        raise RefusedRow("a chat without a message of the user")
    return chat


def _read_message(message: Mapping[str, Any]) -> tuple[str, str]:
    entries = {name: entry for name, entry in message.items() if entry is not None}
    _refuse_lost(entries)
    name = entries.get("role", entries.get("from"))
    role = _ROLES.get(name.strip().casefold()) if isinstance(name, str) else None
    if role is None:
        raise RefusedRow(
            "a message without a role"
            if name is None
            else f"a message of the role {name!r}; use system, user or assistant"
        )
    content = _read_content(entries.get("content", entries.get("value", "")))
    if not content and role != "system":
        raise RefusedRow(f"an empty message of the {role}")
    return role, content


def _read_content(content: Any) -> str:
    """The text of a message, or of its text parts."""
    if isinstance(content, str | bytes):
        return clean_text(content, "a message")
    if isinstance(content, Mapping):
        content = [content]
    if not isinstance(content, list | tuple):
        raise RefusedRow(f"a message of type {type(content).__name__}; give a text")
    texts = []
    for part in content:
        if isinstance(part, Mapping):
            kind = part.get("type")
            others = [n for n, v in part.items() if v is not None and n not in ("type", "text")]
            if kind not in (None, "text", "input_text") or (kind is None and others):
                raise RefusedRow(
                    f"a message with a part of the type {kind or others[0]}; only text can be used"
                )
            part = part.get("text")
        if not isinstance(part, str):
            raise RefusedRow("a message with a part that is no text")
        texts.append(clean_text(part, "a message"))
    return "\n".join(filter(None, texts))


def _refuse_lost(entries: Mapping[str, Any]) -> None:
    """Tools and images belong to a prompt, and nothing here would show them to the model."""
    for name in _LOST:
        if entries.get(name):
            raise RefusedRow(f"a chat with the entry {name}; only text can be used")
