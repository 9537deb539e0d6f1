"""bf16 weights as numpy arrays, the form in which they travel between hosts."""

import warnings
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor, nn

from fos_rl.model.convert import prepare_weights
from fos_rl.model.hf import named_hf_weights


def to_wire(tensor: Tensor) -> np.ndarray:
    """The int16 bits of a tensor rounded to bf16 (numpy has no bf16)."""
    return tensor.detach().to(torch.bfloat16).contiguous().cpu().view(torch.int16).numpy()


def from_wire(array: np.ndarray) -> Tensor:
    """The bf16 tensor of such bits, sharing the array's memory; read-only."""
    with warnings.catch_warnings():
        # The object store hands out read-only memory; the tensor is only copied from.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array).view(torch.bfloat16)


class WeightLoader:
    """Fills a decoder by Hugging Face name and knows what is still missing.

    `load` may be called once a bucket; `finish` raises when a tensor never came.
    """

    def __init__(self, decoder: nn.Module) -> None:
        self._decoder = decoder
        self._targets = dict(named_hf_weights(decoder))
        self._missing = set(self._targets)

    @torch.no_grad()
    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            target = self._targets.get(name)
            if target is None:
                raise ValueError(f"weight {name} is not in the decoder; the hosts differ in layout")
            if target.shape != tensor.shape:
                raise ValueError(
                    f"weight {name} has shape {list(tensor.shape)}, the decoder's is "
                    f"{list(target.shape)}; the hosts differ in architecture"
                )
            target.copy_(tensor)
            self._missing.discard(name)

    def finish(self) -> None:
        """Quantize what was loaded; ValueError names what was not."""
        if self._missing:
            names = ", ".join(sorted(self._missing)[:5])
            raise ValueError(f"weight sync ended without {len(self._missing)} tensors: {names}")
        prepare_weights(self._decoder)
