"""Sums over a step's micro-batches that become its metrics."""

import math
from collections import defaultdict

import torch
from torch import Tensor

from fos_rl.algorithms.losses import PolicyLoss, PolicyTokens


class StepSums:
    """Collects micro-batches and updates; `means` are the step's metrics."""

    def __init__(self) -> None:
        self._loss = 0.0
        self._losses: list[float] = []
        self._per_token: defaultdict[str, float] = defaultdict(float)
        self._num_tokens = 0.0
        self._grad_norms: list[float] = []

    @torch.no_grad()
    def add(self, result: PolicyLoss, tokens: PolicyTokens) -> None:
        """Add a micro-batch; what the settings do not use (None) gets no key."""
        counted, factors = tokens.counted, tokens.correction

        def number(where: Tensor | None) -> Tensor | None:
            return None if where is None else (where & counted).sum()

        sums = {
            "loss/ratio/mean": result.ratio_sum,
            "loss/clip_frac": result.num_clipped,
            "loss/out_of_band_frac": result.num_out_of_band,
            "loss/dual_clip_frac": result.num_dual_clipped,
            "correction/truncated_frac": number(factors.truncated),
            "correction/masked_frac": number(factors.masked),
            "correction/weight/mean": (factors.weights * counted).sum()
            if factors.changes
            else None,
        }
        for name, value in sums.items():
            if value is not None:
                self._per_token[name] += float(value)
        self._loss += float(result.loss)
        self._num_tokens += float(result.num_tokens)

    @property
    def loss(self) -> float:
        """Of the current update's micro-batches so far."""
        return self._loss

    def update_done(self, grad_norm: float) -> None:
        """Close an optimizer update: its summed loss, and its gradient norm before clipping."""
        self._losses.append(self._loss)
        self._loss = 0.0
        self._grad_norms.append(grad_norm)

    def means(self) -> dict[str, float]:
        """Per token, but for the loss and the gradient norm, which are per update.

        Updates that were skipped are counted, and leave both. What is not finite all the same is
        left out, as a metric with nothing to measure is.
        """
        pairs = list(zip(self._losses, self._grad_norms, strict=True))
        made = [pair for pair in pairs if is_sound(*pair)]
        metrics: dict[str, float] = {}
        if self._num_tokens:
            metrics |= {name: value / self._num_tokens for name, value in self._per_token.items()}
        if made:
            metrics["loss/policy"] = sum(loss for loss, _ in made) / len(made)
            metrics["trainer/grad_norm"] = sum(norm for _, norm in made) / len(made)
        if len(made) < len(pairs):
            metrics["trainer/skipped_updates"] = float(len(pairs) - len(made))
        return {name: value for name, value in metrics.items() if math.isfinite(value)}


def is_sound(loss: float, grad_norm: float) -> bool:
    """Whether an update may be made of such a loss and gradient."""
    return math.isfinite(loss) and math.isfinite(grad_norm)
