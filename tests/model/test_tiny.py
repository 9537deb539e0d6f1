"""Tiny random models: the same bytes for a seed, sane log-probs, a tokenizer that round-trips."""

import hashlib
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from fos_rl.model.tiny import VOCAB_SIZE, write_tiny_model
from tests.support.decoders import FAMILIES, random_samples, tiny


def digests(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_seed_decides_every_byte(family, tmp_path):
    first, again, other = (
        digests(write_tiny_model(family, tmp_path / name, seed))
        for name, seed in (("first", 1), ("again", 1), ("other", 2))
    )
    assert first == again
    assert {name for name in first if first[name] != other[name]} == {"model.safetensors"}


@pytest.mark.parametrize("family", FAMILIES)
def test_sampling_is_neither_uniform_nor_greedy(family):
    packed = tiny(family)
    with torch.no_grad():
        log_probs = packed.log_probs(random_samples(200))
    entropy = float(-(log_probs.exp() * log_probs).sum(dim=-1).mean())
    # Uniform over 288 tokens is 5.66.
    assert 2.0 < entropy < 5.4


@pytest.mark.parametrize("family", FAMILIES)
def test_widths_fit_quantization_blocks(family):
    architecture = tiny(family).spec.architecture
    widths = (
        architecture.head_dim,
        architecture.hidden_size,
        architecture.intermediate_size,
        architecture.moe_intermediate_size,
    )
    assert all(width % 32 == 0 for width in widths)
    assert architecture.num_kv_heads < architecture.num_heads


def test_tokenizer_gives_bytes_and_special_tokens(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(write_tiny_model("llama", tmp_path))
    assert len(tokenizer) == VOCAB_SIZE
    text = "".join(map(chr, range(1, 600))) + "\n\n 3 + 4 = 7\U0001f600"
    ids = tokenizer(text).input_ids
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (256, 259)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    assert chat == [258, *b"user\nhi", 259, *b"\n", 258, *b"assistant\n"]
    assert tokenizer.decode([104, 105, 259], skip_special_tokens=True) == "hi"
    assert all(isinstance(tokenizer.decode([i]), str) for i in range(VOCAB_SIZE))
