"""Rotary tables against the formula in fp64 and against transformers."""

import copy
import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from fos_rl.model.rope import RotaryTable, inverse_frequencies, rotate
from fos_rl.spec import RopeScaling
from tests.support.decoders import tiny

CPU = torch.device("cpu")


def test_table_is_the_formula_rounded_once():
    packed = tiny("llama")
    table = RotaryTable(packed.spec.architecture).on(CPU)
    assert (table.dtype, tuple(table.shape)) == (torch.float32, (4096, 2, 16))
    for position in (0, 1, 999, 4095):
        for i in (0, 1, 7, 15):
            # The angle is an fp32 product of two fp32 numbers.
            inverse = torch.tensor(10000.0 ** (-2 * i / 32), dtype=torch.float64).float()
            angle = float(inverse * position)
            assert float(table[position, 0, i]) == float(torch.tensor(math.cos(angle)).float())
            assert float(table[position, 1, i]) == float(torch.tensor(math.sin(angle)).float())


@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("theta", [1e4, 1e5, 5e5, 1e6])
def test_frequencies_are_those_of_transformers(head_dim, theta):
    config = LlamaConfig(
        hidden_size=head_dim,
        num_attention_heads=1,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": theta,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        max_position_embeddings=131072,
    )
    want, _ = ROPE_INIT_FUNCTIONS["llama3"](config, CPU)
    scaling = RopeScaling(
        factor=32.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    # transformers computes in fp32 throughout, a few roundings of 2^-24.
    torch.testing.assert_close(
        inverse_frequencies(head_dim, theta, scaling), want, rtol=1e-6, atol=0
    )
    plain = 1.0 / (theta ** (torch.arange(0, head_dim, 2).float() / head_dim))
    torch.testing.assert_close(inverse_frequencies(head_dim, theta, None), plain, rtol=1e-6, atol=0)


def test_a_cast_or_copy_of_the_decoder_leaves_the_table_alone():
    decoder = tiny("qwen3").decoder
    before = decoder.model.rotary.on(CPU).clone()
    for changed in (decoder.to(torch.bfloat16), copy.deepcopy(decoder).double()):
        table = changed.model.rotary.on(CPU)
        assert table.dtype == torch.float32
        assert torch.equal(table, before)
    assert not list(decoder.buffers())


def test_a_decoder_built_on_meta_has_a_real_table():
    with torch.device("meta"):
        table = RotaryTable(tiny("llama").spec.architecture)
    assert table.on(CPU).device == CPU
    assert float(table.on(CPU)[0, 0, 0]) == 1.0


def test_rotation_turns_pairs_that_are_half_a_head_apart():
    heads = torch.tensor([[[1.0, 0.0, 0.0, 2.0]]])
    quarter = torch.tensor([[[0.0, 1.0], [1.0, 0.0]]])  # cos (0, 1), sin (1, 0)
    # Pair (1, 0) turned by 90 degrees is (0, 1); pair (0, 2) stays.
    assert rotate(heads, quarter).tolist() == [[[0.0, 0.0, 1.0, 2.0]]]


def test_rotation_rounds_once_in_bf16():
    generator = torch.Generator().manual_seed(0)
    heads = torch.randn(5, 2, 8, generator=generator).to(torch.bfloat16)
    angles = torch.rand(5, 4, generator=generator)
    cos_sin = torch.stack((angles.cos(), angles.sin()), dim=1)
    assert torch.equal(rotate(heads, cos_sin), rotate(heads.float(), cos_sin).to(torch.bfloat16))
