// Few query vectors: keys and values are read once, where they lie.
//
// Of several kv heads in turns: a token's heads lie side by side, and the CPU fetches ahead only what is read within a
// page without long breaks. One head alone reaches three quarters of the bandwidth, with prefetches even less.
#pragma once

#include "attention_tile.h"

namespace ucm {

constexpr int64_t MOST_HEADS = 16;  // that take turns

inline bool is_few(const Layer& layer, const Job& job) {
    return (job.row_hi - job.row_lo) * (layer.heads / layer.kv_heads) <= FEW && layer.cache_type == FP32 &&
           layer.dim % LANES == 0 && layer.value_dim % LANES == 0;
}

// The units of kv heads that see the same tokens; the tile's pointers are those of the first one.
struct Heads {
    Unit units[MOST_HEADS];
    int64_t count, key_bytes, value_bytes;  // bytes: from one head to the next
};

inline void score_few(Heads& heads, const Tile& tile, int64_t t) {
    for (int64_t h = 0; h < heads.count; ++h) {
        Unit& unit = heads.units[h];
        const float* keys[LANES];
        for (int lane = 0; lane < LANES; ++lane) {
            const char* key = tile.key[t + lane < tile.count ? t + lane : t] + h * heads.key_bytes;
            keys[lane] = reinterpret_cast<const float*>(key);
        }
        for (int64_t i = 0; i < unit.count; ++i) {
            Floats parts[LANES];
            for (int lane = 0; lane < LANES; ++lane) parts[lane] = dot(unit.query + i * unit.dim, keys[lane], unit.dim);
            store(unit.scores + i * KEYS + t, sum_each(parts));
        }
    }
}

inline void weigh_few(Heads& heads, const Tile& tile) {
    for (int64_t h = 0; h < heads.count; ++h) {
        Unit& unit = heads.units[h];
        for (int64_t i = 0; i < unit.count; ++i) {
            const float kept = weigh(unit, i, unit.scores + i * KEYS, tile.count, padded(tile.count, LANES));
            float* out = unit.out + i * unit.value_width;
            for (int64_t d = 0; kept != 1.0f && d < unit.value_dim; d += LANES) store(out + d, load(out + d) * kept);
        }
    }
}

inline void add_few_values(Heads& heads, const Tile& tile, int64_t first) {
    const int64_t last = first + LANES < tile.count ? first + LANES : tile.count;
    for (int64_t h = 0; h < heads.count; ++h) {
        Unit& unit = heads.units[h];
        for (int64_t i = 0; i < unit.count; ++i) {
            const float* weights = unit.scores + i * KEYS;
            for (int64_t d = 0; d < unit.value_dim; d += WIDTH) {
                const int vectors = unit.value_dim - d < WIDTH ? int((unit.value_dim - d) / LANES) : VECTORS;
                float* out = unit.out + i * unit.value_width + d;
                Floats c[VECTORS] = {};
                for (int j = 0; j < vectors; ++j) c[j] = load(out + j * LANES);
                for (int64_t t = first; t < last; ++t) {
                    const float* value = reinterpret_cast<const float*>(tile.value[t] + h * heads.value_bytes) + d;
                    const Floats weight = all(weights[t]);
                    for (int j = 0; j < vectors; ++j) c[j] += weight * load(value + j * LANES);
                }
                for (int j = 0; j < vectors; ++j) store(out + j * LANES, c[j]);
            }
        }
    }
}

inline void add_tile_to_few(Heads& heads, const Tile& tile) {
    for (int64_t t = 0; t < tile.count; t += LANES) score_few(heads, tile, t);
    weigh_few(heads, tile);
    for (int64_t t = 0; t < tile.count; t += LANES) add_few_values(heads, tile, t);
}

}  // namespace ucm
