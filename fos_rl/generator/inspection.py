"""A look inside a generator in this process: its decoder, and given tokens through its prefill."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor
from vllm import SamplingParams
from vllm.forward_context import get_forward_context
from vllm.inputs import TokensPrompt

from fos_rl.generator.engine import VllmGenerator
from fos_rl.model.decoder import Decoder

Place = tuple[int, int]
"""Number of a sequence, and a position in it."""


def generator_decoder(generator: VllmGenerator) -> Decoder:
    """The decoder that the engine runs, to be hooked or read, not written."""
    return cast(Decoder, _runner(generator).get_model().decoder)


def prefill(
    generator: VllmGenerator,
    sequences: Sequence[Sequence[int]],
    after_forward: Callable[[list[Place]], None],
) -> None:
    """Run token ids through the engine's prefill, without its prefix cache.

    The scheduler decides which sequences, or parts of them, share a forward. `after_forward` gets
    the place of each row, in the order of the rows, once the decoder's forward has returned.
    """
    decoder = generator_decoder(generator)
    runner = _runner(generator)
    places: list[Place] = []

    def locate(_: Any, inputs: tuple[Tensor, Tensor]) -> None:
        places[:] = _row_places(runner, inputs[1])

    handles = [
        decoder.register_forward_pre_hook(locate),
        decoder.register_forward_hook(lambda *_: after_forward(list(places)) if places else None),
    ]
    try:
        generator._thread.submit(_run, generator._engine, sequences).result()
    finally:
        for handle in handles:
            handle.remove()


def sampler_log_probs(
    generator: VllmGenerator, logits: Float[Tensor, "rows vocab"]
) -> Float[Tensor, "rows vocab"]:
    """What the engine's sampler makes of logits at the rollout temperature."""
    sampler = _runner(generator).sampler
    temperatures = torch.full_like(logits[:, 0], generator.rollout.temperature)
    return sampler.compute_logprobs(sampler.apply_temperature(logits.clone(), temperatures, True))


def _runner(generator: VllmGenerator) -> Any:
    call = generator._engine.collective_rpc
    [runner] = generator._thread.submit(call, lambda worker: worker.model_runner).result()
    return runner


def _run(engine: Any, sequences: Sequence[Sequence[int]]) -> None:
    # One token is sampled, after which a request is done; the cache would skip shared prefixes.
    params = SamplingParams(max_tokens=1, skip_reading_prefix_cache=True)
    for number, ids in enumerate(sequences):
        engine.add_request(str(number), TokensPrompt(prompt_token_ids=list(ids)), params)
    while engine.has_unfinished_requests():
        engine.step()


def _row_places(runner: Any, positions: Tensor) -> list[Place]:
    metadata = get_forward_context().attn_metadata
    if not metadata:
        # A warm-up forward belongs to no request.
        return []
    per_layer = cast("dict[str, Any]", metadata)
    starts = next(iter(per_layer.values())).query_start_loc.tolist()
    names = runner.input_batch.req_ids[: len(starts) - 1]
    # vLLM appends a suffix to the name of a request.
    numbers = [int(name.split("-")[0]) for name in names]
    rows = positions.tolist()
    return [
        (number, rows[row])
        for number, begin, end in zip(numbers, starts, starts[1:], strict=False)
        for row in range(begin, end)
    ]
