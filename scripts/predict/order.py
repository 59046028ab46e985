"""Which units the blocks of a product multiply, as `kernels/wgmma/order.cuh` cuts them."""

from typing import NamedTuple

UNIT_BYTES = 8192
UNIT_OUTPUTS = 64
UNIT_ROW_BYTES = 128
PAIR_TILES = 2
# Stages of a ring at most, and units that are asked for and not there yet, while it fills for the first time and after.
MOST_STAGES = 11
FIRST_UNDER_WAY = 2
UNITS_UNDER_WAY = 4
# Warps that copy rows, of up to so many and of more; beyond MOST_COPIED a thread asks for them, and two blocks share them.
COPY_WARPS, FEW_COPIED, MANY_COPY_WARPS, MOST_COPIED = 1, 32, 2, 64


class Order(NamedTuple):
    """Averages over the blocks, but for the units, of which the last block to end has the most."""

    # Of pairs of tiles.
    units: int
    # Runs of units of one pair.
    pieces: float
    # Parts of a pair that are added up; 0 where blocks have whole pairs.
    parts: float
    # Pairs that a block finishes.
    pairs: float


def up(a, b):
    return -(-a // b)


def finish_rows(most_rows):
    """Rows whose sums are made outputs of together, by a kernel for so many."""
    return most_rows if most_rows <= 32 else 16 if most_rows <= 192 else 32


def most_at_once(most_rows):
    """Rows of a warp whose outputs are made together, by a kernel for so many."""
    return 4 if most_rows <= 192 else 8


def unit_k(weight_bytes):
    return UNIT_ROW_BYTES // weight_bytes


def order(n, k, weight_bytes, grid, owns_tiles):
    """Of n outputs and k inputs of so many bytes."""
    pairs, k_units = up(up(n, UNIT_OUTPUTS), PAIR_TILES), up(k, unit_k(weight_bytes))
    if owns_tiles:
        most = up(pairs, grid)
        return Order(most * k_units, most, 0, most)
    units = pairs * k_units
    per_block = up(units, grid)
    blocks = up(units, per_block)
    pieces = [(pair * k_units + k_units - 1) // per_block - pair * k_units // per_block + 1 for pair in range(pairs)]
    is_whole = sum(pieces) == pairs
    return Order(per_block, sum(pieces) / blocks, 0 if is_whole else sum(pieces) / pairs, pairs / blocks)


def shares_rows(n, k, weight_bytes, grid):
    """Whether two blocks multiply the same units of k at the same time, with other weights."""
    pairs, k_units = up(up(n, UNIT_OUTPUTS), PAIR_TILES), up(k, unit_k(weight_bytes))
    per_block = up(pairs * k_units, grid)
    return any(distance * per_block % k_units == 0 for distance in range(1, grid // 2 + 1))
