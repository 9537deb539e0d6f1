from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from fos_rl.config import RunConfig, parse_config
from fos_rl.data.problems import Problem, ProblemCounts, Problems
from fos_rl.data.prompts import PromptSet, encode_problems

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    words = ["[UNK]", "<user>", "<assistant>", *(f"w{i}" for i in range(100))]
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="[UNK]", chat_template=TEMPLATE
    )


def make_problems(contents: list[str]) -> Problems:
    rows = [
        Problem(id=f"p{i}", messages=(("user", content),), answer=str(i))
        for i, content in enumerate(contents)
    ]
    count = len(rows)
    return Problems(
        rows=rows,
        summary=ProblemCounts(rows=count, duplicates=0, conflicting=0, damaged=0, kept=count),
    )


def make_config(prompts_per_step: int, seed: int = 0, max_prompt_tokens: int = 1024) -> RunConfig:
    return parse_config(
        {
            "model": {"path": "random:llama"},
            "data": {"type": "arithmetic"},
            "seed": seed,
            "rollout": {
                "prompts_per_step": prompts_per_step,
                "max_prompt_tokens": max_prompt_tokens,
            },
        }
    )


def ids(prompts: PromptSet, steps: range) -> list[str]:
    return [prompt.id for step in steps for prompt in prompts.batch(step)]


def test_chat_template_is_applied(tokenizer) -> None:
    prompts = PromptSet(make_problems(["w0 w1"]), tokenizer, make_config(1))
    (prompt,) = prompts.batch(0)
    assert prompt.text == "<user> w0 w1 <assistant>"
    assert prompt.token_ids == [1, 3, 4, 2]
    assert prompt.answer == "0"


def test_without_a_template_the_text_is_plain(tokenizer) -> None:
    tokenizer.chat_template = None
    (prompt,) = PromptSet(make_problems(["w0 w1"]), tokenizer, make_config(1)).batch(0)
    assert prompt.text == "w0 w1\n"
    assert prompt.token_ids == [3, 4]


def test_no_end_of_text_before_the_answer(tokenizer) -> None:
    """Some tokenizers put it behind every text."""
    tokenizer.chat_template = None
    tokenizer.eos_token = "w9"
    end = processors.TemplateProcessing(single="$A w9", special_tokens=[("w9", 12)])
    tokenizer.backend_tokenizer.post_processor = end
    assert tokenizer("w0")["input_ids"] == [3, 12]
    (prompt,) = encode_problems(make_problems(["w0"]).rows, tokenizer)
    assert prompt.token_ids == [3]


def test_turns_need_a_template(tokenizer) -> None:
    tokenizer.chat_template = None
    chat = Problem(id="1", messages=(("system", "w1"), ("user", "w0")), answer="0", row=3)
    assert encode_problems([chat], tokenizer)[0].text == "w1\n\nw0\n"
    turns = replace(chat, messages=(*chat.messages, ("assistant", "w2"), ("user", "w3")))
    with pytest.raises(
        ValueError, match=r"row 3 .*a chat of 4 turns .system, user, assistant, user"
    ):
        encode_problems([turns], tokenizer)


def test_prompts_that_are_rendered_already_are_an_error(tokenizer) -> None:
    tokenizer.add_special_tokens({"additional_special_tokens": ["<user>"]})
    rendered = make_problems(["w0", "<user> w1 <assistant>"])
    with pytest.raises(
        ValueError, match=r"1 of 2 prompts hold special tokens .*'<user>' in prompt"
    ):
        PromptSet(rendered, tokenizer, make_config(1))
    one_of_many = make_problems([*["w0"] * 199, "What does <user> mean?"])
    summary = PromptSet(one_of_many, tokenizer, make_config(1)).summary
    assert "1 of 200 prompts hold special tokens of the model ('<user>' in" in summary
    # Without a template the text is the user's own to write.
    tokenizer.chat_template = None
    PromptSet(rendered, tokenizer, make_config(1))


