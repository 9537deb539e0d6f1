"""What a run will take, before it is started: memory and time, each from a formula stated here.

Memory of the trainer, for P parameters, activations of c bytes (2 or 4), h = hidden_size, f = MLP
width times the experts that a token goes through, V = vocab_size and T = the tokens of a
micro-batch:

    P (4 master + 4 gradient + 8 Adam moments + c working copy)
    + T layers c (12 h + 5 f)                   what autograd keeps
    + 16 V log_prob_chunk_tokens                four fp32 arrays of logits

and of the generator, P c + kv_cache_gib; each adds a process of about 1 GiB. On a GPU it is
1.4 times that, for the allocator's reserve, workspaces and graphs. Against measured peaks,
SmolLM2-135M, trainer and generator: 5.9 + 1.8 GiB for 5.2 + 2.3 in fp32 on a CPU
(experiments/laptop, MXFP8); on an H200 35 in all for 28 (experiments/deepmath, bf16), 36 for 33
(experiments/deepmath_moe) and 43 for 42 (the same with microbatches of 8192 tokens).

Time of a step is the mean of the study's own steps that are already on disk, of the same arm where
there are some. Before the first it is

    6 P_active trained tokens / trainer speed + 2 P_active sampled tokens / generator speed

for the largest step, P_active leaving out the experts that a token does not visit.
The speeds (`_SPEEDS`) are those of one kind of machine: a guess within a factor of 5, until a first
step is measured.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fos_rl.config import RunConfig
from fos_rl.model.hf import hf_weight_shapes
from fos_rl.run_folder.folder import read_metrics
from fos_rl.runtime.launch import Plan
from fos_rl.spec import ModelSpec

_GIB = 1 << 30
_PROCESS_GIB = 1.0
_ON_GPU = 1.4

# Operations per second of (trainer, generator). CPU: SmolLM2-135M on two AVX2 cores in fp32, 143
# and 250 tokens per second. GPU: an order of magnitude, for models that fill one; small ones are
# slower.
_SPEEDS = {"cpu": (1.2e11, 0.7e11), "cuda": (2e14, 2e13)}
# Engine and trainer start, model load, first sync.
_START_S = 40.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What one run takes; `measured` when the step's time is that of finished steps."""

    trainer_gib: float
    generator_gib: float
    step_s: float
    steps: int
    measured: bool

    @property
    def run_s(self) -> float:
        """Seconds of a run, with its start."""
        return _START_S + self.steps * self.step_s

    def __str__(self) -> str:
        basis = "measured steps" if self.measured else "a formula, within a factor of 5"
        return (
            f"trainer {self.trainer_gib:.1f} GiB, generator {self.generator_gib:.1f} GiB; "
            f"{self.step_s:.3g} s per step, {self.run_s / 60:.3g} min per run (from {basis})"
        )


def estimate(config: RunConfig, plan: Plan, earlier: Iterable[Path] = ()) -> Estimate:
    """What a run that passed its checks will take.

    Args:
        earlier: run folders whose measured steps tell more than the formula.
    """
    times = [step["time/step_s"] for folder in earlier for step in _steps(folder)]
    trainer_more, generator_more = (
        _ON_GPU if gpus else 1.0
        for gpus in (plan.placement.trainer_gpus, plan.placement.generator_gpus)
    )
    return Estimate(
        trainer_gib=trainer_gib(config, plan.spec) * trainer_more,
        generator_gib=generator_gib(config, plan.spec) * generator_more,
        step_s=sum(times) / len(times) if times else formula_step_s(config, plan),
        steps=config.steps,
        measured=bool(times),
    )


def num_parameters(spec: ModelSpec, *, active: bool = False) -> int:
    """Parameters of the model; `active` leaves out the experts that a token does not visit."""
    architecture = spec.architecture
    total = 0.0
    for name, shape in hf_weight_shapes(spec).items():
        visited = architecture.num_experts_per_token / max(1, architecture.num_experts)
        total += math.prod(shape) * (visited if active and ".experts." in name else 1)
    return round(total)


def trainer_gib(config: RunConfig, spec: ModelSpec) -> float:
    """Memory of the trainer, GiB: weights with masters, gradients and moments, one micro-batch's
    activations and logits, and the process."""
    architecture, width = spec.architecture, _activation_bytes(spec)
    inner = architecture.intermediate_size
    if architecture.num_experts:
        inner = architecture.moe_intermediate_size * architecture.num_experts_per_token
    weights = num_parameters(spec) * (16 + width)
    kept = 12 * architecture.hidden_size + 5 * inner
    longest = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
    sequences = config.rollout.prompts_per_step * config.rollout.group_size
    tokens = min(max(config.trainer.microbatch_tokens, longest), sequences * longest)
    activations = tokens * architecture.num_layers * kept * width
    logits = 16 * architecture.vocab_size * min(config.trainer.log_prob_chunk_tokens, tokens)
    return (weights + activations + logits) / _GIB + _PROCESS_GIB


def generator_gib(config: RunConfig, spec: ModelSpec) -> float:
    """Memory of the generator, GiB: weights, key-value cache, and the process."""
    weights = num_parameters(spec) * _activation_bytes(spec) / _GIB
    return weights + float(config.generator.kv_cache_gib) + _PROCESS_GIB


def formula_step_s(config: RunConfig, plan: Plan) -> float:
    """Seconds per step by rule of thumb: 2 operations per parameter and sampled token, 6 per
    trained one, at the device's usual speeds."""
    sequences = config.rollout.prompts_per_step * config.rollout.group_size
    sampled = sequences * config.rollout.max_new_tokens
    trained = sampled + sequences * plan.prompts.counts.longest
    active = num_parameters(plan.spec, active=True)
    gpus = plan.placement.trainer_gpus, plan.placement.generator_gpus
    trainer, generator = (_SPEEDS["cuda" if number else "cpu"] for number in gpus)
    return 6 * active * trained / trainer[0] + 2 * active * sampled / generator[1]


def _activation_bytes(spec: ModelSpec) -> int:
    return 4 if spec.precision.compute_dtype == "float32" else 2


def _steps(folder: Path) -> list[dict[str, float]]:
    found = read_metrics(folder) if (folder / "metrics.jsonl").is_file() else []
    return [step for step in found if "time/step_s" in step]
