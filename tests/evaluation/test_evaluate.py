"""avg@k and pass@k against brute force, sets by name and file, and evaluation inside a run."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import datasets
import numpy as np
import pytest
from transformers import AutoTokenizer

from fos_rl.cli import main
from fos_rl.config import parse_config
from fos_rl.config.evaluation import eval_config, eval_precisions
from fos_rl.data.eval_sets import NAMED_SETS, load_eval_set, load_eval_sets, trained_on_note
from fos_rl.data.problems import load_problems
from fos_rl.evaluation.evaluate import Evaluator, accuracy_metrics, pass_at_k
from fos_rl.model.tiny import write_tiny_model
from fos_rl.run_folder.folder import resolved_toml
from fos_rl.spec import Bf16, Mxfp8
from fos_rl.types import Rollout, StepRecord

ROOT = Path(__file__).parents[2]
# The hub's data sets as others load them: (name, subset, split) and a row of all columns. Of
# GSM8K and MATH-500 lighteval (src/lighteval/tasks/tasks/gsm8k.py, math_500.py), of AIME 2024 verl
# (recipe/dapo) and NeMo-RL (datasets/response_datasets/dapo_math.py), of AIME 2025
# lm-evaluation-harness (lm_eval/tasks/aime/aime25.yaml).
HUB: dict[str, tuple[tuple[str, str | None, str], dict[str, object]]] = {
    "gsm8k": (
        ("openai/gsm8k", "main", "test"),
        {"question": "What is 3 + 4?", "answer": "3 + 4 is <<3+4=7>>7.\n#### 7"},
    ),
    "math500": (
        ("HuggingFaceH4/MATH-500", None, "test"),
        {
            "problem": "What is 3 + 4?",
            "solution": "It is $\\boxed{7}$.",
            "answer": "7",
            "subject": "Prealgebra",
            "level": 1,
            "unique_id": "test/prealgebra/1.json",
        },
    ),
    "aime24": (
        ("BytedTsinghua-SIA/AIME-2024", None, "train"),
        {
            "data_source": "math_dapo",
            "prompt": [{"role": "user", "content": "What is 3 + 4?"}],
            "ability": "MATH",
            "reward_model": {"ground_truth": "7", "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": 0, "raw_problem": "What is 3 + 4?", "split": None},
        },
    ),
    "aime25": (
        ("math-ai/aime25", None, "test"),
        {"problem": "What is 3 + 4?", "answer": "7", "id": "0"},
    ),
}
TREE = {"model": {"path": "random:llama"}, "data": {"type": "vowels"}, "steps": 5}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(write_tiny_model("llama", tmp_path_factory.mktemp("m")))


def _write(path: Path, *rows: dict) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("num_samples", [1, 4, 6])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(num_samples: int) -> None:
    for num_correct in range(num_samples + 1):
        samples = [1] * num_correct + [0] * (num_samples - num_correct)
        for k in range(1, num_samples + 1):
            subsets = list(itertools.combinations(samples, k))
            share = sum(any(subset) for subset in subsets) / len(subsets)
            assert pass_at_k(num_samples, num_correct, k) == pytest.approx(share, abs=1e-12)


def test_accuracy_metrics() -> None:
    scores = np.array([[1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
    assert accuracy_metrics(scores) == pytest.approx(
        {"avg@4": 5 / 12, "pass@2": (0.5 + 1 + 0) / 3, "pass@4": 2 / 3}
    )
    assert accuracy_metrics(scores[:, :1]) == pytest.approx({"avg@1": 2 / 3})


def test_a_files_columns_tell_what_it_is(tmp_path: Path, tokenizer) -> None:
    chat = [{"role": "user", "content": "2 + 2?"}]
    files = [
        _write(tmp_path / "gsm.jsonl", {"question": "1 + 1?", "answer": "It is\n#### 2"}),
        _write(tmp_path / "dapo.jsonl", {"prompt": chat, "reward_model": {"ground_truth": "4"}}),
        _write(tmp_path / "deep.jsonl", {"prompt": "3 + 3?", "ground_truth": "6", "id": "1"}),
        _write(tmp_path / "plain.jsonl", {"question": "4 + 4?", "answer": "8"}),
    ]
    sets = [load_eval_set(file, tokenizer, 1000) for file in files]
    assert [s.name for s in sets] == ["gsm", "dapo", "deep", "plain"]
    assert [s.prompts[0].answer for s in sets] == ["2", "4", "6", "8"]
    assert "Answer:" in sets[2].prompts[0].text


@pytest.mark.parametrize("name", NAMED_SETS)
def test_a_named_set_is_one_of_the_hubs(name: str, tokenizer, monkeypatch) -> None:
    """Its name, subset and split, and the columns that hold question and answer."""
    (path, subset, split), row = HUB[name]

    def load_dataset(asked: str, asked_subset: str | None, split: str) -> datasets.Dataset:
        assert (asked, asked_subset) == (path, subset)
        return hub[split]

    hub = {split: datasets.Dataset.from_list([row])}
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    found = load_eval_set(name, tokenizer, 1000)
    assert (found.name, found.rule) == (name, "math")
    (prompt,) = found.prompts
    assert prompt.answer == "7"
    assert "What is 3 + 4?" in prompt.text


def test_copies_of_a_problem_count_once(tmp_path: Path, tokenizer) -> None:
    """AIME sets come with 32 copies of 30 problems."""
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{i} + 1?"}],
            "reward_model": {"ground_truth": f"{i + 1}"},
        }
        for i in range(3)
    ]
    found = load_eval_set(_write(tmp_path / "aime.jsonl", *(rows * 32)), tokenizer, 1000)
    assert [prompt.answer for prompt in found.prompts] == ["1", "2", "3"]
    assert found.summary == "aime: 3 problems"
    few = load_eval_set(str(tmp_path / "aime.jsonl"), tokenizer, 1000, max_problems=2)
    assert len(few.prompts) == 2


def test_problems_that_are_trained_on_are_counted(tmp_path: Path, tokenizer) -> None:
    rows = [{"question": f"{i} + 1?", "answer": f"{i + 1}"} for i in range(4)]
    found = load_eval_set(_write(tmp_path / "e.jsonl", *rows), tokenizer, 1000)
    trained = load_eval_set(_write(tmp_path / "t.jsonl", *rows[2:]), tokenizer, 1000)
    assert trained_on_note(found, trained.prompts) == "; 2 of them trained on"
    assert trained_on_note(found, []) == ""


def test_wrong_sets_are_explained(tmp_path: Path, tokenizer) -> None:
    with pytest.raises(ValueError, match=r"eval.sets: 'gsm9k': no such set; use one of gsm8k"):
        load_eval_set("gsm9k", tokenizer, 1000)
    file = _write(tmp_path / "x.jsonl", {"q": "1 + 1?", "a": "2"})
    with pytest.raises(ValueError, match=r"the columns are q, a; rename a question column"):
        load_eval_set(file, tokenizer, 1000)
    file = _write(tmp_path / "y.jsonl", {"question": "1 + 1?", "answer": "2"})
    with pytest.raises(ValueError, match=r"more than rollout.max_prompt_tokens = 3 tokens"):
        load_eval_set(file, tokenizer, 3)


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"sets": ["gsm8k"], "max_new_tokens": 999}, "eval.max_new_tokens = 999: the engine"),
        ({"sets": ["gsm8k"], "samples": 0, "greedy": False}, "nothing is evaluated"),
        ({"sets": []}, "eval.sets"),
        ({"sets": ["gsm8k"], "evry": 3}, "did you mean every?"),
    ],
)
def test_wrong_settings_are_explained(section: dict, words: str) -> None:
    with pytest.raises(ValueError, match=r".") as error:
        parse_config({**TREE, "eval": section})
    assert words in str(error.value)


class _Oracle:
    """Answers every problem right when sampled with an even index, and never when greedy."""

    def __init__(self) -> None:
        self.calls: list = []

    def generate(self, prompts, seed, sampling=None, first_index=0):
        self.calls.append((len(prompts), seed, sampling))
        return [
            [
                Rollout(
                    prompt_id=p.id,
                    prompt_ids=p.token_ids,
                    response_ids=[1],
                    log_probs=[0.0],
                    finish_reason="length" if sampling.temperature == 0 else "stop",
                    policy_version=0,
                    text=f"Answer: {p.answer if sampling.temperature and not i % 2 else 'x'}",
                )
                for i in range(sampling.num_samples)
            ]
            for p in prompts
        ]


def test_evaluation_is_due_every_so_many_steps_and_at_the_end(tmp_path: Path, tokenizer) -> None:
    file = _write(tmp_path / "two.jsonl", *({"question": f"{i}?", "answer": i} for i in (7, 8)))
    section = {"sets": [file], "every": 2, "samples": 4, "max_new_tokens": 9}
    tree = {**TREE, "seed": 3, "reward": {"workers": 0}, "eval": section}
    oracle = _Oracle()
    with Evaluator(parse_config(tree), [load_eval_set(file, tokenizer, 1000)]) as evaluator:
        records = [
            evaluator.add_to(StepRecord(step=step, metrics={"reward/mean": 0.5}), [oracle])
            for step in range(5)
        ]
    due = [any(key.startswith("eval/") for key in record.metrics) for record in records]
    assert due == [False, True, False, True, True]
    assert records[1].metrics == {
        "reward/mean": 0.5,
        "eval/two/avg@4": 0.5,
        "eval/two/pass@2": 1 - 1 / 6,
        "eval/two/pass@4": 1.0,
        "eval/two/greedy": 0.0,
        "eval/two/truncated_frac": 2 / 10,
    }
    # The same seeds every time, so that two evaluations differ by the policy alone.
    assert {(count, seed) for count, seed, _ in oracle.calls} == {(2, 3)}
    assert {sampling.max_new_tokens for *_, sampling in oracle.calls} == {9}


def test_answers_that_were_not_decided_are_counted(tmp_path: Path, tokenizer, monkeypatch) -> None:
    file = _write(tmp_path / "two.jsonl", *({"question": f"{i}?", "answer": i} for i in (7, 8)))
    section = {"sets": [file], "samples": 4, "max_new_tokens": 9}
    config = parse_config({**TREE, "reward": {"workers": 0}, "eval": section})
    counts = {"reward/errors": 1.0, "reward/timeouts": 2.0}
    monkeypatch.setattr(
        "fos_rl.rewards.verifiers.VerifierPool.score",
        lambda self, rollouts, answers: (np.zeros(len(rollouts)), counts),
    )
    with Evaluator(config, [load_eval_set(file, tokenizer, 1000)]) as evaluator:
        (result,) = evaluator.results(config.eval, [_Oracle()])
    # Sampled and greedy responses are scored apart.
    assert result.metrics()["eval/two/undecided"] == 6.0


def test_what_fos_rl_eval_evaluates(tmp_path: Path, capsys) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").touch()
    assert main(["eval", str(run), "--data", "gsm8k"]) == 2
    assert "no trained model yet" in capsys.readouterr().err

    (run / "model").mkdir()
    precision = {"recipe": "mxfp8", "compute_dtype": "float32"}
    tree = {**TREE, "seed": 7, "model": {"path": "x", "precision": precision}}
    (run / "config.toml").write_text(resolved_toml(parse_config(tree)))
    config = eval_config(str(run), sets=["gsm8k", "a.jsonl"], samples=4, greedy=False)
    assert (config.model.path, config.seed) == (str(run / "model"), 7)
    assert (config.eval.sets, config.eval.samples) == (("gsm8k", "a.jsonl"), 4)
    plain = Bf16(compute_dtype="float32")
    assert eval_precisions(config, "both") == [Mxfp8(compute_dtype="float32"), plain]
    assert eval_precisions(config, "bf16") == [plain]

    config = eval_config("some/model", sets=["aime24"], samples=0, greedy=True)
    assert config.model.path == "some/model"
    assert eval_precisions(config, "both") == [Bf16()]


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, pytest.param(2, marks=pytest.mark.long)])
def test_fos_rl_eval_of_a_model(times: int, tmp_path: Path) -> None:
    """Real vLLM, in two precisions one after the other, and the same figures when asked again."""
    model = write_tiny_model("qwen3_moe", tmp_path / "model")
    rows = ({"question": f"{i} + 1?", "answer": str(i + 1)} for i in range(5))
    file = _write(tmp_path / "sums.jsonl", *rows)
    command = [sys.executable, "-m", "fos_rl.cli", "eval", str(model), "--data", file]
    command += ["--samples", "2", "--greedy", "--set", "rollout.max_new_tokens=8"]
    command += ["--set", "model.precision.recipe=mxfp8", "--out", str(tmp_path / "eval.json")]
    command += ["--set", "model.precision.compute_dtype=float32"]
    found = []
    for _ in range(times):
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
        found.append(json.loads((tmp_path / "eval.json").read_text()))
    assert found[0] == found[-1]
    assert found[0]["metrics"].keys() == {"mxfp8", "bf16"}
    for metrics in found[0]["metrics"].values():
        names = ("avg@2", "pass@2", "greedy", "truncated_frac")
        assert metrics.keys() == {f"eval/sums/{name}" for name in names}
    assert all(len(sets["sums"]) == 5 for sets in found[0]["num_correct"].values())


def _held_out_config(**data: object) -> dict[str, object]:
    return {
        "model": {"path": "random:llama"},
        "data": {"type": "arithmetic", **data},
        "eval": {"sets": ["held_out"], "max_problems": 30},
    }


def test_held_out_problems_are_of_the_task_and_not_trained_on(tokenizer) -> None:
    config = parse_config(_held_out_config(difficulty=2, num_problems=1000))
    trained = {problem.id for problem in load_problems(config.data, config.seed).rows}
    (held_out,) = load_eval_sets(config, tokenizer)
    assert held_out.summary == "held_out: 30 problems"
    assert held_out.rule == "last_integer"
    assert len({prompt.id for prompt in held_out.prompts} - trained) == 30
    expressions = [prompt.id.removeprefix("arithmetic/") for prompt in held_out.prompts]
    assert [int(p.answer) for p in held_out.prompts] == [eval(e) for e in expressions]


def test_what_cannot_be_held_out_is_refused(tokenizer) -> None:
    whole = parse_config(_held_out_config(difficulty=1))
    with pytest.raises(ValueError, match=r"data\.num_problems = 1000: all 81 .*lower it"):
        load_eval_sets(whole, tokenizer)
    other = parse_config(_held_out_config() | {"data": {"type": "vowels"}})
    with pytest.raises(ValueError, match=r"'held_out'.*data\.type = 'vowels'"):
        load_eval_sets(other, tokenizer)
