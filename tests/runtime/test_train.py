"""The main job, whole: config file to run folder, through real Ray and real vLLM."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from fos_rl.cli import main
from fos_rl.compare import compare
from fos_rl.config import RunConfig, load_config, parse_config
from fos_rl.grpo import NoLearningSignal
from fos_rl.model.tiny import write_tiny_model
from fos_rl.run_folder.folder import read_metrics
from fos_rl.runtime import launch
from fos_rl.runtime.launch import resume, train
from fos_rl.spec import ModelSpec
from fos_rl.trainer.trainer import GrpoTrainer
from fos_rl.types import Prompt, Rollout
from tests.support.metric_keys import unknown_keys

ROOT = Path(__file__).parents[2]
TINY_MOE = ROOT / "configs" / "tiny_moe.toml"

QUANTILES = ("p50", "p90", "p99", "max")
KEYS = {
    "step",
    "reward/mean",
    "rollout/response_length/mean",
    "rollout/truncated_frac",
    "rollout/zero_variance_groups",
    "mismatch/log_prob_abs_diff/mean",
    *(f"mismatch/{floor}log_prob_abs_diff/{q}" for floor in ("", "floor_") for q in QUANTILES),
    *(f"mismatch/{way}kl_{k}" for way in ("", "reverse_") for k in ("k1", "k2", "k3")),
    "mismatch/chi2",
    "mismatch/ess_frac",
    "mismatch/perplexity_ratio",
    "mismatch/outside_1e-6_frac",
    "loss/clip_frac",
    "loss/out_of_band_frac",
    "loss/ratio_is_generator",
    "policy/entropy",
    "trainer/grad_norm",
    "time/generate_s",
    "time/reward_s",
    "time/train_s",
    "time/sync_s",
    "throughput/generate_tokens_per_s",
    "throughput/train_tokens_per_s",
    "memory/trainer_peak_gib",
    "memory/generator_peak_gib",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Three steps of the tiny mixture of experts, with TensorBoard."""
    config = load_config(TINY_MOE, ["logging.tensorboard=true"])
    return train(config, tmp_path_factory.mktemp("runs") / "tiny")


def test_metrics_are_complete_and_agree(run: Path) -> None:
    steps = read_metrics(run)
    assert [m["step"] for m in steps] == [0, 1, 2]
    for metrics in steps:
        assert metrics.keys() >= KEYS
        assert not unknown_keys(metrics.keys() - {"step"})
        assert 0 < metrics["mismatch/log_prob_abs_diff/max"] < 1e-4
        assert abs(metrics["loss/ratio/mean"] - 1) < 1e-4
    assert [m["policy/version"] for m in steps] == [1, 2, 3]


def test_run_folder_is_complete(run: Path) -> None:
    resolved = tomllib.loads((run / "config.toml").read_text())
    assert parse_config(resolved) == load_config(TINY_MOE, ["logging.tensorboard=true"])
    environment = json.loads((run / "environment.json").read_text())
    assert {"packages", "device", "verifier", "contract", "command"} <= environment.keys()
    assert {"torch", "ray"} <= environment["packages"].keys()
    assert list((run / "tensorboard").glob("events*"))
    for step in range(3):
        rows = [json.loads(x) for x in (run / f"rollouts/{step:06d}.jsonl").open()]
        assert len(rows) == 16
        for row in rows:
            assert len(row["log_probs"]) == len(row["response_ids"])
            assert row["policy_version"] == step
        trained = [json.loads(x) for x in (run / f"rollouts/{step:06d}.trainer.jsonl").open()]
        for row in trained:
            assert len(row["trainer_log_probs"]) == len(row["generator_log_probs"])
    errors = json.loads((run / "per_layer.json").read_text())
    assert errors == {"layers.0": 0.0, "layers.1": 0.0, "layers.2": 0.0}


