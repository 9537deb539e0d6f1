"""fp32 masters behind a low-precision working copy."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from fos_rl.model.convert import prepare_weights


class Masters:
    """The optimizer's fp32 weights; the module computes with their bf16-rounded values.

    Gradients of every micro-batch are added in fp32, whatever the module's dtype.
    """

    def __init__(self, module: nn.Module, compute_dtype: torch.dtype) -> None:
        """Take the module's fp32 weights as masters and turn it into the working copy."""
        self.weights: dict[str, Tensor] = {
            name: parameter.detach().to(torch.float32, copy=True)
            for name, parameter in module.named_parameters()
        }
        module.to(compute_dtype)
        self._module = module
        self._working = dict(module.named_parameters())
        for name, parameter in self._working.items():
            parameter.register_post_accumulate_grad_hook(self._collector(self.weights[name]))
        self.publish()

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.weights.values())

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters to bf16 into the working copy: the bytes that are also synced."""
        for name, parameter in self._working.items():
            parameter.copy_(self.weights[name].to(torch.bfloat16))
        prepare_weights(self._module)

    def gradients(self) -> dict[str, Tensor]:
        """Those that have been collected, by the parameter's name."""
        return {name: m.grad for name, m in self.weights.items() if m.grad is not None}

    @staticmethod
    def _collector(master: Tensor) -> Callable[[Tensor], None]:
        def collect(parameter: Tensor) -> None:
            assert parameter.grad is not None
            if master.grad is None:
                master.grad = torch.zeros_like(master)
            master.grad += parameter.grad
            parameter.grad = None

        return collect
