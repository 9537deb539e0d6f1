"""Two backward modes through real Ray and real vLLM: what must hold does hold."""

from pathlib import Path

import pytest

from fos_rl.compare import Limit, compare
from fos_rl.compare.load import load
from fos_rl.compare.series import layer_errors
from fos_rl.config import load_config
from fos_rl.runtime.launch import train
from tests.compare.conftest import CONFIG, QUANTIZED

K3 = "mismatch/kl_k3"


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "modes"
    for mode, overrides in QUANTIZED.items():
        config = load_config(CONFIG, ["steps=2", "trainer.lr=0.01", *overrides])
        train(config, folder / mode / "seed_0")
    return folder


@pytest.mark.slow
def test_first_steps_are_identical_and_limits_hold_or_do_not(study: Path) -> None:
    ours, theirs = load([study]).runs
    assert ours.steps[0][K3] == theirs.steps[0][K3] > 0
    assert ours.steps[1][K3] != theirs.steps[1][K3]
    assert compare([study], baseline="high_precision") == []
    worst = max(metrics[K3] for run in (ours, theirs) for metrics in run.steps)
    assert compare([study], limits=[Limit(key=K3, value=worst)]) == []
    (failed,) = compare([study], limits=[Limit(key=K3, value=worst * 0.999)])
    assert f"{K3} = {worst:g}" in failed.detail


@pytest.mark.slow
def test_errors_by_layer_are_those_of_the_forward(study: Path) -> None:
    """The default patterns quantize the experts of every layer; how a run differentiates is not in
    its forward."""
    ours, theirs = (layer_errors(arm) for arm in load([study]).arms)
    assert ours == theirs
    assert list(ours) == ["layers.0", "layers.1", "layers.2"]
    assert all(0.05 < error < 0.3 for error in ours.values())