def test_the_run_is_compared_whole(run: Path, tmp_path: Path) -> None:
    """The memory of both actors and the errors of each layer reach the report of a real run."""
    assert compare([run], out=tmp_path) == []
    table = (tmp_path / "report.md").read_text()
    _, memory = table.split("**Peak memory (GiB)**", 1)
    for actor in ("trainer", "generator"):
        found = re.search(rf"^\| {actor} \| ([0-9.]+) \|", memory, re.MULTILINE)
        # torch alone is a quarter GiB.
        assert found
        assert 0.2 < float(found[1]) < 50
    assert "No run folder has a per_layer.json" not in (tmp_path / "report.html").read_text()


def test_rewards_on_disk_are_the_metrics(run: Path) -> None:
    for metrics in read_metrics(run):
        path = run / f"rollouts/{int(metrics['step']):06d}.jsonl"
        rewards = [json.loads(line)["reward"] for line in path.open()]
        assert sum(rewards) / len(rewards) == pytest.approx(metrics["reward/mean"])
        vowel = [any(v in json.loads(x)["text"].lower() for v in "aeiou") for x in path.open()]
        assert vowel == [bool(r) for r in rewards]


def test_a_run_evaluates_its_policy(run: Path, tmp_path: Path) -> None:
    """Evaluation draws from seeds of its own: the training is that of a run without."""
    file = tmp_path / "sums.jsonl"
    rows = [{"question": f"{i}?", "answer": i} for i in (7, 8)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluated = [f'eval.sets=["{file}"]', "eval.every=1", "eval.samples=3"]
    other = train(load_config(TINY_MOE, ["steps=2", *evaluated]), tmp_path / "run")
    for got, want in zip(read_metrics(other), read_metrics(run)[:2], strict=True):
        assert {"eval/sums/avg@3", "eval/sums/pass@3", "eval/sums/greedy"} <= got.keys()
        assert got["reward/mean"] == want["reward/mean"]
        assert got["loss/policy"] == pytest.approx(want["loss/policy"], abs=1e-6)


class _NeverRight:
    """A generator of responses that are never right, whatever its weights."""

    def __init__(self, group_size: int) -> None:
        self.group_size = group_size
        self.begin_weight_sync = self.load_weight_bucket = self.finish_weight_sync = self._ignore
        self.load_shared_weights = self.release_memory = self._ignore

    def _ignore(self, *_: object) -> None:
        pass

    def peak_memory_gib(self) -> float:
        return 0.0

    def generate(self, prompts: Sequence[Prompt], seed: int, *_: object) -> list[list[Rollout]]:
        return [[self._response(prompt)] * self.group_size for prompt in prompts]

    def _response(self, prompt: Prompt) -> Rollout:
        return Rollout(
            prompt_id=prompt.id, prompt_ids=prompt.token_ids, response_ids=[7, 8],
            log_probs=[-5.0, -6.0], finish_reason="stop", policy_version=0, text="no idea",
        )  # fmt: skip

    def rescore(self, rollouts: Sequence[Rollout]) -> list[np.ndarray]:
        return [np.array(rollout.log_probs, dtype=np.float32) for rollout in rollouts]


@contextmanager
def _without_ray(config: RunConfig, spec: ModelSpec, folder: Path, _: object) -> Iterator[object]:
    """The cluster's part in a run, with a real trainer."""
    sections = (config.rollout, config.algorithm, config.trainer)
    trainer = GrpoTrainer(spec, folder, *sections, torch.device("cpu"))
    yield SimpleNamespace(
        trainer=trainer, generator=_NeverRight(config.rollout.group_size), started=""
    )


def test_a_run_without_signal_says_so_and_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every reward is 0; what was learned before is kept."""
    monkeypatch.setattr(launch, "Cluster", _without_ray)
    settings = ["data.type=arithmetic", "algorithm.max_zero_variance_steps=2", "steps=50"]
    with pytest.raises(NoLearningSignal, match="no group had reward variance for 2 steps"):
        train(load_config(TINY_MOE, settings), tmp_path / "run")
    steps = read_metrics(tmp_path / "run")
    assert [m["rollout/zero_variance_groups"] for m in steps] == [4.0, 4.0]
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
    # Nothing was trained, so nothing of it is reported; the mismatch is measured all the same.
    assert not any(key.startswith("loss/") for key in steps[0])
    assert steps[1]["policy/version"] == 0
    assert steps[1]["mismatch/log_prob_abs_diff/mean"] > 0


# Ray has a handler of its own for SIGTERM.
@pytest.mark.parametrize(
    "request_to_end", [pytest.param(signal.SIGINT, marks=pytest.mark.long), signal.SIGTERM]
)
def test_interrupt_ends_the_actors_and_keeps_the_steps(
    tmp_path: Path, request_to_end: signal.Signals
) -> None:
    """Ctrl-C or a scheduler's request in the middle of a long run; a second run takes a folder of
    its own."""
    out = tmp_path / "run"
    out.mkdir()
    # Ray's processes inherit it: other tests may have actors of their own at the same time.
    mark = f"FOS_RL_TEST={tmp_path}"
    command = [sys.executable, "-m", "fos_rl.cli", "train", str(TINY_MOE), "--set", "steps=10000"]
    process = subprocess.Popen(
        [*command, "--out", str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "FOS_RL_TEST": str(tmp_path)},
    )
    metrics = tmp_path / "run-2" / "metrics.jsonl"
    deadline = time.monotonic() + 300
    while not (metrics.exists() and metrics.read_text().count("\n") >= 2):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline, "no step finished in 300 s"
        time.sleep(0.5)
    assert len(_actors(mark)) == 2
    process.send_signal(request_to_end)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "every finished step" in errors
    steps = read_metrics(tmp_path / "run-2")
    assert [m["step"] for m in steps] == list(range(len(steps)))
    assert not list(out.iterdir())
    # The actors were this driver's, so their names are gone from the process table.
    deadline = time.monotonic() + 30
    while _actors(mark):
        assert time.monotonic() < deadline, "actors outlived the run"
        time.sleep(0.5)


def _actors(mark: str) -> set[int]:
    """Process ids of living Ray actors of ours whose environment has the mark."""
    names = (b"ray::TrainerActor", b"ray::GeneratorActor")
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            ours = (entry / "cmdline").read_bytes().startswith(names)
            if ours and mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.add(int(entry.name))
        except OSError:
            continue
    return found


def test_resume_goes_on_to_the_bit_past_torn_checkpoints(tmp_path: Path, capsys) -> None:
    """Six steps, and a copy of them that continues from the third: the newer checkpoints are
    damaged."""
    settings = [
        "trainer.lr=1e-2",
        "model.consistency=exact",
        "trainer.num_threads=1",
        "generator.num_threads=1",
        "trainer.save_every=1",
    ]
    whole = train(load_config(TINY_MOE, [*settings, "steps=6"]), tmp_path / "whole")
    first = Path(shutil.copytree(whole, tmp_path / "parts"))
    shutil.move(first / "checkpoints" / "000006", first / "checkpoints" / "000006.partial")
    with pytest.raises(ValueError, match="no checkpoint"):
        resume(tmp_path)
    # Measured at the first step only.
    (first / "per_layer.json").write_text('{"layers.0": 0.5}')
    checkpoints = first / "checkpoints"
    flipped = bytearray((checkpoints / "000005" / "state.pt").read_bytes())
    flipped[len(flipped) // 2] ^= 1
    (checkpoints / "000005" / "state.pt").write_bytes(flipped)
    os.truncate(checkpoints / "000004" / "state.pt", 1000)
    with (first / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "rew')
    kept = {p: p.read_bytes() for p in first.rglob("*") if p.is_file() and p.name != "run.lock"}
    with pytest.raises(ValueError, match=r"--strict.*000006\.partial.*000005.*000004"):
        resume(first, strict=True)
    with pytest.raises(ValueError, match="seed = 1: the run has 0"):
        resume(first, ["seed=1"])
    assert kept == {p: p.read_bytes() for p in kept}, "a refused resume changes nothing"

    capsys.readouterr()
    assert resume(first, ["trainer.save_every=3"]) == first
    shown = capsys.readouterr().out
    for words in (
        "checkpoints/000006.partial: left by a save that was interrupted",
        "checkpoints/000005: state.pt has other bytes than were written",
        "checkpoints/000004: state.pt is truncated: 1,000 bytes",
        f"resumed from {checkpoints}/000003",
        "metrics.jsonl, line 7: torn",
        "metrics of steps 3 to 5, rollouts of steps 3 to 5",
        "trainer.save_every: 1 until now, 3 from here",
    ):
        assert words in shown
    want, got = read_metrics(whole), read_metrics(first)
    assert [m["step"] for m in got] == list(range(6))
    for a, b in zip(want, got, strict=True):
        timings = ("time/", "throughput/", "memory/")
        assert {k: v for k, v in a.items() if not k.startswith(timings)} == {
            k: v for k, v in b.items() if not k.startswith(timings)
        }
    weights = "model/model.safetensors"
    assert (whole / weights).read_bytes() == (first / weights).read_bytes()
    assert (first / "per_layer.json").read_text() == '{"layers.0": 0.5}'
    assert [m["step"] for m in read_metrics(first / "before-resume-1")] == [3, 4, 5]
    assert parse_config(tomllib.loads((first / "config.toml").read_text())).trainer.save_every == 3
    assert (
        parse_config(tomllib.loads((first / "config.0001.toml").read_text())).trainer.save_every
        == 1
    )
    assert not (first / "model.outdated").exists()
    # The trained model is a Hugging Face folder, and not the one it started from.
    trained = AutoModelForCausalLM.from_pretrained(first / "model")
    start = AutoModelForCausalLM.from_pretrained(
        write_tiny_model("qwen3_moe", tmp_path / "m", seed=0)
    )
    pairs = zip(trained.parameters(), start.parameters(), strict=True)
    assert any(not a.equal(b) for a, b in pairs)
    assert AutoTokenizer.from_pretrained(first / "model").chat_template
    with pytest.raises(ValueError, match="has finished its 6 steps"):
        resume(first)
    with pytest.raises(ValueError, match=r"steps = 4: .*000006 has gone through 6 steps"):
        resume(first, ["steps=4"])


def test_a_broken_model_does_not_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the trainer's actor finds wrong at its start reaches the user as it stands."""
    folder = write_tiny_model("llama", tmp_path / "model", seed=0)
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    out = tmp_path / "run"
    status = main(["train", str(TINY_MOE), "--set", f"model.path={folder}", "--out", str(out)])
    error = capsys.readouterr().err
    assert status == 2
    assert re.match(
        r"error: model.path: \S+: model.layers.1.mlp.up_proj.weight has 1 of 8192 values that are "
        "NaN",
        error,
    )
    assert "Traceback" not in error
    assert not (out / "model").exists()


@pytest.mark.long
def test_a_model_that_breaks_leaves_what_was_good(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two good steps, a checkpoint and a model; then one that breaks the weights."""
    out = tmp_path / "run"
    good = train(load_config(TINY_MOE, ["steps=2", "trainer.save_every=1"]), out)
    before = {p: p.read_bytes() for p in sorted(good.rglob("*.safetensors"))}
    checkpoints = sorted(p.name for p in (good / "checkpoints").iterdir())
    assert before
    assert checkpoints == ["000001", "000002"]
    more = ["--set", "steps=4", "--set", "trainer.lr=3e38"]
    assert main(["resume", str(good), *more]) == 1
    error = capsys.readouterr().err
    assert re.match(r"failed: step 2: after an update model\.\S+ has \d+ of \d+ values", error)
    assert "not saved" in error
    assert {p: p.read_bytes() for p in sorted(good.rglob("*.safetensors"))} == before
    assert sorted(p.name for p in (good / "checkpoints").iterdir()) == checkpoints
    assert [m["step"] for m in read_metrics(good)] == [0, 1]
