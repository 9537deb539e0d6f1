"""Qwen3 with a mixture of experts: transformers' Qwen3MoeConfig and Qwen3MoeForCausalLM."""

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


def parse_qwen3_moe(reader: ConfigReader) -> Architecture:
    """The architecture that a Qwen3 mixture's config.json describes."""
    return decoder_architecture(
        reader,
        "qwen3_moe",
        heads=attention_heads(reader, default_kv_heads=4),
        default_max_positions=32768,
        attention_bias=reader.flag("attention_bias", False),
        experts=experts(reader),
    )


QWEN3_MOE = ModelFamily(
    parse=parse_qwen3_moe,
    tiny={
        **TINY_WIDTHS,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "tie_word_embeddings": False,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    splits=(*VOCABULARY_AND_NORM_SPLITS, *ATTENTION_SPLITS, *MLP_SPLITS, *EXPERT_SPLITS),
    qk_norm=True,
)
