// Rows that are rounded to 8-bit integers times a weight of 8-bit integers, by instructions that add up four products in
// 32 bits (AVX512-VNNI): sums are exact, and scaled at the end.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <vector>

#include "memory.h"
#include "team.h"

#if defined(__AVX512VNNI__)

namespace ucm {
namespace {

constexpr int64_t WIDTH = 64;        // columns of a panel; the last one may have fewer
constexpr int64_t VECTORS = WIDTH / LANES, AT_ONCE = 6;  // rows whose sums have room in registers
constexpr int64_t DEPTH = 384;       // inputs of a panel that stay in the first cache: 24 KB
constexpr int64_t MOST_ROWS = 1024;  // that all panels pass at once; more do not stay in the third cache

// How rows are rounded: code = round(x * inverse) + zero. fixed: scale and zero of all rows; null: of each row its own.
struct Rounding {
    const float* fixed;
    bool symmetric;
};

// out [rows, outputs], dense, = x [rows, in] * weight + bias. The weight lies in panels [in / 4, WIDTH, 4], its inputs
// filled up with zeros. scales, sums: of the codes of each output; they, and the weight, have whole vectors of outputs.
struct Task {
    const float* x;
    int64_t x_stride;
    Rounding rounding;
    const int8_t* weight;
    const float* scales;
    const int32_t* sums;
    const float* bias;
    float* out;
    int64_t rows, in, outputs;
};

// Rows as codes of 0 to 255: what multiplies codes with a sign has none. shift: what was added to each of them.
struct Codes {
    std::vector<uint8_t> codes;
    std::vector<float> scales;
    std::vector<int32_t> shifts;
    int64_t stride = 0;
};

inline __mmask16 first(int64_t count) { return count >= LANES ? 0xffff : __mmask16((1 << count) - 1); }

// The scale of a row and its inverse, and its zero.
struct Scale {
    float scale, inverse;
    int32_t zero;
};

// A row that is not finite has no scale: its results are NaN. With a fixed scale what is beyond its range ends there.
Scale scale_of(const float* x, int64_t in, const Rounding& rounding) {
    __m512 high = _mm512_setzero_ps(), low = high;
    __mmask16 spoilt = 0;
    for (int64_t k = 0; k < in; k += LANES) {
        const __m512 v = _mm512_maskz_loadu_ps(first(in - k), x + k);
        spoilt |= _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
        high = _mm512_max_ps(high, v), low = _mm512_min_ps(low, v);
    }
    if (rounding.fixed) {
        const float scale = rounding.fixed[0];
        return {spoilt ? NAN : scale, 1 / scale, int32_t(rounding.fixed[1])};
    }
    const float top = _mm512_reduce_max_ps(high), bottom = _mm512_reduce_min_ps(low);
    const float most = rounding.symmetric ? std::max(top, -bottom) : top - bottom;
    if (spoilt || !(most <= FLT_MAX)) return {NAN, 0, 0};
    const float steps = rounding.symmetric ? 127 : 255, inverse = most > 0 ? steps / most : 0;
    // what is too small for an inverse is zero
    if (!(inverse <= FLT_MAX)) return {0, 0, 0};
    return {most / steps, inverse, rounding.symmetric ? 0 : int32_t(std::nearbyintf(-bottom * inverse)) - 128};
}

void round_row(const Task& task, int64_t row, Codes& to) {
    const float* x = task.x + row * task.x_stride;
    const Scale scale = scale_of(x, task.in, task.rounding);
    to.scales[row] = scale.scale, to.shifts[row] = scale.zero + 128;
    const __m512 inverse = _mm512_set1_ps(scale.inverse), most = _mm512_set1_ps(1024);
    const __m512i zero = _mm512_set1_epi32(scale.zero);
    uint8_t* codes = to.codes.data() + row * to.stride;
    for (int64_t k = 0; k < task.in; k += LANES) {
        __m512 v = _mm512_mul_ps(_mm512_maskz_loadu_ps(first(task.in - k), x + k), inverse);
        v = _mm512_max_ps(_mm512_min_ps(v, most), _mm512_sub_ps(_mm512_setzero_ps(), most));
        const __m128i code = _mm512_cvtsepi32_epi8(_mm512_add_epi32(_mm512_cvtps_epi32(v), zero));
        _mm_storeu_si128((__m128i*)(codes + k), _mm_xor_si128(code, _mm_set1_epi8(-128)));
    }
}

// In words of its own: GCC 12 copies sums around its intrinsic, and has no room left in registers.
inline __m512i with_products(__m512i sum, __m512i codes, __m512i weight) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(weight));
    return sum;
}

