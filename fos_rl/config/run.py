"""The settings of a run: one TOML file, one tree of frozen models. No torch import.

Sort a new setting by one question: can it change a log-prob? Then it belongs to `model.precision`
(shared by trainer and generator); otherwise to the one of the two that it steers.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from fos_rl.config.algorithm import AlgorithmConfig
from fos_rl.spec import (
    MAX_INT,
    Bf16,
    Consistency,
    Frozen,
    Names,
    NotNegative,
    Positive,
    Precision,
    check_consistency,
)

# vLLM samples at 0.01 when asked for less and raises above 2 (`SamplingParams.__post_init__`,
# https://docs.vllm.ai/en/latest/api/vllm/sampling_params.html); the trainer divides by what it is
# given.
Temperature = Annotated[float, Field(ge=0.01, le=2)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Device = Literal["auto", "cpu", "cuda"]
Threads = Annotated[int, Field(gt=0, le=4096)]
# The engine multiplies seeds modulo 2^62: up to there each gives samples of its own.
Seed = Annotated[int, Field(ge=0, lt=2**62)]


class ModelConfig(Frozen):
    """`[model]`: which model, in which number format, and how exactly both sides agree."""

    path: str
    """Folder or hub name of a Hugging Face model, or `random:FAMILY`, as in `random:llama`, for a
    tiny random model with a byte tokenizer; another FAMILY's error lists those that there are."""
    precision: Precision = Bf16()
    """Number format and its settings, for trainer and generator."""
    consistency: Consistency = "fast"
    """fast: trainer and generator compute as fast as they can, and sums round differently. exact:
    both give a token's log-prob the same bits, whatever else is in the batch; slower."""

    @model_validator(mode="after")
    def _consistency_is_possible(self) -> Self:
        check_consistency(self.consistency, self.precision)
        return self


class ArithmeticData(Frozen):
    """Generated additions and subtractions: a task that a small model can learn in minutes."""

    type: Literal["arithmetic"] = "arithmetic"
    difficulty: Annotated[int, Field(ge=1, le=5)] = 1
    """1: one-digit sums .. 5: three operands of three digits."""
    num_problems: Positive = 1000
    """Distinct problems; level 1 has 81, so fewer there."""


_INSTRUCTION = 'Think step by step. Write the answer on the last line, after "Answer:".'


class VowelsData(Frozen):
    """Reply with a vowel: a task that even a tiny random model of bytes learns, for smoke runs."""

    type: Literal["vowels"] = "vowels"
    num_problems: Positive = 100


class Gsm8kData(Frozen):
    """`[data]` with type "gsm8k": grade-school word problems with whole answers."""

    type: Literal["gsm8k"] = "gsm8k"
    path: str = "openai/gsm8k"
    """Hub name or JSONL/Parquet file with columns question and answer (ends in `#### N`)."""
    split: str = "train"
    instruction: str = _INSTRUCTION
    """Follows each question after an empty line; "" adds nothing."""


class DapoMathData(Frozen):
    """`[data]` with type "dapo_math": competition problems with whole answers."""

    type: Literal["dapo_math"] = "dapo_math"
    path: str = "BytedTsinghua-SIA/DAPO-Math-17k"
    """Hub name or JSONL/Parquet file of DAPO-Math-17k's schema."""
    split: str = "train"


class DatasetData(Frozen):
    """Any table with a question column and an answer column."""

    type: Literal["dataset"] = "dataset"
    path: str
    """Hub name, folder, or .jsonl, .json, .csv or .parquet file."""
    subset: str | None = None
    """Configuration of a hub data set that has several."""
    split: str = "train"
    prompt_column: str = "prompt"
    """A string, or a chat in any of the shapes of docs/data.md. `a.b` is entry b of a column a."""
    answer_column: str = "answer"
    """A number, text or LaTeX, also within a whole solution; `a.b` as above."""
    instruction: str = _INSTRUCTION
    """Follows each string prompt after an empty line; "" adds nothing. Chats stay as they are."""


Data = Annotated[
    ArithmeticData | VowelsData | Gsm8kData | DapoMathData | DatasetData,
    Field(discriminator="type"),
]


class RewardConfig(Frozen):
    """`[reward]`: the processes that verify answers, and their limits."""

    workers: Annotated[int, Field(ge=0, le=4096)] = 2
    """Verifier processes; 0 verifies in the driver's own process, without the time limit."""
    timeout_s: Annotated[float, Field(ge=0.01, le=3600)] = 5.0
    """Processor time for one answer; over it the answer scores 0 and is counted."""
    batch_timeout_s: Annotated[float, Field(gt=0, le=2_592_000)] = 30.0
    """Seconds that a step's slow answers may take together, per worker. Every answer is tried;
    those over their share of it again while some is left, then they count as timeouts."""


