// bfloat16 rows times a bfloat16 weight, by instructions that multiply pairs and add to float32 (AVX512-BF16): twice the
// rate of float32's, and nothing is widened. Products are exact, sums are rounded as oneDNN's are there.
#include "panel_product.h"
#include "team.h"

#if defined(__AVX512BF16__)

namespace ucm {
namespace {

// Panels are [in / 2, width, 2].
struct PairProduct {
    using Number = uint16_t;
    static constexpr int64_t DEPTH = 2;
    static Floats widened(const uint16_t* from) {
        return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)), 16);
    }
    static __m512bh weights(const uint16_t* from) { return (__m512bh)_mm512_loadu_si512(from); }
    // The same two inputs in all lanes.
    static __m512bh input(const uint16_t* from) {
        int32_t both;
        std::memcpy(&both, from, sizeof both);
        return (__m512bh)_mm512_set1_epi32(both);
    }
    static Floats add(Floats sum, __m512bh input, __m512bh weights) {
        return (Floats)_mm512_dpbf16_ps((__m512)sum, input, weights);
    }
    static void leave(uint16_t* to, Floats sum) {
        _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh((__m512)sum));
    }
};

}  // namespace
}  // namespace ucm

using namespace ucm;

// Everything in bfloat16. in is even, width one of the lanes, outputs one of the width; x may have gaps between rows.
extern "C" void ucm_bf16_linear(
    const uint16_t* x, int64_t x_stride, const uint16_t* panels, const uint16_t* bias, uint16_t* out, int64_t rows,
    int64_t in, int64_t outputs, int64_t width) {
    const LinearOf<uint16_t> task{x, x_stride, bias, out, rows, in, outputs, width};
    const int64_t count = outputs / width, size = in * width;
#pragma omp parallel
    {
        const auto [thread, threads] = member();
        for (int64_t row = 0; row < rows; row += MOST_ROWS) {
            const LinearOf<uint16_t> part = task.rows_from(row);
            share_panels(count, width, thread, threads, [&](int64_t index, int64_t from, int64_t to) {
                const uint16_t* weight = panels + index * size;
                // one row is faster with the hardware's prefetcher alone
                const uint16_t* next = part.rows > 1 && index + 1 < count ? weight + size : nullptr;
                multiply_panel<PairProduct>(part, {index, weight, next}, from, to);
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
