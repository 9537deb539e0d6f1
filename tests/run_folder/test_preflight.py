"""A run that cannot start is refused before an actor does, by setting or file, rule and remedy."""

import json
import shutil
import struct
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from safetensors.torch import load_file, save_file

from fos_rl.cli import main
from fos_rl.config import parse_config
from fos_rl.generator.head_sizes import cpu_head_sizes
from fos_rl.model.hf import parse_architecture
from fos_rl.model.tiny import tiny_config, write_tiny_model
from fos_rl.model.weight_files import check_weights
from fos_rl.run_folder import preflight
from fos_rl.run_folder.loggers import check_loggers, start_loggers
from fos_rl.runtime.launch import planned
from fos_rl.spec import Bf16, ModelSpec
from fos_rl.types import Prompt


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return write_tiny_model("llama", tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Path:
    """A model to damage; brackets in its name, which are no pattern."""
    return Path(shutil.copytree(tiny, tmp_path / "m[1]"))


def config_of(folder: Path | str, **sections: dict[str, Any]) -> dict[str, Any]:
    model = {"path": str(folder), "precision": {"compute_dtype": "float32"}}
    data = {"type": "vowels", "num_problems": 8}
    return {"model": {**model, **sections.pop("model", {})}, "data": data, "steps": 10, **sections}


def refusal(folder: Path | str, **sections: dict[str, Any]) -> str:
    config = parse_config(config_of(folder, **sections))
    with pytest.raises(ValueError, match=r".") as error, planned(config):
        pass
    assert not ray.is_initialized()
    return str(error.value)


def edit(file: Path, **values: Any) -> None:
    """Set keys of a JSON file; those that are None are taken out."""
    tree = {**json.loads(file.read_text()), **values}
    file.write_text(json.dumps({key: value for key, value in tree.items() if value is not None}))


def replace_tensor(file: Path, **tensors: torch.Tensor | None) -> None:
    kept = {**load_file(file), **{name.replace("__", "."): t for name, t in tensors.items()}}
    save_file({name: tensor for name, tensor in kept.items() if tensor is not None}, file)


def _cut(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])


LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 335688\n"
NORM = torch.ones(64)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda file: file.unlink(), "has no .safetensors files"),
        (lambda file: file.write_text(LFS), "is a Git LFS pointer"),
        (lambda file: file.write_bytes(b""), "is empty"),
        (lambda file: file.write_bytes(b"abc"), "is cut off, or no safetensors file: it has 3 by"),
        (lambda file: _cut(file, 300), "it has 300 bytes, and its header alone would have"),
        (lambda file: _cut(file, 335_000), "has 335,000 bytes, and its header tells of 335,688"),
        (lambda file: file.write_bytes(file.read_bytes() + b"x"), "has 335,689 bytes, and its hea"),
        (lambda file: file.write_bytes(struct.pack("<Q", 4) + b"{]{]"), "is damaged"),
        (lambda file: (file.unlink(), file.mkdir()), "cannot be read (Is a directory)"),
        (lambda file: (file.unlink(), file.symlink_to("/nowhere")), "cannot be read (No such file"),
        (lambda file: file.rename(file.with_name("pytorch_model.bin")), "pickled weights alone"),
        (lambda file: file.rename(file.with_name("model.gguf")), "GGUF weights alone (model.gguf)"),
        (
            lambda file: (
                shutil.copyfile(file, file.with_name("1.safetensors")),
                file.rename(file.with_name("2.safetensors")),
            ),
            "model.embed_tokens.weight: in 1.safetensors and in 2.safetensors",
        ),
        (lambda file: replace_tensor(file, model__norm__weight=None), "model.norm.weight: missing"),
        (
            lambda file: replace_tensor(file, model__extra=NORM),
            "model.extra: the architecture has no",
        ),
        (
            lambda file: replace_tensor(file, model__norm__weight=NORM[:3]),
            "model.norm.weight: shape (3,), the architecture needs (64,)",
        ),
        (
            lambda file: replace_tensor(file, model__norm__weight=NORM.to(torch.int8)),
            "model.norm.weight: type I8",
        ),
        (
            lambda file: replace_tensor(file, lm_head__weight=torch.ones(5, 64)),
            "lm_head.weight: shape (5, 64), the architecture needs (288, 64)",
        ),
    ],
)
def test_weights_that_cannot_be_loaded(damage, words: str, folder: Path) -> None:
    damage(folder / "model.safetensors")
    message = refusal(folder)
    assert message.startswith("model.path: ")
    assert str(folder) in message
    assert words in message


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a JSON object"),
        ("{}", "has no weight_map"),
        ('{"weight_map": {}}', "has no weight_map"),
        ('{"weight_map": {"a": "model-2.safetensors"}}', "lacks model-2.safetensors"),
        ('{"weight_map": {"a": 3}}', "lacks 3"),
    ],
)
def test_an_index_that_does_not_fit(index: str, words: str, folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(index)
    assert words in refusal(folder)


def test_saved_frequencies_a_tied_head_and_another_format_are_no_mistake(folder: Path) -> None:
    file = folder / "model.safetensors"
    (folder / "consolidated.safetensors").write_text("the same model in another layout")
    head = load_file(file)["model.embed_tokens.weight"].clone()
    replace_tensor(file, lm_head__weight=head, model__rotary_emb__inv_freq=torch.ones(16))
    with planned(parse_config(config_of(folder))) as plan:
        assert "weights    30 tensors, 0.00 GiB, in model.safetensors" in plan.notes


def test_shards_are_read_by_their_headers(tmp_path: Path) -> None:
    save_file({"a": NORM}, tmp_path / "1.safetensors")
    save_file({"b": NORM[:2]}, tmp_path / "2.safetensors")
    shapes = {"a": (64,), "b": (2,)}
    assert check_weights(tmp_path, shapes, tied_head=False).startswith("2 tensors, 0.00 GiB, in 2 ")


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("num_hidden_layers", "12", "whole number"),
        ("num_hidden_layers", 0, "whole number"),
        ("num_hidden_layers", -3, "whole number"),
        ("num_hidden_layers", 1.5, "whole number"),
        ("num_hidden_layers", True, "whole number"),
        ("hidden_size", [64], "whole number"),
        ("num_attention_heads", 0, "whole number"),
        ("num_key_value_heads", 0, "whole number"),
        ("head_dim", "32", "whole number"),
        ("vocab_size", -1, "whole number"),
        ("max_position_embeddings", {}, "whole number"),
        ("rms_norm_eps", "x", "number above 0"),
        ("rope_theta", -1.0, "number above 0"),
        ("tie_word_embeddings", "yes", "true or false"),
        ("layer_types", 3, "list of str"),
        ("rope_scaling", [1], "give an object"),
        ("rope_scaling", {"rope_type": "llama3", "factor": "8"}, "number above 0 for factor"),
    ],
)
def test_a_config_json_with_a_wrong_value(key: str, value: Any, rule: str, folder: Path) -> None:
    edit(folder / "config.json", **{key: value})
    message = refusal(folder)
    for words in (str(folder / "config.json"), f"{key} = ", rule):
        assert words in message


def test_heads_that_do_not_divide_the_width() -> None:
    config = {**tiny_config("llama"), "hidden_size": 66, "head_dim": None}
    with pytest.raises(ValueError, match=r"hidden_size = 66.*num_attention_heads = 4 must divide"):
        parse_architecture(config)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("", "is empty"),
        ("[1]", "is not a JSON object"),
        ("null", "not a JSON object"),
    ],
)
@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"]
)
def test_a_broken_json_file(name: str, text: str, words: str, folder: Path) -> None:
    (folder / name).write_text(text)
    message = refusal(folder)
    assert str(folder / name) in message
    assert words in message


def test_a_model_without_its_files(folder: Path) -> None:
    file = folder / "model.safetensors"
    assert f"is a file; give the folder that it is in, {folder}" in refusal(file)
    (folder / "tokenizer.json").write_text("{}")
    assert "cannot be loaded (KeyError: 'added_tokens')" in refusal(folder)
    (folder / "tokenizer.json").unlink()
    assert "has no tokenizer (tokenizer.json" in refusal(folder)


