"""Encoding of the blocks a warp holds: scales, the choice between two candidates, packed codes.

The common case takes the short candidate and decides by estimated errors; a warp in which some
block needs more care (subnormal scales, an undecided choice) repeats that step exactly. Both
are branches a whole warp takes together. Where an instruction rounds to E2M1, scales need no care.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Uint32, const_expr, range_constexpr

from fos_rl.kernels import arithmetic, minifloat, ptx
from fos_rl.kernels.arithmetic import Encoding, GlobalScale
from fos_rl.kernels.packed import packing


@dataclass(frozen=True)
class Holding:
    """Which part of a block a thread holds: rows of 16 elements, and where the others are.

    A 16x16 block's error is a tree over its rows: 8 apart, 4 apart, 2 apart, neighbours. lanes are
    the lane xors in that order; a thread's own two rows are 8 apart or, with neighbours, adjacent.
    """

    rows: int = 1
    lanes: tuple[int, ...] = ()
    neighbours: bool = False


ONE_ROW = Holding()
# Lanes 4r .. 4r+3 hold rows r and r + 8 of four blocks.
ROWS_APART = Holding(2, (16, 8, 4))
# Lanes 8b .. 8b+7 hold rows 2i and 2i + 1 of block b.
ROW_PAIRS = Holding(2, (4, 2, 1), True)


def words_per_block(encoding: Encoding) -> int:
    """32-bit words of 16 elements."""
    return 16 if encoding.dtype == "float32" else 8


def read(fragment, start: int, count: int) -> list:
    return [fragment[start + i] for i in range(count)]


def write(fragment, start: int, values) -> None:
    for i, value in enumerate(values):
        fragment[start + i] = value


def segment(raw, index: int, encoding: Encoding) -> list:
    """The words of the index-th run of 16 elements in raw."""
    words = words_per_block(encoding)
    return read(raw, index * words, words)


def _candidates(raw, rows, encoding, entries, kind):
    """Packed values (all rows of the first candidate, then of the second) and summed estimates."""
    packed = [[] for _ in entries]
    totals = [None for _ in entries]
    for row in range(rows):
        words = segment(raw, row, encoding)
        if kind in ("careful", "literal"):
            if row:
                ptx.keep_branch()
            words = [ptx.fresh(word) for word in words]
        x = arithmetic.widen(words, encoding.dtype)
        for i, (multiplier, magnifier) in enumerate(entries):
            if kind == "converted":
                made, deviations = arithmetic.converted_candidate(x, multiplier)
            elif kind == "short":
                made, deviations = arithmetic.short_candidate(x, magnifier)
            elif kind == "careful":
                made, deviations = arithmetic.careful_candidate(x, multiplier)
            else:
                made, deviations = arithmetic.literal_candidate(x, multiplier)
            packed[i] += made
            if encoding.scheme == "nvfp4" or deviations is None:
                continue
            estimated = arithmetic.estimate(deviations, encoding.err_mode)
            totals[i] = estimated if totals[i] is None else ptx.add(totals[i], estimated)
    words = [word for candidate in packed for word in candidate]
    return words, [Float32(0.0) if total is None else total for total in totals]


def _exact_errors(raw, packed, holding, encoding, scales, g, wild, units=None):
    """The reference's error of each candidate over this thread's rows (and the warp's).

    units are short_decode's, where all lanes may use them.
    """
    rows, count = holding.rows, packing().words
    row_errors = [[] for _ in scales]
    for row in range(rows):
        if row:
            ptx.keep_branch()
        words = [ptx.fresh(word) for word in segment(raw, row, encoding)]
        x = arithmetic.widen(words, encoding.dtype)
        for candidate, scale in enumerate(scales):
            words = read(packed, (candidate * rows + row) * count, count)
            values = arithmetic.unpack_values(words)
            if units is not None:
                error = arithmetic.short_error(x, values, units[candidate], encoding.err_mode)
            else:
                error = arithmetic.exact_error(x, values, scale, g, encoding, wild)
            row_errors[candidate].append(error)
    return [_tree_sum(of_rows, holding) for of_rows in row_errors]


def _tree_sum(row_errors: list[Float32], holding: Holding) -> Float32:
    if holding.rows == 1:
        return row_errors[0]
    if not holding.neighbours:
        row_errors = [ptx.add(*row_errors)]
    for lanes in holding.lanes:
        row_errors = [ptx.add(error, ptx.shuffle_xor(error, lanes)) for error in row_errors]
    return ptx.add(*row_errors) if holding.neighbours else row_errors[0]


def _entry(table, offset, g: GlobalScale, has_table: bool, encoding: Encoding):
    """The table entry at an offset, or made anew."""
    if has_table:
        return ptx.shared_load(ptx.iadd(table, offset), 4)
    return arithmetic.table_entry(ptx.shr(offset, 4), g, encoding)


def scale_of(entry: Uint32) -> Float32:
    """fp32 of the scale whose table entry starts at that offset."""
    return minifloat.e4m3_to_float(ptx.shr(entry, 4))


def careful_sums(sums, entry6: Uint32):
    """Estimates, a large first one where the map-to-6 scale is 0: its unit is lost there.

    A scale of 0 decodes to zeros. If map-to-4 has another, it is the smallest, 2^-9, and its
    products reach 2 to 3, so it is better by far: no element is worse than zero would be.
    """
    lost = ptx.select(entry6 == Uint32(0), Float32(2.0**30), sums[0])
    return [lost, sums[-1]]


def careful_mask(entry6: Uint32) -> Uint32:
    """Which signs the codes keep: all, or none in a block with a NaN scale, whose codes are +6."""
    return ptx.select(entry6 == Uint32(0x7F0), Uint32(0), Uint32(0x88888888))


def write_choice(delta, undecided: Boolean, errors) -> None:
    """Make delta of undecided lanes negative where map-to-4, the second, is strictly better."""
    exact = ptx.select(errors[1] < errors[0], Float32(-1.0), Float32(1.0))
    delta[0] = ptx.select(undecided, exact, delta[0])


def warp_sum(value, holding: Holding):
    """value summed over the lanes that share a block (any order: for estimates)."""
    for lanes in holding.lanes:
        value = ptx.add(value, ptx.shuffle_xor(value, lanes))
    return value


def block_amax(raw, holding: Holding, encoding: Encoding):
    """max |x| of the block this thread has rows of."""
    words = [raw[i] for i in range(holding.rows * words_per_block(encoding))]
    amax = arithmetic.max_magnitude(words, encoding.dtype)
    for lanes in holding.lanes:
        amax = arithmetic.larger(amax, ptx.shuffle_xor(amax, lanes))
    return amax


@cute.jit
def encode(
    raw: cute.Tensor,
    out: cute.Tensor,
    block_max: Float32,
    scaling: tuple,
    wild: cutlass.Constexpr,
    has_table: cutlass.Constexpr,
    holding: cutlass.Constexpr,
    encoding: cutlass.Constexpr,
):
    """Fill out: two words of codes for each of this thread's rows, the scale byte, and the packed
    values of the chosen candidate.

    raw holds rows runs of 16 elements of one block, block_max its amax. scaling is (table, amax,
    encode_scale, four): a table in shared memory and what global_scale says of its amax. wild says
    that this amax is out of the range of the short formulas; without has_table, entries are made
    here, which is less work for few blocks.
    """
    table, amax, encode_scale, four = scaling
    g = GlobalScale(amax, encode_scale, four, Boolean(wild))
    rows, form = const_expr(holding.rows), const_expr(packing())
    count = const_expr(form.words * rows)
    two = const_expr(encoding.scheme == "four_over_six")
    base = arithmetic.unrounded_scale(block_max, g, encoding, wild)
    pair = minifloat.e4m3_pair(base, ptx.mul(base, four))
    entry6 = ptx.and_(ptx.shl(pair, 4), 0x7F0)
    entry4 = ptx.and_(ptx.shr(pair, 4), 0x7F0)
    *multipliers6, weight6, limit = _entry(table, entry6, g, has_table, encoding)
    entries = [multipliers6]
    weight4 = weight6
    if const_expr(two):
        *multipliers4, weight4, limit4 = _entry(table, entry4, g, has_table, encoding)
        entries = [multipliers6, multipliers4]
        limit = ptx.min_(limit, limit4)
    packed = cute.make_rmem_tensor(2 * count, Uint32)
    totals = cute.make_rmem_tensor(2, Float32)
    sign_mask = cute.make_rmem_tensor(1, Uint32)

    kind = const_expr(arithmetic.candidate_kind(wild, encoding.dtype))
    if const_expr(kind != "short"):
        words, sums = _candidates(raw, rows, encoding, entries, kind)
        write(packed, 0, words)
        write(totals, 0, careful_sums(sums, entry6))
        sign_mask[0] = careful_mask(entry6)
    else:
        # Not "greater": a NaN amax needs care too.
        if cute.arch.vote_any_sync(~(block_max <= limit)):
            ptx.keep_branch()
            words, sums = _candidates(raw, rows, encoding, entries, "careful")
            write(packed, 0, words)
            write(totals, 0, careful_sums(sums, entry6))
            sign_mask[0] = careful_mask(entry6)
        else:
            words, sums = _candidates(raw, rows, encoding, entries, "short")
            write(packed, 0, words)
            write(totals, 0, sums)
            sign_mask[0] = Uint32(0x88888888)

    byte = pair
    chosen = read(packed, 0, count)
    if const_expr(two):
        weighted6 = ptx.mul(weight6, totals[0])
        delta = cute.make_rmem_tensor(1, Float32)
        delta[0] = warp_sum(ptx.sub(ptx.mul(weight4, totals[1]), weighted6), holding)
        bound = arithmetic.error_bound(warp_sum(weighted6, holding), base, encoding.err_mode, rows)
        undecided = ~(ptx.abs_(delta[0]) > bound)
        if const_expr(wild):
            undecided = Boolean(True)
        # Equal scales give equal candidates, and a delta of 0 or NaN keeps map-to-6.
        undecided = undecided & (entry4 != entry6)
        if cute.arch.vote_any_sync(undecided):
            ptx.keep_branch()
            scales = (scale_of(entry6), scale_of(entry4))
            difference = arithmetic.decoded_difference(
                read(packed, 0, count), read(packed, count, count), *scales
            )
            for lanes in holding.lanes:
                difference = ptx.or_(difference, ptx.shuffle_xor(difference, lanes))
            equal = difference == Uint32(0)
            delta[0] = ptx.select(undecided & equal, Float32(0.0), delta[0])
            undecided = undecided & ~equal
            if cute.arch.vote_any_sync(undecided):
                ptx.keep_branch()
                if const_expr(wild):
                    errors = _exact_errors(raw, packed, holding, encoding, scales, g, True)
                    write_choice(delta, undecided, errors)
                else:
                    unit6, is_short6 = arithmetic.short_decode(scales[0], g, encoding)
                    unit4, is_short4 = arithmetic.short_decode(scales[1], g, encoding)
                    if cute.arch.vote_all_sync((is_short6 & is_short4) | ~undecided):
                        ptx.keep_branch()
                        units = (unit6, unit4)
                        errors = _exact_errors(
                            raw, packed, holding, encoding, scales, g, False, units
                        )
                        write_choice(delta, undecided, errors)
                    else:
                        ptx.keep_branch()
                        errors = _exact_errors(raw, packed, holding, encoding, scales, g, False)
                        write_choice(delta, undecided, errors)
        take4 = delta[0] < Float32(0.0)
        byte = ptx.select(take4, ptx.shr(pair, 8), pair)
        chosen = [ptx.select(take4, packed[count + i], packed[i]) for i in range(count)]
    for row in range_constexpr(rows):
        words = segment(raw, row, encoding)
        half = len(words) // 2
        for side in range_constexpr(2):
            signs = arithmetic.sign_word(words[half * side : half * (side + 1)], encoding.dtype)
            magnitudes = form.codes(chosen[form.words * row : form.words * (row + 1)], side)
            out[2 * row + side] = arithmetic.signed_codes(magnitudes, signs, sign_mask[0])
    out[2 * rows] = byte
    write(out, 2 * rows + 1, chosen)
