from fos_rl.quant.four_over_six import four_over_six_quantize
from fos_rl.quant.mxfp8 import MXFP8Tensor, mxfp8_dequantize, mxfp8_quantize
from fos_rl.quant.nvfp4 import NVFP4Tensor, exact_operand, nvfp4_dequantize, nvfp4_quantize

__all__ = [
    "MXFP8Tensor",
    "NVFP4Tensor",
    "exact_operand",
    "four_over_six_quantize",
    "mxfp8_dequantize",
    "mxfp8_quantize",
    "nvfp4_dequantize",
    "nvfp4_quantize",
]
