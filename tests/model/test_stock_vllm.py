"""Folders that `write_model` wrote, in vLLM's own model classes."""

import gc

import pytest
import torch

from fos_rl.model.hf import write_model
from fos_rl.model.tiny import write_tiny_model
from tests.support.decoders import FAMILIES, random_samples, tiny


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
def test_stock_vllm_gives_our_log_probs(family, tmp_path):
    from vllm import LLM, SamplingParams

    packed = tiny(family)
    source = write_tiny_model(family, tmp_path / "source")
    folder = write_model(packed.decoder, packed.spec, source, tmp_path / "out")
    (prompt,) = random_samples(20, vocab=256)
    engine = LLM(
        str(folder),
        dtype="float32",
        enforce_eager=True,
        kv_cache_memory_bytes=64 << 20,
        max_model_len=256,
        max_num_seqs=2,
    )
    try:
        sampling = SamplingParams(max_tokens=16, temperature=1.0, seed=0, logprobs=0)
        (output,) = engine.generate({"prompt_token_ids": prompt.tolist()}, sampling)
    finally:
        del engine
        gc.collect()
    sampled = output.outputs[0]
    got = [
        step[token].logprob for step, token in zip(sampled.logprobs, sampled.token_ids, strict=True)
    ]
    tokens = torch.tensor([*prompt.tolist(), *sampled.token_ids])
    with torch.no_grad():
        log_probs = packed.log_probs([tokens])[19:-1]
    want = log_probs.gather(1, tokens[20:, None])[:, 0]
    # As against transformers, plus vLLM's own order of sums and its fp32 rotary cache.
    torch.testing.assert_close(torch.tensor(got), want, rtol=0, atol=1e-4)
