// The same as elementwise.cpp for bfloat16 and float16: read as fp32, computed so, and rounded once where results are left.
// A norm is rounded before it is weighted, too, as vLLM defines it.
#include <cmath>

#include "half.h"
#include "memory.h"

using namespace ucm;

namespace {

constexpr int64_t SERIAL = 1 << 15;  // elements below which waking other threads costs more than it saves

template <typename T>
void normalise(
    const uint16_t* x, uint16_t* residual, const uint16_t* weight, uint16_t* out, float* y, int64_t size, float eps) {
    float squares[LANES] = {};
    for (int64_t i = 0; i < size; ++i) y[i] = T::widen(x[i]) + (residual ? T::widen(residual[i]) : 0.0f);
    if (residual)
        for (int64_t i = 0; i < size; ++i) residual[i] = T::narrow(y[i]);
    const int64_t whole = size / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES)
        for (int lane = 0; lane < LANES; ++lane) squares[lane] += y[i + lane] * y[i + lane];
    float total = sum(load(squares));
    for (int64_t i = whole; i < size; ++i) total += y[i] * y[i];
    const float scale = 1.0f / std::sqrt(total / float(size) + eps);
    if (weight)
        for (int64_t i = 0; i < size; ++i) out[i] = T::narrow(T::widen(T::narrow(y[i] * scale)) * T::widen(weight[i]));
    else
        for (int64_t i = 0; i < size; ++i) out[i] = T::narrow(y[i] * scale);
}

template <typename T>
void normalise_rows(
    const uint16_t* x, int64_t x_stride, uint16_t* residual, int64_t residual_stride, const uint16_t* weight,
    uint16_t* out, int64_t rows, int64_t size, float eps) {
#pragma omp parallel for if (rows * size > SERIAL)
    for (int64_t row = 0; row < rows; ++row) {
        static thread_local Scratch scratch;
        normalise<T>(x + row * x_stride, residual ? residual + row * residual_stride : nullptr, weight, out + row * size,
                     scratch.take(size), size, eps);
    }
}

template <typename T>
void rotate(uint16_t* heads, int64_t count, int64_t size, int64_t half, const float* cosine, const float* sine) {
    for (int64_t head = 0; head < count; ++head, heads += size)
        for (int64_t i = 0; i < half; ++i) {
            const float a = T::widen(heads[i]), b = T::widen(heads[half + i]);
            heads[i] = T::narrow(a * cosine[i] - b * sine[i]);
            heads[half + i] = T::narrow(b * cosine[i] + a * sine[i]);
        }
}

template <typename T>
void rotate_rows(
    uint16_t* query, int64_t query_stride, int64_t query_heads, uint16_t* key, int64_t key_stride, int64_t key_heads,
    const int64_t* positions, int64_t rows, const uint16_t* angles, int64_t head_size, int64_t rotary_size) {
#pragma omp parallel for if (rows * query_heads * head_size > SERIAL)
    for (int64_t row = 0; row < rows; ++row) {
        static thread_local Scratch scratch;
        float* cosine = scratch.take(rotary_size);
        for (int64_t i = 0; i < rotary_size; ++i) cosine[i] = T::widen(angles[positions[row] * rotary_size + i]);
        const float* sine = cosine + rotary_size / 2;
        rotate<T>(query + row * query_stride, query_heads, head_size, rotary_size / 2, cosine, sine);
        rotate<T>(key + row * key_stride, key_heads, head_size, rotary_size / 2, cosine, sine);
    }
}

template <typename T>
void gate_rows(const uint16_t* x, int64_t x_stride, uint16_t* out, int64_t rows, int64_t size) {
    constexpr int64_t piece = 512;  // one row may be all there is: threads share its columns
    const int64_t pieces = (size + piece - 1) / piece;
#pragma omp parallel for collapse(2) if (rows * size > SERIAL)
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t part = 0; part < pieces; ++part) {
            const uint16_t* gate = x + row * x_stride + part * piece;
            const int64_t count = part + 1 < pieces ? piece : size - part * piece;
            float gates[piece] = {};
            for (int64_t i = 0; i < count; ++i) gates[i] = T::widen(gate[i]);
            for (int64_t i = 0; i < piece; i += LANES) {
                const Floats g = load(gates + i);
                store(gates + i, g / (1.0f + exponential(-g)));
            }
            uint16_t* to = out + row * size + part * piece;
            for (int64_t i = 0; i < count; ++i) to[i] = T::narrow(gates[i] * T::widen(gate[size + i]));
        }
}

template <typename T>
void widen_rows(const uint16_t* from, int64_t stride, float* to, int64_t rows, int64_t size) {
#pragma omp parallel for if (rows * size > SERIAL)
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t i = 0; i < size; ++i) to[row * size + i] = T::widen(from[row * stride + i]);
}

template <typename T>
void narrow_rows(const float* from, uint16_t* to, int64_t stride, int64_t rows, int64_t size) {
#pragma omp parallel for if (rows * size > SERIAL)
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t i = 0; i < size; ++i) to[row * stride + i] = T::narrow(from[row * size + i]);
}

}  // namespace

// type: as in memory.h, of all tensors but positions.
extern "C" void ucm_rms_norm_half(
    const uint16_t* x, int64_t x_stride, uint16_t* residual, int64_t residual_stride, const uint16_t* weight,
    uint16_t* out, int64_t rows, int64_t size, float eps, int64_t type) {
    const auto run = type == BF16 ? normalise_rows<Brain> : normalise_rows<Half>;
    run(x, x_stride, residual, residual_stride, weight, out, rows, size, eps);
}

// Returns the first row whose position is not in the angles, or -1.
extern "C" int64_t ucm_rotary_half(
    uint16_t* query, int64_t query_stride, int64_t query_heads, uint16_t* key, int64_t key_stride, int64_t key_heads,
    const int64_t* positions, int64_t rows, const uint16_t* angles, int64_t max_position, int64_t head_size,
    int64_t rotary_size, int64_t type) {
    for (int64_t row = 0; row < rows; ++row)
        if (positions[row] < 0 || positions[row] >= max_position) return row;
    const auto run = type == BF16 ? rotate_rows<Brain> : rotate_rows<Half>;
    run(query, query_stride, query_heads, key, key_stride, key_heads, positions, rows, angles, head_size, rotary_size);
    return -1;
}

extern "C" void ucm_silu_and_mul_half(
    const uint16_t* x, int64_t x_stride, uint16_t* out, int64_t rows, int64_t size, int64_t type) {
    const auto run = type == BF16 ? gate_rows<Brain> : gate_rows<Half>;
    run(x, x_stride, out, rows, size);
}

// Dense fp32 rows from and to rows of half precision, which may have gaps between them.
extern "C" void ucm_widen_rows(
    const uint16_t* from, int64_t stride, float* to, int64_t rows, int64_t size, int64_t type) {
    const auto run = type == BF16 ? widen_rows<Brain> : widen_rows<Half>;
    run(from, stride, to, rows, size);
}

extern "C" void ucm_narrow_rows(
    const float* from, uint16_t* to, int64_t stride, int64_t rows, int64_t size, int64_t type) {
    const auto run = type == BF16 ? narrow_rows<Brain> : narrow_rows<Half>;
    run(from, to, stride, rows, size);
}
