"""Who decides a token's experts: the layer's own router, a record of it, or the generator's record.

The routers of trainer and generator see slightly different hidden states and sometimes choose
different experts: the largest log-prob differences of a mixture of experts. A generator records its
choices; a trainer counts where its own differ, and with router replay (R3: Ma et al. 2025,
arXiv:2510.11370) computes with the generator's experts and gates of its own.
"""

from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Int
from torch import Tensor

from fos_rl.model.decoder import Decoder
from fos_rl.model.moe import SparseMlp

UNKNOWN = -1
"""In a record, where the generator's choice of experts is not known."""

ChooseByLayer = Callable[[int, Int[Tensor, "tokens k"]], Int[Tensor, "tokens k"]]
"""(place among the decoder's expert layers, the router's choice) -> the experts to use."""


def expert_layers(decoder: Decoder) -> list[int]:
    """Layers that have experts, in order."""
    return [i for i, layer in enumerate(decoder.model.layers) if isinstance(layer.mlp, SparseMlp)]


def route_through(decoder: Decoder, choose: ChooseByLayer) -> None:
    """Ask `choose` in every expert layer of the decoder, from now on."""
    mlps = (layer.mlp for layer in decoder.model.layers if isinstance(layer.mlp, SparseMlp))
    for place, mlp in enumerate(mlps):
        mlp.choose = partial(choose, place)


class RoutingReplay:
    """The trainer's routers beside the generator's record of the same tokens.

    Set `recorded` before a forward. `own` afterwards is what the trainer's routers chose, which is
    what was computed with unless `replay`.
    """

    def __init__(self, decoder: Decoder, *, replay: bool) -> None:
        self.layers = expert_layers(decoder)
        self.replay = replay
        self.recorded: Int[Tensor, "tokens layers k"] | None = None
        self._own: dict[int, Int[Tensor, "tokens k"]] = {}
        route_through(decoder, self._choose)

    def _choose(self, place: int, own: Int[Tensor, "tokens k"]) -> Int[Tensor, "tokens k"]:
        self._own[place] = own
        if self.recorded is None or not self.replay:
            return own
        recorded = self.recorded[:, place]
        return torch.where(recorded == UNKNOWN, own, recorded)

    @property
    def own(self) -> Int[Tensor, "tokens layers k"]:
        """The routers' own choices in the last forward."""
        return torch.stack([self._own[place] for place in range(len(self.layers))], dim=1)