def test_a_tokenizer_outside_the_embedding(folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    more = {**tokenizer["added_tokens"][-1], "id": 288, "content": "<|new|>"}
    edit(folder / "tokenizer.json", added_tokens=[*tokenizer["added_tokens"], more])
    message = refusal(folder)
    for words in ("token '<|new|>' with id 288", "ids up to 287 (vocab_size = 288"):
        assert words in message


def test_a_response_that_no_token_ends(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", eos_token=None)
    # vLLM takes generation_config.json's.
    with planned(parse_config(config_of(folder))) as plan:
        assert any("ends at <|im_end|> (259)" in note for note in plan.notes)
    (folder / "generation_config.json").unlink()
    edit(folder / "config.json", eos_token_id=None)
    assert "no token ends a response" in refusal(folder)
    for wrong in (288, -1, "259", [259, 288], True):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": wrong}))
        assert f"eos_token_id = {wrong!r}" in refusal(folder)


def test_the_first_prompt_is_shown() -> None:
    prompt = Prompt(id="1", token_ids=[1, 2, 3], text="a" * 200 + "b" * 80, answer="")
    shown = preflight.describe_first_prompt([prompt], prompt)
    assert shown == f"3 tokens, '{'a' * 160} ... {'b' * 70}'"
    empty = Prompt(id="2", token_ids=[], text="x", answer="")
    with pytest.raises(ValueError, match="makes no token of the prompt 'x'"):
        preflight.describe_first_prompt([prompt, empty], prompt)


def test_a_sequence_longer_than_the_context(tiny: Path) -> None:
    lengths = {"max_prompt_tokens": 4000, "max_new_tokens": 97}
    message = refusal(tiny, rollout=lengths)
    for words in ("rollout.max_new_tokens = 97", "together 4097", "4096 tokens", "by 1"):
        assert words in message
    fits = {**lengths, "max_new_tokens": 96}
    with planned(parse_config(config_of(tiny, rollout=fits))):
        pass


def test_a_cache_that_holds_no_sequence(tiny: Path) -> None:
    """A tiny model keeps 2 x 2 heads x 32 numbers x 4 bytes x 3 layers = 1,536 bytes per token; 72
    tokens take three pages of 32: 147,456 bytes, 0.000137 GiB."""
    rollout = {"max_prompt_tokens": 64, "max_new_tokens": 8}
    small, enough = {"kv_cache_gib": 147_455 / 2**30}, {"kv_cache_gib": 147_456 / 2**30}
    assert "72 tokens needs 0.000137" in refusal(tiny, rollout=rollout, generator=small)
    with planned(parse_config(config_of(tiny, rollout=rollout, generator=enough))):
        pass
    few = {"max_num_batched_tokens": 8, "max_num_seqs": 9}
    assert "generator.max_num_seqs = 9" in refusal(tiny, generator=few)


def test_head_sizes_are_those_that_vllm_lists() -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    assert cpu_head_sizes() == CPUAttentionBackend.get_supported_head_sizes()


@pytest.mark.parametrize(
    ("head_dim", "dtype", "trainer", "generator", "refused"),
    [
        (64, "float32", "cpu", "cpu", None),
        (16, "float32", "cpu", "cpu", "vLLM's CPU attention has kernels for 32, 64"),
        (16, "float32", None, None, None),
        (72, "bfloat16", "cuda", "cuda", None),
        (36, "bfloat16", "cuda", "cuda", "multiples of 8 up to 256"),
        (264, "bfloat16", "cuda", "cuda", "multiples of 8 up to 256"),
        (264, "float32", "cuda", "cpu", "vLLM's CPU attention"),
    ],
)
def test_a_head_size_without_a_kernel(head_dim, dtype, trainer, generator, refused) -> None:
    architecture = parse_architecture({**tiny_config("llama"), "head_dim": head_dim})
    spec = ModelSpec(architecture=architecture, precision=Bf16(compute_dtype=dtype))
    if refused is None:
        assert preflight.check_head_size(spec, trainer, generator) == []
        return
    with pytest.raises(ValueError, match=refused) as error:
        preflight.check_head_size(spec, trainer, generator)
    assert f"head_dim = {head_dim}" in str(error.value)


def test_what_a_run_writes() -> None:
    """10 parameters: 20 bytes of bf16, and 120 of fp32 master and moments per checkpoint, after
    steps 3, 6 and 9. 10 steps of 8 x 8 responses, 256 tokens of 80 bytes and a prompt of 5."""
    config = parse_config(config_of("x", trainer={"save_every": 3}))
    space = preflight.needed_space(config, {"a": (2, 4), "b": (2,)}, longest_prompt=5)
    assert (space.model, space.checkpoints, space.num_checkpoints) == (20, 360, 3)
    assert (space.certain, space.rollouts) == (380, 10 * 64 * (256 * 80 + 5 * 6))
    later = preflight.needed_space(config, {"a": (10,)}, longest_prompt=5, first_step=6)
    assert (later.num_checkpoints, later.rollouts) == (1, 4 * 64 * (256 * 80 + 5 * 6))


def test_an_output_that_cannot_be_written(tmp_path: Path, monkeypatch) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    for out, words in (
        (file, "is a file"),
        (file / "run", "Not a directory"),
        (Path("/proc/none/run"), "cannot be written"),
        (tmp_path / ("x" * 300), "File name too long"),
    ):
        with pytest.raises(ValueError, match=words):
            preflight.check_writable(out, "--out")
    monkeypatch.chdir(tmp_path)
    preflight.check_output(Path("runs/a"), 1, "")
    assert sorted(tmp_path.iterdir()) == [file]
    usage = SimpleNamespace(free=3 << 30)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert preflight.check_output(tmp_path, 3 << 30, "") == "3.0 GiB free"
    with pytest.raises(ValueError, match=r"3\.0 GiB free, and the models need 4\.0 GiB"):
        preflight.check_output(tmp_path, 4 << 30, "the models")


@pytest.fixture
def wandb(monkeypatch) -> ModuleType:
    """The parts of W&B that are used, without an account."""

    class Error(Exception):
        pass

    def init(**_: object) -> None:
        raise Error("no API key")

    module: Any = ModuleType("wandb")
    module.errors = SimpleNamespace(Error=Error)
    module.mode, module.key = "online", False
    module.setup = lambda: SimpleNamespace(settings=SimpleNamespace(mode=module.mode))
    module.login = lambda *, prompt: not prompt and module.key
    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


LOGGED = config_of("random:llama", logging={"wandb_project": "p"})


def test_weights_and_biases_without_a_key(wandb: Any, tmp_path: Path) -> None:
    config = parse_config(LOGGED)
    with pytest.raises(ValueError, match=r"'p': Weights & Biases has no key.*wandb login"):
        check_loggers(config)
    wandb.key = True
    assert check_loggers(config) == ["whether Weights & Biases can be reached and takes the key"]
    wandb.key, wandb.mode = False, "offline"
    assert check_loggers(config) == []
    with pytest.raises(RuntimeError, match=r"did not start \(no API key\).*wandb offline"):
        start_loggers(config, tmp_path)


def test_loggers_that_are_not_installed(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    for ask in (check_loggers, lambda config: start_loggers(config, tmp_path)):
        with pytest.raises(ValueError, match=r"'p': the package wandb is not installed"):
            ask(parse_config(LOGGED))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = parse_config(config_of("random:llama", logging={"tensorboard": True}))
    with pytest.raises(ValueError, match=r"logging\.tensorboard.*not installed"):
        check_loggers(config)


def test_a_dry_run_says_what_it_checked(tiny: Path, tmp_path: Path, capsys) -> None:
    config = tmp_path / "c.toml"
    config.write_text(
        f'[model]\npath = "{tiny}"\nprecision.compute_dtype = "float32"\n[data]\ntype = "vowels"\n'
    )
    out = tmp_path / "runs" / "new"
    assert main(["train", str(config), "--dry-run", "--out", str(out)]) == 0
    *notes, checked, unchecked, last = capsys.readouterr().out.splitlines()
    assert not out.parent.exists()
    assert last == "dry run: nothing started"
    for words in ("names, shapes and types of the weights", "head size", "disk", "loggers"):
        assert words in checked
    assert unchecked == "unchecked  memory; values of the weights"
    # 4 bytes of three byte tokens and the template's; the tiny tokenizer has one token per byte.
    [prompt] = [note for note in notes if note.startswith("prompt")]
    assert "tokens, '<|im_start|>user\\nSay a vowel" in prompt
    [output] = [note for note in notes if note.startswith("output")]
    assert output.startswith(f"output     {out}: 0.3 MiB for the model")


def test_a_train_run_makes_the_same_checks(folder: Path, tmp_path: Path, capsys) -> None:
    (folder / "model.safetensors").write_text(LFS)
    config = tmp_path / "c.toml"
    config.write_text(f'[model]\npath = "{folder}"\n[data]\ntype = "vowels"\n')
    assert main(["train", str(config), "--out", str(tmp_path / "run")]) == 2
    assert "is a Git LFS pointer" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert not ray.is_initialized()
