import json
from pathlib import Path

import pytest

from fos_rl.config import ArithmeticData, DapoMathData, DatasetData, Gsm8kData
from fos_rl.data.problems import ProblemCounts, Problems, load_problems

pytestmark = pytest.mark.usefixtures("golds_in_process")
HERE = Path(__file__).parent
OLD = (
    "Solve the following math problem step by step. The last line of your response should be of "
    "the form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
NEW = (
    "Solve the following math problem step by step. The last line of your response should be of "
    "the form Answer: \\boxed{$Answer} where $Answer is the answer to the problem.\n\n"
)
END = '\n\nRemember to put your answer on its own line after "Answer:".'


def write_rows(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def dapo_row(question: str, answer: str | None, before: str = OLD) -> dict:
    return {
        "prompt": [{"role": "user", "content": before + question + END}],
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
    }


def test_dapo_sample_keeps_its_36_distinct_questions() -> None:
    problems = load_problems(DapoMathData(path=str(HERE / "dapo_math_sample.jsonl")), seed=0)
    assert problems.summary == ProblemCounts(
        rows=36, duplicates=0, conflicting=0, damaged=0, kept=36
    )
    assert problems.rows[1].answer == "2410"
    assert problems.rows[1].messages[0][0] == "user"
    assert "143 互质" in problems.rows[1].messages[0][1]
    assert len({problem.id for problem in problems.rows}) == 36
    assert problems.verifier == "math"


def test_dapo_rows_are_deduplicated_and_conflicts_dropped(tmp_path: Path) -> None:
    rows = [
        dapo_row("What is 1 + 1?", "2"),
        dapo_row("What is 1 + 1?", "2"),
        # The other wording, another whitespace, the same number: one question with one answer.
        dapo_row("What  is 1 + 1?\n", "2.0", NEW),
        dapo_row("Two answers?", "3"),
        dapo_row("Two answers?", "4", NEW),
        dapo_row("Two answers?", "3"),
        dapo_row("No answer?", None),
        dapo_row("Empty answer?", " "),
        dapo_row("", "7"),
        dapo_row("What is 2 + 2?", "4"),
    ]
    problems = load_problems(DapoMathData(path=write_rows(tmp_path / "d.jsonl", rows)), seed=0)
    assert problems.summary == ProblemCounts(
        rows=10, duplicates=4, conflicting=1, damaged=3, kept=2
    )
    assert [problem.answer for problem in problems.rows] == ["2", "4"]
    assert problems.rows[0].messages == (("user", OLD + "What is 1 + 1?" + END),)
    for figure in ("10 rows", "4 duplicates", "1 question", "3 damaged", "2 problems"):
        assert figure in str(problems.summary)


@pytest.mark.parametrize(
    ("question", "kept"),
    [
        pytest.param("Add $\x0crac{1}{2}$.", "Add $\\frac{1}{2}$.", id="form-feed-frac"),
        pytest.param("Let $\x08eta > 0$.", "Let $\\beta > 0$.", id="backspace-beta"),
        pytest.param("Let $2\times 3$.", "Let $2\\times 3$.", id="tab-times"),
        pytest.param("A\tB", "A\tB", id="tab-stays"),
        pytest.param("Add $rac{1}{2}$.", None, id="lost-frac"),
        pytest.param("Add \ufffd.", None, id="undecodable"),
        pytest.param(
            "Add $\\frac{1}{2}$, a fraction.", "Add $\\frac{1}{2}$, a fraction.", id="whole"
        ),
    ],
)
def test_damaged_latex(tmp_path: Path, question: str, kept: str | None) -> None:
    rows = [{"prompt": question, "answer": 1}, {"prompt": "What is 3?", "answer": 3}]
    config = DatasetData(path=write_rows(tmp_path / "d.jsonl", rows), instruction="")
    problems = load_problems(config, seed=0)
    assert problems.summary.damaged == (kept is None)
    assert problems.rows[0].messages[0][1] == (kept or "What is 3?")


def test_gsm8k_answer_is_what_follows_the_hashes() -> None:
    problems = load_problems(Gsm8kData(path=str(HERE / "gsm8k_sample.jsonl")), seed=0)
    assert [problem.answer for problem in problems.rows][:4] == ["72", "10", "5", "42"]
    content = problems.rows[0].messages[0][1]
    assert content.startswith("Natalia sold clips")
    assert content.endswith('after "Answer:".')


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet"])
def test_any_table_by_column_names(tmp_path: Path, suffix: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / f"table.{suffix}"
    rows = [{"q": "What is 1 + 2?", "a": 3}, {"q": "What is 2 + 2?", "a": 4}]
    if suffix == "jsonl":
        write_rows(path, rows)
    elif suffix == "json":
        path.write_text(json.dumps(rows))
    elif suffix == "csv":
        path.write_text("q,a\nWhat is 1 + 2?,3\nWhat is 2 + 2?,4\n")
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    config = DatasetData(
        path=str(path), split="test", prompt_column="q", answer_column="a", instruction="Think."
    )
    problems = load_problems(config, seed=0)
    assert [problem.messages for problem in problems.rows] == [
        (("user", "What is 1 + 2?\n\nThink."),),
        (("user", "What is 2 + 2?\n\nThink."),),
    ]
    assert [problem.answer for problem in problems.rows] == ["3", "4"]


def test_chat_prompts_stay_as_they_are_and_structs_are_reached(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 2?"}]
    answered = [*chat, {"role": "assistant", "content": "3"}]
    rows = [{"chat": chat, "gold": {"value": "3"}}, {"chat": answered, "gold": {"value": "3"}}]
    config = DatasetData(
        path=write_rows(tmp_path / "d.jsonl", rows),
        prompt_column="chat",
        answer_column="gold.value",
    )
    problems = load_problems(config, seed=0)
    assert problems.rows[0].messages == (("system", "Be brief."), ("user", "1 + 2?"))
    # A chat that ends with its answer leaves nothing to sample.
    assert problems.summary.damaged == 1


@pytest.mark.parametrize(
    ("config", "words"),
    [
        pytest.param(
            DatasetData(path="dapo_math_sample.jsonl", prompt_column="question"),
            ["data.prompt_column = 'question'", "data_source, prompt", "Set data.prompt_column"],
            id="prompt-column",
        ),
        pytest.param(
            DatasetData(path="gsm8k_sample.jsonl", prompt_column="question", answer_column="gold"),
            ["data.answer_column = 'gold'", "question, answer", "Set data.answer_column"],
            id="answer-column",
        ),
        pytest.param(
            DatasetData(path="dapo_math_sample.jsonl", answer_column="reward_model.gold"),
            ["data.answer_column = 'reward_model.gold'", "reward_model.ground_truth"],
            id="struct-entry",
        ),
        pytest.param(
            Gsm8kData(path="dapo_math_sample.jsonl"),
            ["data.path", "'question'", 'data.type = "dataset"'],
            id="not-gsm8k",
        ),
        pytest.param(
            DapoMathData(path="gsm8k_sample.jsonl"),
            ["data.path", "'prompt'", "question, answer", 'data.type = "dataset"'],
            id="not-dapo",
        ),
        pytest.param(
            Gsm8kData(path="missing.jsonl"),
            ["data.path = ", "missing.jsonl", "no such file", "hub name"],
            id="missing-file",
        ),
        pytest.param(
            Gsm8kData(path="README.md"), ["data.path = ", "README.md", ".parquet"], id="file-type"
        ),
    ],
)
def test_errors_name_field_value_and_remedy(config, words: list[str]) -> None:
    config = config.model_copy(update={"path": str(HERE / config.path)})
    with pytest.raises(ValueError, match=r"^data\.") as error:
        load_problems(config, seed=0)
    for word in words:
        assert word in str(error.value)


def test_a_set_without_a_problem_is_an_error(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "d.jsonl", [{"prompt": "", "answer": "1"}])
    with pytest.raises(ValueError, match=r"data\.path = .*1 damaged or empty row"):
        load_problems(DatasetData(path=path), seed=0)


def test_a_file_that_is_no_table_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_text("not json\n")
    with pytest.raises(ValueError, match=r"data\.path = .*cannot be read as a table"):
        load_problems(DatasetData(path=str(path)), seed=0)


def load(path: Path, rows: list[dict], **settings: str) -> Problems:
    config = DatasetData(path=write_rows(path / "d.jsonl", rows), instruction="", **settings)
    return load_problems(config, seed=0)


def test_answers_of_any_type_in_one_column(tmp_path: Path) -> None:
    answers = [
        34,
        "x",
        [1, 2],
        2**63,
        0,
        5.0,
        False,
        ["7"],
        "#### 2",
        r"so \boxed{5}",
        None,
        {},
        "",
    ]
    rows = [{"prompt": f"What is {i}?", "answer": answer} for i, answer in enumerate(answers)]
    problems = load(tmp_path, rows)
    assert [problem.answer for problem in problems.rows] == [
        *("34", "x", "[1, 2]", "9223372036854775808", "0", "5", "false", "7", "2", "5")
    ]
    assert [problem.row for problem in problems.rows] == list(range(1, 11))
    assert problems.summary.damaged == 3
    assert problems.notes[0] == "refused 2 rows with no answer (first in row 11)"
    assert problems.notes[1].startswith("refused 1 row with an answer with the entries (none)")
    assert set(problems.notes[2:]) == {
        "took 2 answers out of whole solutions",
        "took 1 answer out of lists",
    }
    assert problems.gold_check is not None
    assert (problems.gold_check.scored, problems.gold_check.failed) == (10, 0)


def test_a_row_that_is_refused_is_named(tmp_path: Path) -> None:
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": "u"}]}]
    rows = [{"prompt": "1 + 1?", "answer": 2}, *[{"prompt": image, "answer": 2}] * 2]
    problems = load(tmp_path, rows)
    assert problems.summary.damaged == 2
    assert problems.notes == (
        "refused 2 rows with a message with a part of the type image_url; only text can be used "
        "(first in row 2)",
    )
    with pytest.raises(ValueError, match=r"no problem .*only text can be used \(first in row 1\)"):
        load(tmp_path, rows[1:])


@pytest.mark.parametrize(
    ("answers", "agree"),
    [
        (("-5", "\u22125"), True),
        (("34", "$34$"), True),
        ((34, 34.0), True),
        (("1,007", 1007), True),
        (("1/2", r"\frac{1}{2}"), True),
        (("0.5", "1/2"), True),
        (("x + 1", "x+1"), True),
        (("1", "-1"), False),
        (("3 4", "34"), False),
        (("x", "y"), False),
        ((0, None), True),
        ((1, True), False),
    ],
)
def test_answers_agree_by_spelling_or_number(tmp_path: Path, answers: tuple, agree: bool) -> None:
    problems = load(
        tmp_path, [{"prompt": "A?", "answer": a} for a in answers] + [{"prompt": "B?", "answer": 1}]
    )
    assert problems.summary.conflicting == (not agree)
    assert len(problems.rows) == 1 + agree


def test_a_column_without_a_value_is_an_error(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}?", "answer": None} for i in range(3)]
    with pytest.raises(ValueError, match=r"data\.path = .*no problem.*3 rows with no answer"):
        load(tmp_path, rows)


def test_golds_that_nothing_can_match_stop_the_run(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}?", "answer": f"He has 3+{i}=<<3+{i}>> apples."} for i in range(8)]
    with pytest.raises(ValueError, match=r"data\.path = .*: 8 of 8 gold answers .*for example 'He"):
        load(tmp_path, rows)


def test_gsm8k_rows_without_hashes_are_refused(tmp_path: Path) -> None:
    rows = [
        {"question": "A?", "answer": "So 2.\n#### 2"},
        {"question": "B?", "answer": "So 2."},
        {"question": "C?", "answer": 2},
    ]
    problems = load_problems(Gsm8kData(path=write_rows(tmp_path / "g.jsonl", rows)), seed=0)
    assert [problem.answer for problem in problems.rows] == ["2"]
    assert problems.notes == ("refused 2 rows with an answer without #### (first in row 2)",)


def test_an_unreachable_hub_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*args, **kwargs):
        raise ConnectionError("Couldn't reach 'openai/gsm8k' on the Hub")

    monkeypatch.setattr("datasets.load_dataset", unreachable)
    with pytest.raises(ValueError, match=r"data\.path = 'openai/gsm8k': .*hub.*\.jsonl"):
        load_problems(Gsm8kData(), seed=0)


@pytest.mark.parametrize("difficulty", [1, 2, 3, 4, 5])
def test_arithmetic_is_right_distinct_and_fixed_by_the_seed(difficulty: int) -> None:
    config = ArithmeticData(difficulty=difficulty, num_problems=200)
    problems = load_problems(config, seed=3)
    assert problems == load_problems(config, seed=3)
    assert problems.rows != load_problems(config, seed=4).rows
    assert problems.verifier == "last_integer"
    assert len({problem.id for problem in problems.rows}) == (81 if difficulty == 1 else 200)
    for problem in problems.rows:
        expression = problem.id.removeprefix("arithmetic/")
        assert int(problem.answer) == eval(expression)
        assert expression.replace("+", " + ").replace("-", " - ") in problem.messages[-1][1]


def test_arithmetic_stops_at_the_number_of_distinct_problems() -> None:
    problems = load_problems(ArithmeticData(difficulty=2, num_problems=5000), seed=0)
    assert len(problems.rows) == 90 * 9 * 2
