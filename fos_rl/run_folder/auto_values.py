"""Values that `auto` leaves to the program. They are chosen once, before a run starts, and stand in
its config.toml, where a resumed run finds them."""

from typing import Literal

from fos_rl.config import RunConfig
from fos_rl.generator.cache_size import chosen_cache_gib
from fos_rl.spec import ModelSpec


def with_chosen_values(
    config: RunConfig, spec: ModelSpec, *, device: str, memory_gib: float, shares_device: bool
) -> RunConfig:
    """The config without `auto`.

    Args:
        device: the generator's, "cpu" or "cuda", and all memory of it.
        shares_device: the trainer is on it, too.
    """
    generator = config.generator
    if generator.kv_cache_gib != "auto":
        return config
    chosen = chosen_cache_gib(
        config.rollout,
        generator,
        spec,
        device=device,
        memory_gib=memory_gib,
        with_trainer=shares_device,
    )
    return _with_cache(config, chosen)


def with_values_of(config: RunConfig, earlier: RunConfig) -> RunConfig:
    """The config with an earlier run's values wherever it has `auto`."""
    if config.generator.kv_cache_gib != "auto":
        return config
    return _with_cache(config, earlier.generator.kv_cache_gib)


def _with_cache(config: RunConfig, gib: float | Literal["auto"]) -> RunConfig:
    generator = config.generator.model_copy(update={"kv_cache_gib": gib})
    return config.model_copy(update={"generator": generator})
