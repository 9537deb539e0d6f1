"""Flipped codes: a difference of few responses, in each from one token on.

A quantized activation that is at a rounding boundary falls to either side of it for a difference
in the last bit, and an expert is chosen or not. The token's log-prob and all that attend to the
token then jump, by 0.01 to 1 nat where the kernels' noise is 1e-6. One such response carries the
mean of a step's |d| away, and leaves its median at the noise; a wrong setting moves every response.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fos_rl.diagnose.scorer import Forward, run_forward
from fos_rl.model.decoder import Decoder
from fos_rl.spec import Quantized

# A difference up to this many times what other kernels alone make is noise: the two kernels that
# made it need not be as near to each other as the two that measure it.
NOISE = 3.0
# A token that is off by so many times the mean noise jumped: the noise of single tokens reaches 8
# times its mean (fp32, the tiny models), and two other kernels make NOISE times as much.
JUMP = 30.0
# Relative change of the embeddings that flips some codes of every token.
_NUDGE = 2.0**-10


@dataclass(frozen=True, slots=True, kw_only=True)
class Differences:
    """|d| token by token, one array per response; NaN where a log-prob is not finite."""

    responses: list[np.ndarray]

    @property
    def mean(self) -> float:
        """Over all tokens, nats."""
        return _mean(np.concatenate(self.responses))

    @property
    def typical(self) -> float:
        """Median over the responses of a response's mean, nats: what a few cannot move."""
        means = [m for values in self.responses if np.isfinite(m := _mean(values))]
        return float(np.median(means)) if means else np.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class Jump:
    """A response whose tokens are at the noise up to one, and off from there."""

    response: int
    token: int
    """The first one that is off."""
    mean: float
    """|d| from there to the end of the response, nats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flips:
    """A difference that flipped codes explain."""

    what: str
    jumps: list[Jump]
    num_responses: int
    others: float
    """Mean |d| of the responses that did not jump, nats."""

    @property
    def verdict(self) -> str:
        """One line: what flipped, in how many responses, and from where on."""
        first = self.jumps[0]
        return (
            f"{self.what}: {len(self.jumps)} of {self.num_responses} responses, median at the "
            f"noise (response {first.response} from its token {first.token} on, mean |d| "
            f"{first.mean:.2e} there; the other responses {self.others:.2e})"
        )


def differences(log_probs: np.ndarray, recorded: np.ndarray, lengths: Sequence[int]) -> Differences:
    """|recorded - log_probs|, cut into responses of so many tokens."""
    with np.errstate(invalid="ignore"):
        d = np.abs(recorded - log_probs)
    d[~np.isfinite(d)] = np.nan
    return Differences(responses=np.split(d, np.cumsum(lengths)[:-1]))


def is_noise(found: Differences, noise: Differences) -> bool:
    """Whether both the mean and the typical response are within what other kernels make.

    The mean alone would not do: with a flipped code of its own, the noise hides anything else.
    """
    return found.mean <= NOISE * noise.mean and found.typical <= NOISE * noise.typical


def find_flips(
    found: Differences, noise: Differences, what: str | None, flip_size: Callable[[], float]
) -> Flips | None:
    """The responses that jumped, where that is all there is; None where it is not.

    Fewer than half of the responses may jump (or NOISE times as many as other kernels alone make
    jump), none by more than NOISE times what flipped codes do, and the others must be at the noise.

    Args:
        what: what can flip in this arm; None where nothing can.
        flip_size: mean |d| that flipped codes in every token make, nats.
    """
    if what is None or noise.typical == 0:
        return None
    jumps, expected = _jumps(found, noise), _jumps(noise, noise)
    few = len(jumps) < len(found.responses) / 2 or len(jumps) <= NOISE * len(expected)
    if not jumps or not few:
        return None
    # The noise of the tokens that other kernels did not flip.
    plain = _without(noise, expected)
    others = _without(found, jumps)
    if not others.responses or not plain.responses or not is_noise(others, plain):
        return None
    if max(jump.mean for jump in jumps) > NOISE * flip_size():
        return None
    return Flips(what=what, jumps=jumps, num_responses=len(found.responses), others=others.mean)


def what_flips(forward: Forward) -> str | None:
    """What a last bit can flip in an arm; nothing in exact mode, which has no such noise."""
    spec = forward.spec
    if spec.consistency == "exact":
        return None
    codes = isinstance(spec.precision, Quantized)
    experts = spec.architecture.num_experts > 0
    if codes:
        return "flipped code or expert choice" if experts else "flipped code"
    return "flipped expert choice" if experts else None


def nudge_size(forward: Forward, log_probs: np.ndarray, lengths: Sequence[int]) -> float:
    """Mean |d| when every embedding is changed by a thousandth, which flips codes in all tokens."""

    def edit(decoder: Decoder) -> None:
        # Signs of a fixed pattern, so that the same records get the same verdict.
        generator = torch.Generator().manual_seed(0)

        def nudged(module: object, inputs: object, out: torch.Tensor) -> torch.Tensor:
            del module, inputs
            signs = torch.randint(0, 2, out.shape, generator=generator) * 2 - 1
            return out * (1 + _NUDGE * signs.to(out))

        decoder.model.embed_tokens.register_forward_hook(nudged)

    other = run_forward(forward.but(edit_decoder=edit)).log_probs
    return differences(other, log_probs, lengths).mean


def _jumps(found: Differences, noise: Differences) -> list[Jump]:
    jumps: list[Jump] = []
    for number, values in enumerate(found.responses):
        off = np.flatnonzero(values > JUMP * noise.typical)
        if off.size:
            first = int(off[0])
            jumps.append(Jump(response=number, token=first, mean=_mean(values[first:])))
    return jumps


def _without(found: Differences, jumps: Sequence[Jump]) -> Differences:
    left_out = {jump.response for jump in jumps}
    kept = [values for n, values in enumerate(found.responses) if n not in left_out]
    return Differences(responses=kept)


def _mean(values: np.ndarray) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if finite.size else np.nan
