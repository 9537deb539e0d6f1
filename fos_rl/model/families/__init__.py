"""The model families that fos_rl runs, by the `model_type` of their config.json.

A family is one file, its import and its line here; nothing else of fos_rl names it.
"""

from collections.abc import Mapping

from fos_rl.model.families.family import ModelFamily
from fos_rl.model.families.llama import LLAMA
from fos_rl.model.families.qwen2 import QWEN2
from fos_rl.model.families.qwen3 import QWEN3
from fos_rl.model.families.qwen3_moe import QWEN3_MOE
from fos_rl.spec import Architecture

__all__ = ["FAMILIES", "ModelFamily", "family_of"]

FAMILIES: Mapping[str, ModelFamily] = {
    "llama": LLAMA,
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3_MOE,
    "qwen2": QWEN2,
}


def family_of(architecture: Architecture) -> ModelFamily:
    """What the architecture's family has of its own."""
    return FAMILIES[architecture.family]
