"""Which tensor, in which state, codes were made of: codes of another one are never multiplied.

PyTorch counts the in-place writes of a tensor (`_version`), and memory that is held is not given to
another tensor, so address and count say whether a weight is the one that was quantized. Two kinds
of writes are not counted:

- Fused optimizers. A hook counts each step of an optimizer for the parameters it has, unless
  the step itself is compiled.
- Writes that autograd does not see: through `.data`, NumPy or DLPack. On a CPU a few elements are
  compared, which costs microseconds and sees any write of a whole tensor. On CUDA that would wait
  for the device: whoever writes so prepares the weight again.
"""

from dataclasses import dataclass
from typing import Any, Self, cast

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

_SAMPLED = 64
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True, eq=False)
class WeightState:
    """A weight as it was.

    alias: its memory, which is held so that its address stays its own. place: where in memory and
    how laid out. writes: PyTorch's count; None where it counts none (inference tensors), so that no
    state equals a later one. sampled, sample: some elements of that memory, and their bits as they
    were; None on CUDA.
    """

    alias: Tensor
    place: tuple[object, ...]
    writes: int | None
    sampled: Tensor | None
    sample: Tensor | None

    @classmethod
    def of(cls, weight: Tensor) -> Self:
        """The weight's state now."""
        alias = weight.detach()
        sampled = _sampled(alias)
        sample = None if sampled is None else sampled.clone()
        return cls(alias, _place(weight), _writes(weight), sampled, sample)

    def is_of(self, weight: Tensor) -> bool:
        """Whether weight is the tensor of this state, and unchanged."""
        if self.writes is None or self.writes != _writes(weight) or self.place != _place(weight):
            return False
        return self.sampled is None or torch.equal(self.sampled, cast(Tensor, self.sample))

    def has_values_of(self, weight: Tensor) -> bool:
        """Whether weight is another tensor with the values of this state; reads both."""
        unchanged = self.is_of(self.alias) and weight.device == self.alias.device
        return unchanged and torch.equal(weight.detach(), self.alias)


def _place(weight: Tensor) -> tuple[object, ...]:
    return weight.data_ptr(), weight.shape, weight.stride(), weight.dtype


def _writes(weight: Tensor) -> int | None:
    return None if weight.is_inference() else weight._version


def _sampled(weight: Tensor) -> Tensor | None:
    """Elements at equal distances, as integers: a NaN is equal to itself."""
    if weight.device.type != "cpu" or not weight.is_contiguous():
        return None
    count = min(_SAMPLED, weight.numel())
    bits = weight.view(_BITS[weight.itemsize])
    return bits.as_strided((count,), (weight.numel() // max(count, 1),))


def _count_optimizer_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    torch.autograd.graph.increment_version([p for p in parameters if not p.is_inference()])


register_optimizer_step_post_hook(_count_optimizer_step)
