"""The generator's record of its routing is what its routers chose, token by token."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fos_rl.config import RolloutConfig
from fos_rl.spec import Bf16
from tests.support.pair import batch_of, random_prompts, tiny_pair


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    with tiny_pair(
        "qwen3_moe",
        folder,
        precision=Bf16(compute_dtype="float32"),
        rollout=RolloutConfig(group_size=3, max_new_tokens=24, max_prompt_tokens=512),
    ) as pair:
        pair.sync()
        yield pair


def own_choices(trainer, ids):
    """What the trainer's routers choose for a sequence, in fp32: int [tokens, layers, k]."""
    trainer._sequences.set([len(ids)])
    trainer.routing.recorded = None
    with torch.no_grad():
        trainer.decoder(torch.tensor(ids), torch.arange(len(ids)))
    return trainer.routing.own.numpy()


def test_a_rollout_brings_the_experts_of_its_tokens(pair):
    """Prefill, decode, and prompts whose shared prefix comes from the cache."""
    rollouts = pair.generate(random_prompts(8))
    assert pair.trainer.routing.layers == [0, 1, 2]
    agree = total = 0
    for rollout in rollouts:
        ids = rollout.prompt_ids + rollout.response_ids
        assert rollout.experts.shape == (len(ids) - 1, 3, 2)
        own = own_choices(pair.trainer, ids)[:-1]
        same = (np.sort(own, -1) == np.sort(rollout.experts, -1)).all(-1)
        agree, total = agree + same.sum(), total + same.size
    # In fp32 the pair's router logits differ by about 1e-6, so a flip needs a tie that close;
    # shifted by one token, 2 of 8 experts would agree in 1 of 28 places.
    assert agree / total > 0.9999, f"{total - agree} of {total} choices differ"


def flipped(experts: np.ndarray) -> np.ndarray:
    """Every token of the last layer sent to the experts 3 further on."""
    other = experts.copy()
    other[:, 2] = (other[:, 2] + 3) % 8
    return other


def test_flips_are_counted_by_layer_and_replay_computes_with_the_recorded_experts(pair):
    """A record that differs in the last layer: counted there alone, and what replay then computes
    is a decoder whose last router chooses so by itself."""
    trainer = pair.trainer
    rollouts = pair.generate(random_prompts(2), seed=1)
    batch = replace(batch_of(rollouts), experts=[flipped(r.experts) for r in rollouts])
    plain = [values.numpy() for values in trainer._score(batch)]
    trainer.routing.replay = True
    replayed = [values.numpy() for values in trainer._score(batch)]
    trainer.routing.replay = False
    assert np.abs(np.concatenate(plain) - np.concatenate(replayed)).max() > 1e-2

    mlp = trainer.decoder.model.layers[2].mlp
    choose = mlp.choose
    mlp.choose = lambda own: (own + 3) % 8
    rerouted = [values.numpy() for values in trainer._score(replace(batch, experts=None))]
    mlp.choose = choose
    # In fp32 both choose alike but for ties closer than 1e-6.
    np.testing.assert_allclose(np.concatenate(replayed), np.concatenate(rerouted), atol=1e-4)

    metrics = trainer.step(batch).metrics
    flips = [metrics[f"mismatch/routing_flip_frac/layer_{n}"] for n in range(3)]
    assert flips[0] < 1e-3
    assert flips[1] < 1e-3
    assert flips[2] > 0.5


def test_replay_removes_what_a_router_of_another_mind_does(pair):
    """The trainer's routers made to choose otherwise: replay gives the generator's log-probs."""
    pair.sync()
    rollouts = pair.generate(random_prompts(2), seed=2)
    theirs = np.concatenate([r.log_probs for r in rollouts])
    trainer = pair.trainer
    mlp = trainer.decoder.model.layers[0].mlp
    choose = mlp.choose
    mlp.choose = lambda own: choose((own + 1) % 8)
    batch = replace(batch_of(rollouts), experts=[r.experts for r in rollouts])
    differences = []
    for replay in (False, True):
        trainer.routing.replay = replay
        scored = np.concatenate([values.numpy() for values in trainer._score(batch)])
        differences.append(np.abs(scored - theirs).max())
    trainer.routing.replay, mlp.choose = False, choose
    assert differences[0] > 1e-2
    # What is left is fp32 sums in another order; the last token, whose experts are unknown,
    # predicts nothing.
    assert differences[1] < 1e-4
