"""Weights straight from a model's folder, where no trainer holds them."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from fos_rl.model.checksum import checksum
from fos_rl.model.convert import compute_dtype
from fos_rl.model.hf import read_weights
from fos_rl.model.transport import pack_weights
from fos_rl.spec import ModelSpec
from fos_rl.types import WeightBucket


class FolderWeights:
    """A folder's weights, rounded to bf16, as the source of a sync: policy version 0.

    They take the same path as a trainer's: every tensor must arrive, and its checksum is compared.
    """

    def __init__(self, spec: ModelSpec, folder: Path) -> None:
        self._dtype = compute_dtype(spec)
        self._tied = spec.architecture.tie_word_embeddings
        self._folder = folder
        self._checksums: dict[str, int] = {}

    def weights_version(self) -> int:
        """0: a folder has one version."""
        return 0

    def weight_checksums(self) -> dict[str, int]:
        """Of the weights that have been exported."""
        return self._checksums

    def shared_weights(self) -> None:
        """None: they are read file by file."""

    def export_weights(self) -> Iterator[WeightBucket]:
        """One bucket per tensor, whose checksum is kept."""
        for name, tensor in self._weights():
            self._checksums[name] = checksum(tensor.to(torch.bfloat16).to(self._dtype))
            yield pack_weights({name: tensor})

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in read_weights(self._folder):
            # Constants, and the head that is the embedding, are no weights of their own.
            if name.endswith("rotary_emb.inv_freq") or (self._tied and name == "lm_head.weight"):
                continue
            yield name, tensor
