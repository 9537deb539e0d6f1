"""Which instructions the architecture has that a kernel is being traced for.

Imports cutlass, so it is itself imported only when a kernel is built.
"""

from cutlass.base_dsl.dsl import BaseDSL


def _arch() -> tuple[int, int, str]:
    """Compute capability of the architecture and its suffix, as "a" in sm_90a."""
    return BaseDSL._get_dsl().get_arch_enum().value


def has_xorsign() -> bool:
    """The larger magnitude of two bf16 pairs."""
    return _arch() >= (8, 6)


def has_fp8() -> bool:
    """Between E4M3 or E5M2 and wider formats."""
    return _arch() >= (8, 9)


def has_e2m1() -> bool:
    """fp32 to E2M1 and E2M1 to fp16: only in code for one architecture or one family."""
    return _arch() >= (10, 0) and _arch()[2] != ""
