"""Weights read where they lie: experts stacked, differences named, nothing to open on a CPU."""

import pickle

import pytest
import torch
from torch import nn

from fos_rl.model import shared_weights
from fos_rl.model.checksum import named_checksums
from fos_rl.model.convert import build_decoder
from fos_rl.model.hf import read_architecture
from fos_rl.model.shared_weights import SharedWeights
from fos_rl.model.tiny import write_tiny_model
from fos_rl.model.transport import WeightLoader
from fos_rl.spec import Bf16, ModelSpec


@pytest.fixture(scope="module")
def spec(tmp_path_factory) -> ModelSpec:
    folder = write_tiny_model("qwen3_moe", tmp_path_factory.mktemp("model"), seed=0)
    architecture = read_architecture(folder)
    assert architecture.num_experts
    return ModelSpec(architecture=architecture, precision=Bf16(compute_dtype="float32"))


def _decoder(spec: ModelSpec, seed: int) -> nn.Module:
    decoder = build_decoder(spec, lambda _: nn.Identity())
    generator = torch.Generator().manual_seed(seed)
    for parameter in decoder.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    return decoder


def test_stacked_experts_are_copied_and_named_one_by_one(spec):
    ours, theirs = _decoder(spec, 0), _decoder(spec, 1)
    assert not named_checksums(ours).items() & named_checksums(theirs).items()
    loader = WeightLoader(ours)
    loader.load_all(SharedWeights(theirs).open(torch.device("cpu")))
    loader.finish()
    assert named_checksums(ours) == named_checksums(theirs)


def test_an_unlike_decoder_is_refused_by_name(spec):
    theirs = SharedWeights(_decoder(spec, 1)).open(torch.device("cpu"))
    assert theirs is not None
    loader = WeightLoader(_decoder(spec, 0))
    norm = theirs.pop("model.norm.weight")
    with pytest.raises(ValueError, match=r"only one side has the weights model\.norm\.weight"):
        loader.load_all(theirs)
    with pytest.raises(ValueError, match=r"model\.norm\.weight has shape \[3\]"):
        loader.load_all({**theirs, "model.norm.weight": norm[:3]})


def test_a_cpu_has_nothing_that_another_process_could_open(spec):
    shared = SharedWeights(_decoder(spec, 0))
    assert pickle.loads(pickle.dumps(shared)).open(torch.device("cpu")) is None


def test_parameters_that_moved_are_noticed(spec):
    decoder = _decoder(spec, 0)
    shared = SharedWeights(decoder)
    assert shared.are_of(decoder)
    decoder.model.norm.weight.data = decoder.model.norm.weight.data.clone()
    assert not shared.are_of(decoder)


def test_handles_that_cannot_be_made_or_opened_leave_it_to_buckets(spec, monkeypatch, caplog):
    """As where a container forbids CUDA IPC: the reason is logged, once for each source."""

    def forbidden(*_: object) -> None:
        raise RuntimeError("CUDA error: invalid argument")

    monkeypatch.setattr(shared_weights, "_gpu_name", lambda _: "GPU-1")
    cpu = torch.device("cpu")
    handles = shared_weights._Handles("key", "GPU-1", {"w": (forbidden, (None,) * 7)})
    assert handles.open(cpu) is None
    assert handles.open(cpu) is None
    assert caplog.text.count("CUDA IPC failed: CUDA error: invalid argument") == 1
    monkeypatch.setattr(shared_weights, "reduce_tensor", forbidden)
    assert shared_weights._handles_of(dict(_decoder(spec, 0).named_parameters())).gpu is None
