"""Layouts of trainer and generator over several GPUs, checked against the model. None runs yet."""

from fos_rl.config import ParallelConfig, RunConfig
from fos_rl.spec import Architecture, Bf16, ModelSpec, Mxfp8

_ACTORS = ("trainer", "generator")


def check_parallel(config: RunConfig, spec: ModelSpec) -> list[str]:
    """What a user should know about the layout, one note per line; none for one GPU each.

    Raises:
        ValueError: naming the setting, the dimension that it does not divide and the remedy.
    """
    layouts = {actor: getattr(config, actor).parallel for actor in _ACTORS}
    for actor, layout in layouts.items():
        _check_layout(f"{actor}.parallel", layout, spec)
    if not is_parallel(config):
        return []
    parts = [
        f"{actor} on {layout.num_gpus} GPUs (tensor {layout.tensor}, data {layout.data}, expert "
        f"{layout.expert})"
        for actor, layout in layouts.items()
    ]
    return [f"parallel   {'; '.join(parts)}: fits the model, but is not runnable yet"]


def is_parallel(config: RunConfig) -> bool:
    """Whether trainer or generator is spread over several GPUs."""
    return any(getattr(config, actor).parallel != ParallelConfig() for actor in _ACTORS)


def refuse_parallel(config: RunConfig) -> None:
    """ValueError unless trainer and generator have one GPU or the CPU each: more do not run yet."""
    for actor in _ACTORS:
        layout = getattr(config, actor).parallel
        if layout != ParallelConfig():
            raise ValueError(
                f"{actor}.parallel = {layout.model_dump()}: the {actor} runs on one GPU so far; "
                "leave the section out, or check the layout with --dry-run"
            )


def _check_layout(name: str, layout: ParallelConfig, spec: ModelSpec) -> None:
    architecture = spec.architecture
    block = _block(spec)
    for what, size, multiple in _split_sizes(architecture, block):
        if size % (layout.tensor * multiple):
            rule = f" in parts of a multiple of {multiple}" if multiple > 1 else ""
            raise ValueError(
                f"{name}.tensor = {layout.tensor}: it must divide {what} = {size}{rule}; use a "
                "smaller one"
            )
    if layout.expert == 1:
        return
    if not architecture.num_experts or architecture.num_experts % layout.expert:
        raise ValueError(
            f"{name}.expert = {layout.expert}: it must divide the model's num_experts = "
            f"{architecture.num_experts}; use {1 if not architecture.num_experts else 'a divisor'}"
        )
    if layout.num_gpus % layout.expert:
        raise ValueError(
            f"{name}.expert = {layout.expert}: it must divide tensor x data = {layout.num_gpus} "
            "GPUs; use a divisor"
        )


def _split_sizes(architecture: Architecture, block: int) -> list[tuple[str, int, int]]:
    """(name, size, what a part must be a multiple of) of each dimension that tensor ranks share."""
    heads = architecture.num_heads * architecture.head_dim
    sizes = [
        ("num_attention_heads", architecture.num_heads, 1),
        ("num_key_value_heads", architecture.num_kv_heads, 1),
        ("num_attention_heads x head_dim", heads, block),
    ]
    if not architecture.num_experts or architecture.dense_layers:
        sizes.append(("intermediate_size", architecture.intermediate_size, block))
    return sizes


def _block(spec: ModelSpec) -> int:
    """Elements that share a scale along a row, which no cut may part."""
    if isinstance(spec.precision, Bf16):
        return 1
    return 32 if isinstance(spec.precision, Mxfp8) else 16
