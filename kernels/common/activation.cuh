// What an MLP does with its gates and ups. Products of few rows and of many end with the same.
#pragma once

constexpr float LOG2_E = 1.44269504f;

// 1 / (1 + e^-gate)
DEVICE float sigmoid(float gate) {
    // Not divided: that has a branch for what is rare, and rows that wait for it one after the other.
    return reciprocal(1.0f + ex2(-gate * LOG2_E));
}

// silu(gate) * up
DEVICE float swiglu(float gate, float up) {
    return gate * sigmoid(gate) * up;
}

// x + silu(gate)
DEVICE float grown_by_silu(float x, float gate) {
    return fmaf(gate, sigmoid(gate), x);
}
