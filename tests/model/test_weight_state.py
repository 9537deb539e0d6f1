"""Quantized weights are never stale: whichever way a weight changes, the next forward sees it."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fos_rl.model.convert import QuantizedExperts, QuantizedLinear, keep_codes, prepare_weights
from fos_rl.model.moe import Experts
from fos_rl.model.ops import FAST
from fos_rl.quant import (
    MXFP8Quantizer,
    NVFP4Quantizer,
    prepare_weight,
    quantized_grouped_mm,
    quantized_linear,
)

QUANTIZER = NVFP4Quantizer("four_over_six")
N, K = 96, 64
X = torch.randn(20, K, generator=torch.Generator().manual_seed(5))
NEW = torch.randn(N, K, generator=torch.Generator().manual_seed(6))


def linear() -> QuantizedLinear:
    torch.manual_seed(0)
    return QuantizedLinear(nn.Linear(K, N, bias=False), QUANTIZER, "emulated", "high_precision")


def step(optimizer: type[torch.optim.Optimizer], **options: bool) -> Callable[[nn.Module], None]:
    def write(module: nn.Module) -> None:
        made = optimizer(module.parameters(), lr=0.5, **options)
        module.weight.grad = torch.ones_like(module.weight)
        made.step()

    return write


def assign(module: nn.Module) -> None:
    module.load_state_dict({"weight": NEW.clone()}, assign=True)


def assign_twice(module: nn.Module) -> None:
    """The second weight may come to lie where the first one was."""
    assign(module)
    module.load_state_dict({"weight": NEW + 1}, assign=True)


def in_inference_mode(module: nn.Module) -> None:
    with torch.inference_mode():
        module.weight.copy_(NEW)


def through_numpy(module: nn.Module) -> None:
    module.weight.detach().numpy()[:] = NEW.numpy()


def replace_parameter(module: nn.Module) -> None:
    module.weight = nn.Parameter(NEW.clone())


WAYS: dict[str, Callable[[nn.Module], object]] = {
    "copy_": torch.no_grad()(lambda m: m.weight.copy_(NEW)),
    "copy_ of a detached": lambda m: m.weight.detach().copy_(NEW),
    "one element": torch.no_grad()(lambda m: m.weight[7, 3].mul_(-100)),
    "foreach": torch.no_grad()(lambda m: torch._foreach_mul_([m.weight], -2.0)),
    "init": lambda m: nn.init.normal_(m.weight),
    "load_state_dict": lambda m: m.load_state_dict({"weight": NEW}),
    "load_state_dict assign": assign,
    "load_state_dict assign twice": assign_twice,
    "data = ": lambda m: setattr(m.weight, "data", NEW.clone()),
    "data.copy_": lambda m: m.weight.data.copy_(NEW),
    "data.mul_": lambda m: m.weight.data.mul_(-2),
    "inference mode": in_inference_mode,
    "numpy": through_numpy,
    "a new parameter": replace_parameter,
    "vector_to_parameters": lambda m: nn.utils.vector_to_parameters(NEW.flatten(), m.parameters()),
    "cast": lambda m: m.to(torch.bfloat16),
    "SGD": step(torch.optim.SGD),
    "SGD foreach": step(torch.optim.SGD, foreach=True),
    "SGD fused": step(torch.optim.SGD, fused=True),
    "AdamW": step(torch.optim.AdamW),
    "AdamW foreach": step(torch.optim.AdamW, foreach=True),
    "AdamW fused": step(torch.optim.AdamW, fused=True),
}


def right(module: nn.Module, weight: Tensor | None = None) -> Tensor:
    weight = module.weight if weight is None else weight
    return quantized_linear(X.to(weight.dtype), weight, quantizer=QUANTIZER)


@pytest.mark.parametrize("prepared_before", [True, False], ids=["prepared", "at first use"])
@pytest.mark.parametrize("way", WAYS)
def test_a_changed_weight_is_quantized_anew(way: str, prepared_before: bool) -> None:
    module = linear()
    if prepared_before:
        prepare_weights(module)
    before = module(X)
    assert torch.equal(before, right(module))
    WAYS[way](module)
    x = X.to(module.weight.dtype)
    assert torch.equal(module(x), right(module))
    assert not torch.equal(module(x), before.to(x.dtype))
    # And it is told once: codes are held again.
    prepare_weights(module)
    assert module.prepared("weight") is module.prepared("weight")
    assert torch.equal(module(x), right(module))


@pytest.mark.parametrize("way", [way for way in WAYS if "fused" in way])
def test_a_fused_step_is_counted_without_looking_at_elements(way: str) -> None:
    """As on CUDA, where no element is compared."""
    weight = nn.Parameter(NEW.clone())
    module = nn.Module()
    module.weight = weight
    before = weight._version
    WAYS[way](module)
    assert weight._version > before


def test_weights_of_a_functional_call_are_their_own() -> None:
    module = linear()
    prepare_weights(module)
    own = module(X)
    for weight in (NEW, -NEW, module.weight.detach() * 2):
        out = torch.func.functional_call(module, {"weight": weight}, (X,))
        assert torch.equal(out, right(module, weight))
    assert torch.equal(module(X), own)
    # The first call of all, too, leaves nothing of its weight behind.
    module = linear()
    torch.func.functional_call(module, {"weight": NEW}, (X,))
    assert torch.equal(module(X), own)


def test_gradients_of_a_functional_call_are_the_substitutes() -> None:
    module, weight = linear(), NEW.clone().requires_grad_()
    prepare_weights(module)
    torch.func.functional_call(module, {"weight": weight}, (X,)).sum().backward()
    assert module.weight.grad is None
    assert torch.equal(weight.grad, torch.ones(20, N).t() @ X)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"]
)
def test_copies_follow_their_own_weight(copied: Callable[[nn.Module], nn.Module]) -> None:
    module = linear()
    prepare_weights(module)
    other = copied(module)
    for changed, kept in ((other, module), (module, other)):
        before = kept(X)
        with torch.no_grad():
            changed.weight.neg_()
        assert torch.equal(changed(X), right(changed))
        assert torch.equal(kept(X), before)


def test_inference_tensors_are_quantized_each_time() -> None:
    """PyTorch counts none of their writes."""
    with torch.inference_mode():
        module = linear()
        assert module.weight.is_inference()
        prepare_weights(module)
        for factor in (1.0, -1.0, 0.5):
            module.weight.mul_(factor)
            assert torch.equal(module(X), right(module))


def test_a_step_between_forward_and_backward_is_loud() -> None:
    """Codes kept for backward are written anew in their place; autograd notices."""
    module = linear()
    module.backward = "dequantized"
    prepare_weights(module)
    out = module(X.clone().requires_grad_())
    with torch.no_grad():
        module.weight.neg_()
    prepare_weights(module)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.fixture
def quantized(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The weights that were quantized."""
    seen: list[Tensor] = []
    real = NVFP4Quantizer.weight

    def weight(quantizer: NVFP4Quantizer, w: Tensor, **options):
        seen.append(w)
        return real(quantizer, w, **options)

    monkeypatch.setattr(NVFP4Quantizer, "weight", weight)
    return seen


