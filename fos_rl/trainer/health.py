"""Signs that a model is dead: what is not finite, and logits that say nothing."""

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from fos_rl.model.finite import are_usable, broken_tensor
from fos_rl.model.hf import named_hf_weights
from fos_rl.trainer.dead_model import DeadModel


def check_updated(decoder: nn.Module) -> None:
    """DeadModel for weights that an update has broken, or that overflow when rounded to bf16."""
    if not are_usable(decoder.parameters()):
        raise DeadModel(
            f"after an update {broken_tensor(named_hf_weights(decoder))}: the model is "
            "broken, and not saved. Go on from the last checkpoint (fos-rl resume) or start again, "
            "with a lower trainer.lr or trainer.max_grad_norm"
        )


def check_log_probs(
    ours: Sequence[Float[np.ndarray, "_"]],
    theirs: Sequence[Float[np.ndarray, "_"]],
    first_broken: Callable[[], str],
) -> None:
    """DeadModel when trainer or generator gives no token of the step a finite log-prob.

    Args:
        first_broken: says which output of the trainer is the first that is not finite.
    """
    for whose, log_probs in (("trainer", ours), ("generator", theirs)):
        values = np.concatenate(log_probs) if log_probs else np.zeros(0)
        if values.size and not np.isfinite(values).any():
            raise DeadModel(
                f"none of the {values.size} log-probs of the {whose} is finite; {first_broken()}. "
                "The model is not saved. Go on from an earlier checkpoint (fos-rl resume) or other "
                "weights (model.path); if those are good, lower trainer.lr"
            )


def too_many_skipped(skipped: int, decoder: nn.Module, gradients: dict[str, Tensor]) -> DeadModel:
    """What to raise after `trainer.max_nonfinite_updates` updates in a row without a finite one."""
    largest = torch.finfo(torch.float32).max
    broken = broken_tensor(named_hf_weights(decoder, gradients), largest)
    found = f"the gradient of {broken}" if broken else "each gradient is finite by itself"
    return DeadModel(
        f"{skipped} updates in a row had a gradient or a loss that is not finite; {found}. "
        "The model is not saved. Go on from an earlier checkpoint (fos-rl resume) with a lower "
        "trainer.lr, or raise trainer.max_nonfinite_updates if such updates are rare"
    )


@torch.no_grad()
def first_broken_output(decoder: nn.Module, forward: Callable[[], object]) -> str:
    """The first weight, by Hugging Face name, whose product in a forward is not finite.

    Stacked experts go by their common name, `model.layers.0.mlp.experts`.
    """
    found: list[str] = []

    def look(name: str, output: object) -> None:
        if not found and isinstance(output, Tensor) and not bool(output.isfinite().all()):
            found.append(name)

    handles = [
        module.register_forward_hook(lambda _, __, output, name=name: look(name, output))
        for name, module in _weighted(decoder)
    ]
    try:
        forward()
    finally:
        for handle in handles:
            handle.remove()
    if not found:
        return "every layer of the trainer gives finite numbers"
    return f"the first output that is not finite is that of {found[0]}"


def _weighted(decoder: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules that hold weights of their own, by the weight's name."""
    for name, module in decoder.named_modules():
        own = [parameter for parameter, _ in module.named_parameters(recurse=False)]
        if own:
            yield f"{name}.weight" if "weight" in own else name, module


def is_uniform(entropy: Float[Tensor, " tokens"], vocab_size: int) -> Bool[Tensor, " tokens"]:
    """Which distributions give every token of the vocabulary the same probability.

    Their entropy is log(V), the largest there is. Computed in fp32 from equal logits it is off by
    at most a relative eps * (log V + log2 V + 4): the rounding of log V moves each probability by
    eps * log V, a pairwise sum of V terms rounds log2 V times, and the rest is exp, log and a
    product. A spread s of the logits takes s^2 / 2 nats away, so 0.02 differs from none.
    """
    log_v = math.log(vocab_size)
    tolerance = torch.finfo(torch.float32).eps * (log_v + math.log2(vocab_size) + 4)
    return entropy >= log_v * (1 - tolerance)


def entropy_metrics(entropies: Sequence[Float[Tensor, "_"]], vocab_size: int) -> dict[str, float]:
    """Mean of the finite entropies in nats, and the share of uniform ones if there are any."""
    entropy = torch.cat([part.double() for part in entropies]) if entropies else torch.zeros(0)
    entropy = entropy[entropy.isfinite()]
    if not entropy.numel():
        return {}
    metrics = {"policy/entropy": float(entropy.mean())}
    if share := float(is_uniform(entropy, vocab_size).double().mean()):
        metrics["policy/uniform_frac"] = share
    return metrics
