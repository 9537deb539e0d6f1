"""Run by test_checksum_kernel.py in a process whose Triton kernels are interpreted on the CPU."""

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch

from fos_rl.kernels import checksum_kernel
from fos_rl.model import checksum

# Less than a block, a chunk and a word less, more than a chunk, more than a period of words.
SIZES = [4, 1 << 15, (1 << 17) - 4, (1 << 17) + 8, (1 << 22) + 12]

generator = torch.Generator().manual_seed(0)
bits = [torch.randint(-(1 << 15), 1 << 15, (n,), generator=generator) for n in SIZES]
tensors = [t.to(torch.int16).view(torch.bfloat16) for t in bits]
tensors.append(torch.randn(3, 64, 10, generator=generator)[1])
assert all(checksum_kernel.fits(t) for t in tensors)
constants = (checksum._PERIOD, checksum._signed(checksum._REPEAT), checksum._signed(checksum._MIX))
found = checksum_kernel.sums(tensors, *constants)
assert found.tolist() == [checksum.checksum(t) for t in tensors], found
assert not checksum_kernel.fits(tensors[0][1:])
assert not checksum_kernel.fits(tensors[-1].T)
print("ok")
