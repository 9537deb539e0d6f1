"""What an answer column says: the expected answers are read off the values by hand."""

from decimal import Decimal

import pytest

from fos_rl.data.golds import Gold, read_gold, read_gsm8k_gold
from fos_rl.data.row_text import RefusedRow


@pytest.mark.parametrize(
    ("value", "answer"),
    [
        (34, "34"),
        ("x", "x"),
        ([1, 2], "[1, 2]"),
        (0, "0"),
        (False, "false"),
        (True, "true"),
        (5.0, "5"),
        (-0.0, "0"),
        (0.1, "0.1"),
        (1e-7, "0.0000001"),
        (2**63, "9223372036854775808"),
        (2**53 + 1, "9007199254740993"),
        # A float beyond 28 digits would be rounded by decimal's own context.
        (Decimal("123456789012345678901234567890.50"), "123456789012345678901234567890.5"),
        (Decimal("1e400"), r"1 \times 10^{400}"),
        (" 34\n", "34"),
        # An interval, a set of one and an empty set are answers, not lists.
        ("[1, 2]", "[1, 2]"),
        (r"[0, \infty)", r"[0, \infty)"),
        ("{5}", "{5}"),
        ("{}", "{}"),
        ("f'", "f'"),
        ("\u22125", "\u22125"),
        (r"\x0crac{1}{2}".replace(r"\x0c", "\x0c"), r"\frac{1}{2}"),
    ],
    ids=repr,
)
def test_an_answer_stays_what_it_is(value: object, answer: str) -> None:
    assert read_gold(value) == Gold(answer=answer)


@pytest.mark.parametrize(
    ("value", "answer", "source"),
    [
        (["x"], "x", "lists"),
        ([5], "5", "lists"),
        ([["x"]], "x", "lists"),
        (["7", "7"], "7", "lists"),
        ("['x']", "x", "lists"),
        ('["x"]', "x", "lists"),
        ("[34]", "34", "lists"),
        (r'["\\frac{1}{2}"]', r"\frac{1}{2}", "lists"),
        (r'["\frac{1}{2}"]', r"\frac{1}{2}", "lists"),
        (r"['\sqrt{2}']", r"\sqrt{2}", "lists"),
        ('"34"', "34", "quotes"),
        (r'"\\pi"', r"\pi", "quotes"),
        ("'x'", "x", "quotes"),
        (b"34", "34", "bytes"),
        ("b'34'", "34", "bytes"),
        (r"We add. So the answer is \boxed{5}.", "5", "whole solutions"),
        (r"$\boxed{\frac{1}{2}}$", r"\frac{1}{2}", "whole solutions"),
        ("It is 1 + 1.\n#### 2", "2", "whole solutions"),
        ("It is 1 + 1. #### 2", "2", "whole solutions"),
        ("#### 1,000", "1,000", "whole solutions"),
        ("#### Step 1\nWe add.\n#### Step 2\nSo \\boxed{5}.", "5", "whole solutions"),
        ("We add.\nAnswer: 34", "34", "whole solutions"),
        ("<answer>4</answer>", "4", "whole solutions"),
    ],
)
def test_an_answer_is_taken_out(value: object, answer: str, source: str) -> None:
    assert read_gold(value) == Gold(answer=answer, taken_from=source)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "no answer"),
        ("", "no answer"),
        (" \u200b", "no answer"),
        ("nan", "no answer"),
        ("None", "no answer"),
        ("[]", "no answer"),
        ([], "empty list"),
        ([None], "no answer"),
        (["2", "3"], "several answers"),
        ('["2", "3"]', "several answers"),
        ({"value": 3, "unit": "km"}, r"entries value, unit; .*data.answer_column"),
        ('{"value": 3}', r"entries value; .*data.answer_column"),
        (float("nan"), "NaN"),
        (float("inf"), "infinite"),
        (float(2**53), r"above 2\^53.*store it as an integer or as text"),
        (b"\xff", "not UTF-8"),
        (r"So \boxed{}", "empty or not closed"),
        ("He has 3 of them. ####", "nothing after"),
        ("word " * 300, "more than 1,000 characters"),
        ("A\ud800", "undecodable"),
        ("\ufffd", "undecodable"),
        (object, "type type"),
    ],
    ids=lambda v: repr(v)[:30],
)
def test_what_gives_no_answer_is_refused_with_its_reason(value: object, reason: str) -> None:
    with pytest.raises(RefusedRow, match=reason):
        read_gold(value)


def test_gsm8k_answers_stand_behind_the_hashes() -> None:
    assert read_gsm8k_gold("3 + 4 = 7\n#### 7").answer == "7"
    for value in ("He has 3 + 4 = 7 apples.", 7, None):
        with pytest.raises(RefusedRow, match="without ####"):
            read_gsm8k_gold(value)
