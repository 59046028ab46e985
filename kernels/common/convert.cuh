// Number formats by integer arithmetic alone: what architectures without an instruction for them
// run, and what the emulator runs everywhere. Written for both compilers; included by the
// primitives only.
#pragma once

// The e4m3 nearest to a float (ties to even), of which the format has no infinity: what lies beyond
// 448 becomes 448, NaN stays NaN.
DEVICE uint32_t e4m3_bits(float value) {
    const uint32_t bits = float_bits(value);
    const uint32_t sign = (bits >> 24) & 0x80u;
    uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) {
        return 0x7fu;
    }
    if (magnitude >= float_bits(448.0f)) {
        return sign | 0x7eu;
    }
    if (magnitude < float_bits(0.015625f)) {
        // Subnormal: next to 2^14 a float has steps of 2^-9, as the format has near zero.
        return sign | (float_bits(bits_float(magnitude) + 16384.0f) - float_bits(16384.0f));
    }
    magnitude += 0x7ffffu + ((magnitude >> 20) & 1u);
    return sign | ((magnitude >> 20) - ((127u - 7u) << 3));
}

// Two bytes of e4m3, the lower first, as two halves. The bits in the places of a half are the value
// times 2^-8, subnormals included.
DEVICE uint32_t e4m3_to_half2_bits(uint32_t pair) {
    const uint32_t spread = (pair & 0xffu) | (pair & 0xff00u) << 8;
    const uint32_t magnitude = spread & 0x007f007fu;
    const uint32_t is_nan = (magnitude + 0x00010001u) >> 7 & 0x00010001u;
    const uint32_t scaled = (spread & 0x00800080u) << 8 | magnitude << 7;
    return multiply_half2(scaled, 0x5c005c00u) | is_nan * 0x7fffu;
}
