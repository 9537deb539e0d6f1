"""Encoding of the blocks a warp holds: scales, the choice between two candidates, packed codes.

The common case takes the short candidate and decides by estimated errors; a warp in which some block
needs more care (subnormal scales, ties, an undecided choice) repeats that step exactly. Both are
branches a whole warp takes together.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Uint32, const_expr, range_constexpr

from fos_rl.kernels import arithmetic, ptx
from fos_rl.kernels.arithmetic import GlobalScale, Recipe

# Lanes 4r..4r+3 hold four 16x16 blocks' rows r and r + 8; these xors add up rows in the tree's order.
ROW_TREE_LANES = (16, 8, 4)


def words_per_block(recipe: Recipe) -> int:
    """32-bit words of 16 elements."""
    return 16 if recipe.dtype == "float32" else 8


def read(fragment, start: int, count: int) -> list:
    return [fragment[start + i] for i in range(count)]


def write(fragment, start: int, values) -> None:
    for i, value in enumerate(values):
        fragment[start + i] = value


def segment(raw, index: int, recipe: Recipe) -> list:
    """The words of the index-th run of 16 elements in raw."""
    words = words_per_block(recipe)
    return read(raw, index * words, words)


def _candidates(raw, rows, recipe, entries, kind):
    """Packed values and estimates of every candidate (six, then four), rows after rows."""
    packed, totals = [], []
    for multiplier, leading in entries:
        total = None
        for row in range(rows):
            x = arithmetic.widen(segment(raw, row, recipe), recipe.dtype)
            if kind == "short":
                values, deviations = arithmetic.short_candidate(x, multiplier, leading)
            elif kind == "careful":
                values, deviations = arithmetic.careful_candidate(x, multiplier)
            else:
                values, deviations = arithmetic.literal_values(x, multiplier), None
            packed += arithmetic.pack_values(values)
            if recipe.method == "standard" or deviations is None:
                continue
            estimated = arithmetic.estimate(deviations, recipe.error)
            total = estimated if total is None else ptx.add(total, estimated)
        totals.append(Float32(0.0) if total is None else total)
    return packed, totals


def _exact_errors(raw, packed, rows, recipe, scales, g, wild):
    """The reference's error of each candidate over this thread's rows (and the warp's)."""
    errors = []
    for candidate, scale in enumerate(scales):
        row_errors = []
        for row in range(rows):
            x = arithmetic.widen(segment(raw, row, recipe), recipe.dtype)
            words = read(packed, (candidate * rows + row) * 4, 4)
            values = arithmetic.unpack_values(words)
            row_errors.append(arithmetic.exact_error(x, values, scale, g, recipe, wild))
        if rows == 1:
            errors.append(row_errors[0])
            continue
        error = ptx.add(row_errors[0], row_errors[1])
        for lanes in ROW_TREE_LANES:
            error = ptx.add(error, ptx.shuffle_xor(error, lanes))
        errors.append(error)
    return errors


def warp_sum(value, rows: int):
    """value summed over the lanes that share a block (any order: for estimates)."""
    if rows > 1:
        for lanes in ROW_TREE_LANES:
            value = ptx.add(value, ptx.shuffle_xor(value, lanes))
    return value


def block_amax(raw, rows: int, recipe: Recipe):
    """max |x| of the block this thread has rows of."""
    words = [raw[i] for i in range(rows * words_per_block(recipe))]
    amax = arithmetic.max_magnitude(words, recipe.dtype)
    if rows > 1:
        for lanes in ROW_TREE_LANES:
            amax = ptx.max_nan(amax, ptx.shuffle_xor(amax, lanes))
    return amax


@cute.jit
def encode(
    raw: cute.Tensor,
    out: cute.Tensor,
    block_max: Float32,
    amax: Float32,
    encode_scale: Float32,
    keep_six: Boolean,
    table: Uint32,
    wild: cutlass.Constexpr,
    rows: cutlass.Constexpr,
    recipe: cutlass.Constexpr,
):
    """Fill out with two words of codes for each of this thread's rows, then the scale byte.

    raw holds rows runs of 16 elements of one block (1 for 1x16 blocks, 2 for 16x16), block_max its
    amax, table the shared-memory table of the amax that the next three arguments describe. wild says
    that this amax is out of the range of the short formulas. Then come the
    packed values of the chosen candidate, 4 words a row, and the chosen scale's fp32 bits.
    """
    g = GlobalScale(amax, encode_scale, keep_six, Boolean(wild))
    two = const_expr(recipe.method == "four_over_six")
    base = arithmetic.unrounded_scale(block_max, g, recipe, wild)
    pair = ptx.e4m3_pair(base, ptx.mul(base, 1.5))
    byte6 = ptx.and_(pair, 0x7F)
    byte4 = ptx.shr(pair, 8)
    m6, lead6, scale6, flag6 = ptx.shared_load(ptx.iadd(table, ptx.shl(byte6, 4)), 4)
    m4, lead4, scale4, flag4 = m6, lead6, scale6, flag6
    if const_expr(two):
        m4, lead4, scale4, flag4 = ptx.shared_load(ptx.iadd(table, ptx.shl(byte4, 4)), 4)
    entries = [(m6, lead6), (m4, lead4)] if const_expr(two) else [(m6, lead6)]
    packed = cute.make_rmem_tensor(8 * rows, Uint32)
    totals = cute.make_rmem_tensor(2, Float32)

    # Above 464 the scale has saturated and products may pass 7. An all-zero block is always easy.
    careful = (ptx.add(flag6, flag4) > Float32(0.0)) | (base > Float32(464.0))
    careful = careful & (block_max > Float32(0.0))
    if const_expr(wild or recipe.dtype == "float32"):
        kind = "literal" if wild else "careful"
        words, sums = _candidates(raw, rows, recipe, entries, kind)
        write(packed, 0, words)
        write(totals, 0, sums)
    else:
        if cute.arch.vote_any_sync(careful):
            ptx.keep_branch()
            words, sums = _candidates(raw, rows, recipe, entries, "careful")
            write(packed, 0, words)
            write(totals, 0, sums)
        else:
            words, sums = _candidates(raw, rows, recipe, entries, "short")
            write(packed, 0, words)
            write(totals, 0, sums)

    byte = byte6
    scale = scale6
    chosen = read(packed, 0, 4 * rows)
    if const_expr(two):
        weighted6 = ptx.mul(arithmetic.error_weight(scale6, recipe.error), totals[0])
        weighted4 = ptx.mul(arithmetic.error_weight(scale4, recipe.error), totals[1])
        delta = warp_sum(ptx.sub(weighted4, weighted6), rows)
        total = warp_sum(ptx.add(weighted4, weighted6), rows)
        bound = arithmetic.error_bound(total, base, recipe.error, rows)
        same = (byte4 == byte6) | keep_six
        undecided = ~(ptx.abs_(delta) > bound) | (byte6 == Uint32(0)) | Boolean(wild)
        undecided = undecided & ~same
        pick = cute.make_rmem_tensor(1, Uint32)
        pick[0] = ptx.select((delta < Float32(0.0)) & ~same, Uint32(1), Uint32(0))
        if cute.arch.vote_any_sync(undecided):
            ptx.keep_branch()
            scales = (scale6, scale4)
            error6, error4 = _exact_errors(raw, packed, rows, recipe, scales, g, wild)
            exact = ptx.select(error4 < error6, Uint32(1), Uint32(0))
            pick[0] = ptx.select(undecided, exact, pick[0])
        take4 = pick[0] == Uint32(1)
        byte = ptx.select(take4, byte4, byte6)
        scale = ptx.select(take4, scale4, scale6)
        chosen = [ptx.select(take4, packed[4 * rows + i], packed[i]) for i in range(4 * rows)]
    is_nan = byte6 == Uint32(0x7F)
    for row in range_constexpr(rows):
        words = segment(raw, row, recipe)
        half = len(words) // 2
        for side in range_constexpr(2):
            signs = arithmetic.sign_word(words[half * side : half * (side + 1)], recipe.dtype)
            even, odd = chosen[4 * row + 2 * side], chosen[4 * row + 2 * side + 1]
            codes = arithmetic.pack_codes(even, odd, signs)
            out[2 * row + side] = ptx.select(is_nan, Uint32(0x77777777), codes)
    out[2 * rows] = byte
    write(out, 2 * rows + 1, chosen)
    out[6 * rows + 1] = ptx.bits(scale)
