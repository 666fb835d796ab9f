// Stands in for ops/cpu/native/source/amx_tiles.h: the tiles of the matrix unit in memory, for any CPU. What multiplies fp32
// needs AVX-512 (F, BW), too.
//
// What the instructions do is told by their pages in Intel's Software Developer's Manual, volume 2 (LDTILECFG, TILELOADD,
// TDPBF16PS, VCVTNE2PS2BF16). Where the unit would raise an exception, or leave what is undefined, this one is strict.
#pragma once

#include "vector.h"

namespace ucm {

// A row of a tile, whatever the vectors of this CPU are.
typedef float TileRow __attribute__((vector_size(64)));
typedef uint32_t TileWords __attribute__((vector_size(64)));

inline bool have_matrix_tiles() { return true; }

// Of this thread.
struct EmulatedTiles {
    alignas(64) TileRow rows[8][16];
    int64_t heights[8];
    bool configured = false;
};

inline EmulatedTiles& emulated_tiles() {
    static thread_local EmulatedTiles tiles;
    return tiles;
}

// Tiles that are used before they are configured, or after their release, are an invalid instruction.
inline TileRow* emulated_tile(int number) {
    if (!emulated_tiles().configured) __builtin_trap();
    return emulated_tiles().rows[number];
}

inline int64_t height_of(int number) { return emulated_tiles().heights[number]; }

struct MatrixTiles {
    explicit MatrixTiles(int64_t rows = 16) {
        if (emulated_tiles().configured) __builtin_trap();  // the unit would lose what the tiles hold
        emulated_tiles().configured = true;
        // the unit has zeros here: nobody should count on them
        for (auto& tile : emulated_tiles().rows)
            for (TileRow& row : tile) row = TileRow{} + __builtin_nanf("");
        for (int number = 0; number < 8; ++number) emulated_tiles().heights[number] = number < 5 ? rows : 16;
    }
    ~MatrixTiles() { emulated_tiles().configured = false; }
    MatrixTiles(const MatrixTiles&) = delete;
};

template <int TO>
inline void zero_tile() {
    TileRow* tile = emulated_tile(TO);
    for (int row = 0; row < height_of(TO); ++row) tile[row] = TileRow{};
}

template <int TO>
inline void load_tile(const void* from, int64_t stride = 64) {
    TileRow* tile = emulated_tile(TO);
    for (int row = 0; row < height_of(TO); ++row) std::memcpy(&tile[row], static_cast<const char*>(from) + row * stride, 64);
}

template <int FROM>
inline void store_tile(void* to, int64_t stride = 64) {
    const TileRow* tile = emulated_tile(FROM);
    for (int row = 0; row < height_of(FROM); ++row) std::memcpy(static_cast<char*>(to) + row * stride, &tile[row], 64);
}

// Denormal numbers are zeros to the unit, whatever MXCSR says: its operands and its results.
inline TileRow flushed(TileRow v) {
    const TileWords bits = (TileWords)v;
    return (TileRow)((bits & 0x7f800000) == 0 ? bits & 0x80000000 : bits);
}

// The first and the second number of pairs of bfloat16.
inline TileRow first_of(TileRow pairs) { return flushed((TileRow)((TileWords)pairs << 16)); }
inline TileRow second_of(TileRow pairs) { return flushed((TileRow)((TileWords)pairs & 0xffff0000)); }

inline TileRow add_rounded_once(float a, TileRow b, TileRow c) {
    for (int i = 0; i < 16; ++i) c[i] = __builtin_fmaf(a, b[i], c[i]);
    return flushed(c);
}

// First and second numbers have sums of their own, from zero, in the order of pairs; they are added to the result at last.
template <int TO, int A, int B>
inline void add_product() {
    static_assert(TO != A && TO != B && A != B, "an invalid instruction");
    TileRow *to = emulated_tile(TO), *a = emulated_tile(A), *b = emulated_tile(B);
    if (height_of(TO) != height_of(A) || height_of(B) != 16) __builtin_trap();
    for (int row = 0; row < height_of(TO); ++row) {
        const TileRow first = first_of(a[row]), second = second_of(a[row]);
        TileRow sums[2] = {};
        for (int pair = 0; pair < 16; ++pair) {
            sums[0] = add_rounded_once(first[pair], first_of(b[pair]), sums[0]);
            sums[1] = add_rounded_once(second[pair], second_of(b[pair]), sums[1]);
        }
        to[row] = flushed(flushed(to[row]) + flushed(sums[0] + sums[1]));
    }
}

#if defined(__AVX512F__)
inline __m256i to_bfloat16(Floats value) {
    const Words bits = (Words)flushed(value), even = (bits >> 16) & 1, quiet = bits | 0x00400000;
    const Words rounded = value == value ? bits + 0x7fff + even : quiet;
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32((__m512i)rounded, 16));
}

inline __m512i to_bfloat16(Floats low, Floats high) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(to_bfloat16(low)), to_bfloat16(high), 1);
}
#endif

}  // namespace ucm
