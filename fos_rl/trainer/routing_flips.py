"""How often the routers of trainer and generator send a token to different experts."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Integer


def routing_flip_metrics(
    trainer_experts: Integer[np.ndarray, "tokens layers k"],
    generator_experts: Integer[np.ndarray, "tokens layers k"],
    layers: Sequence[int],
) -> dict[str, float]:
    """`mismatch/routing_flip_frac/layer_<n>`: share of tokens whose set of experts differs there.

    Order does not count: the gates carry it. No tokens, no keys.

    Example: with experts [[[0, 1]], [[2, 3]]] against [[[1, 0]], [[2, 4]]] of layer 5, the first
    token agrees and the second does not: layer_5 is 0.5.

    Args:
        layers: the decoder's number of each recorded layer; dense layers have no router.

    Raises:
        ValueError: when the shapes differ, or do not fit `layers`.
    """
    if trainer_experts.shape != generator_experts.shape:
        raise ValueError(
            f"{trainer_experts.shape} expert choices of the trainer, {generator_experts.shape} of "
            "the generator"
        )
    if trainer_experts.shape[1] != len(layers):
        raise ValueError(f"{trainer_experts.shape[1]} layers recorded, {len(layers)} numbers given")
    if not len(trainer_experts):
        return {}
    same = np.sort(trainer_experts, axis=-1) == np.sort(generator_experts, axis=-1)
    flipped = ~same.all(axis=-1)  # [tokens, layers]
    return {
        f"mismatch/routing_flip_frac/layer_{layer}": float(share)
        for layer, share in zip(layers, flipped.mean(axis=0), strict=True)
    }
