"""Tiny random models with a byte tokenizer: the whole stack on a laptop, without a download."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from fos_rl.model.families import FAMILIES
from fos_rl.model.hf_config import parse_architecture
from fos_rl.model.weights import hf_weight_shapes
from fos_rl.spec import ModelSpec

# Of every family's tiny config.json.
VOCAB_SIZE, _NUM_LAYERS, _CONTEXT = 288, 3, 4096
PAD, END_OF_TEXT, TURN_START, TURN_END = "<|pad|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"
_SPECIAL = (PAD, END_OF_TEXT, TURN_START, TURN_END)

_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_tiny_model(family: str, folder: str | Path, seed: int = 0) -> Path:
    """A Hugging Face folder with a random model of a family, the same bytes for the same seed.

    3 layers, width 64 or 128, 288 tokens: the 256 bytes, `<|pad|>`, `<|endoftext|>`,
    `<|im_start|>`, `<|im_end|>` (end of a turn, where sampling stops) and 28 reserved ones. Weights
    are bf16.
    """
    config = tiny_config(family)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {key: config[key] for key in ("eos_token_id", "pad_token_id")}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    _write_tokenizer(folder)
    spec = ModelSpec(architecture=parse_architecture(config))
    save_file(tiny_weights(spec, seed), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def tiny_weights(spec: ModelSpec, seed: int) -> dict[str, Tensor]:
    """bf16 weights by Hugging Face name; each depends on the seed and its own name only."""
    shapes = hf_weight_shapes(spec)
    tied = spec.architecture.tie_word_embeddings
    return {name: _random_weight(name, shape, seed, tied) for name, shape in shapes.items()}


def tiny_config(family: str) -> dict[str, Any]:
    """The config.json of a tiny model, in the style of transformers 4 (5 reads it too)."""
    if family not in FAMILIES:
        known = ", ".join(f"random:{name}" for name in FAMILIES)
        raise ValueError(
            f"model.path = 'random:{family}': no such random model; use one of {known}"
        )
    return dict(FAMILIES[family].tiny)


def _random_weight(name: str, shape: torch.Size, seed: int, tied: bool) -> Tensor:
    """Scales as in a trained model rather than at initialisation, where they matter for noise.

    Logits have a standard deviation near 1.4, so that sampling at temperature 1 is neither uniform
    nor greedy; projections into the residual stream are scaled by 1 / sqrt(2 layers) as GPT-2's;
    the router is sharp enough that two experts rarely tie to within bf16's noise.
    """
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:7], "little"))
    noise = torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)
    if name.endswith("norm.weight"):
        return (1 + 0.1 * noise).to(torch.bfloat16)
    if name.endswith(".bias"):
        return (0.1 * noise).to(torch.bfloat16)
    scale = shape[-1] ** -0.5
    if name == "lm_head.weight" or (name == "model.embed_tokens.weight" and tied):
        scale *= 1.4
    elif name == "model.embed_tokens.weight":
        scale = 1.0
    elif name.endswith(("o_proj.weight", "down_proj.weight")):
        scale *= (2 * _NUM_LAYERS) ** -0.5
    elif name.endswith("mlp.gate.weight"):
        scale *= 4.0
    return (noise * scale).to(torch.bfloat16)


def _write_tokenizer(folder: Path) -> None:
    # Token i is byte i: the byte-level alphabet in byte order.
    alphabet = _byte_alphabet()
    vocab = {character: byte for byte, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    reserved = [f"<|reserved_{i}|>" for i in range(VOCAB_SIZE - len(vocab) - len(_SPECIAL))]
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True) for token in (*_SPECIAL, *reserved)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TURN_END,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": _CONTEXT,
        "chat_template": _CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def _byte_alphabet() -> list[str]:
    """The printable character that stands for each byte in byte-level tokenizers: itself where it
    prints, else the next code point from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    stand_in = {byte: chr(256 + place) for place, byte in enumerate(others)}
    return [stand_in.get(byte, chr(byte)) for byte in range(256)]
