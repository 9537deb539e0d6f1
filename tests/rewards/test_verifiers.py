"""The verdict table row by row, and further rows of each kind."""

# ruff: noqa: RUF001

import json
from pathlib import Path

import pytest

from fos_rl.rewards.verifiers import verify, verify_by_value, verify_last_integer

SAMPLES = Path(__file__).parents[1] / "data"
ECHO = (
    "Solve the following math problem step by step. The last line of your response should be of "
    "the form Answer: {} where $Answer is the answer to the problem.\n\nWhat is 17 + 17?\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)

RIGHT = [
    # The verdict table.
    ("Answer: 34", "34"),
    ("Answer: 34.", "34"),
    ("Answer: $34$", "34"),
    (r"Answer: \boxed{34}", "34"),
    ("We add.\n\n\\boxed{34}", "34"),
    ("**Answer:** 34", "34"),
    ("Answer: **34**", "34"),
    ("answer: 34", "34"),
    ("Final Answer: The final answer is $34$. I hope it is correct.", "34"),
    ("Answer: 12\nNo, I forgot one.\nAnswer: 34", "34"),
    ("Answer: 34.0", "34"),
    (r"Answer: $\frac{68}{2}$", "34"),
    (r"Answer: $\text{34}$", "34"),
    ("Answer: $x = 5$", "5"),
    ("Answer: 1,007", "1007"),
    (r"Answer: $\boxed{-3}$", "-3"),
    ("Answer: 5 km", "5"),
    ("Answer: 34<|im_end|>", "34"),
    ("Answer: 34</s>", "34"),
    ("Answer: 34\n<|endoftext|>", "34"),
    # Where the answer stands.
    ("Answer:\n34", "34"),
    ("**Final Answer**\n\n34", "34"),
    ("### Final Answer:\n\n$$\n34\n$$", "34"),
    ("Answer: \\[\n34\n\\]", "34"),
    ("*Answer: 34*", "34"),
    ("**Answer**: 34", "34"),
    ("ANSWER : 34", "34"),
    ("> Answer: 34", "34"),
    ("The answer is: 34", "34"),
    ("So the answer is 34.", "34"),
    ("答案：34", "34"),
    ("最终答案是34。", "34"),
    ("答案：34元", "34"),
    (r"\boxed{12}, no: \boxed{34}", "34"),
    (r"\boxed{12}. Check." + "\nAnswer: 34", "34"),
    ("<think>Answer: 12</think>\nAnswer: 34", "34"),
    (ECHO.format("$Answer (without quotes)") + "\n17 + 17 = 34.\nAnswer: 34", "34"),
    ("Answer: 34\n\n" + ECHO.format(r"\boxed{$Answer}"), "34"),
    ("Answer: 34\n\nLet me know if you need more.", "34"),
    # Markup and LaTeX around it.
    ("Answer: `34`", "34"),
    ("Answer: <b>34</b> ✅", "34"),
    (r"\text{Answer: } 34", "34"),
    ("__Answer__: 34", "34"),
    (r"\fbox{34}", "34"),
    ('Answer: "34"', "34"),
    (r"Answer: $\boxed{\text{34 km}}$", "34"),
    ("Answer: {34}", "34"),
    ("Answer: 34 = x", "34"),
    ("Answer: $m + n = 12 + 22 = 34$", "34"),
    (r"Answer: $\log_2 32$", "5"),
    ("Answer: 34<｜end▁of▁sentence｜>", "34"),
    (r"Answer: \(34\)", "34"),
    (r"Answer: $$\boxed{34}$$.", "34"),
    (r"Answer: $\boxed{\text{34}}$", "34"),
    (r"Answer: $\mathbf{34}$", "34"),
    (r"Answer: \boxed{x = 34}", "34"),
    (r"Answer: $2 \cdot 17$", "34"),
    (r"Answer: $\sqrt{1156}$", "34"),
    (r"Answer: $\boxed{\frac{\sqrt{2}}{\sqrt{8}}}$", r"\frac{1}{2}"),
    ("Answer: 2 * 17 = 34", "34"),
    # Numbers.
    ("Answer: +34", "34"),
    ("Answer: ３４", "34"),
    ("Answer: −3", "-3"),
    ("Answer: -1/2", r"-\dfrac{1}{2}"),
    (r"Answer: $\frac{-1}{2}$", "-0.5"),
    (r"Answer: $\frac12$", "0.5"),
    ("Answer: ½", "0.5"),
    (r"Answer: $1\frac{1}{2}$", "1.5"),
    ("Answer: 0.333333", r"\frac{1}{3}"),
    (r"Answer: $1{,}007$", "1007"),
    (r"Answer: $1\,007$", "1007"),
    ("Answer: $1,234,567.50", "1234567.5"),
    (r"Answer: $3.4 \times 10^{3}$", "3400"),
    ("Answer: 3.4e-31", r"3.4 \times 10^{-31}"),
    # Units, currencies, percent.
    ("Answer: $34", "34"),
    (r"Answer: \$34.00", "34"),
    ("Answer: €34", "34"),
    ("Answer: 34 dollars.", "34"),
    ("Answer: 34 km/h", "34"),
    (r"Answer: $34\text{ cm}^2$", "34"),
    ("Answer: 34 square meters", "34"),
    (r"Answer: $34^\circ$", "34"),
    ("Answer: There are 34 apples.", "34"),
    ("Answer: She sold 34 clips in April.", "34"),
    ("Answer: 5", "5 km"),
    ("Answer: 45 degrees", r"45^\circ"),
    (r"Answer: $34\,\mathrm{cm}$", "34"),
    ("Answer: 34 m/s^2", "34"),
    ("Answer: 34 €", "34"),
    ("Answer: 5km", "5"),
    ("Answer: 34 years old", "34"),
    ("答案：34平方厘米", "34"),
    ("Answer: 66%", "66"),
    ("Answer: 25%", "25"),
    ("Answer: 25%", "0.25"),
    ("Answer: 0.25", r"25\%"),
    (r"Answer: $48\sqrt{3}\text{ cm}^2$", r"48\sqrt{3}"),
    # Structures and words.
    ("Answer: 1, 2", "(1, 2)"),
    (r"Answer: $\{23, 1\}$", r"\{1, 23\}"),
    ("Answer: 1 and 23", r"\{1, 23\}"),
    ("Answer: 1, -1", r"\pm 1"),
    ("Answer: [0, ∞)", r"[0, \infty)"),
    ("Answer: $(x, y) = (5, 3)$", "(5, 3)"),
    ("Answer: 8 : 7 : 3", "8:7:3"),
    ("Answer: Yes, it is.", "Yes"),
    ("Answer: The statement is true", "True"),
    ("Answer: (4, 5), (2, 3)", "(2, 3), (4, 5)"),
    (r"Answer: $(3,4) \cup (1,2)$", r"(1,2)\cup(3,4)"),
    (r"Answer: $\varnothing$", r"\emptyset"),
    (r"Answer: $\text{No}$", "No"),
    ("Answer: (A)", "A"),
    ("Answer: $x^2$", "f(x) = x^2"),
    ("Answer: $(x+1)^2$", "x^2 + 2x + 1"),
    ("Answer: $n >= 3$", r"n \geq 3"),
    (r"Answer: $2i\pi$", r"2\pi i"),
    (
        "Answer:\n$$\\begin{pmatrix} 1 & 2 \\\\\n3 & 4 \\end{pmatrix}$$",
        r"\begin{bmatrix}1&2\\3&4\end{bmatrix}",
    ),
]

WRONG = [
    # The verdict table.
    ("I do not know.", "34"),
    ("", "34"),
    ("Answer: 34\nNo.\nAnswer: 12", "34"),
    ("17 + 17 = 34, which is even.", "34"),
    (ECHO.format("$Answer (without quotes)") + " 34", "34"),
    ("Answer: $Answer", "34"),
    ("Answer: 340", "34"),
    ("Answer: 3 4", "34"),
    ("Answer: 34 or 35", "34"),
    # Where the answer stands.
    ("34", "34"),
    ("Answer:", "34"),
    ("Answer: 34\nAnswer:", "34"),
    ('Write it after "Answer:" 34', "34"),
    (r"Answer: \boxed{$Answer} 34", "34"),
    (r"\boxed{34} but then \boxed{35}", "34"),
    ("<think>Answer: 34</think> I am not sure.", "34"),
    # More than one value.
    ("Answer: 34, 35", "34"),
    ("Answer: 34 35", "34"),
    ("Answer: $34$ or $35$", "34"),
    (r"Answer: \boxed{34} or \boxed{35}", "34"),
    (r"\boxed{35} or \boxed{34}", "34"),
    (r"\boxed{34} and \boxed{35}", "34"),
    ("Answer: x = 35 or x = 34", "34"),
    ("Answer: (34, 35)", "34"),
    ("Answer: between 34 and 35", "34"),
    ("Answer: 34 (or 35)", "34"),
    ("答案：34或35", "34"),
    ("Answer: 34 & 35", "34"),
    ("Answer: 34 hours and 30 minutes", "34"),
    ("Answer: a = 3, b = 34", "34"),
    ("Answer: 10:34", "34"),
    ("Answer: 34? Or maybe 35", "34"),
    (r"Answer: $3 \quad 4$", "34"),
    (r"Answer: $34 \pm 1$", "34"),
    # Another value.
    ("Answer: -34", "34"),
    ("Answer: 34.5", "34"),
    ("Answer: 34,000", "34"),
    ("Answer: 1/34", "34"),
    ("Answer: 34 million", "34"),
    ("Answer: not 34", "34"),
    ("Answer: at least 34", "34"),
    ("Answer: x > 34", "34"),
    ("Answer: x != 34", "34"),
    ("Answer: 34x", "34"),
    (r"Answer: $34\pi$", "34"),
    ("Answer: 34^2", "34"),
    ("Answer: 34 squared", "34"),
    ("Answer: 1 - p", "1"),
    ("Answer: 0.333", r"\frac{1}{3}"),
    ("Answer: 3.14", r"\pi"),
    ("Answer: 5 miles", "5 km"),
    ("Answer: 0", r"3.4 \times 10^{-31}"),
    ("Answer: 0.000006", "0.00000567"),
    ("Answer: 1 007", "1007"),
    # Another structure or word.
    ("Answer: (2, 1)", "(1, 2)"),
    ("Answer: (0, 1)", "[0, 1]"),
    (r"Answer: $\{0, 1\}$", "(0, 1)"),
    ("Answer: 1", r"\pm 1"),
    ("Answer: 2", "2, 3"),
    ("Answer: 8:3:7", "8:7:3"),
    ("Answer: Yes or No", "Yes"),
    ("Answer: not true", "True"),
    ("Answer: A or B", "A"),
    ("Answer: N", "n"),
    (r"Answer: $-\infty$", r"\infty"),
    ("Answer: 1 = 1", "AB = BA"),
    (r"Answer: $\pi f(0)$", r"\pi f'(0)"),
    ("Answer: x = 0", "y = 0"),
]


@pytest.mark.parametrize(("response", "gold"), RIGHT, ids=[repr(r[-40:]) for r, _ in RIGHT])
def test_right(response: str, gold: str) -> None:
    assert verify(response, gold) == 1.0


@pytest.mark.parametrize(("response", "gold"), WRONG, ids=[repr(r[-40:]) for r, _ in WRONG])
def test_wrong(response: str, gold: str) -> None:
    assert verify(response, gold) == 0.0


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        pytest.param("First we add 17 and 17, so 34 and", 0.0, id="before-its-answer"),
        # It may have been about to say 340.
        pytest.param("Answer: 34", 0.0, id="inside-its-answer"),
        pytest.param(r"Answer: \boxed{34", 0.0, id="inside-a-box"),
        pytest.param("Answer: 34\nAnswer: 3", 0.0, id="inside-a-second-answer"),
        pytest.param("Answer: 34\nThis is", 1.0, id="after-its-line"),
        pytest.param(r"So \boxed{34}", 1.0, id="after-its-box"),
        pytest.param("Answer: $34$", 1.0, id="after-its-dollars"),
    ],
)
@pytest.mark.parametrize("finish_reason", ["length", "abort"])
def test_cut_off(response: str, reward: float, finish_reason) -> None:
    assert verify(response, "34", finish_reason) == reward


