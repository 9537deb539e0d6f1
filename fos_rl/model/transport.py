"""Weights on their way from trainer to generator: packed by one, loaded by name into the other."""

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from fos_rl.model.convert import prepare_weights
from fos_rl.model.hf import named_hf_weights
from fos_rl.model.shared_weights import named_parameters
from fos_rl.types import WeightBucket


def pack_weights(weights: Mapping[str, Tensor]) -> WeightBucket:
    """The tensors rounded to bf16, by Hugging Face name, in one piece."""
    flat = torch.cat([t.detach().to(torch.bfloat16).flatten() for t in weights.values()])
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    return WeightBucket(shapes=shapes, bits=flat.cpu().view(torch.int16).numpy())


def unpack_weights(bucket: WeightBucket, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Each name and its bf16 tensor on the device, which is only to be read."""
    with warnings.catch_warnings():
        # The object store hands out read-only memory.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        flat = torch.from_numpy(bucket.bits).view(torch.bfloat16).to(device)
    parts = flat.split([math.prod(shape) for shape in bucket.shapes.values()])
    for (name, shape), part in zip(bucket.shapes.items(), parts, strict=True):
        yield name, part.view(shape)


class WeightLoader:
    """Fills a decoder by Hugging Face name and knows what is still missing.

    `load` may be called once per bucket; `finish` raises when a tensor never came.
    """

    def __init__(self, decoder: nn.Module) -> None:
        self._decoder = decoder
        self._targets = dict(named_hf_weights(decoder))
        self._missing = set(self._targets)

    @torch.no_grad()
    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy tensors into the decoder; ValueError names those that are unknown or do not fit."""
        for name, tensor in weights:
            target = self._targets.get(name)
            if target is None:
                raise ValueError(
                    f"weight {name} is not in the decoder; trainer and generator differ in layout"
                )
            if target.shape != tensor.shape:
                raise ValueError(
                    f"weight {name} has shape {list(tensor.shape)}, the decoder's is "
                    f"{list(target.shape)}; trainer and generator differ in architecture"
                )
            target.copy_(tensor)
            self._missing.discard(name)

    @torch.no_grad()
    def load_all(self, parameters: Mapping[str, Tensor]) -> None:
        """Copy another decoder's parameters, stacked as they are: experts are not named one by one.

        Raises:
            ValueError: naming a parameter that only one decoder has, or whose shapes differ.
        """
        ours = dict(named_parameters(self._decoder))
        if different := ours.keys() ^ parameters.keys():
            raise ValueError(
                f"only one side has the weights {', '.join(sorted(different)[:5])}; trainer and "
                "generator differ in layout"
            )
        theirs = [parameters[name] for name in ours]
        for (name, target), tensor in zip(ours.items(), theirs, strict=True):
            if target.shape != tensor.shape:
                raise ValueError(
                    f"weight {name} has shape {list(tensor.shape)}, the decoder's is "
                    f"{list(target.shape)}; trainer and generator differ in architecture"
                )
        torch._foreach_copy_(list(ours.values()), theirs)  # pyright: ignore[reportPrivateImportUsage]
        self._missing.clear()

    def finish(self) -> None:
        """Quantize what was loaded; ValueError names what was not."""
        if self._missing:
            names = ", ".join(sorted(self._missing)[:5])
            raise ValueError(f"weight sync ended without {len(self._missing)} tensors: {names}")
        prepare_weights(self._decoder)
