// fp32 products on the matrix unit of x86 CPUs that have one (AMX), which multiplies bfloat16 and adds in fp32.
//
// A float is the exact sum of three bfloat16 (8 bits of mantissa each). Of the nine products of two such sums, the six
// largest give what fp32 arithmetic gives; what is left out is below 2^-23 of a product. cuBLAS calls this scheme
// emulated fp32 (BF16x9, CUDA 12.9); Henry, Tang and Heinecke describe it in "Leveraging the bfloat16 Artificial
// Intelligence Datatype For Higher-Precision Computations" (ARITH 2019). A weight that is a bfloat16 needs three.
#pragma once

#include <atomic>

#include "vector.h"

// A test may name a header that has the names of amx_tiles.h without its instructions (tests/ops/emulated_tiles.h).
#if defined(UCM_EMULATED_TILES)
#define UCM_MATRIX_TILES 1
#include UCM_EMULATED_TILES
#elif defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#define UCM_MATRIX_TILES 1
#include "amx_tiles.h"
#endif

namespace ucm {

#if defined(UCM_MATRIX_TILES)

constexpr int TILE = 16;        // rows and columns of a result, in fp32
constexpr int TILE_DEPTH = 32;  // bfloat16 of a row; the other operand has them in pairs, [16 pairs, 16 columns, 2]
constexpr int PARTS = 3;

#if defined(__AVX512F__)
// 32 floats (two vectors, in order) as three rows of 32 bfloat16, the most significant first.
// A value that is not finite is kept by the first row alone: the others would turn Inf into NaN.
struct Split {
    __m512i part[PARTS];

    Split(Floats low, Floats high) {
        for (int i = 0; i < PARTS; ++i) {
            part[i] = to_bfloat16(low, high);
            if (i + 1 == PARTS) break;
            low = rest(low, _mm512_castsi512_si256(part[i]));
            high = rest(high, _mm512_extracti64x4_epi64(part[i], 1));
        }
    }

    static Floats rest(Floats value, __m256i rounded) {
        const Floats top = (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded), 16);
        const Floats left = value - top;
        return (left >= -FLT_MAX) & (left <= FLT_MAX) ? left : Floats{};
    }
};
#endif

#else

inline bool have_matrix_tiles() { return false; }

#endif

extern std::atomic<bool> matrix_tiles_wanted;  // ucm_use_matrix_tiles

// What a kernel asks once per call.
inline bool use_matrix_tiles() { return matrix_tiles_wanted && have_matrix_tiles(); }

}  // namespace ucm
