"""The generator's second scoring of its own tokens, and the noise floor made of it."""

import numpy as np
import pytest

from fos_rl.algorithms.groups import Sample
from fos_rl.algorithms.noise_floor import floor_sample, noise_floor
from fos_rl.config import RolloutConfig
from fos_rl.spec import Bf16
from fos_rl.types import Rollout
from tests.support.pair import batch_of, random_prompts, tiny_pair


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    with tiny_pair(
        "qwen3",
        tmp_path_factory.mktemp("model"),
        precision=Bf16(compute_dtype="float32"),
        rollout=RolloutConfig(
            group_size=2, max_new_tokens=24, max_prompt_tokens=400, temperature=0.7
        ),
    ) as pair:
        pair.sync()
        yield pair


def rescore(pair, rollouts: list[Rollout]) -> list[np.ndarray]:
    return pair.generator.rescore(rollouts)


class Rescorer:
    """As the loop sees it: what it samples is never asked here."""

    def __init__(self, pair) -> None:
        self.rescore = lambda rollouts: rescore(pair, rollouts)


def sample(rollout: Rollout) -> Sample:
    return Sample(
        rollout=rollout,
        answer="",
        group=0,
        reward=0.0,
        advantage=0.0,
        zero_variance=False,
        masked=False,
    )


def test_prefill_gives_the_log_probs_of_the_sampled_tokens_at_their_temperature(pair):
    """Against those of the decode steps and of the trainer; then the engine still samples."""
    rollouts = pair.generate(random_prompts(6))
    scored = rescore(pair, rollouts)
    assert [len(values) for values in scored] == [len(r.response_ids) for r in rollouts]
    ours = np.concatenate(scored)
    decoded = np.concatenate([r.log_probs for r in rollouts])
    trained = np.concatenate([v.numpy() for v in pair.trainer._score(batch_of(rollouts))])
    # fp32 sums in another order, three layers deep.
    assert np.abs(ours - decoded).max() < 1e-4
    assert np.abs(ours - trained).max() < 1e-4
    again = pair.generate(random_prompts(6))
    assert [r.response_ids for r in again] == [r.response_ids for r in rollouts]


def test_the_floor_is_the_generators_own_difference(pair, monkeypatch):
    samples = [sample(r) for r in pair.generate(random_prompts(3))]
    floor = noise_floor(Rescorer(pair), samples, seed=3)
    # So few tokens are all scored again, in the order of the draw.
    order = floor_sample([len(s.rollout.prompt_ids + s.rollout.response_ids) for s in samples], 3)
    assert sorted(order) == list(range(len(samples)))
    rollouts = [samples[i].rollout for i in order]
    decoded = np.concatenate([np.array(r.log_probs, np.float32) for r in rollouts])
    d = np.abs(np.concatenate(rescore(pair, rollouts)) - decoded)
    assert floor["mismatch/floor_log_prob_abs_diff/mean"] == pytest.approx(d.mean(), rel=1e-5)
    assert floor["mismatch/floor_log_prob_abs_diff/max"] == pytest.approx(d.max(), rel=1e-5)
