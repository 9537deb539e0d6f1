"""How large the key-value cache is where `generator.kv_cache_gib` is left to the program."""

import math

from fos_rl.config import GeneratorConfig, RolloutConfig
from fos_rl.model.families import family_of
from fos_rl.model.hf import hf_weight_shapes
from fos_rl.spec import ModelSpec

# vLLM's pages on the CPU and on a GPU; see `fos_rl.generator.engine`.
BLOCK_TOKENS = {"cpu": 32, "cuda": 16}
# Bytes per parameter: bf16 weights of the generator; of the trainer the bf16 working copy and, in
# fp32, master, gradient and two moments.
_GENERATOR_BYTES, _TRAINER_BYTES = 2, 18
# What is left beside the weights also holds activations, CUDA graphs and the libraries' own memory.
_SHARE = {"cpu": 0.25, "cuda": 0.8}


def most_sequences(rollout: RolloutConfig, generator: GeneratorConfig) -> int:
    """How many sequences of a step are sampled together."""
    return min(generator.max_num_seqs, rollout.prompts_per_step * rollout.group_size)


def sequence_bytes(rollout: RolloutConfig, spec: ModelSpec, device: str) -> int:
    """Keys and values of one sequence of the greatest length, in whole pages."""
    longest = rollout.max_prompt_tokens + rollout.max_new_tokens
    block = BLOCK_TOKENS[device]
    number_bytes = 4 if spec.precision.compute_dtype == "float32" else 2
    architecture = spec.architecture
    token_bytes = family_of(architecture).cache_bytes_per_token(architecture, number_bytes)
    return math.ceil(longest / block) * block * token_bytes


def chosen_cache_gib(
    rollout: RolloutConfig,
    generator: GeneratorConfig,
    spec: ModelSpec,
    *,
    device: str,
    memory_gib: float,
    with_trainer: bool,
) -> float:
    """Enough for all sequences of a step at their greatest length, as far as there is memory: 80 %
    of what a GPU has beside the weights, and the trainer's states where it shares the GPU; a
    quarter of it on a CPU. Rounded up to hundredths.

    Args:
        memory_gib: all memory of the device.
        with_trainer: the trainer has its weights and states there, too.
    """
    parameters = sum(math.prod(shape) for shape in hf_weight_shapes(spec).values())
    held = parameters * (_GENERATOR_BYTES + (_TRAINER_BYTES if with_trainer else 0)) / 2**30
    wanted = most_sequences(rollout, generator) * sequence_bytes(rollout, spec, device) / 2**30
    available = max(0.0, memory_gib - held) * _SHARE[device]
    return math.ceil(100 * min(wanted, available)) / 100