class ParallelConfig(Frozen):
    """How trainer or generator is spread over tensor x data GPUs. So far each runs on one GPU; a
    dry run checks a larger layout against the model."""

    tensor: Positive = 1
    """GPUs that share every linear."""
    data: Positive = 1
    """Copies of the model; the trainer's shard their fp32 masters (FSDP)."""
    expert: Positive = 1
    """GPUs, of the tensor x data ones, that share the experts of a layer."""

    @property
    def num_gpus(self) -> int:
        """GPUs of this side, all together."""
        return self.tensor * self.data


class RolloutConfig(Frozen):
    """`[rollout]`: how many prompts and responses per step, their lengths, and sampling."""

    prompts_per_step: Positive = 8
    group_size: Annotated[int, Field(ge=2, le=MAX_INT)] = 8
    """Responses per prompt; an advantage is relative to its group, so at least 2."""
    temperature: Temperature = 1.0
    """Log-probs of trainer and generator are of logits / temperature. From 0.01 to 2, which vLLM
    applies as they are."""
    top_p: Annotated[float, Field(ge=1, le=1)] = 1.0
    """Only 1: a nucleus changes the generator's log-probs by the log of the kept mass."""
    top_k: Annotated[int, Field(ge=0, le=0)] = 0
    """Only 0 (off), for the same reason."""
    max_new_tokens: Positive = 256
    max_prompt_tokens: Positive = 1024
    """Longer prompts are dropped when the data is loaded, and counted."""
    truncated: Literal["keep", "mask", "zero_reward"] = "keep"
    """A response cut at max_new_tokens: train on it as scored, leave it out of the loss, or
    give it reward 0."""


class TrainerConfig(Frozen):
    """`[trainer]`: optimizer, micro-batches, checkpoints, and where the trainer runs."""

    lr: Annotated[float, Field(gt=0)] = 1e-6
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = (0.9, 0.999)
    """AdamW's decay rates of the gradient's mean and of its square's."""
    eps: Annotated[float, Field(ge=1e-30, le=1)] = 1e-8
    """Added to AdamW's denominator; fp32 must tell it from 0, which a gradient of 0 would be
    divided by."""
    weight_decay: Annotated[float, Field(ge=0, le=10)] = 0.0
    warmup_steps: NotNegative = 0
    """Linear learning-rate warm-up, in optimizer updates."""
    max_grad_norm: Annotated[float, Field(ge=1e-6, le=1e9)] = 1.0
    """Gradients of a larger norm are scaled down to it; 1e9 leaves them as they are."""
    max_nonfinite_updates: Positive = 3
    """Stop when so many updates in a row had a loss or a gradient that is not finite. One that has
    is skipped."""
    microbatch_tokens: Positive = 8192
    """Tokens per packed micro-batch; a longer sequence gets one of its own."""
    log_prob_chunk_tokens: Positive = 1024
    """Tokens whose logits exist at once."""
    save_every: Positive | None = None
    """Steps between checkpoints, from which `fos-rl resume` goes on. The model itself is always
    written at the end."""
    backward_override: Literal["quantized", "high_precision", "dequantized"] | None = None
    """How quantized layers differentiate: quantized multiplies quantized gradients, high_precision
    the original weights and activations, dequantized the very operands of the forward. By default
    quantized, or high_precision where activations are row-scaled. It changes no forward."""
    device: Device = "auto"
    """auto takes a GPU where there is one, and else the CPU."""
    num_threads: Threads | None = None
    """CPU threads of the trainer; by default the cores it shares with the generator."""
    parallel: ParallelConfig = ParallelConfig()


class GeneratorConfig(Frozen):
    """`[generator]`: the engine's cache and batch, and where the generator runs."""

    device: Device = "auto"
    """auto takes a GPU where there is one, and else the CPU, which needs vLLM's CPU build."""
    kv_cache_gib: Literal["auto"] | Annotated[float, Field(gt=0, le=65536)] = "auto"
    """Memory of the paged key-value cache. auto is enough for all responses that a step samples
    together, at their greatest length, as far as there is memory: 80 % of what a GPU has beside
    weights and optimizer states, a quarter of the main memory on a CPU."""
    max_num_seqs: Positive = 256
    """Requests decoded together."""
    max_num_batched_tokens: Positive | None = None
    """Tokens that an engine step computes; prompts that do not fit are split. By default vLLM's."""
    cuda_graphs: bool = True
    """Capture decode steps (GPU only); not with model.precision.gemm = "native" for experts."""
    num_threads: Threads | None = None
    """CPU threads of the engine; by default the cores it shares with the trainer."""
    parallel: ParallelConfig = ParallelConfig()


