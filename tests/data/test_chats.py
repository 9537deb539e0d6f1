"""Chats in the shapes that data sets have them in; the expected messages are read off by hand."""

import json

import pytest

from fos_rl.data.chats import read_prompt
from fos_rl.data.row_text import RefusedRow

USER = {"role": "user", "content": "1 + 1?"}
CHAT = [{"role": "system", "content": "Be brief."}, USER]
READ = (("system", "Be brief."), ("user", "1 + 1?"))


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(CHAT, id="role-content"),
        pytest.param(tuple(CHAT), id="tuple"),
        pytest.param([CHAT], id="list-of-one-chat"),
        pytest.param({"messages": CHAT, "tools": None}, id="messages"),
        pytest.param({"conversations": CHAT}, id="conversations"),
        pytest.param(
            [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "1 + 1?"}],
            id="sharegpt",
        ),
        pytest.param(
            [
                {"role": m["role"], "content": [{"type": "text", "text": m["content"]}]}
                for m in CHAT
            ],
            id="parts",
        ),
        pytest.param(
            [m | {"from": None, "value": None, "name": None} for m in CHAT], id="struct-with-nulls"
        ),
        pytest.param(
            {"role": ["system", "user"], "content": ["Be brief.", "1 + 1?"]}, id="two-lists"
        ),
        pytest.param(json.dumps(CHAT), id="json"),
        pytest.param(json.dumps({"messages": CHAT}), id="json-messages"),
        pytest.param(json.dumps(CHAT).encode(), id="json-bytes"),
        pytest.param(str(CHAT), id="python"),
    ],
)
def test_every_shape_of_a_chat_is_the_same_chat(value: object) -> None:
    assert read_prompt(value) == READ


@pytest.mark.parametrize(
    ("value", "prompt"),
    [
        pytest.param("1 + 1?", "1 + 1?", id="text"),
        pytest.param(["1 + 1?"], "1 + 1?", id="list-of-one-text"),
        pytest.param('["1 + 1?"]', "1 + 1?", id="list-of-one-text-as-json"),
        pytest.param([{"type": "text", "text": "1 + 1?"}], "1 + 1?", id="text-parts-alone"),
        pytest.param("[1, 2, 3]: its sum?", "[1, 2, 3]: its sum?", id="begins-with-bracket"),
        pytest.param("{1, 2}", "{1, 2}", id="set"),
        pytest.param("Is $Answer a word?", "Is $Answer a word?", id="placeholder"),
        pytest.param(USER, (("user", "1 + 1?"),), id="one-message"),
        pytest.param(json.dumps(USER), (("user", "1 + 1?"),), id="one-message-as-json"),
        # Kept, or a chat template would write its own system message.
        pytest.param(
            [{"role": "system", "content": ""}, USER],
            (("system", ""), ("user", "1 + 1?")),
            id="empty-system",
        ),
        pytest.param(
            [{"role": "system", "content": None}, USER],
            (("system", ""), ("user", "1 + 1?")),
            id="null-system",
        ),
        pytest.param(
            [{"role": "user", "content": [{"type": "text", "text": "A"}, {"text": "B"}, "C"]}],
            (("user", "A\nB\nC"),),
            id="several-parts",
        ),
        pytest.param(
            [
                {"from": "human", "value": "A"},
                {"from": "gpt", "value": "B"},
                {"from": "Human", "value": "C"},
            ],
            (("user", "A"), ("assistant", "B"), ("user", "C")),
            id="turns",
        ),
        pytest.param(
            r'[{"role": "user", "content": "\\frac{1}{2}?"}]',
            (("user", r"\frac{1}{2}?"),),
            id="latex-in-json",
        ),
    ],
)
def test_prompts(value: object, prompt: object) -> None:
    assert read_prompt(value) == prompt


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "no prompt"),
        ("", "an empty prompt"),
        (" \t\u200b\n", "an empty prompt"),
        ([], "an empty chat"),
        (7, "a prompt of type int"),
        (True, "a prompt of type bool"),
        (["A", "B", "C"], "list of texts, which does not say who speaks"),
        ('["A", "B"]', "list of texts, which does not say who speaks"),
        ([USER, "B"], "a list that is not a chat"),
        ({"text": "A"}, "entries text; .*data.prompt_column"),
        ({"a": "A", "b": None}, "entries a, b; .*data.prompt_column"),
        ('{"question": "A"}', "a text that is a JSON object"),
        ('[{"role": "user", "content": "A"', "begins as a chat but is not JSON"),
        ("[{'role': 'user', 'content': 'A'}\n {'role': 'user'}]", "begins as a chat"),
        ([USER, {"role": "assistant", "content": "2"}], "ends with the assistant's answer"),
        ([{"from": "human", "value": "A"}, {"from": "gpt", "value": "B"}], "ends with the assist"),
        ([{"role": "system", "content": "A"}], "without a message of the user"),
        ([{"content": "A"}], "a message without a role"),
        ([{"human": "A"}], "a message without a role"),
        ([{"role": "tool", "content": "A"}, USER], "the role 'tool'; use system"),
        ([{"role": "user", "content": ""}], "an empty message of the user"),
        ([{"role": "user", "content": None}], "an empty message of the user"),
        ([{"role": "user", "content": 5}], "a message of type int"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "u"}]}], "image_url"),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], "input_audio; only text"),
        ([{"role": "user", "content": [{"image": "u", "text": None}]}], "type image; only text"),
        ([USER | {"images": ["u"]}], "the entry images; only text"),
        ([USER | {"tool_calls": [{"id": 1}]}, USER], "the entry tool_calls"),
        ({"messages": CHAT, "tools": [{"name": "f"}]}, "the entry tools"),
        ([{"role": "user", "content": "A\ud800"}], "undecodable"),
    ],
    ids=lambda v: repr(v)[:40],
)
def test_what_is_no_prompt_is_refused_with_its_reason(value: object, reason: str) -> None:
    with pytest.raises(RefusedRow, match=reason):
        read_prompt(value)
