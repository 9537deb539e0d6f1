"""The settings of a run: one TOML file, one tree of frozen models. No torch import.

Sort a new setting by one question: can it change a log-prob? Then it belongs to `model.precision`
(shared by both hosts); otherwise to the host it steers.
"""

import difflib
import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from fos_rl.algorithm import AlgorithmConfig
from fos_rl.files import read_text
from fos_rl.shipped import config_names, find_config
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
Threads = Annotated[int, Field(gt=0, le=4096)]
# The engine multiplies seeds modulo 2^62: up to there each gives samples of its own.
Seed = Annotated[int, Field(ge=0, lt=2**62)]


class ModelConfig(Frozen):
    path: str
    """Folder or hub name of a Hugging Face model, or `random:llama`, `random:qwen3`,
    `random:qwen3_moe` for a tiny random model with a byte tokenizer."""
    precision: Precision = Bf16()
    """The recipe both hosts run."""
    consistency: Consistency = "fast"
    """fast: each host computes as fast as it can, and sums round differently. exact: trainer and
    generator give a token's log-prob the same bits, whatever else is in the batch; slower."""

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
    type: Literal["gsm8k"] = "gsm8k"
    path: str = "openai/gsm8k"
    """Hub name or JSONL/Parquet file with columns question and answer (ends in `#### N`)."""
    split: str = "train"
    instruction: str = _INSTRUCTION
    """Follows each question after an empty line; "" adds nothing."""


class DapoMathData(Frozen):
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
    workers: Annotated[int, Field(ge=0, le=4096)] = 2
    """Verifier processes; 0 verifies in the driver's own process, without the time limit."""
    timeout_s: Annotated[float, Field(ge=0.01, le=3600)] = 5.0
    """Processor time for one answer; over it the answer scores 0 and is counted."""
    batch_timeout_s: Annotated[float, Field(gt=0, le=2_592_000)] = 30.0
    """Seconds that a step's slow answers may take together, per worker. Every answer is tried;
    those over their share of it again while some is left, then they count as timeouts."""


class ParallelConfig(Frozen):
    """How a host is spread over tensor x data GPUs. So far only one GPU a host runs; a dry run
    checks a larger layout against the model."""

    tensor: Positive = 1
    """GPUs that share every linear."""
    data: Positive = 1
    """Copies of the host; the trainer's shard their fp32 masters (FSDP)."""
    expert: Positive = 1
    """GPUs, of the tensor x data ones, that share the experts of a layer."""

    @property
    def num_gpus(self) -> int:
        return self.tensor * self.data


class RolloutConfig(Frozen):
    prompts_per_step: Positive = 8
    group_size: Annotated[int, Field(ge=2, le=MAX_INT)] = 8
    """Responses a prompt; an advantage is relative to its group, so at least 2."""
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
    """Tokens a packed micro-batch; a longer sequence gets one of its own."""
    log_prob_chunk_tokens: Positive = 1024
    """Tokens whose logits exist at once."""
    save_every: Positive | None = None
    """Steps between checkpoints, from which `fos-rl resume` goes on. The model itself is always
    written at the end."""
    backward_override: Literal["quantized", "high_precision", "dequantized"] | None = None
    """How quantized layers differentiate: quantized multiplies quantized gradients, high_precision
    the original weights and activations, dequantized the very operands of the forward. By default
    quantized, or high_precision where activations are row-scaled. It changes no forward."""
    num_gpus: Literal["auto"] | Annotated[int, Field(ge=0, le=1)] = "auto"
    """0 runs on the CPU; auto takes a GPU when there is one."""
    num_threads: Threads | None = None
    """CPU threads of the trainer; by default the cores it shares with the generator."""
    parallel: ParallelConfig = ParallelConfig()


