// From scores to weights: temperature, then top-k, top-p and min-p, each on what the one before has left, as
// the host's `sampling::truncate` has them.
#pragma once
#include "select.cuh"
#include "step.cuh"

// Tokens that are listed before a search; if there are more, it goes through all.
constexpr uint32_t MAX_LISTED = 4096;

// Shared memory of a row.
struct RowScratch {
    BlockScratch block;
    SelectScratch select;
    float largest[MAX_THREADS];  // each thread's largest score
    uint32_t num_listed;
    uint32_t listed[MAX_LISTED];
};

// Tokens of which the values of at least `floor` are searched.
struct Candidates {
    const float* values;
    float floor;
    const uint32_t* listed;  // ids, or null for all
    uint32_t count;

    DEVICE uint32_t id(uint32_t idx) const {
        return listed == nullptr ? idx : listed[idx];
    }
};

// The k largest of them.
struct CountedFloats {
    Candidates of;

    DEVICE uint64_t measure(uint32_t) const {
        return 1;
    }

    DEVICE Item operator()(uint32_t idx) const {
        const uint32_t id = of.id(idx);
        const float value = of.values[id];
        return {id, ordered_key(value), value >= of.floor ? 1u : 0u};
    }
};

// Positive weights as integers: multiples of a power of two that is 2^-61 of their total or less.
struct FixedWeights {
    Candidates of;
    double scale;

    DEVICE uint64_t measure(uint32_t key) const {
        const double fixed = static_cast<double>(bits_float(key)) * scale;
        return maximum<uint64_t>(static_cast<uint64_t>(fixed), 1);
    }

    DEVICE Item operator()(uint32_t idx) const {
        const uint32_t id = of.id(idx);
        const float weight = of.values[id];
        const uint32_t key = float_bits(weight);
        return {id, key, weight > 0.0f && weight >= of.floor ? measure(key) : 0};
    }
};

// Lists the tokens whose value is at least `floor`, in no particular order, if they are not too many.
DEVICE Candidates list(const float* values, uint32_t vocab, float floor, RowScratch& scratch) {
    if (thread_index() == 0) {
        scratch.num_listed = 0;
    }
    barrier_all();
    for (uint32_t id = thread_index(); id < vocab; id += num_threads()) {
        if (values[id] >= floor) {
            const uint32_t place = atomic_add(&scratch.num_listed, 1);
            if (place < MAX_LISTED) {
                scratch.listed[place] = id;
            }
        }
    }
    barrier_all();
    if (scratch.num_listed > MAX_LISTED) {
        return {values, floor, nullptr, vocab};
    }
    return {values, floor, scratch.listed, scratch.num_listed};
}

// The largest score, negative infinity if there is none but NaN; leaves each thread's own behind.
DEVICE float largest_score(const float* scores, uint32_t vocab, RowScratch& scratch) {
    float largest = negative_infinity();
    for (uint32_t id = thread_index(); id < vocab; id += num_threads()) {
        if (scores[id] > largest) {
            largest = scores[id];
        }
    }
    scratch.largest[thread_index()] = largest;
    return static_cast<float>(block_best(scratch.block, {largest, thread_index()}).score);
}

// Where top-k cuts the scores. At least k of them reach the k-th largest of the threads' own largest, which
// leaves few to search.
DEVICE Cut top_k(const float* scores, uint32_t vocab, uint32_t k, RowScratch& scratch) {
    Candidates all = {scores, negative_infinity(), nullptr, vocab};
    if (k <= num_threads() / 2) {
        const CountedFloats own = {{scratch.largest, negative_infinity(), nullptr, num_threads()}};
        const uint32_t key = reach(own, num_threads(), k, 32, scratch.select).key;
        all = list(scores, vocab, ordered_float(key), scratch);
    }
    return select(CountedFloats{all}, all.count, k, scratch.select);
}

// Where top-p cuts weights of this total: after the shortest prefix that reaches `goal`.
DEVICE Cut top_p(const float* weights, uint32_t vocab, float floor, double total, double goal,
                 RowScratch& scratch) {
    // The total is below 2^(exponent + 1), so that no sum reaches 2^63.
    const uint64_t exponent = (double_bits(total) >> 52) - 1023;
    const double scale = bits_double((1023 + 61 - exponent) << 52);
    const double scaled = goal * scale;
    const uint64_t whole = static_cast<uint64_t>(scaled);
    const uint64_t fixed = whole + (static_cast<double>(whole) < scaled ? 1 : 0);
    const Candidates likely = list(weights, vocab, floor, scratch);
    return select(FixedWeights{likely, scale}, likely.count, fixed, scratch.select);
}

// Writes the weight of each token that `cut` keeps, relative to the likeliest, else 0; returns their total.
DEVICE double weigh(const float* scores, uint32_t vocab, const Cut& cut, float temperature,
                    float largest, float* weights, BlockScratch& scratch) {
    // Infinite scores would give NaN against an infinite maximum.
    const float most = minimum(largest, LARGEST_FLOAT);
    double total = 0.0;
    for (uint32_t id = thread_index(); id < vocab; id += num_threads()) {
        const float score = scores[id] > LARGEST_FLOAT ? LARGEST_FLOAT : scores[id];
        const bool is_kept = cut.keeps(ordered_key(scores[id]), id);
        const float weight = is_kept ? exp_weight((score - most) / temperature) : 0.0f;
        weights[id] = weight;
        total += static_cast<double>(weight);
    }
    return block_sum(scratch, total);
}

// Drops weights that `cut` does not keep or that are below `least`; returns the new total.
DEVICE double narrow(float* weights, uint32_t vocab, const Cut& cut, float least,
                     BlockScratch& scratch) {
    double total = 0.0;
    for (uint32_t id = thread_index(); id < vocab; id += num_threads()) {
        float weight = weights[id];
        if (weight < least || !cut.keeps(float_bits(weight), id)) {
            weight = 0.0f;
            weights[id] = weight;
        }
        total += static_cast<double>(weight);
    }
    return block_sum(scratch, total);
}

// Writes the weights of a positive temperature and returns their total; all threads see them. `largest` is
// what largest_score found, above negative infinity.
DEVICE double truncate(const StepSequence& s, const float* scores, uint32_t vocab, float largest,
                       float* weights, RowScratch& scratch) {
    const bool has_top_k = s.top_k > 0 && s.top_k < vocab;
    const Cut first = has_top_k ? top_k(scores, vocab, s.top_k, scratch) : KEEP_ALL;
    double total = weigh(scores, vocab, first, s.temperature, largest, weights, scratch.block);
    if (s.top_p == 1.0f && s.min_p == 0.0f) {
        return total;
    }
    Cut second = KEEP_ALL;
    float least = s.min_p;
    if (s.top_p < 1.0f) {
        const double goal = total * static_cast<double>(s.top_p);
        // All tokens below together weigh less than what may be left out, so none of them is needed. The
        // factor covers the rounding of the sums.
        const double most_tokens = static_cast<double>(has_top_k ? s.top_k : vocab);
        const float floor = static_cast<float>(0.99 * (total - goal) / most_tokens);
        second = top_p(weights, vocab, floor, total, goal, scratch);
        least = maximum(least, floor);
    }
    return narrow(weights, vocab, second, least, scratch.block);
}
