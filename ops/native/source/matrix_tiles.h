// fp32 products on the matrix unit of x86 CPUs that have one (AMX), which multiplies bfloat16 and adds in fp32.
//
// A float is the exact sum of three bfloat16 (8 bits of mantissa each). Of the nine products of two such sums, the six
// largest give what fp32 arithmetic gives; what is left out is below 2^-23 of a product. cuBLAS calls this scheme
// emulated fp32 (BF16x9, CUDA 12.9); Henry, Tang and Heinecke describe it in "Leveraging the bfloat16 Artificial
// Intelligence Datatype For Higher-Precision Computations" (ARITH 2019). A weight that is a bfloat16 needs three.
#pragma once

#include <atomic>

#include "vector.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#define UCM_MATRIX_TILES 1
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace ucm {

#if defined(UCM_MATRIX_TILES)

constexpr int TILE = 16;       // rows and columns of a result, in fp32
constexpr int TILE_DEPTH = 32; // bfloat16 of a row; the other operand has them in pairs, [16 pairs, 16 columns, 2]
constexpr int PARTS = 3;

// Linux lets a process use the tiles once it has asked; a sandbox may say no.
inline bool have_matrix_tiles() {
    constexpr long ask = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    static const bool granted = syscall(SYS_arch_prctl, ask, tile_data) == 0;
    return granted;
}

// While it lives, all eight tiles of this thread are 16 rows of 64 bytes. Released at the end: idle tiles cost context
// switches and clock. Whoever calls oneDNN on this thread meanwhile would lose them.
struct MatrixTiles {
    MatrixTiles() {
        struct alignas(64) {
            uint8_t palette = 1, start = 0, reserved[14] = {};
            uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
        } shape;
        // not _tile_loadconfig: GCC takes it to read eight bytes, and drops the others
        asm volatile("ldtilecfg %0" ::"m"(shape));
    }
    ~MatrixTiles() { _tile_release(); }
    MatrixTiles(const MatrixTiles&) = delete;
};

// The compiler's own tile intrinsics take literal numbers only, and do not say that a load reads memory.
template <int TO>
inline void zero_tile() {
    asm volatile("tilezero %%tmm%c0" ::"i"(TO));
}

// Rows of 64 bytes that are so many bytes apart.
template <int TO>
inline void load_tile(const void* from, int64_t stride = 64) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(TO) : "memory");
}

template <int FROM>
inline void store_tile(void* to, int64_t stride = 64) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(FROM) : "memory");
}

// tile TO [16, 16] += tile A [16 rows, 32] * tile B [16 pairs, 16 columns, 2]
template <int TO, int A, int B>
inline void add_product() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(TO), "i"(A), "i"(B));
}

// 32 floats (two vectors, in order) as three rows of 32 bfloat16, the most significant first.
// A value that is not finite is kept by the first row alone: the others would turn Inf into NaN.
struct Split {
    __m512i part[PARTS];

    Split(Floats low, Floats high) {
        for (int i = 0; i < PARTS; ++i) {
            part[i] = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
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

#else

inline bool have_matrix_tiles() { return false; }

#endif

extern std::atomic<bool> matrix_tiles_wanted;  // ucm_use_matrix_tiles

// What a kernel asks once per call.
inline bool use_matrix_tiles() { return matrix_tiles_wanted && have_matrix_tiles(); }

}  // namespace ucm
