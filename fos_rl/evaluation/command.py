"""`fos-rl eval`: the accuracy of a model or a trained run, in one or more precisions."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from fos_rl.compare.statistics import bootstrap_interval, show_interval
from fos_rl.config import EvalConfig, RunConfig
from fos_rl.data.eval_sets import load_eval_sets
from fos_rl.evaluation.evaluate import Evaluator, SetResult
from fos_rl.files.whole import write_whole
from fos_rl.generator.engine import VllmGenerator
from fos_rl.generator.folder_weights import FolderWeights
from fos_rl.model.hf import hf_weight_shapes, read_architecture, resolve_model
from fos_rl.model.machine import check_precision
from fos_rl.model.sync import sync
from fos_rl.model.tokenizer import check_tokenizer, load_tokenizer
from fos_rl.model.weight_files import check_weights
from fos_rl.run_folder.preflight import check_cache, check_head_size, check_lengths, check_writable
from fos_rl.spec import ModelSpec, Precision


def evaluate_model(config: RunConfig, precisions: Sequence[Precision], out: Path | None) -> int:
    """Print the accuracy of `config.model` on `config.eval`'s sets, once a precision.

    Args:
        precisions: in place of the config's; the weights are the same bf16 ones.
        out: also written there as JSON, with the number of right answers of every problem.

    Raises:
        ValueError: for a model, a set or a precision that cannot be used, before any engine starts.
    """
    settings = config.eval
    assert settings is not None
    folder = resolve_model(config.model.path)
    device: Literal["cpu", "cuda"] = "cuda" if torch.cuda.is_available() else "cpu"
    architecture = read_architecture(folder)
    specs = [
        ModelSpec(architecture=architecture, precision=p, consistency=config.model.consistency)
        for p in precisions
    ]
    check_lengths(config, architecture)
    for spec in specs:
        check_precision(spec, None, [device], cuda_graphs=config.generator.cuda_graphs)
        check_cache(config, spec, device)
        check_head_size(spec, trainer=None, generator=device)
    shapes, tied_head = hf_weight_shapes(specs[0]), architecture.tie_word_embeddings
    check_weights(folder, shapes, tied_head=tied_head)
    tokenizer = load_tokenizer(folder)
    check_tokenizer(tokenizer, folder, architecture.vocab_size)
    if out is not None:
        check_writable(out.parent, "--out")
    sets = load_eval_sets(config, tokenizer)
    console = Console()
    for eval_set in sets:
        console.print(eval_set.summary, highlight=False, markup=False)
    found: dict[str, list[SetResult]] = {}
    with Evaluator(config, sets) as evaluator:
        for spec in specs:
            with _generator(spec, folder, config, device) as generator:
                found[spec.precision.recipe] = evaluator.results(settings, [generator])
    console.print(_table(config.model.path, found))
    if out is not None:
        write_whole(out, json.dumps(_as_json(config, settings, found), indent=2) + "\n")
        console.print(f"written to {out}", highlight=False, markup=False)
    return 0


@contextmanager
def _generator(
    spec: ModelSpec, folder: Path, config: RunConfig, device: Literal["cpu", "cuda"]
) -> Iterator[VllmGenerator]:
    """vLLM in this process with the folder's weights."""
    generator = VllmGenerator(spec, folder, config.rollout, config.generator, device)
    try:
        sync(FolderWeights(spec, folder), [generator])
        yield generator
    finally:
        generator.close()


def _table(title: str, found: dict[str, list[SetResult]]) -> Table:
    """A line per figure, with what its problems resolve; of two precisions also the difference."""
    table = Table(
        title=title,
        caption="intervals are over the problems",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for heading in ("set", "precision"):
        table.add_column(heading, overflow="fold")
    table.add_column("metric", no_wrap=True)
    for heading in ("value", "95 % interval"):
        table.add_column(heading, justify="right", no_wrap=True)
    for precision, results in found.items():
        for result in results:
            scores = problem_scores(result)
            for key, value in result.metrics().items():
                metric = key.removeprefix(f"eval/{result.name}/")
                interval = _interval_cell(scores[metric]) if metric in scores else ""
                table.add_row(_sized(result), precision, metric, f"{value:.4f}", interval)
    if len(found) == 2:
        (ours, theirs), names = found.values(), " - ".join(found)
        for left, right in zip(ours, theirs, strict=True):
            for metric, values in problem_scores(left).items():
                differences = values - problem_scores(right)[metric]
                value, interval = f"{differences.mean():+.4f}", _interval_cell(differences)
                table.add_row(_sized(left), names, metric, value, interval)
    return table


def _sized(result: SetResult) -> str:
    return f"{result.name} ({len(result.problem_ids):,})"


def problem_scores(result: SetResult) -> dict[str, np.ndarray]:
    """The figures that are means over problems, one value per problem."""
    scores: dict[str, np.ndarray] = {}
    if result.sampled is not None:
        scores[f"avg@{result.sampled.shape[1]}"] = result.sampled.mean(axis=1)
    if result.greedy is not None:
        scores["greedy"] = result.greedy.astype(np.float64)
    return scores


def _interval_cell(values: np.ndarray) -> str:
    interval = bootstrap_interval(values.tolist(), "problems")
    if interval is None:
        return "one problem"
    reason = f"\n{interval.reason}" if interval.reason else ""
    return show_interval(interval, "{:.3f}") + reason


def _as_json(
    config: RunConfig, settings: EvalConfig, found: dict[str, list[SetResult]]
) -> dict[str, object]:
    return {
        "model": config.model.path,
        "settings": settings.model_dump(mode="json"),
        "max_new_tokens": settings.max_new_tokens or config.rollout.max_new_tokens,
        "seed": config.seed,
        "metrics": {
            precision: {key: value for r in results for key, value in r.metrics().items()}
            for precision, results in found.items()
        },
        "num_correct": {
            precision: {result.name: _num_correct(result) for result in results}
            for precision, results in found.items()
        },
    }


def _num_correct(result: SetResult) -> dict[str, dict[str, int]]:
    """By problem id: right answers among the samples, and of the greedy response."""
    counts: dict[str, dict[str, int]] = {problem: {} for problem in result.problem_ids}
    for kind, scores in (("sampled", result.sampled), ("greedy", result.greedy)):
        if scores is not None:
            totals = scores.reshape(len(result.problem_ids), -1).sum(axis=1)
            for problem, total in zip(result.problem_ids, totals, strict=True):
                counts[problem][kind] = int(total)
    return counts
