// What an MLP does with its gates and ups. Products of few rows and of many end with the same.
#pragma once

constexpr float LOG2_E = 1.44269504f;

// silu(gate) * up
DEVICE float swiglu(float gate, float up) {
    // Not divided: that has a branch for what is rare, and rows that wait for it one after the other.
    return gate * reciprocal(1.0f + ex2(-gate * LOG2_E)) * up;
}
