"""Which units the blocks of a few-row product multiply, as `kernels/gemm/split.cuh` cuts them."""

from typing import NamedTuple

UNIT_BYTES = 8192
UNIT_OUTPUTS = 64
UNIT_ROW_BYTES = 128
SEGMENT_K = 1024


class Split(NamedTuple):
    """Averages over the blocks, but for the units, of which the last block to end has the most."""

    units: int
    pieces: float
    # Segments of the inputs that a block stages.
    segments: int
    # Parts of a tile that are added up; 0 where blocks have whole tiles.
    parts: float
    # Tiles that a block finishes.
    tiles: float


def up(a, b):
    return -(-a // b)


def split(n, k, weight_bytes, grid, owns_tiles):
    """Of n outputs and k inputs of so many bytes."""
    unit_k = UNIT_ROW_BYTES // weight_bytes
    tiles, k_units = up(n, UNIT_OUTPUTS), up(k, unit_k)
    segment_units = up(k_units, up(k_units, SEGMENT_K // unit_k))
    num_segments = up(k_units, segment_units)
    if owns_tiles:
        most = up(tiles, grid)
        return Split(most * k_units, most * num_segments, num_segments, 0, most)
    units = tiles * k_units
    per_block = up(units, grid)
    num_parts = [0] * tiles
    num_pieces = first = 0
    for segment in range(num_segments):
        length = min(segment_units, k_units - segment * segment_units)
        for tile in range(tiles):
            pieces = (first + length - 1) // per_block - first // per_block + 1
            num_pieces += pieces
            num_parts[tile] += pieces
            first += length
    is_whole = num_segments == 1 and num_pieces == tiles
    return Split(per_block, num_pieces / grid, 1, 0 if is_whole else sum(num_parts) / tiles, tiles / grid)
