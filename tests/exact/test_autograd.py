"""The value of the exact function, the gradient of the ordinary one."""

import torch

from fos_rl.exact.autograd import ordinary_backward


def test_value_and_gradient_come_from_two_functions() -> None:
    x = torch.tensor([2.0, 3.0], requires_grad=True)
    w = torch.tensor([5.0, 7.0], requires_grad=True)
    out = ordinary_backward(lambda x, w, _: x + w, lambda x, w, _: x * x * w, x, w, None)
    assert out.tolist() == [7.0, 10.0]
    out.backward(torch.tensor([1.0, 10.0]))
    # d(x^2 w) = 2 x w dx + x^2 dw
    assert x.grad is not None
    assert w.grad is not None
    assert x.grad.tolist() == [20.0, 420.0]
    assert w.grad.tolist() == [4.0, 90.0]


def test_inputs_without_gradient_get_none() -> None:
    x, w = torch.tensor([2.0], requires_grad=True), torch.tensor([5.0])
    ordinary_backward(torch.add, torch.mul, w, x).backward()
    assert x.grad is not None
    assert x.grad.tolist() == [5.0]
    assert w.grad is None
