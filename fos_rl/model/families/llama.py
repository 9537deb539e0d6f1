"""Llama 2 and 3, and SmolLM2: transformers' LlamaConfig and LlamaForCausalLM."""

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


def parse_llama(reader: ConfigReader) -> Architecture:
    """The architecture that a Llama model's config.json describes."""
    return decoder_architecture(
        reader,
        "llama",
        heads=attention_heads(reader),
        default_max_positions=2048,
        attention_bias=reader.flag("attention_bias", False),
        mlp_bias=reader.flag("mlp_bias", False),
        # A Llama with experts is `fos_rl.tools.upcycle`'s; transformers knows no such model.
        experts=experts(reader) if "num_experts" in reader.config else None,
    )


LLAMA = ModelFamily(
    parse=parse_llama,
    tiny={
        **TINY_WIDTHS,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "tie_word_embeddings": True,
    },
    splits=(*VOCABULARY_AND_NORM_SPLITS, *ATTENTION_SPLITS, *MLP_SPLITS, *EXPERT_SPLITS),
)
