"""The experts that the generator chose for each token of a finished request.

vLLM's own record needs its expert layers and a GPU. This one keeps a token's experts where vLLM
keeps its keys and values, by slot of the paged cache: a prompt that comes out of the prefix cache
brings the experts its keys were computed with, and a request's are read when vLLM frees its blocks.
"""

from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Int, Int16
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.engine.llm_engine import LLMEngine

from fos_rl.generator.prefill import batch_metadata, runner_of
from fos_rl.model.decoder import Decoder
from fos_rl.model.families import family_of
from fos_rl.model.router_replay import expert_layers, route_through
from fos_rl.spec import Architecture


class RoutingRecord:
    """Every cached token's experts: int16 [slots, expert layers, k] on the engine's device."""

    def __init__(self, decoder: Decoder, vllm_config: VllmConfig) -> None:
        layers = len(expert_layers(decoder))
        architecture = decoder.spec.architecture
        # Allocated before vLLM captures its graphs, which write to this very memory. One more slot
        # takes what vLLM's padding (-1) writes.
        self._by_slot = torch.full(
            (num_slots(architecture, vllm_config) + 1, layers, architecture.num_experts_per_token),
            -1,
            dtype=torch.int16,
        )
        route_through(decoder, self._write)

    def _write(self, place: int, chosen: Int[Tensor, "tokens k"]) -> Int[Tensor, "tokens k"]:
        metadata = batch_metadata()
        if metadata is not None:
            slots = metadata.slot_mapping
            self._by_slot[slots.long(), place] = chosen[: slots.shape[0]].to(torch.int16)
        return chosen

    def read(
        self, blocks: list[int], block_size: int, num_tokens: int
    ) -> Int16[np.ndarray, "tokens layers k"]:
        """The experts of a request's first tokens, which lie in these blocks."""
        index = torch.tensor(blocks)[:, None] * block_size + torch.arange(block_size)
        slots = index.flatten()[:num_tokens].to(self._by_slot.device)
        return self._by_slot[slots].cpu().numpy()


def num_slots(architecture: Architecture, vllm_config: VllmConfig) -> int:
    """At least as many tokens as the key-value cache has room for."""
    config = vllm_config.cache_config
    number_bytes = vllm_config.model_config.dtype.itemsize
    token_bytes = family_of(architecture).cache_bytes_per_token(architecture, number_bytes)
    cache_bytes = cast(int, config.kv_cache_memory_bytes)
    return cache_bytes // token_bytes + config.block_size


class FinishedRouting:
    """Reads a request's experts just before vLLM gives its cache blocks to others."""

    def __init__(self, engine: LLMEngine) -> None:
        """Watch an engine in this process, whose model is a mixture of experts."""
        core = cast(Any, engine.engine_core).engine_core
        self._manager = core.scheduler.kv_cache_manager
        self._block_size = core.vllm_config.cache_config.block_size
        self._record = cast(RoutingRecord, runner_of(engine).get_model().routing)
        self._experts: dict[str, np.ndarray] = {}
        self._free = self._manager.free
        self._manager.free = self._read_and_free

    def _read_and_free(self, request: Any) -> None:
        [blocks] = self._manager.get_block_ids(request.request_id)
        # vLLM appends a suffix to the name. A preempted request is freed, too, and read again when
        # it has finished.
        name = request.request_id.split("-")[0]
        num_tokens = request.num_tokens - 1
        self._experts[name] = self._record.read(blocks, self._block_size, num_tokens)
        self._free(request)

    def pop(self, request_id: str) -> Int16[np.ndarray, "tokens layers k"]:
        """The experts of a finished request's tokens, but for the last, which was never fed back;
        they are forgotten here."""
        return self._experts.pop(request_id)

    def forget(self) -> None:
        """Drop what was not asked for."""
        self._experts.clear()
