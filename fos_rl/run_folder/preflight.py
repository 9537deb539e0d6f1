"""What can be known of a run before an actor starts, beyond what its settings tell by themselves.

Each check reads headers, sizes and permissions, no tensors. Its error names the setting or the file
at fault, the value, the rule and the remedy.
"""

import math
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fos_rl.config import RunConfig
from fos_rl.generator.cache_size import sequence_bytes
from fos_rl.generator.head_sizes import cpu_head_sizes
from fos_rl.spec import Architecture, ModelSpec
from fos_rl.types import Prompt

_GIB = 1 << 30
# fp32 master and two Adam moments of each parameter; the model itself is bf16.
_CHECKPOINT_BYTES, _MODEL_BYTES = 12, 2
# A sampled token in JSON: its id twice, its log-prob three times (20 digits each), its text.
_TOKEN_BYTES = 80


def check_lengths(config: RunConfig, architecture: Architecture) -> str:
    """The longest sequence, in words; ValueError where the model or the engine cannot hold it."""
    rollout, generator = config.rollout, config.generator
    longest = rollout.max_prompt_tokens + rollout.max_new_tokens
    what = (
        f"rollout.max_prompt_tokens = {rollout.max_prompt_tokens} and rollout.max_new_tokens = "
        f"{rollout.max_new_tokens}"
    )
    context = architecture.max_position_embeddings
    if longest > context:
        raise ValueError(
            f"{what}: together {longest}, and the model's context (max_position_embeddings of its "
            f"config.json) has {context} tokens; lower one of them by {longest - context}"
        )
    budget = generator.max_num_batched_tokens
    if budget is not None and budget < generator.max_num_seqs:
        raise ValueError(
            f"generator.max_num_batched_tokens = {budget}: an engine step has a token of each of "
            f"generator.max_num_seqs = {generator.max_num_seqs} sequences; raise it, or lower "
            "max_num_seqs"
        )
    return f"sequences of at most {longest:,} tokens in a context of {context:,}"


def check_cache(config: RunConfig, spec: ModelSpec, device: str) -> None:
    """ValueError where the key-value cache cannot hold one sequence of the greatest length."""
    longest = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
    needed = sequence_bytes(config.rollout, spec, device) / _GIB
    size = config.generator.kv_cache_gib
    if size != "auto" and needed > size:
        raise ValueError(
            f"generator.kv_cache_gib = {size}: one sequence of "
            f"rollout.max_prompt_tokens + rollout.max_new_tokens = {longest} tokens needs "
            f"{needed:.3g}; raise it, or lower one of the two"
        )


def check_head_size(spec: ModelSpec, trainer: str | None, generator: str | None) -> list[str]:
    """ValueError where an attention has no kernel for the model's heads; else what is not known.

    The limits hold in exact mode, too: it has its own attention, and the trainer's for the backward
    and vLLM's for all around it.

    Args:
        trainer: "cpu" or "cuda", where it is known; so is generator.
    """
    size = spec.architecture.head_dim
    flash = spec.precision.compute_dtype == "bfloat16" and trainer == "cuda"
    if flash and (size % 8 or size > 256):
        raise ValueError(
            f"model.path: head_dim = {size} of its config.json: the trainer's FlashAttention has "
            "kernels for multiples of 8 up to 256; use another model, or "
            "model.precision.compute_dtype = 'float32'"
        )
    if generator == "cuda" and (size % 8 or not 32 <= size <= 256):
        return [f"whether vLLM has an attention for head_dim = {size} on this GPU"]
    if generator != "cpu":
        return []
    known = cpu_head_sizes()
    if known is None:
        return [f"whether vLLM's CPU attention takes head_dim = {size}"]
    if size not in known:
        raise ValueError(
            f"model.path: head_dim = {size} of its config.json: vLLM's CPU attention has kernels "
            f"for {', '.join(map(str, known))}; use another model, or run the generator on a GPU"
        )
    return []


