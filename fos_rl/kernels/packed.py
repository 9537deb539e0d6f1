"""How the E2M1 magnitudes of 16 elements are held while a block is encoded.

Compute capability 10.0 has a conversion to E2M1: two words of codes. Before, a conversion to E5M2
does its work: of a value times 2^-14 its byte is ``code << 1``, four words.
"""

from collections.abc import Callable
from dataclasses import dataclass

from cutlass import Float32, Uint32

from fos_rl.kernels import minifloat, ptx, target


@dataclass(frozen=True)
class Packing:
    """One of the two forms.

    scale is the factor of the values that pack takes and halves gives, words the length of the
    form. pack rounds what is not an E2M1 value only where rounds says so. halves gives a pair of
    fp16, the i-th those of elements[i] (and further ones of further rows); codes gives the eight
    codes of one half of the elements, in order and a nibble each.
    """

    scale: float
    words: int
    rounds: bool
    elements: tuple[tuple[int, int], ...]
    pack: Callable[[list[Float32]], list[Uint32]]
    halves: Callable[[list[Uint32], int], Uint32]
    codes: Callable[[list[Uint32], int], Uint32]


# Elements 0 2 4 6, 1 3 5 7 and so on share a word, so that two words of bytes interleave to codes.
_FIRST_OF_WORD = (0, 1, 8, 9)


def _pack_bytes(values: list[Float32]) -> list[Uint32]:
    return [
        minifloat.e5m2_quad(*(values[first + 2 * i] for i in range(4))) for first in _FIRST_OF_WORD
    ]


def _halves_of_bytes(packed: list[Uint32], i: int) -> Uint32:
    return ptx.prmt(packed[i // 2], Uint32(0), (0x1404, 0x3424)[i % 2])


def _codes_of_bytes(packed: list[Uint32], side: int) -> Uint32:
    even, odd = packed[2 * side : 2 * side + 2]
    return ptx.bit_select(0x0F0F0F0F, ptx.shr(even, 1), ptx.shl(odd, 3))


E5M2_BYTES = Packing(
    scale=2.0**-14,
    words=4,
    rounds=False,
    elements=tuple((i, i + 2) for first in _FIRST_OF_WORD for i in (first, first + 4)),
    pack=_pack_bytes,
    halves=_halves_of_bytes,
    codes=_codes_of_bytes,
)
E2M1_CODES = Packing(
    scale=1.0,
    words=2,
    rounds=True,
    elements=tuple((i, i + 1) for i in range(0, 16, 2)),
    pack=lambda values: [ptx.e2m1_word(*values[:8]), ptx.e2m1_word(*values[8:])],
    halves=lambda packed, i: ptx.e2m1_to_halves(packed[i // 4], i % 4),
    codes=lambda packed, side: packed[side],
)


def packing() -> Packing:
    """The form for the architecture that is compiled for."""
    return E2M1_CODES if target.has_e2m1() else E5M2_BYTES
