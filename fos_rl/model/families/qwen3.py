"""Qwen3, dense: transformers' Qwen3Config and Qwen3ForCausalLM."""

from fos_rl.model.families.config_json import (
    ConfigReader,
    attention_heads,
    decoder_architecture,
    experts,
)
from fos_rl.model.families.family import (
    ATTENTION_SPLITS,
    EXPERT_SPLITS,
    MLP_SPLITS,
    TINY_WIDTHS,
    VOCABULARY_AND_NORM_SPLITS,
    ModelFamily,
)
from fos_rl.spec import Architecture


def parse_qwen3(reader: ConfigReader) -> Architecture:
    """The architecture that a dense Qwen3 model's config.json describes."""
    return decoder_architecture(
        reader,
        "qwen3",
        heads=attention_heads(reader, default_kv_heads=32, default_head_dim=128),
        default_max_positions=32768,
        attention_bias=reader.flag("attention_bias", False),
        experts=experts(reader) if "num_experts" in reader.config else None,
    )


QWEN3 = ModelFamily(
    parse=parse_qwen3,
    tiny={
        **TINY_WIDTHS,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "tie_word_embeddings": True,
    },
    splits=(*VOCABULARY_AND_NORM_SPLITS, *ATTENTION_SPLITS, *MLP_SPLITS, *EXPERT_SPLITS),
    qk_norm=True,
)