def describe_first_prompt(prompts: Sequence[Prompt], first: Prompt) -> str:
    """The run's first prompt as the model reads it, shortened, and its length.

    Raises:
        ValueError: for a prompt without tokens.
    """
    if empty := next((prompt for prompt in prompts if not prompt.token_ids), None):
        raise ValueError(
            f"model.path: its tokenizer makes no token of the prompt {empty.text[:80]!r}; the "
            "tokenizer's files or its chat template are damaged: download the model's own"
        )
    text = first.text if len(first.text) <= 240 else f"{first.text[:160]} ... {first.text[-70:]}"
    return f"{len(first.token_ids):,} tokens, {text!r}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Bytes that a run writes. `rollouts` is a bound: every response as long as it may be."""

    model: int
    checkpoints: int
    num_checkpoints: int
    rollouts: int

    @property
    def certain(self) -> int:
        """Without the rollouts."""
        return self.model + self.checkpoints

    def __str__(self) -> str:
        checkpoints = (
            f", {size_text(self.checkpoints)} for {self.num_checkpoints} checkpoints"
            if self.num_checkpoints
            else ""
        )
        rollouts = f"at most {size_text(self.rollouts)} of rollouts"
        return f"{size_text(self.model)} for the model{checkpoints}, {rollouts}"


def needed_space(
    config: RunConfig,
    shapes: Mapping[str, Sequence[int]],
    longest_prompt: int,
    first_step: int = 0,
) -> Space:
    """What steps `first_step` to the end write, for weights of these shapes."""
    parameters = sum(math.prod(shape) for shape in shapes.values())
    every = config.trainer.save_every
    number = config.steps // every - first_step // every if every else 0
    sequences = config.rollout.prompts_per_step * config.rollout.group_size
    sequence = _TOKEN_BYTES * config.rollout.max_new_tokens + 6 * longest_prompt
    return Space(
        model=_MODEL_BYTES * parameters,
        checkpoints=number * _CHECKPOINT_BYTES * parameters,
        num_checkpoints=number,
        rollouts=(config.steps - first_step) * sequences * sequence,
    )


def check_output(folder: Path, num_bytes: int, what: str) -> str:
    """The free space at a folder that may not exist yet, in words.

    Raises:
        ValueError: when it cannot be made or written, or the disk has no room for `what`, which
            takes `num_bytes`.
    """
    free = check_writable(folder, "--out")
    if free < num_bytes:
        raise ValueError(
            f"--out {folder}: its disk has {size_text(free)} free, and {what} need "
            f"{size_text(num_bytes)}; free some, give another folder, or raise trainer.save_every"
        )
    return f"{size_text(free)} free"


def check_writable(folder: Path, option: str) -> int:
    """Free bytes at a folder that may not exist yet; ValueError when it cannot be written.

    Args:
        option: what named the folder, as in --out.
    """
    try:
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if folder.is_file():
            raise ValueError(f"{option} {folder} is a file; give a folder")
        # The only test that also knows of read-only disks, quotas and access lists.
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=there):
            pass
        return shutil.disk_usage(there).free
    except OSError as error:
        raise ValueError(
            f"{option} {folder}: the folder cannot be written ({error.strerror}); give another one"
        ) from None


def remote_unknowns(address: str, folder: Path, uses_gpus: bool) -> list[str]:
    """What this machine cannot tell of a cluster elsewhere."""
    machines = f"the machines of cluster.address = {address!r}"
    gpus = [f"what the GPUs of {machines} can run"] if uses_gpus else []
    return [*gpus, f"whether {machines} see {folder} and the run folder"]


def size_text(num_bytes: int) -> str:
    """A number of bytes as a user reads it."""
    if num_bytes >= _GIB // 10:
        return f"{num_bytes / _GIB:.1f} GiB"
    return f"{num_bytes / (1 << 20):.1f} MiB"
