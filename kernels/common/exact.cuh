// Arithmetic whose last bit is the same on every machine: weights must not depend on where they are
// computed. The compiler may fuse a product with a sum that it sees as `a * b + c`, but not these.
#pragma once

#ifdef __CUDACC_RTC__

DEVICE float product(float a, float b) {
    return __fmul_rn(a, b);
}

DEVICE float sum(float a, float b) {
    return __fadd_rn(a, b);
}

DEVICE double product(double a, double b) {
    return __dmul_rn(a, b);
}

DEVICE double sum(double a, double b) {
    return __dadd_rn(a, b);
}

#else

DEVICE float product(float a, float b) {
    return a * b;
}

DEVICE float sum(float a, float b) {
    return a + b;
}

DEVICE double product(double a, double b) {
    return a * b;
}

DEVICE double sum(double a, double b) {
    return a + b;
}

#endif

constexpr float LARGEST_FLOAT = 3.40282347e38f;
constexpr float LOWEST_EXPONENT = -87.0f;

DEVICE float negative_infinity() {
    return bits_float(0xff800000u);
}

// e^x for x <= 0: exactly 1 at 0, and 0 below -87 and for NaN. Operation by operation the executors' `exp`
// on the host.
DEVICE float exp_weight(float x) {
    // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits.
    const float round = 12582912.0f;
    const float clamped = x > LOWEST_EXPONENT ? x : LOWEST_EXPONENT;
    const float shifted = sum(product(clamped, 1.44269504f), round);
    const float power = sum(shifted, -round);
    // ln 2 in two parts.
    float r = sum(clamped, -product(power, 0.6933594f));
    r = sum(r, -product(power, -2.1219444e-4f));
    float p = 1.9875691e-4f;
    p = sum(product(p, r), 1.3981999e-3f);
    p = sum(product(p, r), 8.333452e-3f);
    p = sum(product(p, r), 4.1665796e-2f);
    p = sum(product(p, r), 1.6666665e-1f);
    p = sum(product(p, r), 5e-1f);
    const float value = sum(sum(product(p, product(r, r)), r), 1.0f);
    const float scale = bits_float((float_bits(shifted) << 23) + float_bits(1.0f));
    return x >= LOWEST_EXPONENT ? product(value, scale) : 0.0f;
}