@pytest.mark.parametrize(
    ("response", "gold", "finish_reason", "reward"),
    [
        ("7", "7", "stop", 1.0),
        ("3 + 4 = 7.", "7", "stop", 1.0),
        ("The answer is **7**<|im_end|>", "7", "stop", 1.0),
        ("Answer: 1,007", "1007", "stop", 1.0),
        ("5 - 9 = -4", "-4", "stop", 1.0),
        ("5 - 9 = −4", "-4", "stop", 1.0),
        ("5 - 9 = 4", "-4", "stop", 0.0),
        ("7 or 8", "7", "stop", 0.0),
        ("3 + 4 = 7, not 8", "7", "stop", 0.0),
        ("3 + 4 = 7", "7", "length", 0.0),
        ("seven", "7", "stop", 0.0),
        ("", "7", "stop", 0.0),
        ("7.5", "7", "stop", 0.0),
        ("71", "7", "stop", 0.0),
        ("9" * 10_000, "7", "stop", 0.0),
    ],
)
def test_last_integer(response: str, gold: str, finish_reason, reward: float) -> None:
    assert verify_last_integer(response, gold, finish_reason) == reward


def real_golds() -> list[str]:
    dapo = [json.loads(line) for line in (SAMPLES / "dapo_math_sample.jsonl").open()]
    gsm8k = [json.loads(line) for line in (SAMPLES / "gsm8k_sample.jsonl").open()]
    deepmath = [json.loads(line) for line in (SAMPLES / "deepmath_sample.jsonl").open()]
    golds = [row["reward_model"]["ground_truth"] for row in dapo]
    golds += [row["answer"].rpartition("####")[2].strip() for row in gsm8k]
    return sorted({*golds, *(row["ground_truth"] for row in deepmath)})


@pytest.mark.parametrize("gold", real_golds())
@pytest.mark.parametrize(
    "form",
    ["Answer: {}", "Answer: ${}$", "\\boxed{{{}}}", "**Answer:**\n\\[\n{}\n\\]", "Answer: {}."],
    ids=["plain", "dollars", "boxed", "display", "full-stop"],
)
def test_real_golds_verify_against_themselves_and_no_other(gold: str, form: str) -> None:
    assert verify(form.format(gold), gold) == 1.0
    assert verify(form.format("31415"), gold) == 0.0


@pytest.mark.parametrize(
    ("gold", "reward"),
    [
        ("34", 1.0),
        (r"\frac{1}{2}", 1.0),
        ("(1, x)", 1.0),
        ("x^2 + 1", 1.0),
        ("Yes", 1.0),
        ("even numbers", 1.0),
        ("B", 1.0),
        # Nothing here has a value.
        ("34 35 36", 0.0),
        (r"\frac{1}{", 0.0),
        ("We add 17 and 17. So it is 34, which is 2 times 17.", 0.0),
    ],
)
def test_by_value_the_same_text_is_no_proof(gold: str, reward: float) -> None:
    assert verify_by_value(f"Answer: {gold}", gold) == reward
