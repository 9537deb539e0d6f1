"""Weights read where they lie: by a generator in the trainer's process, or on the trainer's GPU."""

import logging
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import reduce_tensor

_logger = logging.getLogger(__name__)

# Where torch's arguments of a rebuilt CUDA tensor name the GPU (`rebuild_cuda_tensor`).
_DEVICE = 6
# The parameters of the one source that this process has opened, by the source's key.
_opened: dict[str, dict[str, Tensor] | None] = {}


def named_parameters(decoder: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """A decoder's parameters as they are stored, without those of the inner attention."""
    for name, parameter in decoder.named_parameters():
        if ".self_attn.inner." not in name:
            yield name, parameter.detach()


class SharedWeights:
    """A decoder's parameters, for whoever can read them where they are.

    In the process that holds them it has the tensors themselves; pickled, it becomes CUDA IPC
    handles, which that process could not open. They are made once, so `are_of` says whether the
    parameters have kept their addresses.
    """

    def __init__(self, decoder: nn.Module) -> None:
        self._tensors = dict(named_parameters(decoder))
        self._handles: _Handles | None = None

    def are_of(self, decoder: nn.Module) -> bool:
        """Whether the decoder has these parameters, where they were."""
        ours = [(name, tensor.data_ptr()) for name, tensor in self._tensors.items()]
        return ours == [(name, tensor.data_ptr()) for name, tensor in named_parameters(decoder)]

    def open(self, device: torch.device) -> dict[str, Tensor] | None:
        """The parameters by name, only to be read."""
        return self._tensors

    def __reduce__(self) -> tuple[Any, ...]:
        if self._handles is None:
            self._handles = _handles_of(self._tensors)
        handles = self._handles
        return _Handles, (handles.key, handles.gpu, handles.parts)


@dataclass(frozen=True, slots=True)
class _Handles:
    """What `SharedWeights` is in another process.

    gpu: the GPU's own name, the same in every process; None on a CPU, whose memory is not shared.
    parts: by parameter, torch's function and arguments that open it.
    """

    key: str
    gpu: str | None
    parts: dict[str, tuple[Callable[..., Tensor], tuple[Any, ...]]]

    def open(self, device: torch.device) -> dict[str, Tensor] | None:
        """The parameters by name, only to be read; None where they cannot be read."""
        if self.gpu is None or self.gpu != _gpu_name(device):
            return None
        if self.key not in _opened:
            _opened.clear()
            try:
                _opened[self.key] = dict(self._rebuilt(device))
            except RuntimeError as error:
                _say_why_not(error)
                _opened[self.key] = None
        return _opened[self.key]

    def _rebuilt(self, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        for name, (rebuild, arguments) in self.parts.items():
            # Every process counts the GPUs that it sees.
            yield name, rebuild(*arguments[:_DEVICE], device.index or 0, *arguments[_DEVICE + 1 :])


def _handles_of(tensors: dict[str, Tensor]) -> _Handles:
    gpu = _gpu_name(next(iter(tensors.values())).device)
    parts: dict[str, Any] = {}
    if gpu is not None:
        try:
            parts = {name: reduce_tensor(tensor) for name, tensor in tensors.items()}
        except RuntimeError as error:
            _say_why_not(error)
            gpu = None
    return _Handles(uuid.uuid4().hex, gpu, parts)


def _say_why_not(error: RuntimeError) -> None:
    """Containers may forbid CUDA IPC, and not every allocator's memory can be shared."""
    _logger.warning("weights go through Ray, since CUDA IPC failed: %s", error)


def _gpu_name(device: torch.device) -> str | None:
    if device.type != "cuda":
        return None
    return str(torch.cuda.get_device_properties(device).uuid)
