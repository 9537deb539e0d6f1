"""Four-over-six NVFP4, NVFP4 and MXFP8: quantize, dequantize, and linears with autograd."""

from fos_rl.quant.entry_points import (
    four_over_six_grouped_mm,
    four_over_six_linear,
    four_over_six_mm,
    mxfp8_grouped_mm,
    mxfp8_linear,
    mxfp8_mm,
    nvfp4_grouped_mm,
    nvfp4_linear,
    nvfp4_mm,
)
from fos_rl.quant.four_over_six import four_over_six_quantize
from fos_rl.quant.gemm import gemm_operand, swizzle_scales
from fos_rl.quant.grouped_autograd import quantized_grouped_mm
from fos_rl.quant.linear_autograd import quantized_linear
from fos_rl.quant.mxfp8 import MXFP8Tensor, mxfp8_dequantize, mxfp8_quantize
from fos_rl.quant.nvfp4 import NVFP4Tensor, exact_operand, nvfp4_dequantize, nvfp4_quantize
from fos_rl.quant.quantizers import (
    MXFP8Quantizer,
    NVFP4Quantizer,
    QuantizedWeight,
    prepare_weight,
    resolve_backward,
)

# Earlier names of the same; a recipe is a ready-made partial config file since.
MXFP8Recipe, NVFP4Recipe = MXFP8Quantizer, NVFP4Quantizer

__all__ = [
    "MXFP8Quantizer",
    "MXFP8Recipe",
    "MXFP8Tensor",
    "NVFP4Quantizer",
    "NVFP4Recipe",
    "NVFP4Tensor",
    "QuantizedWeight",
    "exact_operand",
    "four_over_six_grouped_mm",
    "four_over_six_linear",
    "four_over_six_mm",
    "four_over_six_quantize",
    "gemm_operand",
    "mxfp8_dequantize",
    "mxfp8_grouped_mm",
    "mxfp8_linear",
    "mxfp8_mm",
    "mxfp8_quantize",
    "nvfp4_dequantize",
    "nvfp4_grouped_mm",
    "nvfp4_linear",
    "nvfp4_mm",
    "nvfp4_quantize",
    "prepare_weight",
    "quantized_grouped_mm",
    "quantized_linear",
    "resolve_backward",
    "swizzle_scales",
]
