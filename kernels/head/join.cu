// Puts rows together from pieces that lie side by side, each normed where it has weights: what a head on hidden states
// multiplies, in f16. The last piece may grow before that by what silu makes of the sums of a product; it may be kept in f32
// too, and rows that a product then adds to are cleared on the way.
// Any grid: a CTA takes every num_blocks-th row. A row's bits depend on that row alone.
#include "common/prims.cuh"
#include "common/types.cuh"

#include "common/activation.cuh"
#include "common/halves.cuh"
#include "common/squares.cuh"
#include "common/unit.cuh"

// A part of each row.
struct Piece {
    const float* rows;    // [row][stride]
    const float* norm;    // [len], or null: no norm
    uint32_t stride;
    uint32_t len;         // a multiple of 4
};
static_assert(sizeof(Piece) == 24, "as on the host");

constexpr uint32_t MOST_PIECES = 16;

struct JoinParams {
    Piece pieces[MOST_PIECES];
    const uint32_t* row_index;  // row of the pieces for each row, or null: its own
    uint8_t* joined;            // f16 [row][all pieces], or units; or null
    const float* sums;          // [row][len of the last piece], or null: that piece grows by their silu, and has no norm
    float* kept;                // [row][len of the last piece], or null; may be where the first piece comes from
    float* cleared;             // [row][cleared_len], may be `sums`, or where the first piece comes from without gaps, if as long
    uint32_t num_rows;
    uint32_t num_pieces;        // 1 ..= MOST_PIECES
    uint32_t is_together;       // one norm over all pieces, not one each
    uint32_t keeps_normed;      // what is kept is behind the norm
    uint32_t cleared_len;       // a multiple of 4
    float eps;
    uint32_t joined_units;      // of 64 joined rows; 0: row after row
    uint32_t unused;
};
static_assert(sizeof(JoinParams) == 456, "as on the host");

constexpr uint32_t THREADS = 256;
constexpr uint32_t WARPS = THREADS / 32;

// Every thread gets the sum, which is added up in the same order whatever the row.
DEVICE float block_sum(float value) {
    value = warp_sum(value);
    float* parts = (float*)shared_memory();
    // Nobody reads an earlier sum any more.
    barrier_all();
    if (lane_index() == 0) {
        parts[warp_index()] = value;
    }
    barrier_all();
    float total = parts[0];
    for (uint32_t warp = 1; warp < WARPS; ++warp) {
        total += parts[warp];
    }
    return total;
}

DEVICE const float* row_of(const JoinParams& p, const Piece& piece, uint32_t row) {
    const uint32_t from = p.row_index ? p.row_index[row] : row;
    return piece.rows + uint64_t(from) * piece.stride;
}

// A thread's share of the squares of a piece.
DEVICE float squares_of(const Piece& piece, const float* row) {
    float sum = 0.0f;
    for (uint32_t k = 4 * thread_index(); k < piece.len; k += 4 * THREADS) {
        sum = add_squares(*(const Float4*)(row + k), sum);
    }
    return sum;
}

DEVICE float factor_of(float squares, uint32_t len, float eps) {
    return 1.0f / sqrtf(squares / float(len) + eps);
}

// That of a norm over all pieces.
DEVICE float factor_of_all(const JoinParams& p, uint32_t row) {
    float share = 0.0f;
    uint32_t len = 0;
    for (uint32_t i = 0; i < p.num_pieces; ++i) {
        share += squares_of(p.pieces[i], row_of(p, p.pieces[i], row));
        len += p.pieces[i].len;
    }
    return factor_of(block_sum(share), len, p.eps);
}

DEVICE Float4 normed(const Piece& piece, uint32_t k, float factor, const Float4& v) {
    if (!piece.norm) {
        return v;
    }
    const Float4 w = *(const Float4*)(piece.norm + k);
    return {v.x * factor * w.x, v.y * factor * w.y, v.z * factor * w.z, v.w * factor * w.w};
}

DEVICE Float4 grown(const Float4& v, const Float4& s) {
    return {
        grown_by_silu(v.x, s.x), grown_by_silu(v.y, s.y), grown_by_silu(v.z, s.z), grown_by_silu(v.w, s.w)};
}

// Where a joined row, so long, has four elements.
DEVICE Uint2* joined_at(const JoinParams& p, uint32_t row, uint32_t len, uint32_t k) {
    const bool in_units = p.joined_units != 0;
    return (Uint2*)(p.joined + (in_units ? half_offset(row, k, p.joined_units) : (uint64_t(row) * len + k) * 2));
}

// A joined row: which, how long, and where the piece begins.
struct Joined {
    uint32_t row;
    uint32_t len;
    uint32_t first;
};

DEVICE void join_piece(
    const JoinParams& p, uint32_t idx, const float* row, const float* sums, float factor, const Joined& joined,
    float* kept) {
    const Piece& piece = p.pieces[idx];
    for (uint32_t k = 4 * thread_index(); k < piece.len; k += 4 * THREADS) {
        Float4 v = *(const Float4*)(row + k);
        if (sums) {
            v = grown(v, *(const Float4*)(sums + k));
        }
        const Float4 w = normed(piece, k, factor, v);
        if (p.joined) {
            *joined_at(p, joined.row, joined.len, joined.first + k) = four_halves(w);
        }
        if (kept) {
            *(Float4*)(kept + k) = p.keeps_normed ? w : v;
        }
    }
}

// Pieces are read in their order, each element of a row by one thread: so the last one may take the first one's place,
// and what is cleared may be there too.
DEVICE void join_row(const JoinParams& p, uint32_t row) {
    uint32_t len = 0;
    for (uint32_t i = 0; i < p.num_pieces; ++i) {
        len += p.pieces[i].len;
    }
    float factor = p.is_together ? factor_of_all(p, row) : 1.0f;
    uint32_t before = 0;
    for (uint32_t i = 0; i < p.num_pieces; ++i) {
        const Piece& piece = p.pieces[i];
        const float* from = row_of(p, piece, row);
        if (piece.norm && !p.is_together) {
            factor = factor_of(block_sum(squares_of(piece, from)), piece.len, p.eps);
        }
        const bool is_last = i + 1 == p.num_pieces;
        const float* sums = is_last && p.sums ? p.sums + uint64_t(row) * piece.len : nullptr;
        float* kept = is_last && p.kept ? p.kept + uint64_t(row) * piece.len : nullptr;
        join_piece(p, i, from, sums, factor, {row, len, before}, kept);
        before += piece.len;
    }
    // What a product finds beyond a row has to be numbers.
    for (uint32_t k = len + 4 * thread_index(); p.joined && k < p.joined_units * UNIT_HALVES; k += 4 * THREADS) {
        *joined_at(p, row, len, k) = {};
    }
    for (uint32_t k = 4 * thread_index(); k < p.cleared_len; k += 4 * THREADS) {
        *(Float4*)(p.cleared + uint64_t(row) * p.cleared_len + k) = {};
    }
}

KERNEL(join, JoinParams, THREADS, 4) {
    grid_wait();
    grid_launch_dependents();
    for (uint32_t row = block_index(); row < p.num_rows; row += num_blocks()) {
        join_row(p, row);
    }
}
