// The instructions of the matrix unit (AMX), and of the CPUs that have one.
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include "vector.h"

namespace ucm {

// Linux lets a process use the tiles once it has asked; a sandbox may say no.
inline bool have_matrix_tiles() {
    constexpr long ask = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    static const bool granted = syscall(SYS_arch_prctl, ask, tile_data) == 0;
    return granted;
}

// While it lives, all eight tiles of this thread are 16 rows of 64 bytes; the first five may have fewer rows. Released at the end: idle tiles cost context
// switches and clock. Whoever calls oneDNN on this thread meanwhile would lose them.
struct MatrixTiles {
    explicit MatrixTiles(int64_t rows = 16) {
        struct alignas(64) {
            uint8_t palette = 1, start = 0, reserved[14] = {};
            uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
        } shape;
        for (int tile = 0; tile < 5; ++tile) shape.rows[tile] = uint8_t(rows);
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

// Rows of 64 bytes, this many bytes apart.
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

// 32 floats, rounded to nearest even: `low` in the lower half.
inline __m512i to_bfloat16(Floats low, Floats high) {
    return (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
}

}  // namespace ucm
