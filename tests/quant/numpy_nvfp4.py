"""NVFP4 written a second time, slowly, in NumPy float32: nearest-value search instead of bit
tricks.

Every NumPy float32 operation here is one IEEE rounding; tables and ties are decided in float64.
"""

import numpy as np

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
_E4M3_NORMAL = [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)]
E4M3 = np.array([*(m * 2.0**-9 for m in range(8)), *_E4M3_NORMAL][:127])
F = np.float32
FLT_MAX = np.finfo(F).max


def nearest(values: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Index of the table entry nearest to each |value|, ties to the even index, saturating."""
    magnitude = np.minimum(np.abs(values.astype(np.float64)), table[-1])
    above = np.searchsorted(table, magnitude).clip(1, len(table) - 1)
    low, high = table[above - 1], table[above]
    to_low, to_high = magnitude - low, high - magnitude
    even = above - 1 + (above - 1) % 2
    return np.where(to_low < to_high, above - 1, np.where(to_high < to_low, above, even))


def quantize(
    x: np.ndarray,
    amax: np.ndarray,
    bound: int,
    err_mode: str | None,
    block: str = "1x16",
) -> tuple[np.ndarray, np.ndarray]:
    """x float32 [R, C], amax float32 [1] or [R] -> (codes 0..15 [R, C], scale bytes [R, C/16]).

    err_mode None is standard NVFP4 (map-to-6 only).
    """
    with np.errstate(all="ignore"):
        rows, cols = x.shape
        blocks = x.reshape(rows, cols // 16, 16)
        amax = np.broadcast_to(amax.astype(F), (rows,))[:, None]
        encode_scale = np.minimum(F(6 * bound) / amax, FLT_MAX)
        encode_scale = np.where((amax == 0) | (encode_scale == 0), F(1), encode_scale)
        decode = F(1) / encode_scale
        peak = np.abs(blocks).max(-1)
        if block == "16x16":
            peak = peak.reshape(rows // 16, 16, -1).max(1).repeat(16, axis=0)
        if err_mode is None:
            return encode(blocks, nearest(peak * (encode_scale * F(1 / 6)), E4M3), decode)[:2]
        base = (peak / F(6)) * encode_scale
        candidates = []
        for scaled in (base * F(1.5), base):
            codes, scale, values = encode(blocks, nearest(scaled, E4M3), decode)
            error = row_errors(blocks, values, scale, amax, bound, err_mode)
            if block == "16x16":
                by_block = error.reshape(rows // 16, 16, -1)
                error = fold(by_block).repeat(16, axis=0)
            candidates.append((error, codes, scale))
        (error4, codes4, scale4), (error6, codes6, scale6) = candidates
        pick = error4 < error6
        scale = np.where(pick, scale4, scale6)
        return np.where(pick.repeat(16, axis=-1), codes4, codes6), scale


def row_errors(
    blocks: np.ndarray,
    values: np.ndarray,
    scale: np.ndarray,
    amax: np.ndarray,
    bound: int,
    err_mode: str,
) -> np.ndarray:
    """Sum of the 16 errors of each row of a block, in element order."""
    decoded = values * E4M3[scale].astype(F)[..., None] * amax[..., None] / F(6 * bound)
    deviation = decoded - blocks
    terms = np.abs(deviation) if err_mode == "mae" else deviation * deviation
    error = np.zeros(terms.shape[:-1], F)
    for element in range(16):
        error = error + terms[..., element]
    return error


def fold(errors: np.ndarray) -> np.ndarray:
    """[n, 16] row errors -> [n]: halves are added to each other, 8, 4, 2, 1."""
    for half in (8, 4, 2, 1):
        errors = errors[:, :half] + errors[:, half : 2 * half]
    return errors[:, 0]


def encode(
    blocks: np.ndarray, scale: np.ndarray, decode: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    multiplier = np.minimum(F(1) / (E4M3[scale].astype(F) * decode), FLT_MAX)
    scaled = blocks * multiplier[..., None]
    index = nearest(scaled, E2M1)
    values = np.copysign(E2M1[index].astype(F), scaled)
    codes = (index + 8 * np.signbit(scaled)).reshape(blocks.shape[0], -1)
    return codes.astype(np.uint8), scale.astype(np.uint8), values
