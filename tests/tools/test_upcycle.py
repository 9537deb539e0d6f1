"""A mixture made of a dense model computes what the dense model does, up to the noise asked for."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from fos_rl.config import load_config
from fos_rl.model.hf import load_hf_weights, read_weights
from fos_rl.model.tiny import write_tiny_model
from fos_rl.run_folder.folder import read_metrics
from fos_rl.runtime.launch import train
from fos_rl.tools.upcycle import upcycle
from tests.support.decoders import Packed, random_samples

ROOT = Path(__file__).parents[2]
SAMPLES = random_samples(7, 1, 20)


@pytest.fixture(scope="module")
def dense(tmp_path_factory) -> Path:
    return write_tiny_model("llama", tmp_path_factory.mktemp("dense"), seed=3)


def _log_probs(folder: Path) -> torch.Tensor:
    packed = Packed(json.loads((folder / "config.json").read_text()))
    load_hf_weights(packed.decoder, read_weights(folder))
    packed.decoder.float()
    with torch.no_grad():
        return packed.log_probs(SAMPLES)


def test_without_noise_it_is_the_dense_model(dense: Path, tmp_path: Path) -> None:
    """Against transformers' Llama. The gates sum to 1 to 6e-8, and each of 3 layers rounds its sum
    once more: some 1e-6 of a logit's size."""
    mixture = upcycle(dense, tmp_path / "moe", num_experts=4, top_k=2, noise=0)
    config = json.loads((mixture / "config.json").read_text())
    assert (config["num_experts"], config["num_experts_per_tok"]) == (4, 2)
    reference = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    with torch.no_grad():
        wanted = [reference(s[None]).logits[0].log_softmax(-1) for s in SAMPLES]
    torch.testing.assert_close(_log_probs(mixture), torch.cat(wanted), atol=2e-5, rtol=0)


def test_experts_differ_by_the_noise(dense: Path, tmp_path: Path) -> None:
    mixture = upcycle(dense, tmp_path / "moe", num_experts=3, top_k=1, noise=0.1)
    weights, own = dict(read_weights(mixture)), dict(read_weights(dense))
    name = "model.layers.1.mlp.{}up_proj.weight"
    experts = [weights[name.format(f"experts.{e}.")].float() for e in range(3)]
    weight = own[name.format("")].float()
    for expert in experts:
        # 8,192 samples: the deviation's own is 1/128 of it; bf16 adds 0.2 % of the weight.
        assert (expert - weight).std() == pytest.approx(float(0.1 * weight.std()), rel=0.03)
    assert not torch.equal(experts[0], experts[1])
    difference = (_log_probs(mixture) - _log_probs(dense)).abs().mean()
    assert 1e-3 < difference < 0.5


def test_a_seed_writes_the_same_bytes(dense: Path, tmp_path: Path) -> None:
    digests = [
        hashlib.sha256(
            (upcycle(dense, tmp_path / name, seed=seed) / "model.safetensors").read_bytes()
        ).hexdigest()
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    ]
    assert digests[0] == digests[1] != digests[2]


def test_what_cannot_be_upcycled_is_refused(dense: Path, tmp_path: Path) -> None:
    qwen = write_tiny_model("qwen3", tmp_path / "qwen3")
    with pytest.raises(ValueError, match=r"only a dense Llama.*this is qwen3"):
        upcycle(qwen, tmp_path / "out")
    with pytest.raises(ValueError, match=r"--top-k 9: .* 1 to --experts = 8"):
        upcycle(dense, tmp_path / "out", top_k=9)
    with pytest.raises(ValueError, match=r"--noise -1"):
        upcycle(dense, tmp_path / "out", noise=-1)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_trainer_and_generator_run_it(dense: Path, tmp_path: Path) -> None:
    """Through Ray and vLLM; the weight sync compares a checksum of every expert."""
    mixture = upcycle(dense, tmp_path / "moe", noise=0.1)
    overrides = [f"model.path={mixture}", "steps=1"]
    run = train(load_config(ROOT / "configs" / "tiny_moe.toml", overrides), tmp_path / "run")
    (metrics,) = read_metrics(run)
    assert 0 < metrics["mismatch/log_prob_abs_diff/max"] < 1e-4