def test_held_codes_are_multiplied_until_a_write(quantized: list[Tensor]) -> None:
    module = linear()
    prepare_weights(module)
    assert len(quantized) == 1
    for _ in range(3):
        module(X).sum().backward()
        with torch.inference_mode():
            module(X)
    # What only reads, or writes elsewhere, leaves them.
    module.state_dict()
    module.weight.data.norm()
    nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    module.zero_grad()
    other = nn.Linear(2, 2)
    other(torch.ones(2)).sum().backward()
    torch.optim.AdamW(other.parameters()).step()
    module(X)
    assert len(quantized) == 1
    module.weight.data.neg_()
    module(X)
    assert len(quantized) == 2


def test_codes_may_be_kept_over_a_cast(quantized: list[Tensor]) -> None:
    module = linear()
    prepare_weights(module)
    codes = module.prepared("weight").rowwise.codes
    module.to(torch.bfloat16)
    keep_codes(module)
    assert module.prepared("weight").rowwise.codes is codes
    module(X.bfloat16())
    assert len(quantized) == 1


def test_each_projection_of_experts_is_its_own() -> None:
    experts = Experts(FAST, 3, K, N)
    for parameter in experts.parameters():
        nn.init.normal_(parameter)
    names = ("gate_proj", "up_proj", "down_proj")
    quantizer = NVFP4Quantizer("nvfp4")
    module = QuantizedExperts(experts, names, quantizer, "emulated", "high_precision")
    prepare_weights(module)
    ends = torch.tensor([4, 4, 20], dtype=torch.int32)
    held = {name: module.prepared(name) for name in names}
    with torch.no_grad():
        module.up_proj[1].neg_()
    for name in names:
        rows = torch.randn(20, getattr(module, name).shape[-1])
        want = quantized_grouped_mm(rows, getattr(module, name), ends, quantizer=quantizer)
        assert torch.equal(module.multiply(name, rows, ends), want)
        assert (module.prepared(name) is held[name]) == (name != "up_proj")


