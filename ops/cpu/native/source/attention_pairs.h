// A tile's products by instructions that multiply pairs of bfloat16 and add to fp32 (AVX512-BF16): twice the rate of fp32's.
// Scores are sums of exact products. Weights are rounded to bfloat16, and so is their sum, so that they still are shares of a
// whole.
#pragma once

#include "attention_tile.h"

namespace ucm {

#if defined(__AVX512BF16__)

constexpr bool MULTIPLIES_PAIRS = true;

constexpr int64_t PAIRS = LANES;  // of a vector

struct PairWeights {
    static Floats keep(float* weights, int64_t t, Floats w) {
        const __m256i rounded = (__m256i)_mm512_cvtneps_pbh((__m512)w);
        _mm256_storeu_si256((__m256i*)(reinterpret_cast<uint16_t*>(weights) + t), rounded);
        return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded), 16);
    }
};

// The numbers of a head from the d-th on, zeros beyond its end; or zeros.
inline __m512i numbers(const uint16_t* head, int64_t d, int64_t size) {
    if (!head) return _mm512_setzero_si512();
    const __mmask32 there = size - d >= 2 * PAIRS ? ~__mmask32(0) : (__mmask32(1) << (size - d)) - 1;
    return _mm512_maskz_loadu_epi16(there, head + d);
}

inline const uint16_t* head_of(const Tile& tile, const char* const* heads, int64_t t) {
    return t < tile.count ? reinterpret_cast<const uint16_t*>(heads[t]) : nullptr;
}

// keys[pair of dimensions][token], zeros beyond the tile's tokens.
inline void pack_key_pairs(Unit& unit, const Tile& tile, Ahead& ahead) {
    for (int64_t t = 0; t < KEYS; t += LANES)
        for (int64_t d = 0; d < unit.dim; d += 2 * PAIRS) {
            Floats v[LANES];
            ahead.fetch();
            for (int lane = 0; lane < LANES; ++lane) v[lane] = (Floats)numbers(head_of(tile, tile.key, t + lane), d, unit.dim);
            transpose(v);
            const int64_t pairs = unit.dim - d >= 2 * PAIRS ? PAIRS : (unit.dim - d) / 2;
            for (int64_t i = 0; i < pairs; ++i) store(unit.keys + (d / 2 + i) * KEYS + t, v[i]);
        }
}

// values[pair of tokens][d], zeros beyond the tile's tokens and beyond value_dim.
inline void pack_value_pairs(Unit& unit, const Tile& tile) {
    alignas(64) uint16_t low[2 * PAIRS], high[2 * PAIRS];
    for (int i = 0; i < 2 * PAIRS; ++i) low[i] = i / 2 + i % 2 * 2 * PAIRS, high[i] = low[i] + PAIRS;
    const __m512i lower = _mm512_load_si512(low), upper = _mm512_load_si512(high);
    for (int64_t t = 0; t < KEYS; t += 2) {
        const uint16_t *first = head_of(tile, tile.value, t), *second = head_of(tile, tile.value, t + 1);
        float* to = unit.values + t / 2 * unit.value_width;
        for (int64_t d = 0; d < unit.value_width; d += 2 * PAIRS) {
            const bool there = d < unit.value_dim;
            const __m512i a = numbers(there ? first : nullptr, d, unit.value_dim);
            const __m512i b = numbers(there ? second : nullptr, d, unit.value_dim);
            _mm512_storeu_si512(to + d, _mm512_permutex2var_epi16(a, lower, b));
            _mm512_storeu_si512(to + d + LANES, _mm512_permutex2var_epi16(a, upper, b));
        }
    }
}

// c[R][VECTORS] += a[R][depth] * b[depth][WIDTH], in pairs: each number of a and b is two.
template <int R>
inline void multiply_pairs(
    const float* a, int64_t a_stride, const float* b, int64_t b_stride, int64_t depth, Floats (&c)[R][VECTORS], Ahead& ahead) {
    for (int64_t k = 0; k < depth; ++k, b += b_stride) {
        if (k % FETCH == 0) ahead.fetch();
        __m512bh row[VECTORS];
        for (int j = 0; j < VECTORS; ++j) row[j] = (__m512bh)_mm512_loadu_si512(b + j * LANES);
        for (int i = 0; i < R; ++i) {
            int32_t both;
            std::memcpy(&both, a + i * a_stride + k, sizeof both);
            const __m512bh x = (__m512bh)_mm512_set1_epi32(both);
            for (int j = 0; j < VECTORS; ++j) c[i][j] = (Floats)_mm512_dpbf16_ps((__m512)c[i][j], x, row[j]);
        }
    }
}

class PairProducts {
public:
    using Weights = PairWeights;

    PairProducts(Unit& of, const Tile& by, Ahead& next) : unit(of), ahead(next) {
        pack_key_pairs(unit, by, ahead);
        pack_value_pairs(unit, by);
    }

    template <int R>
    void score(int64_t first, int64_t t, Floats (&c)[R][VECTORS]) const {
        const int64_t pairs = unit.dim / 2;
        multiply_pairs(unit.query + first * pairs, pairs, unit.keys + t, KEYS, pairs, c, ahead);
        for (int i = 0; i < R; ++i)
            for (int j = 0; j < VECTORS; ++j) c[i][j] *= unit.scale;
    }

    template <int R>
    void add(int64_t d, int64_t depth, Floats (&c)[R][VECTORS]) const {
        multiply_pairs(unit.scores, KEYS, unit.values + d, unit.value_width, (depth + 1) / 2, c, ahead);
    }

private:
    Unit& unit;
    Ahead& ahead;
};

#else

constexpr bool MULTIPLIES_PAIRS = false;

#endif

}  // namespace ucm
