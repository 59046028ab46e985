// Where a new key and value go in one layer's cache: [page][kv head][K | V] with K = [16 tokens][d] and
// V = [d][16 tokens], elements f16 or e4m3. Values are transposed so that attention reads pairs of tokens.
#pragma once

struct Cache {
    uint8_t* memory;   // of the layer
    uint32_t num_kv_heads;
    bool is_fp8;
    float factor;      // of what is stored as e4m3: one over the scale of the head's keys, or of its values
};

// One over a power of two, exactly.
DEVICE float one_over(float power_of_two) {
    return bits_float(0x7f000000u - float_bits(power_of_two));
}

// The place of one row's keys and values.
struct CacheSlot {
    uint64_t page;
    uint32_t token;
};

// By the table of pages, [sequence][max_pages]. Rows without a sequence have no place: the caller must not ask for it.
DEVICE CacheSlot cache_slot(const uint32_t* pages, uint32_t max_pages, const Row& row) {
    const uint64_t entry = uint64_t(row.sequence) * max_pages + row.slot / PAGE_TOKENS;
    return {pages[entry], row.slot % PAGE_TOKENS};
}

DEVICE uint64_t cache_block(const Cache& cache, const CacheSlot& slot, uint32_t head) {
    return (slot.page * cache.num_kv_heads + head) * (2 * PAGE_TOKENS * HEAD_DIM);
}

DEVICE void store_element(const Cache& cache, uint64_t index, float value) {
    if (cache.is_fp8) {
        cache.memory[index] = float_to_e4m3(value * cache.factor);
    } else {
        ((uint16_t*)cache.memory)[index] = float_to_half_sat(value);
    }
}

DEVICE void store_key(
    const Cache& cache, const CacheSlot& slot, uint32_t head, uint32_t element, float value) {
    const uint64_t index = cache_block(cache, slot, head) + slot.token * HEAD_DIM + element;
    store_element(cache, index, value);
}

DEVICE void store_value(
    const Cache& cache, const CacheSlot& slot, uint32_t head, uint32_t element, float value) {
    const uint32_t place = (HEAD_DIM + element) * PAGE_TOKENS + slot.token;
    store_element(cache, cache_block(cache, slot, head) + place, value);
}
