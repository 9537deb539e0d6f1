"""Flipped activation codes between trainer and generator, and what they explain.

    python -m benchmarks.flipped_codes

Rounding to few bits is discontinuous: where the two activations differ by 1e-6, an element
near the middle between two codes may fall to either side. The generator samples; both decoders'
quantizer inputs are recorded at each of the sites (attention in and out, MLP in and down), a token
at a time; the trainer then scores the same tokens. A token's log-prob sees the flips of its own
forward and, through attention, those of every earlier token.

Last, the trainer scores again with the generator's activation in place of its own wherever
codes had flipped, and nowhere else: what is left is not the flips'. A replaced row changes the
noise of the sums after it, which can flip another element, so this is repeated until none is left
(at most five times).
"""

import argparse
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.arms import (
    DTYPES,
    Workload,
    byte_prompts,
    chat_prompts,
    differences,
    precision,
    sampled,
    score,
    statistics,
    synced_pair,
    tiny_folder,
    write_results,
)
from fos_rl.model.convert import QuantizedExperts, QuantizedLinear
from fos_rl.model.moe import SparseMlp, route
from fos_rl.quant.grouped_autograd import _quantize_rows
from fos_rl.quant.grouped_gemm import group_of_rows
from fos_rl.quant.linear_autograd import tensors_of
from fos_rl.types import Prompt, Rollout
from tests.support.pair import Pair

# Linears that share an input are one site.
SHARED = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}
ARMS = ("mxfp8", "nvfp4", "four_over_six")
MAX_ROUNDS = 5


@dataclass(slots=True)
class Seen:
    """What one forward quantized, by site: one row per token (experts: per chosen one)."""

    inputs: dict[str, Tensor] = field(default_factory=dict)
    codes: dict[str, Tensor] = field(default_factory=dict)
    scales: dict[str, Tensor] = field(default_factory=dict)
    chosen: dict[str, Tensor] = field(default_factory=dict)
    """Experts of each token, by name of the MLP."""


Replay = Callable[[str, Tensor], Tensor]


class Recorder:
    """Records a decoder's quantizer inputs in every forward; may replace some of them."""

    def __init__(self, decoder: nn.Module, done: Callable[[Seen], None]) -> None:
        self.seen = Seen()
        self.replay: Replay | None = None
        self._handles = [decoder.register_forward_hook(lambda *_: self._finish(done))]
        for name, module in decoder.named_modules():
            if isinstance(module, QuantizedLinear):
                hook = self._linear(name)
                self._handles.append(module.register_forward_pre_hook(hook))
            elif isinstance(module, SparseMlp):
                self._handles.append(module.register_forward_pre_hook(self._router(name)))
            elif isinstance(module, QuantizedExperts):
                self._experts(name.removesuffix(".experts"), module)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _finish(self, done: Callable[[Seen], None]) -> None:
        done(self.seen)
        self.seen = Seen()

    def _linear(self, name: str) -> Callable[..., Any]:
        parent, _, leaf = name.rpartition(".")
        site = f"{parent}.{SHARED.get(leaf, leaf)}"

        def hook(module: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            x = self.replay(site, inputs[0]) if self.replay else inputs[0]
            if leaf not in SHARED:
                self._keep(site, x, module.quantizer.activation(x))
            return (x,)

        return hook

    def _router(self, name: str) -> Callable[..., Any]:
        def hook(module: SparseMlp, inputs: tuple[Tensor, ...]) -> None:
            self.seen.chosen[name], _ = route(
                inputs[0],
                module.gate.weight,
                num_experts_per_token=module.num_experts_per_token,
                norm_topk_prob=module.norm_topk_prob,
                ops=module.ops,
            )

        return hook

    def _experts(self, mlp: str, module: QuantizedExperts) -> None:
        multiply = module.multiply

        def recorded(leaf: str, rows: Tensor, ends: Tensor) -> Tensor:
            site = f"{mlp}.experts.{SHARED.get(leaf, leaf)}"
            order = self.seen.chosen[mlp].flatten().sort(stable=True).indices
            back = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel()))
            if self.replay:
                rows = self.replay(site, rows[back])[order]
            if leaf not in SHARED:
                group = group_of_rows(ends, rows.shape[0])
                quantized, _ = _quantize_rows(rows, ends, group, module.quantizer)
                self._keep(site, rows[back], quantized, back)
            return multiply(leaf, rows, ends)

        module.multiply = recorded

    def _keep(self, site: str, x: Tensor, quantized: Any, order: Tensor | None = None) -> None:
        codes, scales = (t.view(torch.uint8) for t in tensors_of(quantized)[:2])
        if order is not None:
            codes, scales = codes[order], scales[order]
        self.seen.inputs[site] = x.detach().clone()
        self.seen.codes[site] = codes.clone()
        self.seen.scales[site] = scales.clone()


