"""The named entry points: linear, mm and grouped_mm for four-over-six, NVFP4 and MXFP8.

Each builds a quantizer from its keywords and calls quantized_linear or quantized_grouped_mm, which
a caller that already holds a quantizer can call directly.
"""

from typing import Any

from jaxtyping import Float, Int32
from torch import Tensor

from fos_rl.kernels.arguments import BlockShape
from fos_rl.quant.four_over_six import E4M3ScaleBound, ErrMode
from fos_rl.quant.gemm import Gemm
from fos_rl.quant.grouped_autograd import quantized_grouped_mm
from fos_rl.quant.linear_autograd import WeightArgument, quantized_linear
from fos_rl.quant.mxfp8 import ScaleMode
from fos_rl.quant.quantizers import Backward, MXFP8Quantizer, NVFP4Quantizer


def four_over_six_linear(
    x: Float[Tensor, "*lead k"],
    weight: Float[Tensor, "n k"],
    bias: Float[Tensor, "n"] | None = None,
    *,
    weight_block: BlockShape = "16x16",
    err_mode: ErrMode = "mse",
    e4m3_scale_bound: E4M3ScaleBound = 256,
    row_scaled_activation: bool = True,
    gemm: Gemm = "emulated",
    backward: Backward | None = None,
    quantized_weight: WeightArgument = None,
) -> Float[Tensor, "*lead n"]:
    """Return x @ weight.T + bias with four-over-six NVFP4 operands: quantized_linear says the
    rest."""
    return quantized_linear(
        x,
        weight,
        bias,
        quantizer=NVFP4Quantizer(
            "four_over_six",
            weight_block,
            err_mode,
            e4m3_scale_bound,
            row_scaled_activation,
        ),
        gemm=gemm,
        backward=backward,
        quantized_weight=quantized_weight,
    )


def four_over_six_mm(
    x: Float[Tensor, "*lead k"], weight: Float[Tensor, "n k"], **knobs: Any
) -> Float[Tensor, "*lead n"]:
    """Return x @ weight.T: four_over_six_linear, with its knobs, without bias."""
    return four_over_six_linear(x, weight, None, **knobs)


def nvfp4_linear(
    x: Float[Tensor, "*lead k"],
    weight: Float[Tensor, "n k"],
    bias: Float[Tensor, "n"] | None = None,
    *,
    weight_block: BlockShape = "16x16",
    row_scaled_activation: bool = True,
    gemm: Gemm = "emulated",
    backward: Backward | None = None,
    quantized_weight: WeightArgument = None,
) -> Float[Tensor, "*lead n"]:
    """Return x @ weight.T + bias with standard NVFP4 operands (bound 448): quantized_linear says
    the rest."""
    return quantized_linear(
        x,
        weight,
        bias,
        quantizer=NVFP4Quantizer(
            "nvfp4", weight_block, row_scaled_activation=row_scaled_activation
        ),
        gemm=gemm,
        backward=backward,
        quantized_weight=quantized_weight,
    )


def nvfp4_mm(
    x: Float[Tensor, "*lead k"], weight: Float[Tensor, "n k"], **knobs: Any
) -> Float[Tensor, "*lead n"]:
    """Return x @ weight.T: nvfp4_linear, with its knobs, without bias."""
    return nvfp4_linear(x, weight, None, **knobs)


def mxfp8_linear(
    x: Float[Tensor, "*lead k"],
    weight: Float[Tensor, "n k"],
    bias: Float[Tensor, "n"] | None = None,
    *,
    scale_mode: ScaleMode = "rceil",
    gemm: Gemm = "emulated",
    backward: Backward | None = None,
    quantized_weight: WeightArgument = None,
) -> Float[Tensor, "*lead n"]:
    """Return x @ weight.T + bias with MXFP8 operands: quantized_linear says the rest."""
    return quantized_linear(
        x,
        weight,
        bias,
        quantizer=MXFP8Quantizer(scale_mode),
        gemm=gemm,
        backward=backward,
        quantized_weight=quantized_weight,
    )


def mxfp8_mm(
    x: Float[Tensor, "*lead k"], weight: Float[Tensor, "n k"], **knobs: Any
) -> Float[Tensor, "*lead n"]:
    """Return x @ weight.T: mxfp8_linear, with its knobs, without bias."""
    return mxfp8_linear(x, weight, None, **knobs)


def four_over_six_grouped_mm(
    x: Float[Tensor, "m k"],
    weight: Float[Tensor, "experts n k"],
    offs: Int32[Tensor, "experts"],
    *,
    weight_block: BlockShape = "16x16",
    err_mode: ErrMode = "mse",
    e4m3_scale_bound: E4M3ScaleBound = 256,
    row_scaled_activation: bool = True,
    gemm: Gemm = "emulated",
    backward: Backward | None = None,
    quantized_weight: WeightArgument = None,
) -> Float[Tensor, "m n"]:
    """Return x[group e] @ weight[e].T for each expert e: quantized_grouped_mm says the rest."""
    return quantized_grouped_mm(
        x,
        weight,
        offs,
        quantizer=NVFP4Quantizer(
            "four_over_six",
            weight_block,
            err_mode,
            e4m3_scale_bound,
            row_scaled_activation,
        ),
        gemm=gemm,
        backward=backward,
        quantized_weight=quantized_weight,
    )


def nvfp4_grouped_mm(
    x: Float[Tensor, "m k"],
    weight: Float[Tensor, "experts n k"],
    offs: Int32[Tensor, "experts"],
    *,
    weight_block: BlockShape = "16x16",
    row_scaled_activation: bool = True,
    gemm: Gemm = "emulated",
    backward: Backward | None = None,
    quantized_weight: WeightArgument = None,
) -> Float[Tensor, "m n"]:
    """Return x[group e] @ weight[e].T in standard NVFP4: quantized_grouped_mm says the rest."""
    return quantized_grouped_mm(
        x,
        weight,
        offs,
        quantizer=NVFP4Quantizer(
            "nvfp4", weight_block, row_scaled_activation=row_scaled_activation
        ),
        gemm=gemm,
        backward=backward,
        quantized_weight=quantized_weight,
    )


def mxfp8_grouped_mm(
    x: Float[Tensor, "m k"],
    weight: Float[Tensor, "experts n k"],
    offs: Int32[Tensor, "experts"],
    *,
    scale_mode: ScaleMode = "rceil",
    gemm: Gemm = "emulated",
    backward: Backward | None = None,
    quantized_weight: WeightArgument = None,
) -> Float[Tensor, "m n"]:
    """Return x[group e] @ weight[e].T in MXFP8: quantized_grouped_mm says the rest."""
    return quantized_grouped_mm(
        x,
        weight,
        offs,
        quantizer=MXFP8Quantizer(scale_mode),
        gemm=gemm,
        backward=backward,
        quantized_weight=quantized_weight,
    )