@pytest.mark.parametrize(
    ("template", "words"),
    [
        pytest.param(
            "{% if messages[0].role == 'system' %}{{ raise_exception('No system') }}{% endif %}",
            ["No system"],
            id="refuses-system",
        ),
        pytest.param("{% for m in messages %}", ["TemplateSyntaxError"], id="syntax"),
        pytest.param("{{ messages[0].name.first }}", ["UndefinedError"], id="undefined"),
        pytest.param("{{ messages[0].content + 1 }}", ["TypeError"], id="type"),
        pytest.param(
            "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
            ["leaves out what the system says"],
            id="leaves-out",
        ),
    ],
)
def test_a_template_that_cannot_render_is_named(tokenizer, template: str, words: list[str]) -> None:
    tokenizer.chat_template = template
    chat = Problem(id="p", messages=(("system", "w1"), ("user", "w0")), answer="0", row=3)
    with pytest.raises(ValueError, match=r"^the tokenizer's chat_template .*row 3 of") as error:
        encode_problems([chat], tokenizer)
    for word in [*words, "correct chat_template in the model's folder"]:
        assert word in str(error.value)


def test_an_empty_system_message_is_rendered(tokenizer) -> None:
    """A template that finds no system message would write its own."""
    chat = Problem(id="p", messages=(("system", ""), ("user", "w0")), answer="0")
    assert encode_problems([chat], tokenizer)[0].text == "<system>  <user> w0 <assistant>"


def test_each_epoch_is_a_permutation_across_batch_boundaries(tokenizer) -> None:
    # 10 prompts in batches of 4: epochs end inside of batches.
    prompts = PromptSet(make_problems([f"w{i}" for i in range(10)]), tokenizer, make_config(4))
    drawn = ids(prompts, range(10))
    epochs = [drawn[start : start + 10] for start in range(0, 40, 10)]
    assert all(sorted(epoch) == sorted(f"p{i}" for i in range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_batches_depend_on_seed_and_step_only(tokenizer) -> None:
    contents = [f"w{i}" for i in range(20)]
    problems = make_problems(contents)
    first = PromptSet(problems, tokenizer, make_config(6, seed=1))
    expected = [first.batch(step) for step in range(8)]
    # A resumed run starts at a later step; a set read in another order has the same prompts.
    resumed = PromptSet(problems, tokenizer, make_config(6, seed=1))
    assert [resumed.batch(step) for step in (7, 3, 5)] == [expected[i] for i in (7, 3, 5)]
    shuffled = Problems(rows=problems.rows[::-1], summary=problems.summary)
    reordered = PromptSet(shuffled, tokenizer, make_config(6, seed=1))
    assert [reordered.batch(step) for step in range(8)] == expected
    other = PromptSet(problems, tokenizer, make_config(6, seed=2))
    assert ids(other, range(8)) != ids(first, range(8))


def test_a_set_smaller_than_a_batch_goes_round(tokenizer) -> None:
    prompts = PromptSet(make_problems(["w0", "w1", "w2"]), tokenizer, make_config(8))
    drawn = ids(prompts, range(3))
    assert len(drawn) == 24
    assert all(drawn.count(f"p{i}") == 8 for i in range(3))
    assert sorted(drawn[:3]) == ["p0", "p1", "p2"]


def test_long_prompts_are_dropped_and_counted(tokenizer) -> None:
    problems = make_problems(["w0", "w0 " * 30, "w1 w2"])
    prompts = PromptSet(problems, tokenizer, make_config(2, max_prompt_tokens=4))
    assert [prompt.id for prompt in prompts.prompts] == ["p0", "p2"]
    assert (prompts.counts.too_long, prompts.counts.kept, prompts.counts.longest) == (1, 2, 4)
    assert "dropped 1 of more than 4" in prompts.summary


def test_only_long_prompts_is_an_error(tokenizer) -> None:
    problems = make_problems(["w0 w1", "w0 w1 w2"])
    with pytest.raises(ValueError, match=r"rollout\.max_prompt_tokens = 2: all 2 .* at least 4"):
        PromptSet(problems, tokenizer, make_config(2, max_prompt_tokens=2))


def test_import_is_light() -> None:
    import subprocess
    import sys

    code = (
        "import sys, fos_rl.data.prompts, fos_rl.rewards.verifiers; "
        "print([m for m in ('torch', 'ray', 'vllm', 'datasets', 'sympy') if m in sys.modules])"
    )
    root = Path(__file__).parents[2]
    out = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert out.stdout.strip() == "[]", out.stderr