@contextmanager
def generator_recording(pair: Pair) -> Iterator[dict[tuple[str, int], dict[str, Any]]]:
    """(request, position) to what the generator quantized there, and its experts."""
    table: dict[tuple[str, int], dict[str, Any]] = {}
    engine = pair.generator._engine

    def start(worker: Any) -> None:
        runner = worker.model_runner
        decoder = runner.get_model().decoder
        places: list[tuple[str, int]] = []

        def locate(_: Any, inputs: tuple[Tensor, Tensor]) -> None:
            from vllm.forward_context import get_forward_context

            metadata = get_forward_context().attn_metadata
            places.clear()
            if metadata is None:
                return
            one = next(iter(metadata.values()))
            starts = one.query_start_loc.tolist()
            positions = inputs[1].tolist()
            names = runner.input_batch.req_ids[: len(starts) - 1]
            for name, begin, end in zip(names, starts, starts[1:], strict=False):
                places.extend((name.split("-")[0], positions[i]) for i in range(begin, end))

        def done(seen: Seen) -> None:
            for row, place in enumerate(places):
                table[place] = at_token(seen, row)

        decoder.register_forward_pre_hook(locate)
        Recorder(decoder, done)

    engine.collective_rpc(start)
    yield table


def share_cached_prompts(
    table: dict[tuple[str, int], dict[str, Any]], token_ids: list[np.ndarray], group_size: int
) -> None:
    """Fill in prompt tokens that came from the prefix cache: the group's first member ran them."""
    missing = 0
    for sequence, ids in enumerate(token_ids):
        group = sequence - sequence % group_size
        # The last token is sampled and never fed.
        for position in range(len(ids) - 1):
            if (str(sequence), position) not in table:
                table[str(sequence), position] = table[str(group), position]
                missing += 1
    fed = sum(len(ids) - 1 for ids in token_ids)
    assert len(table) == fed, f"{fed} tokens fed, {len(table)} recorded"
    print(f"{missing} of {fed} tokens came from the prefix cache", flush=True)


def at_token(seen: Seen, row: int) -> dict[str, Any]:
    """One token's rows: [1, ...], or [k, ...] of its k experts."""
    entry: dict[str, Any] = {}
    for site, codes in seen.codes.items():
        mlp = site.rpartition(".experts.")[0]
        k = seen.chosen[mlp].shape[1] if mlp in seen.chosen else 1
        rows = slice(row * k, row * k + k)
        entry[site] = (codes[rows], seen.scales[site][rows], seen.inputs[site][rows])
    for mlp, chosen in seen.chosen.items():
        entry[mlp] = chosen[row]
    return entry


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Per site: elements that differ in each of the trainer's tokens that the generator ran too."""

    flips: dict[str, np.ndarray]
    elements: dict[str, int]
    rerouted: np.ndarray
    replace: dict[str, dict[int, Tensor]]
    """Row of a site's input in the trainer, and the generator's row, where codes differ."""

    @property
    def num_flipped(self) -> int:
        return sum(int(counts.sum()) for counts in self.flips.values())


def compare(
    seen: Seen, table: dict[tuple[str, int], dict[str, Any]], places: list[tuple[str, int]]
) -> Comparison:
    flips = {site: np.zeros(len(places), np.int64) for site in seen.codes}
    elements = dict.fromkeys(seen.codes, 0)
    rerouted = np.zeros(len(places), bool)
    replace: dict[str, dict[int, Tensor]] = {site: {} for site in seen.codes}
    for token, place in enumerate(places):
        theirs = table.get(place)
        if theirs is None:
            continue
        ours = at_token(seen, token)
        moved = {mlp for mlp in seen.chosen if not torch.equal(ours[mlp], theirs[mlp])}
        rerouted[token] = bool(moved)
        for site in seen.codes:
            if site.rpartition(".experts.")[0] in moved:
                continue
            (codes, scales, x), (other_codes, other_scales, other_x) = ours[site], theirs[site]
            elements[site] += x.numel()
            differing = codes != other_codes
            count = int(differing.sum())
            if x.shape[-1] == 2 * codes.shape[-1]:
                # Two 4-bit codes per byte.
                low = ((codes ^ other_codes) & 0x0F) != 0
                count = int(low.sum()) + int(((codes ^ other_codes) >> 4 != 0).sum())
            changed = differing.any(-1) | (scales != other_scales).any(-1)
            if changed.any():
                # A block whose scale alone differs counts as one.
                flips[site][token] = max(count, int((scales != other_scales).sum()))
                for slot in changed.nonzero().flatten().tolist():
                    replace[site][token * codes.shape[0] + slot] = other_x[slot]
    return Comparison(flips=flips, elements=elements, rerouted=rerouted, replace=replace)


def replaying(replace: dict[str, dict[int, Tensor]]) -> Replay:
    def replay(site: str, x: Tensor) -> Tensor:
        if rows := replace.get(site):
            x = x.clone()
            x[list(rows)] = torch.stack(list(rows.values())).to(x)
        return x

    return replay


