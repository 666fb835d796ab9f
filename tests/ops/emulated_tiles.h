// Stands in for ops/native/source/amx_tiles.h: the tiles of the matrix unit in memory, for any CPU with AVX-512 (F, BW).
//
// What the instructions do is told by their pages in Intel's Software Developer's Manual, volume 2 (LDTILECFG, TILELOADD,
// TDPBF16PS, VCVTNE2PS2BF16). Where the unit would raise an exception, or leave what is undefined, this one is strict.
#pragma once

#include "vector.h"

namespace ucm {

inline bool have_matrix_tiles() { return true; }

// Of this thread.
struct EmulatedTiles {
    alignas(64) Floats rows[8][16];
    bool configured = false;
};

inline EmulatedTiles& emulated_tiles() {
    static thread_local EmulatedTiles tiles;
    return tiles;
}

// Tiles that are used before they are configured, or after their release, are an invalid instruction.
inline Floats* emulated_tile(int number) {
    if (!emulated_tiles().configured) __builtin_trap();
    return emulated_tiles().rows[number];
}

struct MatrixTiles {
    MatrixTiles() {
        if (emulated_tiles().configured) __builtin_trap();  // the unit would lose what the tiles hold
        emulated_tiles().configured = true;
        // the unit has zeros here: nobody should count on them
        for (auto& tile : emulated_tiles().rows)
            for (Floats& row : tile) row = all(__builtin_nanf(""));
    }
    ~MatrixTiles() { emulated_tiles().configured = false; }
    MatrixTiles(const MatrixTiles&) = delete;
};

template <int TO>
inline void zero_tile() {
    Floats* tile = emulated_tile(TO);
    for (int row = 0; row < 16; ++row) tile[row] = Floats{};
}

template <int TO>
inline void load_tile(const void* from, int64_t stride = 64) {
    Floats* tile = emulated_tile(TO);
    for (int row = 0; row < 16; ++row) std::memcpy(&tile[row], static_cast<const char*>(from) + row * stride, 64);
}

template <int FROM>
inline void store_tile(void* to, int64_t stride = 64) {
    const Floats* tile = emulated_tile(FROM);
    for (int row = 0; row < 16; ++row) std::memcpy(static_cast<char*>(to) + row * stride, &tile[row], 64);
}

// Denormal numbers are zeros to the unit, whatever MXCSR says: its operands and its results.
inline Floats flushed(Floats v) {
    const Words bits = (Words)v;
    return (Floats)((bits & 0x7f800000) == 0 ? bits & 0x80000000 : bits);
}

// The first and the second number of pairs of bfloat16.
inline Floats first_of(Floats pairs) { return flushed((Floats)((Words)pairs << 16)); }
inline Floats second_of(Floats pairs) { return flushed((Floats)((Words)pairs & 0xffff0000)); }

inline Floats add_rounded_once(Floats a, Floats b, Floats c) {
    return flushed((Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c));
}

// First and second numbers have sums of their own, from zero, in the order of pairs; they are added to the result at last.
template <int TO, int A, int B>
inline void add_product() {
    static_assert(TO != A && TO != B && A != B, "an invalid instruction");
    Floats *to = emulated_tile(TO), *a = emulated_tile(A), *b = emulated_tile(B);
    for (int row = 0; row < 16; ++row) {
        const Floats first = first_of(a[row]), second = second_of(a[row]);
        Floats sums[2] = {};
        for (int pair = 0; pair < 16; ++pair) {
            sums[0] = add_rounded_once(all(first[pair]), first_of(b[pair]), sums[0]);
            sums[1] = add_rounded_once(all(second[pair]), second_of(b[pair]), sums[1]);
        }
        to[row] = flushed(flushed(to[row]) + flushed(sums[0] + sums[1]));
    }
}

inline __m256i to_bfloat16(Floats value) {
    const Words bits = (Words)flushed(value), even = (bits >> 16) & 1, quiet = bits | 0x00400000;
    const Words rounded = value == value ? bits + 0x7fff + even : quiet;
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32((__m512i)rounded, 16));
}

inline __m512i to_bfloat16(Floats low, Floats high) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(to_bfloat16(low)), to_bfloat16(high), 1);
}

}  // namespace ucm
