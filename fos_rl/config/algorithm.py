"""The settings of the loss: which policy gradient, and what is done about the mismatch."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from fos_rl.spec import Frozen, Positive

MAX_RATIO = 1e30
"""What fp32 holds. A limit above exp(20) = 4.9e8, below which the losses hold every ratio of
probabilities, is none."""


class NoCorrection(Frozen):
    """The mismatch is measured and left alone."""

    type: Literal["none"] = "none"


class TruncatedWeights(Frozen):
    """Weigh by trainer / generator probability, at most max_weight (truncated importance sampling).
    Needs algorithm.ratio = "decoupled"."""

    type: Literal["truncated"] = "truncated"
    level: Literal["token", "sequence"] = "token"
    """One weight per token, or the product over its response for all of its tokens."""
    max_weight: Annotated[float, Field(ge=1, le=MAX_RATIO)] = 2.0


class MaskedWeights(Frozen):
    """Weigh by trainer / generator probability, and drop tokens where that is outside the limits
    (IcePop). Needs algorithm.ratio = "decoupled"."""

    type: Literal["masked"] = "masked"
    low: Annotated[float, Field(gt=0, lt=1)] = 0.5
    high: Annotated[float, Field(gt=1, le=MAX_RATIO)] = 5.0


class GeometricMask(Frozen):
    """Drop sequences whose geometric mean of trainer / generator probability lies outside the
    limits; the others keep weight 1. Works with either algorithm.ratio."""

    type: Literal["geometric"] = "geometric"
    low: Annotated[float, Field(gt=0, lt=1)] = 0.99
    high: Annotated[float, Field(gt=1, le=MAX_RATIO)] = 1.01


Correction = NoCorrection | TruncatedWeights | MaskedWeights | GeometricMask


class AlgorithmConfig(Frozen):
    """GRPO and its common variants; a field left out takes the variant's value."""

    type: Literal["grpo", "dapo", "dr_grpo", "gspo", "cispo"] = "grpo"
    """grpo: Shao et al. 2024; dapo: Yu et al. 2025 (clip-higher, token mean); dr_grpo: Liu et
    al. 2025 (no division by the group's standard deviation, constant length normaliser); gspo:
    Zheng et al. 2025 (one ratio per sequence); cispo: MiniMax-M1 2025 (the clip limits a token's
    weight and keeps its gradient, token mean)."""
    clip_low: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Ratio floor is 1 - clip_low; 1 is no floor (gspo: 3e-4, cispo: 1)."""
    clip_high: Annotated[float, Field(gt=0, le=MAX_RATIO)] = 0.2
    """Ratio ceiling is 1 + clip_high (dapo: 0.28, gspo: 4e-4, cispo: 4, its paper gives none)."""
    dual_clip: Annotated[float, Field(gt=1, le=MAX_RATIO)] | None = None
    """Second ceiling of the ratio, for negative advantages; its paper uses 3. Not for cispo."""
    normalize_advantages: bool = True
    """Divide by the group's standard deviation (dr_grpo: false)."""
    aggregation: Literal["sequence_mean", "token_mean", "sequence_sum", "constant"] = (
        "sequence_mean"
    )
    """Mean over tokens then sequences; over all tokens (dapo, cispo); token sums, then the mean
    over sequences; or token sums over max_new_tokens (dr_grpo)."""
    ratio: Literal["bypass", "decoupled"] = "bypass"
    """Old log-probs of the ratio: the generator's own, or the trainer's recompute of them."""
    correction: Annotated[Correction, Field(discriminator="type")] = NoCorrection()
    """What is done about the trainer-generator mismatch."""
    router_replay: bool = False
    """The trainer computes with the experts that the generator chose, and with gates of its own
    (R3). Mixtures of experts only."""
    minibatches: Positive = 1
    """Optimizer updates per step; the batch is split evenly by sequence."""
    max_zero_variance_steps: Positive = 10
    """Stop after this many steps in a row in which no group had reward variance."""

    @model_validator(mode="before")
    @classmethod
    def _variant_defaults(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        variants: dict[str, dict[str, Any]] = {
            "dapo": {"clip_high": 0.28, "aggregation": "token_mean"},
            "dr_grpo": {"normalize_advantages": False, "aggregation": "constant"},
            "gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
            "cispo": {"clip_low": 1.0, "clip_high": 4.0, "aggregation": "token_mean"},
        }
        return {**variants.get(values.get("type", "grpo"), {}), **values}

    @model_validator(mode="after")
    def _settings_fit_each_other(self) -> Self:
        if self.type == "cispo" and self.dual_clip is not None:
            raise ValueError(
                f"algorithm.dual_clip = {self.dual_clip:g}: cispo limits the ratio itself for "
                "either sign of the advantage; leave it out, or lower algorithm.clip_high"
            )
        weighs = isinstance(self.correction, TruncatedWeights | MaskedWeights)
        if weighs and self.ratio == "bypass":
            raise ValueError(
                f"algorithm.correction.type = {self.correction.type!r}: with algorithm.ratio = "
                "'bypass' the loss's ratio already is policy / generator, and the weight trainer / "
                "generator would enter twice; set algorithm.ratio = 'decoupled', or use "
                "correction.type = 'geometric', which only drops sequences"
            )
        return self