// A part of the inputs, and sums of those before it: [rows, WIDTH], of columns that are multiplied now.
struct Depth {
    int64_t from, to;
    int32_t* sums;
};

// The end of a product: sums without what was added to codes, scaled.
template <int ROWS, int COUNT>
void finish(const Task& task, const Codes& rows, const __m512i (&sums)[ROWS][COUNT], int64_t row, int64_t output) {
    for (int j = 0; j < COUNT; ++j) {
        const int64_t column = output + j * LANES;
        const __mmask16 there = first(task.outputs - column);
        const __m512 scale = _mm512_loadu_ps(task.scales + column);
        const __m512i of_codes = _mm512_loadu_si512(task.sums + column);
        const __m512 bias = task.bias ? _mm512_maskz_loadu_ps(there, task.bias + column) : _mm512_setzero_ps();
        for (int i = 0; i < ROWS; ++i) {
            const __m512i shifted = _mm512_mullo_epi32(_mm512_set1_epi32(rows.shifts[row + i]), of_codes);
            const __m512 sum = _mm512_cvtepi32_ps(_mm512_sub_epi32(sums[i][j], shifted));
            const __m512 found = _mm512_mul_ps(_mm512_mul_ps(sum, _mm512_set1_ps(rows.scales[row + i])), scale);
            float* out = task.out + (row + i) * task.outputs + column;
            _mm512_mask_storeu_ps(out, there, _mm512_add_ps(found, bias));
        }
    }
}

// ROWS x COUNT vectors of the product, from column `output` on. weight: of that column, in a panel of `width`.
template <int ROWS, int COUNT>
void multiply(
    const Task& task, const Codes& rows, const int8_t* weight, int64_t width, int64_t row, int64_t output,
    const Depth& depth) {
    const uint8_t* x = rows.codes.data() + row * rows.stride;
    int32_t* before = depth.sums + row * WIDTH;
    __m512i sums[ROWS][COUNT];
    for (int i = 0; i < ROWS; ++i)
        for (int j = 0; j < COUNT; ++j)
            sums[i][j] = depth.from ? _mm512_loadu_si512(before + i * WIDTH + j * LANES) : _mm512_setzero_si512();
    weight += depth.from * width;
    for (int64_t k = depth.from; k < depth.to; k += 4, weight += 4 * width) {
        __m512i w[COUNT];
        for (int j = 0; j < COUNT; ++j) w[j] = _mm512_loadu_si512(weight + j * 4 * LANES);
        for (int i = 0; i < ROWS; ++i) {
            int32_t four;
            std::memcpy(&four, x + i * rows.stride + k, sizeof four);
            const __m512i a = _mm512_set1_epi32(four);
            for (int j = 0; j < COUNT; ++j) sums[i][j] = with_products(sums[i][j], a, w[j]);
        }
    }
    if (depth.to >= task.in) return finish<ROWS, COUNT>(task, rows, sums, row, output);
    for (int i = 0; i < ROWS; ++i)
        for (int j = 0; j < COUNT; ++j) _mm512_storeu_si512(before + i * WIDTH + j * LANES, sums[i][j]);
}

template <int ROWS, int COUNT>
void multiply_rows(
    int64_t count, const Task& task, const Codes& rows, const int8_t* weight, int64_t width, int64_t row,
    int64_t output, const Depth& depth) {
    if constexpr (ROWS > 1) {
        if (count < ROWS) return multiply_rows<ROWS - 1, COUNT>(count, task, rows, weight, width, row, output, depth);
    }
    multiply<ROWS, COUNT>(task, rows, weight, width, row, output, depth);
}