class EvalConfig(Frozen):
    """Accuracy on problems the run does not learn from; `eval/` metrics, before `fos-rl eval`."""

    sets: Annotated[Names, Field(min_length=1)]
    """Names (gsm8k, math500, aime24, aime25) or files; a file's set goes by its name without the
    suffix. `held_out`: problems of generated arithmetic that the run does not train on."""
    every: Positive = 10
    """Steps between evaluations; the last step has one, too."""
    samples: NotNegative = 1
    """Responses per problem that are sampled: avg@k and pass@k. 0 samples none."""
    greedy: bool = True
    """Also one greedy response per problem."""
    temperature: Temperature = 1.0
    """Of the sampled responses; greedy ones need none."""
    max_new_tokens: Positive | None = None
    """At most rollout.max_new_tokens, which it is by default."""
    max_problems: Positive | None = None
    """Only the first so many problems of a set."""


class ClusterConfig(Frozen):
    """`[cluster]`: the Ray cluster to run on, and how long to wait for its actors."""

    address: str = "local"
    """`local` starts Ray on this machine; otherwise the address of a running cluster."""
    start_timeout_s: Annotated[float, Field(gt=0, le=2_592_000)] = 600.0
    """Limit for an actor's start, model load included."""
    call_timeout_s: Annotated[float, Field(gt=0, le=2_592_000)] = 1800.0
    """Limit for one call; the error names the actor and the call that did not answer."""


class LoggingConfig(Frozen):
    """`[logging]`: where metrics go beside the run folder."""

    tensorboard: bool = False
    wandb_project: str | None = None
    """Also log to this Weights & Biases project."""


class RunConfig(Frozen):
    """A run, whole. The same file serves a laptop, a GPU and a cluster."""

    model: ModelConfig
    data: Data
    steps: Positive = 100
    seed: Seed = 0
    """Of prompts, sampling and random weights."""
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    trainer: TrainerConfig = TrainerConfig()
    generator: GeneratorConfig = GeneratorConfig()
    cluster: ClusterConfig = ClusterConfig()
    logging: LoggingConfig = LoggingConfig()
    eval: EvalConfig | None = None

    @model_validator(mode="after")
    def _backward_fits_precision(self) -> Self:
        precision, override = self.model.precision, self.trainer.backward_override
        if override is not None and isinstance(precision, Bf16):
            raise ValueError(
                f"trainer.backward_override = {override!r}: bf16 quantizes nothing; "
                "leave it out or choose another model.precision.recipe"
            )
        if override == "quantized" and getattr(precision, "row_scaled_activation", False):
            raise ValueError(
                "trainer.backward_override = 'quantized': row-scaled activations have a factor for "
                "each row, which cannot leave the weight gradient's sum over rows; use "
                "'high_precision' or 'dequantized', or set model.precision.row_scaled_activation = "
                "false"
            )
        return self

    @model_validator(mode="after")
    def _exact_hosts_are_alike(self) -> Self:
        ours, theirs = self.trainer.num_threads, self.generator.num_threads
        if self.model.consistency == "exact" and ours != theirs:
            raise ValueError(
                f"trainer.num_threads = {ours}, generator.num_threads = {theirs} with "
                "model.consistency = 'exact': a CPU may split a product, and its sums, by the "
                "number of threads; give both the same, or leave both out"
            )
        return self

    @model_validator(mode="after")
    def _eval_fits_engine(self) -> Self:
        if self.eval is None:
            return self
        wanted, limit = self.eval.max_new_tokens, self.rollout.max_new_tokens
        if wanted is not None and wanted > limit:
            raise ValueError(
                f"eval.max_new_tokens = {wanted}: the engine is laid out for "
                f"rollout.max_new_tokens = {limit}; lower it, or evaluate the trained model with "
                "fos-rl eval"
            )
        if not self.eval.samples and not self.eval.greedy:
            raise ValueError(
                "eval.samples = 0: with eval.greedy = false nothing is evaluated; set one of them"
            )
        return self

    @model_validator(mode="after")
    def _minibatches_fit(self) -> Self:
        sequences = self.rollout.prompts_per_step * self.rollout.group_size
        if self.algorithm.minibatches > sequences:
            raise ValueError(
                f"algorithm.minibatches = {self.algorithm.minibatches}: a step has only "
                f"{sequences} sequences (rollout.prompts_per_step x group_size); lower it"
            )
        return self


def section_models(section: str) -> list[type[Frozen]]:
    """The settings models that can stand at a dotted section; the run itself for ''."""
    models: list[type[Frozen]] = [RunConfig]
    for part in filter(None, section.split(".")):
        fields = [model.model_fields[part] for model in models if part in model.model_fields]
        models = [child for f in fields for child in _models_in(f.annotation)]
    return models


def _models_in(annotation: Any) -> list[type[Frozen]]:
    if isinstance(annotation, type) and issubclass(annotation, Frozen):
        return [annotation]
    return [m for arg in getattr(annotation, "__args__", ()) for m in _models_in(arg)]


def tag_of(model: type[Frozen]) -> str | None:
    """What selects this model where a section can have several types."""
    fields = model.model_fields
    return next((fields[key].default for key in ("type", "recipe") if key in fields), None)
