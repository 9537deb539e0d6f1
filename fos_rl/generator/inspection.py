"""A look inside a generator in this process: its decoder, and given tokens through its prefill."""

from collections.abc import Callable, Sequence
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor

from fos_rl.generator import prefill as engine_prefill
from fos_rl.generator.engine import VllmGenerator
from fos_rl.generator.prefill import Place, runner_of
from fos_rl.model.decoder import Decoder


def generator_decoder(generator: VllmGenerator) -> Decoder:
    """The decoder that the engine runs, to be hooked or read, not written."""
    runner = generator._thread.submit(runner_of, generator._engine).result()
    return cast(Decoder, runner.get_model().decoder)


def prefill(
    generator: VllmGenerator,
    sequences: Sequence[Sequence[int]],
    after_forward: Callable[[list[Place]], None],
) -> None:
    """Run token ids through the engine's prefill; `after_forward` gets the place of each row."""
    generator._thread.submit(
        engine_prefill.prefill,
        generator._engine,
        sequences,
        lambda places, _: after_forward(places),
    ).result()


def sampler_log_probs(
    generator: VllmGenerator, logits: Float[Tensor, "rows vocab"]
) -> Float[Tensor, "rows vocab"]:
    """What the engine's sampler makes of logits at the rollout temperature."""
    sampler = generator._thread.submit(runner_of, generator._engine).result().sampler
    temperatures = torch.full_like(logits[:, 0], generator.rollout.temperature)
    return sampler.compute_logprobs(sampler.apply_temperature(logits.clone(), temperatures, True))
