// Floats as f16, several at once.
#pragma once

DEVICE Uint2 four_halves(const Float4& v) {
    return {
        float_to_half_sat(v.x) | uint32_t(float_to_half_sat(v.y)) << 16,
        float_to_half_sat(v.z) | uint32_t(float_to_half_sat(v.w)) << 16,
    };
}
