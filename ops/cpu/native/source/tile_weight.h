// A weight as it is kept for a few rows (fp32 panels, or in fewer bits), laid out for the matrix unit 16 columns at a
// time.
#pragma once

#include <algorithm>

#include "matrix_tiles.h"

#if defined(UCM_MATRIX_TILES)

namespace ucm {

constexpr int64_t TILE_BYTES = 1024;
constexpr int64_t PAIRS = TILE_DEPTH / 2;

// Panels [in, width]; fewer bits as compact_linear.cpp has them, with scales and offsets [in / 32, width] per panel.
struct TileWeight {
    const char* values;
    const float *scales, *offsets;
    int64_t in, width;
};

// Each form writes inputs k and k + 1 of 16 columns as KEPT rows of bfloat16 pairs. `at` is input k of the first column.
// COLUMN: bytes from a column to the next one. PER_TWO: of two inputs of a column.
struct FloatTiles {
    static constexpr int KEPT = PARTS;
    static constexpr int64_t COLUMN = 4, PER_TWO = 8;
    static constexpr bool SCALED = false, OFFSET = false;
    static void pair(const char* at, int64_t width, bool both, __m512i (&row)[KEPT]) {
        alignas(64) static constexpr uint16_t order[32] = {
            0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
            8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
        const float* from = reinterpret_cast<const float*>(at);
        const Split split(load(from), both ? load(from + width) : Floats{});
        for (int i = 0; i < KEPT; ++i) row[i] = _mm512_permutexvar_epi16(_mm512_load_si512(order), split.part[i]);
    }
};

// The forms of fewer bits have a multiple of 32 inputs.
struct BFloat16Tiles {
    static constexpr int KEPT = 1;
    static constexpr int64_t COLUMN = 2, PER_TWO = 4;
    static constexpr bool SCALED = false, OFFSET = false;
    static __m512i half(const char* at) { return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)at)); }
    static void pair(const char* at, int64_t width, bool, __m512i (&row)[KEPT]) {
        row[0] = _mm512_or_si512(half(at), _mm512_slli_epi32(half(at + width * 2), 16));
    }
};

// Codes 0..15 as -8..7, which bfloat16 holds: then the sum of products does not cancel against the offset.
struct Affine4Tiles {
    static constexpr int KEPT = 1;
    static constexpr int64_t COLUMN = 1, PER_TWO = 1;
    static constexpr bool SCALED = true, OFFSET = true;
    static constexpr float CENTRE = 8;
    static void pair(const char* at, int64_t, bool, __m512i (&row)[KEPT]) {
        alignas(64) static constexpr uint16_t values[32] = {
            0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
            0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};
        const __m512i codes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)at));
        const __m512i low = _mm512_and_si512(codes, _mm512_set1_epi32(15));
        const __m512i high = _mm512_and_si512(_mm512_slli_epi32(codes, 12), _mm512_set1_epi32(15 << 16));
        row[0] = _mm512_permutexvar_epi16(_mm512_or_si512(low, high), _mm512_load_si512(values));
    }
};

// Codes -127..127: as floats their lower halves are zeros.
struct Symmetric8Tiles {
    static constexpr int KEPT = 1;
    static constexpr int64_t COLUMN = 1, PER_TWO = 2;
    static constexpr bool SCALED = true, OFFSET = false;
    static constexpr float CENTRE = 0;
    static __m512i codes(const char* at) {
        return (__m512i)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)at)));
    }
    static void pair(const char* at, int64_t width, bool, __m512i (&row)[KEPT]) {
        const __m512i high = _mm512_and_si512(codes(at + width), _mm512_set1_epi32(int(0xffff0000)));
        row[0] = _mm512_or_si512(_mm512_srli_epi32(codes(at), 16), high);
    }
};

// Where input k, an even one, of a column lies.
template <typename Form>
inline const char* place_of(const TileWeight& weight, int64_t column, int64_t k) {
    const int64_t panel = column / weight.width * weight.in;
    return weight.values + (panel + k) / 2 * weight.width * Form::PER_TWO + column % weight.width * Form::COLUMN;
}

// Step `step` of 32 inputs of the 16 columns from `column` on: KEPT tiles.
template <typename Form>
inline void lay_out(const TileWeight& weight, int64_t column, int64_t step, char* tiles) {
    const char* at = place_of<Form>(weight, column, step * TILE_DEPTH);
    const int64_t left = weight.in - step * TILE_DEPTH;
#pragma GCC unroll 4
    for (int64_t pair = 0; pair < PAIRS; ++pair, at += weight.width * Form::PER_TWO) {
        __m512i row[Form::KEPT] = {};
        if (pair * 2 < left) Form::pair(at, weight.width, pair * 2 + 1 < left, row);
        for (int i = 0; i < Form::KEPT; ++i) _mm512_store_si512(tiles + i * TILE_BYTES + pair * 64, row[i]);
    }
}

// What a thread multiplies next, fetched from memory a little at a time while it works on this.
struct TilesAhead {
    const char* at = nullptr;
    int64_t rows = 0, row = 0, bytes = 0, pace = 0;  // rows left, bytes from one to the next, bytes of each

    void fetch() {
        for (int64_t i = 0; i < pace && rows > 0; ++i, --rows, at += row)
            for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(at + byte, 0, 2);
    }

    // Steps [from, to) of `count` columns from `column` on, in about `calls` of `fetch`.
    template <typename Form>
    static TilesAhead of(
        const TileWeight& weight, int64_t column, int64_t count, int64_t from, int64_t to, int64_t calls) {
        const int64_t halves = Form::PER_TWO / Form::COLUMN;  // rows of memory for two inputs
        const int64_t rows = (std::min(to * TILE_DEPTH, weight.in) - from * TILE_DEPTH) / 2 * halves;
        return {
            place_of<Form>(weight, column, from * TILE_DEPTH), rows, weight.width * Form::COLUMN, count * Form::COLUMN,
            rows / calls + 1};
    }
};

}  // namespace ucm

#endif
