"""The next-token study runs, its arms start from the same weights, and its report is whole."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_two_steps_of_every_arm(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "experiments" / "sft_parity" / "run.py")]
    subprocess.run(
        [*command, "--steps", "2", "--seeds", "0", "--out", str(tmp_path)],
        check=True,
        capture_output=True,
        timeout=500,
    )
    results = (tmp_path / "results.json").read_text()
    assert str(tmp_path) not in results, "results that are kept name a folder of this machine"
    losses = json.loads(results)["losses"]
    assert len(losses) == 4
    for runs in losses.values():
        # Random logits have a deviation near 0.02 * 16: the loss starts near that of guessing.
        assert runs[0][0] == pytest.approx(math.log(256), abs=0.2)
        assert runs[0][1] < runs[0][0]
    # A backward mode changes no forward; the first loss is before any update.
    modes = [
        name for name in losses if name.endswith(("precision backward", "dequantized backward"))
    ]
    assert len({losses[mode][0][0] for mode in modes}) == 1
    assert "| bf16 |" in (tmp_path / "results.md").read_text()
    assert (tmp_path / "losses.svg").stat().st_size > 10_000
