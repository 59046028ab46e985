// Units of packed matrices: 64 rows of 128 bytes of k, in which the 16-byte chunks of row r stand at c ^ (r & 7), so that
// neither ldmatrix nor a matrix descriptor meets a bank conflict. Units of a matrix follow each other, k fastest. Word t of
// a chunk of FP8 has elements 2t, 2t + 1, 2t + 8 and 2t + 9 of its 16: what a lane of a product takes.
#pragma once

constexpr uint32_t UNIT_OUTPUTS = 64;
constexpr uint32_t UNIT_ROW_BYTES = 128;
constexpr uint32_t UNIT_BYTES = UNIT_OUTPUTS * UNIT_ROW_BYTES;
constexpr uint32_t CHUNK_BYTES = 16;

// Halves that a row has of a unit.
constexpr uint32_t UNIT_HALVES = UNIT_ROW_BYTES / 2;

// Units of 64 rows of so many halves: what a unit of FP8 weights meets is always there.
DEVICE uint32_t row_units(uint32_t len) {
    return 2 * divide_up(len, 2 * UNIT_HALVES);
}

// Byte of a unit at which a chunk of a row begins.
DEVICE uint32_t chunk_offset(uint32_t row, uint32_t chunk) {
    return row * UNIT_ROW_BYTES + (chunk ^ (row & 7)) * CHUNK_BYTES;
}

// Of rows of halves, 64 of which have so many units: byte at which a row has the one at `k`.
DEVICE uint64_t half_offset(uint32_t row, uint32_t k, uint32_t units) {
    const uint64_t unit = uint64_t(row / UNIT_OUTPUTS) * units + k / UNIT_HALVES;
    const uint32_t chunk = k % UNIT_HALVES / (CHUNK_BYTES / 2);
    return unit * UNIT_BYTES + chunk_offset(row % UNIT_OUTPUTS, chunk) + k % (CHUNK_BYTES / 2) * 2;
}
