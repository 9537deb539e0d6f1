"""Given tokens through an engine's prefill: what its decoder computes of each, and their log-probs.

The sampled tokens' log-probs come from decode steps, whose matrices have one row per running
request. Through the prefill the same weights see the same tokens in matrices of many rows, so that
the two differ by nothing but the batch.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from vllm import SamplingParams
from vllm.forward_context import get_forward_context
from vllm.inputs import TokensPrompt
from vllm.v1.engine.llm_engine import LLMEngine

from fos_rl.model.log_probs import token_log_probs
from fos_rl.types import Rollout

Place = tuple[int, int]
"""Number of a sequence, and a position in it."""

_CHUNK_TOKENS = 1024


def prefill(
    engine: LLMEngine,
    sequences: Sequence[Sequence[int]],
    after_forward: Callable[[list[Place], Float[Tensor, "rows hidden"]], None],
) -> None:
    """Run token ids through the engine's prefill, without its prefix cache.

    The scheduler decides which sequences, or parts of them, share a forward. Once the decoder's
    forward has returned, `after_forward` gets the place of each row, in the order of the rows, and
    the hidden states. The engine must be idle.
    """
    runner = runner_of(engine)
    decoder = runner.get_model().decoder
    places: list[Place] = []

    def locate(_: Any, inputs: tuple[Tensor, Tensor]) -> None:
        places[:] = _row_places(runner, inputs[1])

    def hand_on(_: Any, __: Any, hidden: Tensor) -> None:
        # A warm-up forward has no places.
        if places:
            after_forward(list(places), hidden)

    handles = [
        decoder.register_forward_pre_hook(locate),
        decoder.register_forward_hook(hand_on),
    ]
    # One token is sampled, after which a request is done; the cache would skip shared prefixes.
    params = SamplingParams(max_tokens=1, skip_reading_prefix_cache=True)
    try:
        for number, ids in enumerate(sequences):
            engine.add_request(str(number), TokensPrompt(prompt_token_ids=list(ids)), params)
        while engine.has_unfinished_requests():
            engine.step()
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def prefill_log_probs(
    engine: LLMEngine, rollouts: Sequence[Rollout], temperature: float
) -> list[Float[np.ndarray, " response"]]:
    """fp32 log-probs of the rollouts' response tokens, by the engine's prefill."""
    decoder = runner_of(engine).get_model().decoder
    sequences = [r.prompt_ids + r.response_ids for r in rollouts]
    found = [np.full(len(r.response_ids), np.nan, dtype=np.float32) for r in rollouts]

    def score(places: list[Place], hidden: Tensor) -> None:
        predicting = [
            (row, number, position + 1)
            for row, (number, position) in enumerate(places)
            if position + 1 >= len(rollouts[number].prompt_ids)
        ]
        if not predicting:
            return
        targets = torch.tensor([sequences[number][next_] for _, number, next_ in predicting])
        rows = hidden[[row for row, _, _ in predicting]]
        log_probs, _ = token_log_probs(
            decoder.logits, rows, targets.to(hidden.device), temperature, _CHUNK_TOKENS
        )
        for (_, number, next_), value in zip(predicting, log_probs.tolist(), strict=True):
            found[number][next_ - len(rollouts[number].prompt_ids)] = value

    # The last token predicts nothing, and with it a full sequence would be too long.
    prefill(engine, [ids[:-1] for ids in sequences], score)
    return found


def runner_of(engine: LLMEngine) -> Any:
    """vLLM's model runner, of an engine in this process."""
    [runner] = engine.collective_rpc(lambda worker: worker.model_runner)
    return runner


def batch_metadata() -> Any | None:
    """Where the rows of the current forward belong, the same for all layers; None in a warm-up
    forward, which belongs to no request."""
    per_layer = cast("dict[str, Any]", get_forward_context().attn_metadata)
    return next(iter(per_layer.values())) if per_layer else None


def _row_places(runner: Any, positions: Tensor) -> list[Place]:
    metadata = batch_metadata()
    if metadata is None:
        return []
    starts = metadata.query_start_loc.tolist()
    names = runner.input_batch.req_ids[: len(starts) - 1]
    # vLLM appends a suffix to the name of a request.
    numbers = [int(name.split("-")[0]) for name in names]
    rows = positions.tolist()
    return [
        (number, rows[row])
        for number, begin, end in zip(numbers, starts, starts[1:], strict=False)
        for row in range(begin, end)
    ]
