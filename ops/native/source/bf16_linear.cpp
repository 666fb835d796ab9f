// bfloat16 rows times a bfloat16 weight, by instructions that multiply pairs and add to float32 (AVX512-BF16): twice the
// rate of float32's, and nothing is widened. Products are exact, sums are rounded as oneDNN's are there.
#include <algorithm>

#include "memory.h"
#include "panel_product.h"
#include "team.h"

#if defined(__AVX512BF16__)

namespace ucm {
namespace {

constexpr int64_t MOST_ROWS = 1024;  // that all panels pass at once; more do not stay in the third cache

// out [rows, outputs], dense, = x [rows, in] * weight + bias; the weight lies in panels [outputs / width, in / 2, width, 2].
struct Task {
    const uint16_t* x;
    int64_t x_stride;
    const uint16_t *weight, *bias;
    uint16_t* out;
    int64_t rows, in, outputs, width;
};

// What is fetched while a block of rows is multiplied: `step` bytes per pair of inputs.
struct Next {
    const char* at;
    int64_t step;
};

inline __m512bh pairs(const uint16_t* from) { return (__m512bh)_mm512_loadu_si512(from); }

// The same two inputs in all lanes.
inline __m512bh pair(const uint16_t* from) {
    int32_t both;
    std::memcpy(&both, from, sizeof both);
    return (__m512bh)_mm512_set1_epi32(both);
}

inline __m512 widened(const uint16_t* from) {
    return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)), 16);
}

inline void narrow(uint16_t* to, __m512 v) { _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh(v)); }

// out[ROWS][VECTORS] = bias + x * panel, from column `output` on. weight: of that column, in its panel.
template <int ROWS, int VECTORS>
void multiply(const Task& task, const uint16_t* weight, int64_t row, int64_t output, Next next) {
    const uint16_t* x = task.x + row * task.x_stride;
    __m512 sums[ROWS][VECTORS];
    for (int j = 0; j < VECTORS; ++j) {
        const __m512 start = task.bias ? widened(task.bias + output + j * LANES) : _mm512_setzero_ps();
        for (int i = 0; i < ROWS; ++i) sums[i][j] = start;
    }
    for (int64_t k = 0; k < task.in; k += 2, weight += 2 * task.width) {
        for (int64_t byte = 0; byte < next.step; byte += 64) __builtin_prefetch(next.at + byte, 0, 2);
        next.at += next.step;
        __m512bh w[VECTORS];
        for (int j = 0; j < VECTORS; ++j) w[j] = pairs(weight + j * 2 * LANES);
        for (int i = 0; i < ROWS; ++i) {
            const __m512bh a = pair(x + i * task.x_stride + k);
            for (int j = 0; j < VECTORS; ++j) sums[i][j] = _mm512_dpbf16_ps(sums[i][j], a, w[j]);
        }
    }
    uint16_t* out = task.out + row * task.outputs + output;
    for (int i = 0; i < ROWS; ++i)
        for (int j = 0; j < VECTORS; ++j) narrow(out + i * task.outputs + j * LANES, sums[i][j]);
}

template <int ROWS, int VECTORS>
void multiply_rows(int64_t rows, const Task& task, const uint16_t* weight, int64_t row, int64_t output, Next next) {
    if constexpr (ROWS > 1) {
        if (rows < ROWS) return multiply_rows<ROWS - 1, VECTORS>(rows, task, weight, row, output, next);
    }
    multiply<ROWS, VECTORS>(task, weight, row, output, next);
}

// Columns [from, to) of a panel, in register blocks of about equally many rows. follower: the next panel, or null.
template <int VECTORS>
void multiply_columns(const Task& task, int64_t index, int64_t from, int64_t to, const uint16_t* follower) {
    constexpr int64_t most = REGISTERS / VECTORS;
    const int64_t blocks = (task.rows + most - 1) / most, size = task.in * task.width;
    const int64_t passes = blocks * ((to - from) / (VECTORS * LANES));
    // one row is faster with the hardware's prefetcher alone; whole cache lines per pair and pass, else
    const int64_t step = follower && task.rows > 1 ? ((to - from) * 4 / passes + 63) / 64 * 64 : 0;
    const char* at = reinterpret_cast<const char*>(follower);
    const char* end = at + (follower ? size * 2 : 0);
    for (int64_t column = from; column < to; column += VECTORS * LANES)
        for (int64_t block = 0; block < blocks; ++block) {
            const int64_t first = task.rows * block / blocks, last = task.rows * (block + 1) / blocks;
            const int64_t here = step && end - at >= step * (task.in / 2) ? step : 0;
            const uint16_t* weight = task.weight + index * size + column * 2;
            multiply_rows<most, VECTORS>(last - first, task, weight, first, index * task.width + column, {at, here});
            at += here * (task.in / 2);
        }
}

void multiply_panel(const Task& task, int64_t index, int64_t from, int64_t to, const uint16_t* follower) {
    const int64_t vectors = (to - from) / LANES;
    if (vectors % 4 == 0) multiply_columns<4>(task, index, from, to, follower);
    else if (vectors % 3 == 0) multiply_columns<3>(task, index, from, to, follower);
    else if (vectors % 2 == 0) multiply_columns<2>(task, index, from, to, follower);
    else multiply_columns<1>(task, index, from, to, follower);
}

// The task's rows from `first` on, as many as are multiplied at once.
Task rows_from(const Task& task, int64_t first) {
    Task part = task;
    part.x += first * task.x_stride, part.out += first * task.outputs;
    part.rows = std::min(MOST_ROWS, task.rows - first);
    return part;
}

}  // namespace
}  // namespace ucm

using namespace ucm;

// Everything in bfloat16. in is even, width one of the lanes, outputs one of the width; x may have gaps between rows.
extern "C" void ucm_bf16_linear(
    const uint16_t* x, int64_t x_stride, const uint16_t* panels, const uint16_t* bias, uint16_t* out, int64_t rows,
    int64_t in, int64_t outputs, int64_t width) {
    const Task task{x, x_stride, panels, bias, out, rows, in, outputs, width};
    const int64_t count = outputs / width;
#pragma omp parallel
    {
        const auto [thread, threads] = member();
        for (int64_t row = 0; row < rows; row += MOST_ROWS) {
            const Task part = rows_from(task, row);
            share_panels(count, width, thread, threads, [&](int64_t index, int64_t from, int64_t to) {
                const uint16_t* follower = index + 1 < count ? panels + (index + 1) * in * width : nullptr;
                multiply_panel(part, index, from, to, follower);
            });
        }
    }
}

extern "C" int64_t ucm_multiplies_bf16() { return 1; }

#else

// Never called: ucm_multiplies_bf16 says no.
extern "C" void ucm_bf16_linear(
    const uint16_t*, int64_t, const uint16_t*, const uint16_t*, uint16_t*, int64_t, int64_t, int64_t, int64_t) {}

extern "C" int64_t ucm_multiplies_bf16() { return 0; }

#endif
