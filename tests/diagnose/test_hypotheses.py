"""What may be made of logits, against plain loops; and amaxes of groups against a loop."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from fos_rl.diagnose import readouts
from fos_rl.diagnose.hypotheses import remaining
from fos_rl.diagnose.numerics import AmaxGroups, attend
from fos_rl.diagnose.records import read_jsonl
from fos_rl.diagnose.scorer import Rows
from fos_rl.model.convert import build_decoder, prepare_weights
from fos_rl.model.hf import load_hf_weights, read_architecture, read_weights
from fos_rl.model.packed_attention import PackedSequences, causal_attention, packed_attention
from fos_rl.model.tiny import write_tiny_model
from fos_rl.spec import ModelSpec, Nvfp4
from fos_rl.types import TrainBatch

TEMPERATURE = 0.8


@pytest.fixture
def rows() -> Rows:
    """Twelve predictions over 9 tokens; sequence 0 has a prompt of 2 and 12 response tokens."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 9, 14)
    batch = TrainBatch(
        token_ids=[ids],
        prompt_lengths=[2],
        generator_log_probs=[np.zeros(12, np.float32)],
        advantages=np.zeros(1, np.float32),
    )
    return Rows(
        logits=torch.from_numpy(rng.normal(0, 2, (12, 9))).float(),
        targets=torch.from_numpy(ids[2:]),
        places=[(0, i) for i in range(12)],
        temperature=TEMPERATURE,
        batch=batch,
    )


def _log_prob(logits: list[float], target: int, kept: set[int]) -> float:
    if target not in kept:
        return -math.inf
    total = sum(math.exp(logits[i] / TEMPERATURE) for i in kept)
    return logits[target] / TEMPERATURE - math.log(total)


def _nucleus(logits: list[float], p: float) -> set[int]:
    order = sorted(range(len(logits)), key=lambda i: -logits[i])
    total = sum(math.exp(x / TEMPERATURE) for x in logits)
    kept: set[int] = set()
    mass = 0.0
    for i in order:
        if mass >= p:
            break
        kept.add(i)
        mass += math.exp(logits[i] / TEMPERATURE) / total
    return kept


@pytest.mark.parametrize("p", [0.3, 0.7, 0.95])
def test_top_p(rows: Rows, p: float) -> None:
    found = readouts._top_p(p)(rows).tolist()
    for logits, target, value in zip(
        rows.logits.tolist(), rows.targets.tolist(), found, strict=True
    ):
        assert value == pytest.approx(_log_prob(logits, target, _nucleus(logits, p)), abs=1e-5)


@pytest.mark.parametrize("k", [1, 3, 20])
def test_top_k(rows: Rows, k: int) -> None:
    found = readouts._top_k(k)(rows).tolist()
    for logits, target, value in zip(
        rows.logits.tolist(), rows.targets.tolist(), found, strict=True
    ):
        kept = set(sorted(range(9), key=lambda i: -logits[i])[:k])
        assert value == pytest.approx(_log_prob(logits, target, kept), abs=1e-5)


def test_repetition_penalty(rows: Rows) -> None:
    found = readouts._repetition_penalty(1.3)(rows).tolist()
    ids = rows.batch.token_ids[0].tolist()
    for index, (logits, value) in enumerate(zip(rows.logits.tolist(), found, strict=True)):
        for token in set(ids[: 2 + index]):
            logits[token] *= 1 / 1.3 if logits[token] > 0 else 1.3
        expected = _log_prob(logits, ids[2 + index], set(range(9)))
        assert value == pytest.approx(expected, abs=1e-5)


def test_remaining_leaves_out_what_was_not_recorded_and_charges_silence() -> None:
    recorded = np.array([-1.0, np.nan, -2.0, -3.0])
    log_probs = np.array([-1.5, -1.0, np.nan, -3.0])
    assert remaining(log_probs, recorded) == pytest.approx((0.5 + 1.0 + 0.0) / 3)


def test_other_attention_is_attention() -> None:
    """fp32, where rounding the probabilities changes nothing: within 1e-5 of PyTorch's own."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(7, 4, 8, generator=generator)
    k, v = (torch.randn(7, 2, 8, generator=generator) for _ in range(2))
    expected = torch.cat(
        [causal_attention(q[:4], k[:4], v[:4]), causal_attention(q[4:], k[4:], v[4:])]
    )
    torch.testing.assert_close(attend(q, k, v, [4, 3]), expected, atol=1e-5, rtol=0)


def test_groups_of_expert_rows() -> None:
    """Rows sorted by expert keep their token's group: one amax per group and expert."""
    scope = AmaxGroups(group=torch.tensor([0, 1, 0]), chosen=torch.tensor([[2, 0], [0, 1], [2, 1]]))
    found = scope.of_expert_rows().tolist()
    pairs = sorted(
        (expert, token) for token, row in enumerate([[2, 0], [0, 1], [2, 1]]) for expert in row
    )
    wanted = [scope.group.tolist()[token] * 3 + expert for expert, token in pairs]
    assert found == wanted


def test_one_group_is_the_whole_tensor(tmp_path: Path) -> None:
    """All tokens in one group: the forward of a per-tensor scale, its experts' own included."""
    folder = write_tiny_model("qwen3_moe", tmp_path, seed=0)
    architecture = read_architecture(folder)
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, 256, 40))
    hidden = {}
    for row_scaled in (True, False):
        precision = Nvfp4(compute_dtype="float32", row_scaled_activation=row_scaled)
        spec = ModelSpec(architecture=architecture, precision=precision)
        decoder = build_decoder(spec, packed_attention(PackedSequences([40])))
        load_hf_weights(decoder.float(), read_weights(folder))
        prepare_weights(decoder)
        with torch.no_grad():
            if row_scaled:
                row_scaled_hidden = decoder(ids, torch.arange(40))
                AmaxGroups(group=torch.zeros(40, dtype=torch.int64)).install(decoder)
            hidden[row_scaled] = decoder(ids, torch.arange(40))
    # The same codes and factors; only where the factor enters the fp32 product may differ.
    torch.testing.assert_close(hidden[True], hidden[False], atol=1e-5, rtol=0)
    assert (row_scaled_hidden - hidden[True]).abs().max() > 0.1


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"prompt_ids": [1], "response_ids": [2]}', "log_probs is None"),
        ('{"prompt_ids": [1], "response_ids": [2], "log_probs": [-1, -2]}', "2 log_probs for 1"),
        ('{"prompt_ids": [1], "response_ids": [9], "log_probs": [-1]}', "token id 9 is not"),
        ("[1]", "line 1 is not a JSON object"),
        ("{", "line 1 is not JSON"),
    ],
)
def test_wrong_records_are_named(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "rollouts.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ValueError, match="line 1") as error:
        read_jsonl(path, vocab_size=9)
    assert words in str(error.value)
