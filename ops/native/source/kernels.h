// Kernels that others are made of; what they compute is said where they are defined.
#pragma once

#include <cstdint>

extern "C" {
void ucm_rms_norm(
    const float* x, int64_t x_stride, float* residual, int64_t residual_stride, const float* weight, float* out,
    int64_t rows, int64_t size, float eps);
int64_t ucm_rotary(
    float* query, int64_t query_stride, int64_t query_heads, float* key, int64_t key_stride, int64_t key_heads,
    const int64_t* positions, int64_t rows, const float* angles, int64_t max_position, int64_t head_size,
    int64_t rotary_size);
void ucm_silu_and_mul(const float* x, int64_t x_stride, float* out, int64_t rows, int64_t size);
void ucm_linear(
    const float* x, int64_t x_stride, const float* panels, const float* bias, float* out, int64_t rows, int64_t in,
    int64_t outputs, int64_t width);
}
