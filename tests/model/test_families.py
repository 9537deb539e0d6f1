"""What each family says of itself, against its own tiny model and published configurations."""

import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

import fos_rl
from fos_rl.model.families import FAMILIES, family_of
from fos_rl.model.hf import parse_architecture
from fos_rl.model.tiny import tiny_config
from fos_rl.spec import Family
from tests.support.decoders import tiny

# Qwen/Qwen2.5-0.5B-Instruct and Qwen/Qwen2.5-7B-Instruct, config.json as published.
QWEN25_05B = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 896,
    "initializer_range": 0.02,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN25_7B = {
    **QWEN25_05B,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "vocab_size": 152064,
}


def test_a_familys_name_is_its_model_type() -> None:
    assert all(tiny_config(name)["model_type"] == name for name in FAMILIES)


def test_a_family_is_named_in_its_file_and_the_registry_alone() -> None:
    """So that adding one touches two files. The example of `model.path` names one family, and two
    tools are for one family each."""
    root = Path(fos_rl.__file__).parent
    folder = root / "model" / "families"
    naming = {root / name for name in ("config/run.py", "tools/smollm2.py", "tools/upcycle.py")}
    # qwen3_moe is also written Qwen3-MoE; llama3 is a kind of rotary scaling, not a family.
    names = "|".join(name.replace("_", "[-_ ]?") for name in FAMILIES)
    pattern = re.compile(rf"\b({names})(?![a-z0-9])", re.IGNORECASE)
    found = {path for path in root.rglob("*.py") if pattern.search(path.read_text())}
    assert found == {folder / "__init__.py", *(folder / f"{name}.py" for name in FAMILIES), *naming}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_weight_has_one_way_to_be_cut(family: Family) -> None:
    """Also with the biases that the tiny model leaves out; cuts fit the weights' shapes."""
    biases = {} if family == "qwen2" else {"attention_bias": True}
    packed = tiny(family, **biases)
    architecture, own = packed.spec.architecture, FAMILIES[family]
    heads = architecture.num_heads * architecture.head_dim
    kv_heads = architecture.num_kv_heads * architecture.head_dim
    for name, weight in packed.weights.items():
        fitting = [pattern for pattern, _ in own.splits if fnmatchcase(name, pattern)]
        assert len(fitting) == 1, f"{name}: {fitting}"
        match own.split(name):
            case "heads":
                assert weight.shape[0] == heads, name
            case "kv_heads":
                assert weight.shape[0] == kv_heads, name
            case "head_columns":
                assert weight.shape[1] == heads, name
            case "whole":
                assert weight.dim() == 1 or name.endswith("mlp.gate.weight"), name
            case "experts":
                assert ".experts." in name


@pytest.mark.parametrize(
    ("config", "head_dim", "cache_bytes"),
    # 2 (keys, values) x 24 layers x 2 heads x 64 numbers x 2 bytes; 2 x 28 x 4 x 128 x 2.
    [(QWEN25_05B, 64, 12_288), (QWEN25_7B, 128, 57_344)],
    ids=["0.5B", "7B"],
)
def test_published_qwen25_configs(config: dict, head_dim: int, cache_bytes: int) -> None:
    architecture = parse_architecture(config)
    assert architecture.head_dim == head_dim
    assert architecture.attention_bias
    assert architecture.rope_theta == 1e6
    assert architecture.tie_word_embeddings == config["tie_word_embeddings"]
    assert family_of(architecture).cache_bytes_per_token(architecture, 2) == cache_bytes


def test_qwen2_has_biases_on_queries_keys_and_values_alone() -> None:
    names = {name for name in tiny("qwen2").weights if name.endswith(".bias")}
    assert names == {
        f"model.layers.{layer}.self_attn.{kind}_proj.bias" for layer in range(3) for kind in "qkv"
    }
    # transformers does not read this key of a Qwen2.
    config = {**QWEN25_05B, "attention_bias": False}
    assert parse_architecture(config) == parse_architecture(QWEN25_05B)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"head_dim": 128}, ["head_dim = 128", "896 / 14"]),
        ({"num_attention_heads": 12}, ["hidden_size = 896", "num_attention_heads = 12"]),
        ({"use_sliding_window": True}, ["use_sliding_window = True"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads = 3"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_qwen2_that_computes_something_else_is_refused(change: dict, words: list[str]) -> None:
    with pytest.raises(ValueError, match=r"config\.json") as error:
        parse_architecture({**QWEN25_05B, **change})
    for word in words:
        assert word in str(error.value)