# The functions, to which codes are handed.


def test_stale_codes_are_refused() -> None:
    weight = nn.Parameter(NEW.clone())
    for quantizer in (QUANTIZER, MXFP8Quantizer()):
        prepared = prepare_weight(weight, quantizer)
        quantized_linear(X, weight, quantizer=quantizer, quantized_weight=prepared)
        with torch.no_grad():
            weight.mul_(2)
        with pytest.raises(ValueError, match=r"quantized_weight is stale.*prepare_weight"):
            quantized_linear(X, weight, quantizer=quantizer, quantized_weight=prepared)
        # Codes alone are the caller's.
        quantized_linear(X, weight, quantizer=quantizer, quantized_weight=prepared.rowwise)
    stack = torch.randn(2, N, K)
    prepared = prepare_weight(stack, QUANTIZER)
    stack[1, 0, 0] = 7
    with pytest.raises(ValueError, match="stale"):
        quantized_grouped_mm(
            X,
            stack,
            torch.tensor([5, 20], dtype=torch.int32),
            quantizer=QUANTIZER,
            quantized_weight=prepared,
        )


def test_codes_of_another_weight_are_refused_and_of_an_equal_one_taken() -> None:
    prepared = prepare_weight(NEW, QUANTIZER)
    expected = quantized_linear(X, NEW, quantizer=QUANTIZER)
    for same in (NEW, NEW.detach(), NEW.clone(), nn.Parameter(NEW)):
        out = quantized_linear(X, same, quantizer=QUANTIZER, quantized_weight=prepared)
        assert torch.equal(out, expected)
    for other in (-NEW, NEW.roll(1), NEW.bfloat16()):
        with pytest.raises(ValueError, match="stale"):
            quantized_linear(X, other, quantizer=QUANTIZER, quantized_weight=prepared)


def test_codes_of_another_quantizer_are_refused() -> None:
    """Bound and shape agree in each pair, so nothing else could tell."""
    for made, used in (
        (NVFP4Quantizer("four_over_six", "16x16"), NVFP4Quantizer("four_over_six", "1x16")),
        (NVFP4Quantizer("four_over_six"), NVFP4Quantizer("four_over_six", err_mode="mae")),
        (NVFP4Quantizer("nvfp4"), NVFP4Quantizer("four_over_six", e4m3_scale_bound=448)),
        (MXFP8Quantizer("floor"), MXFP8Quantizer("rceil")),
    ):
        prepared = prepare_weight(NEW, made)
        with pytest.raises(ValueError, match="was prepared as"):
            quantized_linear(X, NEW, quantizer=used, quantized_weight=prepared)
    # What concerns activations alone is free.
    made = NVFP4Quantizer("four_over_six", row_scaled_activation=False)
    quantized_linear(X, NEW, quantizer=QUANTIZER, quantized_weight=prepare_weight(NEW, made))
