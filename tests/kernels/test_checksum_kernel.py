"""The checksum kernel against the definition: interpreted, and on a GPU."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from fos_rl.model.checksum import checksum, named_checksums

pytest.importorskip("triton", reason="triton is not installed")

HERE = Path(__file__).parent


def test_interpreted_kernel_gives_the_checksums_of_the_definition():
    run = subprocess.run(
        [sys.executable, str(HERE / "interpreted_checksum.py")],
        cwd=HERE.parents[1],
        env={"PYTHONPATH": str(HERE.parents[1]), "PATH": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == "ok\n"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_checksums_of_a_gpu_are_those_of_the_cpu():
    layers = nn.ModuleList([nn.Linear(3000, 1001), nn.Linear(7, 3), nn.Linear(4096, 4099)])
    layers.to(torch.bfloat16)
    expected = {f"{n}": checksum(p) for n, p in layers.named_parameters()}
    assert named_checksums(layers.cuda()) == expected
