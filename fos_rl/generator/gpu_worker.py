"""vLLM's GPU worker, whose key-value cache can be given back while the trainer uses the GPU.

vLLM's sleep mode frees all that its allocator has made, the weights too, and carries those to the
CPU and back. Here the allocator makes the cache alone: weights, graphs and all else stay where they
are, and the cache keeps its addresses, which CUDA graphs hold.
"""

from typing import Any

import torch
from vllm.device_allocator.cumem import CuMemAllocator
from vllm.v1.worker.gpu_worker import Worker


class CacheSleepWorker(Worker):
    """vLLM `worker_cls` of a generator that shares its GPU with the trainer."""

    _cache_tensors: list[Any]

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Make the key-value cache in memory that can be given back."""
        runner: Any = self.model_runner
        allocate = runner.initialize_kv_cache_tensors

        def allocate_in_pool(*arguments: Any, **named: Any) -> dict[str, Any]:
            with CuMemAllocator.get_instance().use_memory_pool(tag="kv_cache"):
                tensors = allocate(*arguments, **named)
            self._cache_tensors = list(tensors.values())
            return tensors

        runner.initialize_kv_cache_tensors = allocate_in_pool
        super().initialize_from_config(kv_cache_config)

    def release_cache(self) -> None:
        """Give its memory back; keys and values are lost."""
        # A step that was scheduled ahead may still read it.
        torch.cuda.synchronize()
        CuMemAllocator.get_instance().sleep(())

    @torch.inference_mode()
    def take_cache(self) -> None:
        """Take memory for it again, at the addresses of before."""
        CuMemAllocator.get_instance().wake_up()
        for tensor in self._cache_tensors:
            # Kernels multiply what lies past a sequence's end in its last block by 0, and memory
            # that comes from elsewhere may hold a NaN.
            tensor.zero_()
