// What turns the plain sums of a product into its outputs: the scales of FP8 weights, those of rows that were
// multiplied as FP8, and the bias. Each may be null.
#pragma once

struct Scaling {
    const float* outputs;   // of each output, in image order
    const float* rows;      // of each row
    const float* bias;      // of each output, in image order
};
static_assert(sizeof(Scaling) == 24, "as on the host");

DEVICE float scaled(const Scaling& s, uint32_t row, uint32_t n, float sum) {
    const float of_row = s.rows ? s.rows[row] : 1.0f;
    const float of_output = s.outputs ? s.outputs[n] : 1.0f;
    return fmaf(sum * of_row, of_output, s.bias ? s.bias[n] : 0.0f);
}
