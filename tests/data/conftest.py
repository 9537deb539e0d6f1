"""What several tests of the data path share."""

import numpy as np
import pytest

from fos_rl.data import gold_check
from fos_rl.rewards.verifiers import verify_by_value


class InProcess:
    """The pool's verdicts without its processes, which take a second to start."""

    def __init__(self, *_: object, **__: object) -> None: ...
    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None: ...
    def score_texts(self, samples):
        return np.array([verify_by_value(*sample) for sample in samples]), {}


@pytest.fixture
def golds_in_process(monkeypatch: pytest.MonkeyPatch):
    gold_check._check.cache_clear()
    monkeypatch.setattr(gold_check, "VerifierPool", InProcess)
