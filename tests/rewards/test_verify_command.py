import json
import re
from pathlib import Path

import pytest

from fos_rl.cli import main
from fos_rl.rewards.verify_command import Sample, explain_verdict

LINES = [
    {"gold": "34", "response": "Answer: 34."},
    {"gold": "1/2", "response": "so \\boxed{0.5}"},
    {"gold": 34, "response": "Answer: 35"},
    {"gold": "34", "response": "I do not know"},
    {"gold": "34", "response": "Answer: 34", "finish_reason": "length"},
    {"gold": "34", "response": r"Answer: $9^{9^{9^9}}$", "finish_reason": None},
]
PRINTED = [
    {"verdict": 1, "answer": "34.", "reason": "the same text"},
    {"verdict": 1, "answer": "0.5", "reason": "the same value"},
    {"verdict": 0, "answer": "35", "reason": "read as '35', which is not '34'"},
    {
        "verdict": 0,
        "answer": None,
        "reason": r"no answer: no text after Answer: or ####, in \boxed{} or in <answer> tags",
    },
    {
        "verdict": 0,
        "answer": None,
        "reason": "cut off (finish_reason 'length') before its answer was finished",
    },
    {
        "verdict": 0,
        "answer": "$9^{9^{9^9}}$",
        "reason": "read as '9^{9^{9^9}}', which is not '34'",
    },
]


def test_each_line_gets_its_verdict_in_order(tmp_path: Path, capsys) -> None:
    file = tmp_path / "responses.jsonl"
    # Enough for several batches.
    file.write_text("\n".join(json.dumps(line) for line in LINES * 50) + "\n\n")
    assert main(["verify", str(file)]) == 0
    out, err = capsys.readouterr()
    assert [json.loads(line) for line in out.splitlines()] == PRINTED * 50
    assert err.startswith("300 responses: 100 right, 200 wrong, 100 without an answer; ")


@pytest.mark.parametrize(("verdict", "reason"), [("timeouts", "5 s"), ("errors", "failed")])
def test_an_answer_that_was_not_decided_says_so(verdict, reason: str) -> None:
    judgment = explain_verdict(Sample(gold="34", response="Answer: x"), verdict, 5.0)
    assert judgment["verdict"] == 0
    assert reason in str(judgment["reason"])


GOOD = b'{"gold": "1", "response": "Answer: 1"}\n'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (GOOD + b"{", "line 2: not JSON"),
        (GOOD + b"\n" + b'["1", "Answer: 1"]', "line 3: .* is not an object"),
        (b'{"gold": "1"}', "line 1: no key 'response', only .'gold'.; add it"),
        (b'{"gold": null, "response": "Answer: 1"}', "line 1: gold is None; give it as a string"),
        (b'{"gold": "1", "response": ["Answer: 1"]}', "line 1: response is .'Answer: 1'."),
        (b'{"gold": "1", "response": "1", "finish_reason": "eos"}', "'eos' is none of stop, "),
        (GOOD + b'{"gold": "\xff", "response": "1"}', "line 2: not UTF-8"),
        (b"\n \n", "is empty"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, capsys, content: bytes, message: str) -> None:
    file = tmp_path / "responses.jsonl"
    file.write_bytes(content)
    assert main(["verify", str(file)]) == 2
    out, err = capsys.readouterr()
    # Nothing is scored before the whole file has been read.
    assert out == ""
    assert err.startswith(f"error: {file}")
    assert re.search(message, err)


def test_a_missing_file_is_named(tmp_path: Path, capsys) -> None:
    assert main(["verify", str(tmp_path / "none.jsonl")]) == 2
    assert "none.jsonl: No such file or directory; give a JSONL file" in capsys.readouterr().err
