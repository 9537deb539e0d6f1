"""Log-probs of given tokens without a [tokens, vocab] tensor of the whole batch."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def token_log_probs(
    logits_of: Callable[[Tensor], Tensor],
    hidden: Float[Tensor, "tokens hidden"],
    targets: Int[Tensor, " tokens"],
    temperature: float,
    chunk_tokens: int,
) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " tokens"]]:
    """fp32 log-prob of each target and entropy (nats, no gradient) of its distribution.

    log_softmax(logits / temperature) in fp32, `chunk_tokens` tokens at a time; the backward
    recomputes a chunk's logits instead of keeping them.
    """
    if targets.numel() == 0:
        empty = hidden.new_zeros(0, dtype=torch.float32)
        return empty, empty

    def chunk(rows: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        log_probs = scale_logits(logits_of(rows), temperature).log_softmax(dim=-1)
        with torch.no_grad():
            entropy = torch.special.entr(log_probs.exp()).sum(dim=-1)
        return log_probs.gather(-1, wanted.unsqueeze(-1)).squeeze(-1), entropy

    parts = [
        checkpoint(chunk, rows, wanted, use_reentrant=False)
        for rows, wanted in zip(
            hidden.split(chunk_tokens), targets.split(chunk_tokens), strict=True
        )
    ]
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


def scale_logits(
    logits: Float[Tensor, "tokens vocab"], temperature: float
) -> Float[Tensor, "tokens vocab"]:
    """logits / temperature in fp32, divided by a tensor on the device.

    A CUDA tensor divided by a Python number is multiplied by the number's reciprocal, which rounds
    differently from the division by a tensor that vLLM's sampler does.
    """
    return logits / torch.tensor(temperature, dtype=torch.float32, device=logits.device)
