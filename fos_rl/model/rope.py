"""Rotary position tables, the same bits on every machine."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from fos_rl.spec import Architecture, RopeScaling


class RotaryTable:
    """cos and sin of every position's angles, in fp32, with a cached copy per device.

    A plain object on purpose: as a buffer, `decoder.to(torch.bfloat16)` would round the table, and
    trainer and generator would rotate by different angles. It is computed on the CPU whatever
    device the decoder is built for, because a GPU's cos differs from a CPU's in the last bit.
    """

    def __init__(self, architecture: Architecture) -> None:
        inverse = inverse_frequencies(
            architecture.head_dim, architecture.rope_theta, architecture.rope_scaling
        )
        self._tables = {torch.device("cpu"): _table(inverse, architecture.max_position_embeddings)}

    @property
    def num_positions(self) -> int:
        """Positions that the table has."""
        return self._tables[torch.device("cpu")].shape[0]

    def on(self, device: torch.device) -> Float[Tensor, "positions 2 half"]:
        """The table on a device: [:, 0] is cos and [:, 1] is sin. Copied there once."""
        if device not in self._tables:
            self._tables[device] = self._tables[torch.device("cpu")].to(device)
        return self._tables[device]


def inverse_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None
) -> Float[Tensor, " half"]:
    """theta ** (-2i / head_dim) for i < head_dim / 2, computed in fp64 and rounded once to fp32.

    With `scaling` (rope_type llama3), wavelengths above original / low_freq_factor are stretched by
    `factor`, those below original / high_freq_factor are kept, and those between are interpolated:
    transformers `modeling_rope_utils.py`, `_compute_llama3_parameters`.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim
    inverse = 1.0 / theta**exponents
    if scaling is not None:
        original = scaling.original_max_position_embeddings
        turns = original * inverse / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
        inverse = kept * inverse + (1 - kept) * inverse / scaling.factor
    return inverse.float()


def _table(
    inverse: Float[Tensor, " half"], num_positions: int
) -> Float[Tensor, "positions 2 half"]:
    # The angle is rounded to fp32 as transformers and vLLM do; its cos and sin are rounded once.
    positions = torch.arange(num_positions, dtype=torch.float32, device="cpu")
    angles = torch.outer(positions, inverse).double()
    return torch.stack((angles.cos().float(), angles.sin().float()), dim=1)


def rotate(
    heads: Float[Tensor, "tokens heads head_dim"], cos_sin: Float[Tensor, "tokens 2 half"]
) -> Float[Tensor, "tokens heads head_dim"]:
    """Heads with each pair (i, i + half) turned by its angle, in fp32, rounded once."""
    first, second = heads.float().chunk(2, dim=-1)
    cos, sin = cos_sin[:, None, 0], cos_sin[:, None, 1]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(heads.dtype)
