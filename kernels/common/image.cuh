// The packed form of a weight matrix, as the host's weight image writes it. Units of 64 outputs x 128
// bytes of k follow each other, k fastest; inside a unit the 16-byte chunks of row r stand at c ^ (r & 7),
// so that neither ldmatrix nor a matrix descriptor meets a bank conflict. Word t of a chunk of FP8 has elements
// 2t, 2t + 1, 2t + 8 and 2t + 9 of its 16: what a lane of a product takes.
#pragma once

constexpr uint32_t UNIT_OUTPUTS = 64;
constexpr uint32_t UNIT_ROW_BYTES = 128;
constexpr uint32_t UNIT_BYTES = UNIT_OUTPUTS * UNIT_ROW_BYTES;
constexpr uint32_t CHUNK_BYTES = 16;

constexpr uint32_t WEIGHT_BYTES = WEIGHT == FP8 ? 1 : 2;
constexpr uint32_t UNIT_K = UNIT_ROW_BYTES / WEIGHT_BYTES;

// Byte of a unit at which a chunk of a row begins.
DEVICE uint32_t chunk_offset(uint32_t row, uint32_t chunk) {
    return row * UNIT_ROW_BYTES + (chunk ^ (row & 7)) * CHUNK_BYTES;
}

// Elements 2i and 2i + 1 of a chunk of FP8, in the lower half of a word.
DEVICE uint32_t e4m3_pair(const uint32_t (&chunk)[4], uint32_t i) {
    return chunk[i % 4] >> (i / 4 * 16) & 0xffffu;
}
