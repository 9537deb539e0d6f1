"""Sums over a step's micro-batches that become its metrics."""

import math
from collections import defaultdict

import torch
from torch import Tensor

from fos_rl.trainer.losses import PolicyLoss, PolicyTokens


class StepSums:
    """Collects micro-batches and updates; `means` are the step's metrics."""

    def __init__(self) -> None:
        self._loss = 0.0
        self._per_token: defaultdict[str, float] = defaultdict(float)
        self._num_tokens = 0.0
        self._entropy = 0.0
        self._num_entropies = 0
        self._grad_norms: list[float] = []

    @torch.no_grad()
    def add(self, result: PolicyLoss, tokens: PolicyTokens, entropy: Tensor) -> None:
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
        self._entropy += float(entropy.sum())
        self._num_entropies += entropy.numel()

    def update_done(self, grad_norm: float) -> None:
        self._grad_norms.append(grad_norm)

    def means(self) -> dict[str, float]:
        """Per token, but for the loss and the gradient norm, which are per update."""
        metrics = {"loss/policy": self._loss / len(self._grad_norms)}
        if self._num_tokens:
            metrics |= {name: value / self._num_tokens for name, value in self._per_token.items()}
        if self._num_entropies:
            metrics["policy/entropy"] = self._entropy / self._num_entropies
        finite = [norm for norm in self._grad_norms if math.isfinite(norm)]
        if finite:
            metrics["trainer/grad_norm"] = sum(finite) / len(finite)
        if len(finite) < len(self._grad_norms):
            metrics["trainer/skipped_updates"] = float(len(self._grad_norms) - len(finite))
        return metrics
