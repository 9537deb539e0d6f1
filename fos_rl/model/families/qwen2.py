"""Qwen2 and Qwen2.5, dense: transformers' Qwen2Config and Qwen2ForCausalLM. Queries, keys and
values always have a bias, outputs never, whatever config.json says of `attention_bias`."""

from fos_rl.model.families.config_json import ConfigReader, attention_heads, decoder_architecture
from fos_rl.model.families.family import (
    ATTENTION_SPLITS,
    MLP_SPLITS,
    TINY_WIDTHS,
    VOCABULARY_AND_NORM_SPLITS,
    ModelFamily,
)
from fos_rl.spec import Architecture


def parse_qwen2(reader: ConfigReader) -> Architecture:
    """The architecture that a Qwen2 or Qwen2.5 model's config.json describes."""
    heads = attention_heads(reader, default_kv_heads=32)
    hidden_size, num_heads = reader.whole("hidden_size"), reader.whole("num_attention_heads")
    if heads.head_dim * num_heads != hidden_size:
        # transformers reads a head_dim here, vLLM does not.
        reader.refuse(
            "head_dim",
            f"a Qwen2's is hidden_size / num_attention_heads = {hidden_size} / {num_heads}; use "
            "a model without head_dim",
        )
    return decoder_architecture(
        reader, "qwen2", heads=heads, default_max_positions=32768, attention_bias=True
    )


QWEN2 = ModelFamily(
    parse=parse_qwen2,
    # No head_dim: it follows from hidden_size, 32 again.
    tiny={
        **{k: v for k, v in TINY_WIDTHS.items() if k not in ("head_dim", "attention_bias")},
        "hidden_size": 128,
        "intermediate_size": 192,
        "rope_theta": 1000000.0,
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "tie_word_embeddings": True,
        "use_sliding_window": False,
    },
    splits=(*VOCABULARY_AND_NORM_SPLITS, *ATTENTION_SPLITS, *MLP_SPLITS),
    biased=("q_proj", "k_proj", "v_proj"),
)