def measure(
    name: str, folder: Path, arm: str, dtype: Any, workload: Workload, prompts: list[Prompt]
) -> tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]:
    label = {"model": name, "compute": dtype, "arm": arm}
    with synced_pair(folder, precision(arm, dtype), workload) as pair:
        with generator_recording(pair) as table:
            rollouts, batch = sampled(pair, prompts)
        places = [
            (str(sequence), position)
            for sequence, ids in enumerate(batch.token_ids)
            for position in range(len(ids))
        ]
        share_cached_prompts(table, batch.token_ids, workload.group_size)
        recorded: list[Seen] = []
        recorder = Recorder(pair.trainer.decoder, recorded.append)
        d = differences(score(pair, batch), rollouts)
        [seen] = recorded
        first = compare(seen, table, places)
        left, replace, rounds = first, first.replace, 0
        replayed = d
        while rounds < MAX_ROUNDS and left.num_flipped:
            rounds += 1
            recorder.replay = replaying(replace)
            recorded.clear()
            replayed = differences(score(pair, batch), rollouts)
            left = compare(recorded[0], table, places)
            replace = {site: {**rows, **left.replace[site]} for site, rows in replace.items()}
    own, before = flips_seen(first, rollouts)
    classes = {
        "no flip, none earlier": ~own & ~before,
        "no flip, some in earlier tokens": ~own & before,
        "flips, none earlier": own & ~before,
        "flips, and in earlier tokens": own & before,
    }
    size = np.abs(d)
    by_class = [
        {
            **label,
            "tokens with": what,
            **statistics(d[mask]),
            "share_of_sum": float(size[mask].sum() / size.sum()),
        }
        for what, mask in classes.items()
        if mask.any()
    ]
    sites = [
        {
            **label,
            "site": site.removeprefix("model.layers."),
            "flipped": int(counts.sum()),
            "of": first.elements[site],
            "flipped_per_million": 1e6 * int(counts.sum()) / first.elements[site],
            "tokens_with_a_flip": float((counts > 0).mean()),
        }
        for site, counts in first.flips.items()
    ]
    summary = {
        **label,
        "tokens": d.size,
        "mean": float(np.abs(d).mean()),
        "max": float(np.abs(d).max()),
        "replayed_mean": float(np.abs(replayed).mean()),
        "replayed_max": float(np.abs(replayed).max()),
        "flipped": first.num_flipped,
        "of": sum(first.elements.values()),
        "replays": rounds,
        "flipped_after_replay": left.num_flipped,
        "rerouted_tokens": int(first.rerouted.sum()),
        "rerouted_after_replay": int(left.rerouted.sum()),
    }
    return summary, by_class, sites


def flips_seen(found: Comparison, rollouts: list[Rollout]) -> tuple[np.ndarray, np.ndarray]:
    """For each response token: flips in the forward that predicts it, and in any before that."""
    flipped = sum(found.flips.values()) + found.rerouted > 0
    own, before = [], []
    start = 0
    for rollout in rollouts:
        prompt, response = len(rollout.prompt_ids), len(rollout.response_ids)
        mine = flipped[start : start + prompt + response]
        earlier = np.concatenate([[False], np.logical_or.accumulate(mine)[:-1]])
        own.append(mine[prompt - 1 : -1])
        before.append(earlier[prompt - 1 : -1])
        start += prompt + response
    return np.concatenate(own), np.concatenate(before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="a model folder instead of the two tiny models")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--group-size", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--arms", nargs="+", default=list(ARMS))
    arguments = parser.parse_args()
    workload = Workload(
        num_prompts=arguments.prompts,
        group_size=arguments.group_size,
        max_new_tokens=arguments.new_tokens,
    )
    tables: dict[str, list[dict[str, Any]]] = {"summary": [], "tokens": [], "sites": []}
    with tempfile.TemporaryDirectory() as scratch:
        if arguments.model:
            prompts = chat_prompts(arguments.model, workload)
            models = {arguments.model.name: arguments.model}
        else:
            prompts = byte_prompts(workload)
            models = {f: tiny_folder(f, Path(scratch)) for f in ("qwen3", "qwen3_moe")}
        for name, folder in models.items():
            for dtype in arguments.dtypes:
                for arm in arguments.arms:
                    summary, by_class, sites = measure(name, folder, arm, dtype, workload, prompts)
                    tables["summary"].append(summary)
                    tables["tokens"] += by_class
                    tables["sites"] += sites
                    print(summary, *by_class, sep="\n  ", flush=True)
    command = shlex.join(["python", "-m", "benchmarks.flipped_codes", *sys.argv[1:]])
    stem = f"flipped_codes_{arguments.model.name}" if arguments.model else "flipped_codes"
    write_results(stem, command, tables)


if __name__ == "__main__":
    main()
