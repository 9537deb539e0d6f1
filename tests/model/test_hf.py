"""Hugging Face folders: read, refused by name, loaded, written back."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fos_rl.model.hf import (
    load_hf_weights,
    named_hf_weights,
    parse_architecture,
    read_architecture,
    read_weights,
    resolve_model,
    write_model,
    write_weights,
)
from fos_rl.model.tiny import tiny_config, write_tiny_model
from fos_rl.spec import ModelSpec, RopeScaling
from tests.support.decoders import FAMILIES, random_samples, tiny

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


@pytest.mark.parametrize("kind_key", ["rope_type", "type"])
def test_rope_of_both_config_styles(kind_key):
    config = without(tiny_config("llama"), "rope_theta")
    scaled = {**LLAMA3, kind_key: "llama3"}
    old = parse_architecture({**config, "rope_theta": 5e5, "rope_scaling": scaled})
    new = parse_architecture({**config, "rope_parameters": {**scaled, "rope_theta": 5e5}})
    assert old == new
    assert (old.rope_theta, old.rope_scaling) == (5e5, RopeScaling(**LLAMA3))
    plain = parse_architecture({**config, "rope_theta": 1e6, "rope_scaling": None})
    default = {"rope_type": "default", "rope_theta": 1e6}
    assert plain == parse_architecture({**config, "rope_parameters": default})
    assert plain.rope_scaling is None


def test_experts_of_both_config_styles():
    config = tiny_config("qwen3_moe")
    old = parse_architecture({**config, "mlp_only_layers": [0]})
    new = parse_architecture(
        {**without(config, "num_experts"), "num_local_experts": 8, "mlp_only_layers": [0]}
    )
    assert old == new
    assert (old.num_experts, old.num_experts_per_token, old.dense_layers) == (8, 2, (0,))
    every_second = parse_architecture({**config, "decoder_sparse_step": 2})
    assert every_second.dense_layers == (0, 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_saved_by_transformers_reads_the_same(family, tmp_path):
    folder = write_tiny_model(family, tmp_path / "tiny")
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path / "saved")
    assert read_architecture(tmp_path / "saved") == read_architecture(folder)


def test_absent_keys_take_the_classes_defaults():
    keys = ("head_dim", "num_key_value_heads", "rope_theta", "attention_bias", "rms_norm_eps")
    llama = parse_architecture(without(tiny_config("llama"), *keys))
    assert (llama.head_dim, llama.num_kv_heads) == (16, 4)
    assert (llama.rope_theta, llama.attention_bias, llama.rms_norm_eps) == (1e4, False, 1e-6)
    assert parse_architecture({**tiny_config("qwen3"), "head_dim": None}).head_dim == 128


@pytest.mark.parametrize(
    ("family", "change", "words"),
    [
        ("llama", {"model_type": "mistral"}, ["model_type = 'mistral'", "llama, qwen3"]),
        ("llama", {"model_type": ["llama"]}, ["model_type = ['llama']", "qwen2"]),
        ("llama", {"hidden_act": "gelu"}, ["hidden_act = 'gelu'", "silu"]),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 64}, ["use_sliding_window"]),
        ("qwen3", {"layer_types": ["sliding_attention"]}, ["layer_types"]),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4}}, ["rope_scaling", "yarn"]),
        ("llama", {"rope_parameters": {"rope_type": "linear"}}, ["rope_parameters", "linear"]),
        ("llama", {"rope_scaling": {"type": "llama3", "factor": 4}}, ["low_freq_factor"]),
        ("llama", {"partial_rotary_factor": 0.5}, ["partial_rotary_factor = 0.5"]),
        ("llama", {"quantization_config": {"bits": 4}}, ["quantization_config", "bf16"]),
        ("llama", {"num_key_value_heads": 3}, ["num_key_value_heads = 3", "divide"]),
        ("llama", {"head_dim": 33}, ["head_dim = 33", "even"]),
        ("llama", {"hidden_size": None}, ["hidden_size is missing"]),
        ("qwen3_moe", {"num_experts_per_tok": 9}, ["num_experts_per_tok = 9", "1 to"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_the_decoder_cannot_compute_is_refused_by_name(family, change, words):
    with pytest.raises(ValueError, match=r"config\.json") as error:
        parse_architecture({**tiny_config(family), **change})
    for word in words:
        assert word in str(error.value)


def test_a_sliding_window_that_is_switched_off_is_fine():
    off = {"use_sliding_window": False, "sliding_window": 4096}
    assert parse_architecture({**tiny_config("qwen3"), **off})


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("./no/such/model", ["no such folder"]),
        ("models/not-there/deeper", ["no such folder"]),
        ("random:gpt2", ["random:gpt2", "random:llama", "random:qwen3_moe"]),
        ("someone/no-such-model-of-fos-rl", ["hub", "give the folder"]),
        ("not a name!", ["no such folder"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_model_that_cannot_be_found_names_the_field(path, words, tmp_path):
    with pytest.raises(ValueError, match=r"model\.path") as error:
        resolve_model(path, random_folder=tmp_path / "random")
    for word in words:
        assert word in str(error.value)


def test_a_folder_without_a_model_names_the_field(tmp_path):
    for function in (lambda path: resolve_model(str(path)), read_architecture):
        with pytest.raises(ValueError, match=r"model\.path.* no config\.json"):
            function(tmp_path)
    with pytest.raises(ValueError, match=r"no \.safetensors"):
        next(read_weights(tmp_path))


def test_resolves_folders_and_random_models(tmp_path):
    folder = resolve_model("random:qwen3", random_folder=tmp_path / "tiny", seed=3)
    assert resolve_model(str(folder)) == folder.resolve()
    assert read_architecture(folder).family == "qwen3"


@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip_through_a_folder_and_transformers(family, tmp_path):
    """Changed weights written from the decoder: our own reading and transformers' both see them,
    and the tokenizer came along."""
    source = write_tiny_model(family, tmp_path / "source")
    packed = tiny(family)
    with torch.no_grad():
        for _, view in named_hf_weights(packed.decoder):
            view.mul_(1.25)
            view.copy_(view.to(torch.bfloat16))
    out = write_model(packed.decoder, packed.spec, source, tmp_path / "out")

    written = dict(read_weights(out))
    for name, view in named_hf_weights(packed.decoder):
        assert written[name].dtype == torch.bfloat16
        assert torch.equal(written[name].float(), view), name
    assert written.keys() == {name for name, _ in named_hf_weights(packed.decoder)}

    model, info = AutoModelForCausalLM.from_pretrained(  # pyright: ignore[reportGeneralTypeIssues]
        out, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    (sample,) = random_samples(25)
    with torch.no_grad():
        want = model(sample[None]).logits[0]
        got = packed.decoder.logits(packed.hidden([sample]))
    # As in test_decoder, with logits about twice as large.
    assert float((got - want).abs().max()) < 2e-4
    assert AutoTokenizer.from_pretrained(out)("3+4").input_ids == [51, 43, 52]
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_a_checkpoint_saved_by_transformers_loads(tmp_path):
    """transformers keeps experts stacked in memory; on disk they have names of their own."""
    packed = tiny("qwen3_moe")
    folder = write_tiny_model("qwen3_moe", tmp_path / "tiny")
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path / "saved")
    loaded = load_hf_weights(packed.decoder, read_weights(tmp_path / "saved"))
    assert loaded == packed.weights.keys()
    for name, view in named_hf_weights(packed.decoder):
        assert torch.equal(view, packed.weights[name].float()), name


def test_shards_have_an_index_and_read_back(tmp_path):
    weights = tiny("llama").weights
    write_weights(weights.items(), tmp_path, shard_bytes=100_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert len(files) > 2
    assert all((tmp_path / name).stat().st_size < 110_000 for name in files)
    assert index["metadata"]["total_size"] == sum(2 * w.numel() for w in weights.values())
    back = dict(read_weights(tmp_path))
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], weights[name]) for name in weights)
    (tmp_path / sorted(files)[0]).unlink()
    with pytest.raises(ValueError, match="lacks model-00001"):
        list(read_weights(tmp_path))


def test_write_model_refuses_what_would_not_load(tmp_path):
    packed = tiny("llama")
    source = write_tiny_model("llama", tmp_path / "source")
    names = list(packed.weights.items())
    with pytest.raises(ValueError, match=r"weights are missing: model\.norm\.weight"):
        write_model(names[:-1], packed.spec, source, tmp_path / "out")
    with pytest.raises(ValueError, match=r"model\.norm\.weight: the model has no such .* twice"):
        write_model([*names, names[-1]], packed.spec, source, tmp_path / "out")
    with pytest.raises(ValueError, match="another architecture"):
        write_model(tiny("qwen3").decoder, tiny("qwen3").spec, source, tmp_path / "out")
    with pytest.raises(ValueError, match="not empty"):
        write_model(packed.decoder, packed.spec, source, source)
    assert not (tmp_path / "out").exists()


def _change(weights: dict[str, torch.Tensor], kind: str) -> list[tuple[str, torch.Tensor]]:
    name = "model.layers.1.mlp.up_proj.weight"
    pairs = list(weights.items())
    if kind == "missing":
        return [pair for pair in pairs if pair[0] != name]
    if kind == "unknown":
        return [*pairs, ("model.layers.9.mlp.up_proj.weight", weights[name])]
    if kind == "shape":
        return [(n, w.T if n == name else w) for n, w in pairs]
    if kind == "twice":
        return [*pairs, (name, weights[name])]
    return [("lm_head.weight", weights["model.embed_tokens.weight"] + 1), *pairs]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("missing", r"model\.layers\.1\.mlp\.up_proj\.weight: missing"),
        ("unknown", r"model\.layers\.9\.mlp\.up_proj\.weight: the decoder has no such weight"),
        ("shape", r"up_proj\.weight: shape \(64, 128\), the decoder needs \(128, 64\)"),
        ("twice", r"model\.layers\.1\.mlp\.up_proj\.weight: came twice"),
        ("head", r"lm_head\.weight: differs from model\.embed_tokens\.weight"),
    ],
)
def test_weights_that_do_not_fit_are_named(kind, message):
    packed = tiny("llama")
    with pytest.raises(ValueError, match=message):
        load_hf_weights(packed.decoder, _change(packed.weights, kind))


def test_an_equal_head_and_old_frequencies_are_accepted():
    packed = tiny("llama")
    extra = [
        ("lm_head.weight", packed.weights["model.embed_tokens.weight"]),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", torch.zeros(16)),
    ]
    loaded = load_hf_weights(packed.decoder, [*extra, *packed.weights.items()])
    assert loaded == {"lm_head.weight", *packed.weights}


def test_views_write_through_to_stacked_experts():
    decoder = tiny("qwen3_moe").decoder
    views = dict(named_hf_weights(decoder))
    views["model.layers.1.mlp.experts.5.down_proj.weight"].fill_(7.0)
    stacked = decoder.model.layers[1].mlp.experts.down_proj
    assert bool((stacked[5] == 7).all())
    assert not bool((stacked[4] == 7).any())


def test_a_spec_of_a_written_model_has_the_same_contract(tmp_path: Path):
    source = write_tiny_model("qwen3", tmp_path / "source")
    packed = tiny("qwen3")
    out = write_model(packed.decoder, packed.spec, source, tmp_path / "out")
    assert ModelSpec(architecture=read_architecture(out)).contract_hash() == (
        packed.spec.contract_hash()
    )


def test_a_cache_that_cannot_be_written_is_named(monkeypatch):
    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", "/home/me/.cache/huggingface")

    monkeypatch.setattr("huggingface_hub.snapshot_download", denied)
    with pytest.raises(ValueError, match=r"'a/b'.*/home/me/\.cache/huggingface.*set HF_HOME"):
        resolve_model("a/b")