class GeneratorConfig(Frozen):
    num_gpus: Literal["auto"] | Annotated[int, Field(ge=0, le=1)] = "auto"
    """0 runs vLLM's CPU build; auto takes a GPU when there is one."""
    kv_cache_gib: Annotated[float, Field(gt=0, le=65536)] = 1.0
    """Memory of the paged key-value cache."""
    max_num_seqs: Positive = 256
    """Requests decoded together."""
    max_num_batched_tokens: Positive | None = None
    """Tokens an engine step computes; prompts that do not fit are split. By default vLLM's."""
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
    """Responses a problem that are sampled: avg@k and pass@k. 0 samples none."""
    greedy: bool = True
    """Also one greedy response a problem."""
    temperature: Temperature = 1.0
    """Of the sampled responses; greedy ones need none."""
    max_new_tokens: Positive | None = None
    """At most rollout.max_new_tokens, which it is by default."""
    max_problems: Positive | None = None
    """Only the first so many problems of a set."""


class ClusterConfig(Frozen):
    address: str = "local"
    """`local` starts Ray on this machine; otherwise the address of a running cluster."""
    start_timeout_s: Annotated[float, Field(gt=0, le=2_592_000)] = 600.0
    """Limit for an actor's start, model load included."""
    call_timeout_s: Annotated[float, Field(gt=0, le=2_592_000)] = 1800.0
    """Limit for one call; the error names the actor and the call that did not answer."""


