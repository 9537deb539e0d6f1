"""A model that nothing can be learned from any more, and the run that stops for it."""

from collections.abc import Iterator
from contextlib import contextmanager


class DeadModel(RuntimeError):
    """Weights, log-probs or gradients are not finite, beyond what a run can continue from."""


@contextmanager
def at_step(step: int) -> Iterator[None]:
    """Say at which step of the run a model died."""
    try:
        yield
    except DeadModel as error:
        raise DeadModel(f"step {step}: {error}") from error
