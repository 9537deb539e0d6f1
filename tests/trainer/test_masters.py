"""fp32 masters: rounding of the working copy, fp32 accumulation, small updates not lost."""

import torch
from torch import nn

from fos_rl.trainer.masters import Masters


def test_working_copy_is_the_bf16_rounded_master() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        module = nn.Linear(3, 1, bias=False)
        with torch.no_grad():
            module.weight.copy_(torch.tensor([[1.0, 1 + 2**-9, 1 + 3 * 2**-9]]))
        masters = Masters(module, dtype)
        assert module.weight.dtype == dtype
        # bf16 has 7 fraction bits: the second rounds to even (1), the third to 1 + 2^-7.
        assert module.weight.float().tolist() == [[1.0, 1.0, 1 + 2**-7]]
        assert masters.weights["weight"].tolist() == [[1.0, 1 + 2**-9, 1 + 3 * 2**-9]]


def test_gradients_add_up_in_fp32() -> None:
    module = nn.Linear(1, 1, bias=False)
    masters = Masters(module, torch.bfloat16)
    for value in [1.0, 2.0**-9, 2.0**-9]:
        module(torch.full((1, 1), value, dtype=torch.bfloat16)).sum().backward()
    # In bf16 the two small ones would vanish beside 1.
    assert masters.weights["weight"].grad.item() == 1 + 2.0**-8
    assert module.weight.grad is None


def test_an_update_below_bf16_resolution_is_kept() -> None:
    module = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        module.weight.fill_(1.0)
    masters = Masters(module, torch.bfloat16)
    for _ in range(4):
        masters.weights["weight"] += 2.0**-10
        masters.publish()
    # 1 + 4 * 2^-10 is a tie between 1 and 1 + 2^-7 and goes to even.
    assert module.weight.item() == 1.0
    masters.weights["weight"] += 2.0**-10
    masters.publish()
    assert module.weight.item() == 1 + 2.0**-7