class LoggingConfig(Frozen):
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
    def _backward_fits_recipe(self) -> Self:
        precision, override = self.model.precision, self.trainer.backward_override
        if override is not None and isinstance(precision, Bf16):
            raise ValueError(
                f"trainer.backward_override = {override!r}: the recipe bf16 quantizes nothing; "
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


def load_config(
    path: str | Path, overrides: Sequence[str] = (), recipe: str | None = None
) -> RunConfig:
    """The run described by a TOML file, after a recipe and `a.b=VALUE` overrides.

    Args:
        path: a file, or the name of one in configs/.
        recipe: a partial config, as a file or the name of one in configs/recipes. Its keys win over
            the file's; its `model.precision` replaces the file's whole, and with it the
            `trainer.backward_override` that belonged to it.

    Raises:
        ValueError: naming each wrong field, its value, the rule and the remedy.
    """
    hint = f"give a file, or one of {', '.join(config_names())}"
    return resolve_config(read_toml(find_config(path), hint), overrides, recipe)


def other_arm(path: str | Path, overrides: Sequence[str], recipe: str | None) -> RunConfig:
    """`load_config` for a forward alone: how the file's run differentiates may not fit another
    recipe, and is in no forward."""
    tree = read_toml(Path(path), "give the config of the arm")
    tree.get("trainer", {}).pop("backward_override", None)
    return resolve_config(tree, overrides, recipe)


def resolve_config(
    tree: dict[str, Any], overrides: Sequence[str] = (), recipe: str | None = None
) -> RunConfig:
    """`load_config` of what a file would hold."""
    if recipe is not None:
        hint = f"--recipe {recipe!r}: give a file, or one of {', '.join(config_names('recipes'))}"
        tree = with_recipe(tree, read_toml(find_config(recipe, "recipes"), hint))
    # A new type or recipe first: it takes old keys away, and none that this command line sets.
    for override in sorted(overrides, key=lambda text: not _is_choice(text)):
        _apply_override(tree, override)
    return parse_config(tree)


def read_toml(path: Path, hint: str) -> dict[str, Any]:
    """The tables of a TOML file; ValueError with the hint when there are none."""
    try:
        tree = tomllib.loads(read_text(path, hint))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not valid TOML: {error}; {hint}") from None
    if not tree:
        raise ValueError(f"{path} is empty; {hint}")
    return tree


OUTDATED_MODEL = "model.outdated"
"""Lies in a run folder while its model/ is of an earlier end, and the run has gone on since."""


def run_config_file(run: Path) -> Path:
    """The resolved config of a run folder.

    Raises:
        ValueError: when there is none.
    """
    file = run / "config.toml"
    if not file.is_file():
        raise ValueError(
            f"{run} is no run folder, it has no config.toml; give one, as in runs/NAME"
        )
    return file


def with_recipe(tree: dict[str, Any], recipe: dict[str, Any]) -> dict[str, Any]:
    """A config tree under a recipe, which replaces its precision and the backward that went with
    it; see `load_config`."""
    merged = merge_config(tree, recipe)
    if "precision" not in _table(recipe, "model"):
        return merged
    precision = dict(_table(recipe["model"], "precision", "model."))
    trainer = dict(_table(merged, "trainer"))
    if "backward_override" not in _table(recipe, "trainer"):
        trainer.pop("backward_override", None)
    model = {**_table(merged, "model"), "precision": precision}
    return {**merged, "model": model, "trainer": trainer}


def _table(tree: dict[str, Any], key: str, section: str = "") -> dict[str, Any]:
    """A table of a config tree, empty where there is none."""
    value = tree.get(key, {})
    if not isinstance(value, dict):
        raise ValueError(f"{section}{key} = {value!r}: it is a table; write [{section}{key}]")
    return value


def merge_config(base: dict[str, Any], over: dict[str, Any], section: str = "") -> dict[str, Any]:
    """A config tree with `over` laid on it: tables key by key, of any other value `over`'s.

    A table of another `type` or `recipe` replaces the old one whole, since its keys are others:
    the data {"type": "gsm8k", "split": "test"} and {"type": "arithmetic"} make the latter.
    """
    merged = dict(base)
    for key, value in over.items():
        old, name = base.get(key), f"{section}.{key}".removeprefix(".")
        if isinstance(old, dict) and isinstance(value, dict) and not _other_type(old, value, name):
            value = merge_config(old, value, name)
        merged[key] = value
    return merged


def _other_type(old: dict[str, Any], new: dict[str, Any], section: str) -> bool:
    for model in section_models(section)[:1]:
        for key in {"type", "recipe"} & model.model_fields.keys():
            # What a table without the key is taken for.
            current = old.get(key, model.model_fields[key].default)
            if new.get(key, current) != current:
                return True
    return False


def parse_config(tree: dict[str, Any]) -> RunConfig:
    """A validated RunConfig from nested dicts; see `load_config` for the errors.

    Paths of files that exist become absolute, so that what a run stores can be used from any
    folder.
    """
    try:
        return _with_absolute_paths(RunConfig.model_validate(tree))
    except ValidationError as error:
        lines = [_explain(details, tree) for details in error.errors()]
        raise ValueError("\n".join(dict.fromkeys(lines))) from None


def _with_absolute_paths(config: RunConfig) -> RunConfig:
    model = config.model.model_copy(update={"path": _absolute(config.model.path)})
    changes: dict[str, Any] = {"model": model}
    if "path" in type(config.data).model_fields:
        path = _absolute(config.data.path)  # type: ignore[union-attr]
        changes["data"] = config.data.model_copy(update={"path": path})
    if config.eval is not None:
        sets = tuple(_absolute(name) for name in config.eval.sets)
        changes["eval"] = config.eval.model_copy(update={"sets": sets})
    return config.model_copy(update=changes)


def _absolute(path: str) -> str:
    """The path as it would be from any folder; a hub name or a set's name stays as it is."""
    place = Path(path).expanduser()
    return str(place.resolve()) if place.exists() else path


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    *parents, leaf = parts = key.strip().split(".")
    if not separator or not all(parts):
        raise ValueError(f"--set {override!r}: write it as a.b=VALUE, as in trainer.lr=1e-6")
    if "\n" in text:
        raise ValueError(f"--set {override!r}: one setting has one line; give the others their own")
    try:
        value = tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        # An unquoted word is a string: --set data.type=gsm8k.
        value = text
    for parent in parents:
        tree = tree.setdefault(parent, {})
        if not isinstance(tree, dict):
            raise ValueError(
                f"--set {override!r}: {parent} is a value, not a section; give it as {parent}=VALUE"
            )
    if leaf == "type" and tree.get("type") != value:
        # Another type has other fields; what the file said of the old one does not carry over.
        tree.clear()
    if leaf == "recipe":
        _keep_shared_settings(tree, ".".join(parents), value)
    tree[leaf] = value


def _is_choice(override: str) -> bool:
    """Whether it chooses which other keys its section has."""
    return override.partition("=")[0].rpartition(".")[2] in ("type", "recipe")


def _keep_shared_settings(tree: dict[str, Any], section: str, recipe: Any) -> None:
    """Take out what another recipe does not have, and the old recipe's defaults, which a resolved
    config spells out: the new recipe has its own."""
    models = {_tag(model): model for model in section_models(section)}
    old, new = models.get(tree.get("recipe", "bf16")), models.get(recipe)
    if old is None or new is None or old is new:
        return
    defaults = old().model_dump(mode="json")
    for key in list(tree):
        if key not in new.model_fields or tree[key] == defaults.get(key):
            del tree[key]


# What to do about it, where pydantic's rule alone does not tell.
_TEMPERATURE = (
    "vLLM samples at 0.01 when asked for less and takes none above 2, while the trainer divides by "
    "what it is given; "
)
_REMEDIES = {
    "rollout.temperature": _TEMPERATURE + "use 0.01 to 2 (1.0 is common)",
    "eval.temperature": _TEMPERATURE + "use 0.01 to 2, or eval.samples = 0 with eval.greedy = true "
    "for greedy responses",
    "rollout.top_p": "top-p changes the generator's log-probs by the log of the kept mass, which "
    "the trainer does not apply; leave it out or set 1.0",
    "rollout.top_k": "top-k changes the generator's log-probs by the log of the kept mass, which "
    "the trainer does not apply; leave it out or set 0",
    "rollout.group_size": "an advantage compares responses to one prompt; use 2 or more (8 is "
    "common)",
}


def _explain(details: ErrorDetails, tree: dict[str, Any]) -> str:
    """One validation error as `field = value: rule; remedy`."""
    if details["type"] == "value_error":
        return str(details["msg"]).removeprefix("Value error, ")
    # Discriminated unions put the chosen tag into the location; it is not a key of the file, and a
    # default one not even a value.
    parts = [str(part) for part in details["loc"]]
    names, node = [], tree
    for part in parts:
        tags = [_tag(model) for model in section_models(".".join(names))]
        if isinstance(node, dict) and part not in node and part in tags:
            continue
        # So do plain unions, below the value itself.
        if names and not isinstance(node, dict | list):
            continue
        names.append(part)
        node = node.get(part, {}) if isinstance(node, dict) else {}
    name = ".".join(names)
    if details["type"] in ("union_tag_invalid", "union_tag_not_found"):
        context = details.get("ctx", {})
        key = context["discriminator"].strip("'")
        known = context.get("expected_tags") or ", ".join(_tags(name, key))
        tag = context.get("tag")
        return f"{name}.{key}: {f'{tag!r} is unknown' if tag else 'required'}; one of {known}"
    if details["type"] == "extra_forbidden":
        known = _known_fields(names[:-1], parts)
        close = difflib.get_close_matches(names[-1], known, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]}?" if close else f"known here: {', '.join(known)}"
        return f"{name} = {details['input']!r}: unknown key; {hint}"
    if details["type"] == "missing":
        return f"{name}: required; add it to the file or pass --set {name}=VALUE"
    rule = details["msg"][0].lower() + details["msg"][1:]
    # An entry of an array is no setting of its own.
    section = [part for part in names if not part.isdecimal()][:-1]
    remedy = _REMEDIES.get(name, f"see fos-rl explain {'.'.join(section)}".rstrip())
    return f"{name} = {_as_written(details['input'])}: {rule}; {remedy}"


def _as_written(value: Any) -> str:
    """A value as TOML has it; JSON's spelling differs for infinities and NaN alone."""
    return repr(value) if isinstance(value, float) else json.dumps(value, default=repr)


def _known_fields(section: Sequence[str], location: Sequence[str]) -> list[str]:
    """Field names of a section; where it has several types, of the one the location names."""
    models = section_models(".".join(section))
    if len(models) > 1:
        models = [model for model in models if _tag(model) in location] or models
    return sorted({name for model in models for name in model.model_fields})


def _tags(section: str, key: str) -> list[str]:
    return [repr(model.model_fields[key].default) for model in section_models(section)]


def _tag(model: type[Frozen]) -> str | None:
    """What selects this model where a section can have several types."""
    fields = model.model_fields
    return next((fields[key].default for key in ("type", "recipe") if key in fields), None)


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
