"""Weights straight from a model's folder, where no trainer holds them."""

from pathlib import Path

import torch

from fos_rl.generator.engine import VllmGenerator
from fos_rl.model.checksum import checksum
from fos_rl.model.convert import compute_dtype
from fos_rl.model.finite import check_loaded
from fos_rl.model.hf import read_weights
from fos_rl.model.transport import pack_weights


async def load_folder_weights(generator: VllmGenerator, folder: Path) -> None:
    """Sync the folder's weights, rounded to bf16, into the engine as policy version 0.

    The same path as a trainer's sync: every tensor must arrive, and its checksum is compared.
    """
    dtype = compute_dtype(generator.spec)
    tied = generator.spec.architecture.tie_word_embeddings
    checksums: dict[str, int] = {}
    await generator.begin_weight_sync()
    for name, tensor in read_weights(folder):
        if name.endswith("rotary_emb.inv_freq") or (tied and name == "lm_head.weight"):
            continue
        rounded = tensor.to(torch.bfloat16)
        check_loaded([(name, rounded)], f"model.path: {folder}")
        checksums[name] = checksum(rounded.to(dtype))
        await generator.load_weight_bucket(pack_weights({name: tensor}))
    await generator.finish_weight_sync(0, checksums)
