"""Prompts dealt to several generators, which sample at the same time."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from itertools import pairwise

from fos_rl.types import Prompt, Rollout, Sampler, Sampling


def sample_groups(
    generators: Sequence[Sampler],
    prompts: Sequence[Prompt],
    seed: int,
    sampling: Sampling | None = None,
) -> list[list[Rollout]]:
    """A group of rollouts per prompt, in the prompts' order, whoever sampled it.

    Every generator gets a contiguous part. A sample's seed depends on the prompt's place among all
    prompts, so the number of generators decides only what shares a batch: nothing in exact mode,
    and in fast mode as much as any other batch would.

    Raises:
        Whatever a generator raises, without waiting for the others.
    """
    calls = [
        partial(generator.generate, prompts[part.start : part.stop], seed, sampling, part.start)
        for generator, part in zip(generators, deal(len(prompts), len(generators)), strict=True)
        if part
    ]
    if len(calls) <= 1:
        return [group for call in calls for group in call()]
    pool = ThreadPoolExecutor(len(calls), thread_name_prefix="generator")
    try:
        futures = [pool.submit(call) for call in calls]
        for future in as_completed(futures):
            future.result()
        return [group for future in futures for group in future.result()]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def deal(num_prompts: int, num_generators: int) -> list[range]:
    """Contiguous parts whose sizes differ by one at most, larger ones first.

    Example: 8 prompts for 3 generators are 0 to 2, 3 to 5, and 6 to 7.
    """
    size, larger = divmod(num_prompts, num_generators)
    starts = [i * size + min(i, larger) for i in range(num_generators + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]
