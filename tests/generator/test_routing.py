"""The generator's record of its routing is what its routers chose, token by token."""

import numpy as np
import pytest
import torch

from fos_rl.config import RolloutConfig
from fos_rl.model.routing import RoutingReplay, expert_layers
from fos_rl.spec import Bf16
from tests.hosts import hosts, random_prompts


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    with hosts(
        "qwen3_moe",
        folder,
        precision=Bf16(compute_dtype="float32"),
        rollout=RolloutConfig(group_size=3, max_new_tokens=24, max_prompt_tokens=512),
    ) as pair:
        pair.sync()
        yield pair


def own_choices(trainer, ids):
    """What the trainer's routers choose for a sequence, in fp32: int [tokens, layers, k]."""
    routing = RoutingReplay(trainer.decoder, replay=False)
    routing.recorded = torch.zeros(len(ids), 3, 2, dtype=torch.int64)
    trainer._sequences.set([len(ids)])
    with torch.no_grad():
        trainer.decoder(torch.tensor(ids), torch.arange(len(ids)))
    return routing.chosen.numpy()


def test_a_rollout_brings_the_experts_of_its_tokens(pair):
    """Prefill, decode, and prompts whose shared prefix comes from the cache."""
    rollouts = pair.generate(random_prompts(8))
    assert len(expert_layers(pair.trainer.decoder)) == 3
    agree = total = 0
    for rollout in rollouts:
        ids = rollout.prompt_ids + rollout.response_ids
        assert rollout.experts.shape == (len(ids) - 1, 3, 2)
        own = own_choices(pair.trainer, ids)[:-1]
        same = (np.sort(own, -1) == np.sort(rollout.experts, -1)).all(-1)
        agree, total = agree + same.sum(), total + same.size
    # In fp32 the hosts' router logits differ by about 1e-6, so a flip needs a tie that close;
    # shifted by one token, 2 of 8 experts would agree in 1 of 28 places.
    assert agree / total > 0.9999, f"{total - agree} of {total} choices differ"
