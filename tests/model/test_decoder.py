"""The decoder against transformers' own classes, and what trainer and generator rely on."""

import pytest
import torch
from torch import nn

from fos_rl.model.decoder import Decoder, RMSNorm
from fos_rl.model.hf import load_hf_weights, named_hf_weights
from fos_rl.model.ops import FAST
from fos_rl.model.tiny import tiny_config
from tests.support.decoders import FAMILIES, Packed, random_samples, tiny, transformers_model

# Two fp32 computations in different orders: each of about 10 matmuls on the path rounds at 2^-24,
# relative to terms of size 1 to 10 in sums of 64 to 128: about 10 * sqrt(128) * 2^-24 * 10 = 7e-5
# at worst, 1e-5 typically. A wrong formula (an eps, a norm, a gate) shows from 1e-3.
TOLERANCE = 1e-4

# Each row: a family and the part of it that the tiny configuration alone does not reach.
VARIANTS = {
    "llama": ("llama", {}),
    "llama-untied-biases": (
        "llama",
        {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
    ),
    "llama3-rope": (
        "llama",
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "llama-no-gqa": ("llama", {"num_key_value_heads": 4}),
    "qwen2": ("qwen2", {}),
    "qwen2-untied": ("qwen2", {"tie_word_embeddings": False}),
    "qwen3": ("qwen3", {}),
    "qwen3-untied-bias": ("qwen3", {"tie_word_embeddings": False, "attention_bias": True}),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe-some-dense": ("qwen3_moe", {"mlp_only_layers": [1]}),
    "qwen3_moe-raw-gates": ("qwen3_moe", {"norm_topk_prob": False, "num_experts_per_tok": 3}),
}


@pytest.fixture(params=VARIANTS, ids=str)
def variant(request) -> Packed:
    family, changes = VARIANTS[request.param]
    return tiny(family, **changes)


def test_logits_equal_transformers(variant):
    samples = random_samples(40, 1, 75)
    with torch.no_grad():
        got = variant.decoder.logits(variant.hidden(samples))
        model = transformers_model(variant)
        want = torch.cat([model(sample[None]).logits[0] for sample in samples])
    worst = float((got - want).abs().max())
    print(f"max abs {worst:.1e} of logits up to {float(want.abs().max()):.1f}")
    assert worst < TOLERANCE
    assert want.std() > 0.5, "logits too flat to tell anything"


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_a_packed_batch_equal_transformers_sample_by_sample(family):
    packed = tiny(family)
    # Bytes only: transformers gives the padding token's embedding no gradient.
    samples = random_samples(20, 33, vocab=256)
    log_probs = packed.log_probs(samples)
    targets = torch.cat(samples)[:, None]
    log_probs.gather(1, targets).sum().backward()
    model = transformers_model(packed)
    for sample in samples:
        model(sample[None]).logits[0].log_softmax(-1).gather(1, sample[:, None]).sum().backward()
    want = {name: p.grad for name, p in model.named_parameters()}
    for name, parameter in packed.decoder.named_parameters():
        if ".experts." not in name or name.endswith("down_proj"):
            reference = want[name]
        else:
            stacked = want[name.replace("gate_proj", "gate_up_proj").replace(".up_", ".gate_up_")]
            gate, up = stacked.chunk(2, dim=1)
            reference = gate if name.endswith("gate_proj") else up
        scale = float(reference.abs().max())
        worst = float((parameter.grad - reference).abs().max())
        # Backward repeats the forward's errors and adds up over 53 tokens.
        assert worst < 1e-4 * max(scale, 1.0), f"{name}: {worst:.1e} of {scale:.1e}"


def test_positions_are_taken_from_the_argument():
    packed = tiny("qwen3")
    (sample,) = random_samples(12)
    positions = torch.arange(100, 112)
    model = transformers_model(packed)
    with torch.no_grad():
        packed.sequences.set([12])
        got = packed.decoder.logits(packed.decoder(sample, positions))
        want = model(sample[None], position_ids=positions[None]).logits[0]
    assert float((got - want).abs().max()) < TOLERANCE


def test_a_tied_head_is_the_embedding_and_no_parameter():
    tied, untied = tiny("llama").decoder, tiny("qwen3_moe").decoder
    assert not any(name.startswith("lm_head") for name, _ in tied.named_parameters())
    assert tied.head_weight is tied.model.embed_tokens.weight
    assert "lm_head.weight" in dict(untied.named_parameters())
    hidden = torch.randn(2, 64)
    expected = hidden.double() @ tied.model.embed_tokens.weight.detach().double().T
    # 64 products of size 0.2 in fp32.
    torch.testing.assert_close(tied.logits(hidden).double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_weights_give_fp32_logits_near_the_fp32_ones(family):
    packed = tiny(family)
    samples = random_samples(30, 30)
    with torch.no_grad():
        want = packed.log_probs(samples)
        packed.decoder.to(torch.bfloat16)
        hidden = packed.hidden(samples)
        logits = packed.decoder.logits(hidden)
    assert hidden.dtype == torch.bfloat16
    assert logits.dtype == torch.float32
    assert float(logits.log_softmax(-1).max()) < 0
    # The weights are bf16 already; activations round at 2^-9 some 10 times: 0.01 on average.
    # A cast that rounds something it must not (the rotary table, a gate) shows as 0.05 and more.
    assert float((logits.log_softmax(-1) - want).abs().mean()) < 0.03


def test_builds_as_vllm_builds_it():
    """Under a device context and with bf16 as the default dtype, set back afterwards."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cpu"):
            packed = Packed(tiny_config("qwen3_moe"))
    finally:
        torch.set_default_dtype(torch.float32)
    reference = tiny("qwen3_moe")
    reference.decoder.to(torch.bfloat16)
    samples = random_samples(9, 4)
    with torch.no_grad():
        assert {p.dtype for p in packed.decoder.parameters()} == {torch.bfloat16}
        assert torch.equal(packed.log_probs(samples), reference.log_probs(samples))


def test_meta_construction_then_materialising_computes_the_same():
    reference = tiny("qwen3")
    with torch.device("meta"):
        decoder = Decoder(
            reference.spec, lambda layer: reference.decoder.model.layers[0].self_attn.inner
        )
    assert all(parameter.is_meta for parameter in decoder.parameters())
    decoder.to_empty(device="cpu")
    load_hf_weights(decoder, named_hf_weights(reference.decoder))
    samples = random_samples(5, 8)
    with torch.no_grad():
        want = reference.log_probs(samples)
        reference.decoder = decoder
        assert torch.equal(reference.log_probs(samples), want)


def test_no_tokens():
    packed = tiny("qwen3_moe")
    empty = torch.zeros(0, dtype=torch.int64)
    assert packed.decoder(empty, empty).shape == (0, 64)
    assert packed.decoder.logits(torch.zeros(0, 64)).shape == (0, 288)


def test_rms_norm_rounds_once():
    """bf16 outputs are the bf16 numbers nearest to the fp64 result, but for a few that fp32's error
    (2^-22) carries over the middle between two (2^-8 apart): 1 in 8,000. A second rounding, as of
    the normalised value before the weight, would move one in five."""
    norm = RMSNorm(256, 1e-6, FAST).to(torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    nn.init.normal_(norm.weight, 1.0, 0.3, generator=generator)
    x = torch.randn(64, 256, generator=generator).to(torch.bfloat16)
    wide = x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight.double()
    moved = int((norm(x) != exact.to(torch.bfloat16)).sum())
    assert moved <= 16, f"{moved} of 16384"


def test_weights_carry_hugging_face_names():
    moe = dict(named_hf_weights(tiny("qwen3_moe").decoder))
    assert moe["model.layers.2.mlp.experts.7.gate_proj.weight"].shape == (64, 64)
    assert moe["model.layers.0.mlp.gate.weight"].shape == (8, 64)
    assert moe["model.layers.1.self_attn.k_norm.weight"].shape == (32,)
    assert len(moe) == 3 + 3 * (4 + 2 + 2 + 1 + 3 * 8)
