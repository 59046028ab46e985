// The largest of some logits, and the lowest index that has it.
#pragma once

// NaN and minus infinity never win, and of equals the lowest index does; with nothing to win the value stays
// minus infinity.
DEVICE Best better(Best best, float value, uint32_t index) {
    const bool wins = value > best.value || (value == best.value && index < best.index);
    return wins ? Best{value, index} : best;
}

DEVICE Best warp_best(Best best) {
    for (int32_t mask = 16; mask > 0; mask /= 2) {
        const float value = shuffle_xor(best.value, mask);
        const uint32_t index = shuffle_xor(best.index, mask);
        best = better(best, value, index);
    }
    return best;
}
