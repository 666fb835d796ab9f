// What stands between the matrix products of a decoder layer, each in one pass over memory. fp32, rows strided.
#include <cmath>

#include "vector.h"

using namespace ucm;

namespace {

constexpr int64_t SERIAL = 1 << 15;  // elements below which waking other threads costs more than it saves

// out = weight * y / sqrt(mean(y^2) + eps) with y = x + residual, which is kept in residual.
void normalise(const float* x, float* residual, const float* weight, float* out, int64_t size, float eps) {
    Floats squares[4] = {};
    const int64_t vectors = size / LANES * LANES;
    float rest = 0;
    const float* y = residual ? residual : x;
    for (int64_t i = 0, turn = 0; i < vectors; i += LANES, ++turn) {
        Floats v = load(x + i);
        if (residual) store(residual + i, v = v + load(residual + i));
        squares[turn & 3] += v * v;
    }
    for (int64_t i = vectors; i < size; ++i) {
        if (residual) residual[i] += x[i];
        rest += y[i] * y[i];
    }
    rest += sum((squares[0] + squares[1]) + (squares[2] + squares[3]));
    const float scale = 1.0f / std::sqrt(rest / float(size) + eps);
    for (int64_t i = 0; i < vectors; i += LANES) {
        const Floats v = load(y + i) * scale;
        store(out + i, weight ? v * load(weight + i) : v);
    }
    for (int64_t i = vectors; i < size; ++i) out[i] = y[i] * scale * (weight ? weight[i] : 1.0f);
}

// (a, b) -> (a cos - b sin, b cos + a sin) for the two halves of the first 2 * half elements of every head.
void rotate(float* heads, int64_t count, int64_t size, int64_t half, const float* cosine, const float* sine) {
    for (int64_t head = 0; head < count; ++head, heads += size) {
        int64_t i = 0;
        for (; i + LANES <= half; i += LANES) {
            const Floats a = load(heads + i), b = load(heads + half + i);
            const Floats c = load(cosine + i), s = load(sine + i);
            store(heads + i, a * c - b * s);
            store(heads + half + i, b * c + a * s);
        }
        for (; i < half; ++i) {
            const float a = heads[i], b = heads[half + i];
            heads[i] = a * cosine[i] - b * sine[i];
            heads[half + i] = b * cosine[i] + a * sine[i];
        }
    }
}

}  // namespace

extern "C" void ucm_rms_norm(
    const float* x, int64_t x_stride, float* residual, int64_t residual_stride, const float* weight, float* out,
    int64_t rows, int64_t size, float eps) {
#pragma omp parallel for if (rows * size > SERIAL)
    for (int64_t row = 0; row < rows; ++row)
        normalise(x + row * x_stride, residual ? residual + row * residual_stride : nullptr, weight, out + row * size,
                  size, eps);
}

// angles: [positions, cosines of a half | sines of a half]. Returns the first row whose position is not in it, or -1.
extern "C" int64_t ucm_rotary(
    float* query, int64_t query_stride, int64_t query_heads, float* key, int64_t key_stride, int64_t key_heads,
    const int64_t* positions, int64_t rows, const float* angles, int64_t max_position, int64_t head_size,
    int64_t rotary_size) {
    for (int64_t row = 0; row < rows; ++row)
        if (positions[row] < 0 || positions[row] >= max_position) return row;
    const int64_t half = rotary_size / 2;
#pragma omp parallel for if (rows * query_heads * head_size > SERIAL)
    for (int64_t row = 0; row < rows; ++row) {
        const float* cosine = angles + positions[row] * rotary_size;
        rotate(query + row * query_stride, query_heads, head_size, half, cosine, cosine + half);
        rotate(key + row * key_stride, key_heads, head_size, half, cosine, cosine + half);
    }
    return -1;
}

// out = x[:size] / (1 + exp(-x[:size])) * x[size:]
extern "C" void ucm_silu_and_mul(const float* x, int64_t x_stride, float* out, int64_t rows, int64_t size) {
    constexpr int64_t piece = 512;  // one row may be all there is: threads share its columns
    const int64_t pieces = (size + piece - 1) / piece;
#pragma omp parallel for collapse(2) if (rows * size > SERIAL)
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t part = 0; part < pieces; ++part) {
            const float* gate = x + row * x_stride;
            const int64_t last = part + 1 < pieces ? (part + 1) * piece : size;
            int64_t i = part * piece;
            for (; i + LANES <= last; i += LANES) {
                const Floats g = load(gate + i);
                store(out + row * size + i, g / (1.0f + exponential(-g)) * load(gate + size + i));
            }
            for (; i < last; ++i) out[row * size + i] = gate[i] / (1.0f + std::exp(-gate[i])) * gate[size + i];
        }
}
