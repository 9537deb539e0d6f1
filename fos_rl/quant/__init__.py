from fos_rl.quant.four_over_six import four_over_six_quantize
from fos_rl.quant.nvfp4 import NVFP4Tensor, exact_operand, nvfp4_dequantize, nvfp4_quantize

__all__ = [
    "NVFP4Tensor",
    "exact_operand",
    "four_over_six_quantize",
    "nvfp4_dequantize",
    "nvfp4_quantize",
]