// COUNT vectors of columns from `output` on, all rows, in register blocks of about equally many. The weight of a part
// of the inputs stays in the first cache while all rows pass it.
template <int COUNT>
void multiply_columns(const Task& task, const Codes& rows, const int8_t* weight, int64_t width, int64_t output) {
    static thread_local std::vector<int32_t> sums;
    const int64_t blocks = (task.rows + AT_ONCE - 1) / AT_ONCE, step = blocks > 1 ? DEPTH : task.in;
    if (step < task.in) sums.resize(task.rows * WIDTH);
    for (int64_t from = 0; from < task.in; from += step)
        for (int64_t block = 0; block < blocks; ++block) {
            const int64_t row = task.rows * block / blocks, end = task.rows * (block + 1) / blocks;
            const Depth depth{from, std::min(from + step, task.in), sums.data()};
            multiply_rows<AT_ONCE, COUNT>(end - row, task, rows, weight, width, row, output, depth);
        }
}

// Vectors [from, to) of all columns: a thread's.
void multiply_vectors(const Task& task, const Codes& rows, int64_t from, int64_t to) {
    const int64_t all = (task.outputs + LANES - 1) / LANES, in = padded(task.in, 4);
    while (from < to) {
        const int64_t panel = from / VECTORS, place = from % VECTORS;
        const int64_t vectors = std::min(VECTORS, all - panel * VECTORS), count = std::min(vectors - place, to - from);
        const int8_t* weight = task.weight + panel * WIDTH * in + place * LANES * 4;
        const int64_t width = vectors * LANES, output = from * LANES;
        if (count == 4) multiply_columns<4>(task, rows, weight, width, output);
        else if (count == 3) multiply_columns<3>(task, rows, weight, width, output);
        else if (count == 2) multiply_columns<2>(task, rows, weight, width, output);
        else multiply_columns<1>(task, rows, weight, width, output);
        from += count;
    }
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

// x may have gaps between rows. fixed: a scale and a zero for all rows, or null. At most 65,536 inputs.
extern "C" void ucm_int8_linear(
    const float* x, int64_t x_stride, const float* fixed, int64_t symmetric, const int8_t* panels, const float* scales,
    const int32_t* sums, const float* bias, float* out, int64_t rows, int64_t in, int64_t outputs) {
    static thread_local Codes of_caller;
    Codes& codes = of_caller;
    const Task task{x, x_stride, {fixed, symmetric != 0}, panels, scales, sums, bias, out, rows, in, outputs};
    const int64_t vectors = (outputs + LANES - 1) / LANES;
    codes.stride = padded(in, 64) + 64;  // rows at a distance of a page would share sets of the first cache
    codes.codes.resize(std::min(rows, MOST_ROWS) * codes.stride);
    codes.scales.resize(std::min(rows, MOST_ROWS)), codes.shifts.resize(codes.scales.size());
    for (int64_t row = 0; row < rows; row += MOST_ROWS) {
        const Task part = rows_from(task, row);
#pragma omp parallel
        {
            const auto [thread, threads] = member();
            const int64_t last = part.rows * (thread + 1) / threads;
            for (int64_t i = part.rows * thread / threads; i < last; ++i) round_row(part, i, codes);
#pragma omp barrier
            multiply_vectors(part, codes, vectors * thread / threads, vectors * (thread + 1) / threads);
        }
    }
}

extern "C" int64_t ucm_multiplies_int8() { return 1; }

#else

// Never called: ucm_multiplies_int8 says no.
extern "C" void ucm_int8_linear(
    const float*, int64_t, const float*, int64_t, const int8_t*, const float*, const int32_t*, const float*, float*,
    int64_t, int64_t, int64_t) {}

extern "C" int64_t ucm_multiplies_int8() { return 0; }

#endif
