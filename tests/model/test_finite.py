"""Weights that nothing can be computed with are found, and named."""

import math

import pytest
import torch

from fos_rl.model.finite import MAX_WEIGHT, are_usable, broken_tensor, check_loaded


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("value", "usable"),
    [
        (math.nan, False),
        (math.inf, False),
        (-math.inf, False),
        (1e30, False),
        (-1e30, False),
        (1.9e19, False),
        (1.8e19, True),
        (-1.8e19, True),
        (0.0, True),
        (-0.0, True),
        (1e-40, True),
    ],
)
def test_one_bad_element_is_seen(value: float, usable: bool, dtype: torch.dtype) -> None:
    tensors = {"a": torch.ones(3, 5), "b": torch.zeros(1000), "c": torch.ones(())}
    tensors["b"][777] = value
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    assert are_usable(tensors.values()) == usable
    # The same by each element's own square.
    assert usable == all(bool((t.double() ** 2).float().isfinite().all()) for t in tensors.values())
    found = broken_tensor(tensors.items())
    if usable:
        assert found is None
        check_loaded(tensors.items(), "x")
        return
    assert found is not None
    assert found.startswith("b has 1 of 1000 values that are ")
    with pytest.raises(ValueError, match=r"folder: b has 1 of 1000 .*copy of the weights"):
        check_loaded(tensors.items(), "folder")


def test_the_first_and_the_kind_are_named() -> None:
    nan, inf = torch.tensor([1.0, math.nan]), torch.tensor([math.inf, 1.0, -math.inf])
    assert broken_tensor([("x", torch.ones(2)), ("y", inf), ("z", nan)]) == (
        "y has 2 of 3 values that are infinite"
    )
    assert broken_tensor([("z", nan)]) == "z has 1 of 2 values that are NaN"
    assert broken_tensor([("w", torch.tensor([2 * MAX_WEIGHT]))]) == (
        "w has 1 of 1 values that are above 1.8e+19"
    )
    assert are_usable([])
