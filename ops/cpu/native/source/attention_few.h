// Few query vectors: keys and values are read once, where they lie.
//
// Of several kv heads in turns: a token's heads lie side by side, and the CPU fetches ahead only what is read within a
// page without long breaks. One head alone reaches three quarters of the bandwidth, with prefetches even less.
#pragma once

#include <type_traits>

#include "attention_tile.h"

namespace ucm {

constexpr int64_t MOST_HEADS = 16;  // that take turns

inline bool is_few(const Layer& layer, const Job& job) {
    return (job.row_hi - job.row_lo) * (layer.heads / layer.kv_heads) <= FEW && layer.cache_type == FP32 &&
           !job.is_local && layer.dim % LANES == 0 && layer.value_dim % LANES == 0;
}

// The units of kv heads that see the same tokens; the tile's pointers are those of the first one.
struct Heads {
    Unit units[MOST_HEADS];
    int64_t count, key_bytes, value_bytes;  // bytes: from one head to the next
};

constexpr int AT_ONCE = 4;  // query vectors whose sums have room in registers

// take(first, std::integral_constant<int, n>) for all `count` query vectors, n at a time.
template <typename Take>
inline void each_few(int64_t count, Take take) {
    for (int64_t i = 0; i < count; i += AT_ONCE) switch (count - i) {
        case 1: take(i, std::integral_constant<int, 1>()); break;
        case 2: take(i, std::integral_constant<int, 2>()); break;
        case 3: take(i, std::integral_constant<int, 3>()); break;
        default: take(i, std::integral_constant<int, AT_ONCE>());
    }
}

// Scores of LANES tokens from t on; a key is loaded once for N query vectors.
template <int N>
inline void score_vectors(const float* query, int64_t dim, const float* const* keys, float* scores) {
    constexpr int TOKENS = 4;
    Floats parts[N][LANES];
    for (int lane = 0; lane < LANES; lane += TOKENS) {
        Floats sums[N][TOKENS] = {};
        for (int64_t d = 0; d < dim; d += LANES) {
            Floats key[TOKENS];
            for (int j = 0; j < TOKENS; ++j) key[j] = load(keys[lane + j] + d);
            for (int i = 0; i < N; ++i) {
                const Floats q = load(query + i * dim + d);
                for (int j = 0; j < TOKENS; ++j) sums[i][j] += q * key[j];
            }
        }
        for (int i = 0; i < N; ++i)
            for (int j = 0; j < TOKENS; ++j) parts[i][lane + j] = sums[i][j];
    }
    for (int i = 0; i < N; ++i) store(scores + i * KEYS, sum_each(parts[i]));
}

inline void score_few(Heads& heads, const Tile& tile, int64_t t) {
    for (int64_t h = 0; h < heads.count; ++h) {
        Unit& unit = heads.units[h];
        const float* keys[LANES];
        for (int lane = 0; lane < LANES; ++lane) {
            const char* key = tile.key[t + lane < tile.count ? t + lane : t] + h * heads.key_bytes;
            keys[lane] = reinterpret_cast<const float*>(key);
        }
        each_few(unit.count, [&](int64_t i, auto n) {
            score_vectors<n>(unit.query + i * unit.dim, unit.dim, keys, unit.scores + i * KEYS + t);
        });
    }
}

inline void weigh_few(Heads& heads, const Tile& tile) {
    for (int64_t h = 0; h < heads.count; ++h) {
        Unit& unit = heads.units[h];
        for (int64_t i = 0; i < unit.count; ++i) {
            const float kept = weigh(unit, tile, i, unit.scores + i * KEYS, 0, tile.count, padded(tile.count, LANES));
            float* out = unit.out + i * unit.value_width;
            for (int64_t d = 0; kept != 1.0f && d < unit.value_dim; d += LANES) store(out + d, load(out + d) * kept);
        }
    }
}

// out[N][J * LANES] += weights times the values of tokens first..last; a value is loaded once for N query vectors.
template <int N, int J, typename Value>
inline void add_values(const float* weights, Value value, int64_t first, int64_t last, float* out, int64_t width) {
    Floats c[N][J];
    for (int i = 0; i < N; ++i)
        for (int j = 0; j < J; ++j) c[i][j] = load(out + i * width + j * LANES);
    for (int64_t t = first; t < last; ++t) {
        const float* from = value(t);
        Floats row[J];
        for (int j = 0; j < J; ++j) row[j] = load(from + j * LANES);
        for (int i = 0; i < N; ++i) {
            const Floats weight = all(weights[i * KEYS + t]);
            for (int j = 0; j < J; ++j) c[i][j] += weight * row[j];
        }
    }
    for (int i = 0; i < N; ++i)
        for (int j = 0; j < J; ++j) store(out + i * width + j * LANES, c[i][j]);
}

inline void add_few_values(Heads& heads, const Tile& tile, int64_t first) {
    const int64_t last = first + LANES < tile.count ? first + LANES : tile.count;
    for (int64_t h = 0; h < heads.count; ++h) {
        Unit& unit = heads.units[h];
        each_few(unit.count, [&](int64_t i, auto n) {
            const float* weights = unit.scores + i * KEYS;
            float* out = unit.out + i * unit.value_width;
            for (int64_t d = 0; d < unit.value_dim;) {
                const auto value = [&](int64_t t) {
                    return reinterpret_cast<const float*>(tile.value[t] + h * heads.value_bytes) + d;
                };
                const bool whole = unit.value_dim - d >= WIDTH;
                const auto add = whole ? add_values<n, VECTORS, decltype(value)> : add_values<n, 1, decltype(value)>;
                add(weights, value, first, last, out + d, unit.value_width);
                d += whole ? WIDTH : LANES;
            }
        });
    }
}

inline void add_tile_to_few(Heads& heads, const Tile& tile) {
    for (int64_t t = 0; t < tile.count; t += LANES) score_few(heads, tile, t);
    weigh_few(heads, tile);
    for (int64_t t = 0; t < tile.count; t += LANES) add_few_values(heads, tile, t);
}

}  // namespace ucm
