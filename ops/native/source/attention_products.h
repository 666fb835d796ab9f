// A tile of the online softmax added to a unit: scores, weights and weighted values, in register blocks.
#pragma once

#include "attention_tile.h"

namespace ucm {

// Keys of a tile are transposed. Values are read where they lie, unless they are half precision or do not fill registers.
template <int R>
void add_tile_by(Unit& unit, const Tile& tile, const Tile* next) {
    const int64_t width = unit.value_width;
    const int64_t products = (unit.count + R - 1) / R * (unit.dim + KEYS) / FETCH, packs = KEYS / LANES * (unit.dim / LANES);
    Ahead ahead(unit, next, products + packs + 1);
    const bool in_place = tile.type == FP32 && unit.value_dim == width;
    pack_keys(unit, tile, ahead);
    if (!in_place) pack_values(unit, tile);
    for (int64_t first = 0; first < unit.count; first += R) {
        const int64_t depth = tile.limit(first + R - 1, unit.group);
        if (depth == 0) continue;
        for (int64_t t = 0; t < depth; t += WIDTH) {
            Floats c[R][VECTORS] = {};
            const float* keys = unit.keys + t;
            multiply(unit.query + first * unit.dim, unit.dim, [=](int64_t k) { return keys + k * KEYS; }, unit.dim, c, ahead);
            for (int i = 0; i < R; ++i)
                for (int j = 0; j < VECTORS; ++j) store(unit.scores + i * KEYS + t + j * LANES, c[i][j]);
        }
        float kept[R];
        for (int i = 0; i < R; ++i)
            kept[i] = weigh(unit, first + i, unit.scores + i * KEYS, tile.limit(first + i, unit.group), padded(depth, LANES));
        for (int64_t d = 0; d < width; d += WIDTH) {
            float* out = unit.out + first * width + d;
            Floats c[R][VECTORS];
            for (int i = 0; i < R; ++i)
                for (int j = 0; j < VECTORS; ++j) c[i][j] = load(out + i * width + j * LANES) * kept[i];
            const float* values = unit.values + d;
            const auto packed = [=](int64_t k) { return values + k * width; };
            const auto lying = [&](int64_t k) { return reinterpret_cast<const float*>(tile.value[k]) + d; };
            if (in_place) multiply(unit.scores, KEYS, lying, depth, c, ahead);
            else multiply(unit.scores, KEYS, packed, depth, c, ahead);
            for (int i = 0; i < R; ++i)
                for (int j = 0; j < VECTORS; ++j) store(out + i * width + j * LANES, c[i][j]);
        }
    }
}

// Many query vectors: both products in register blocks, of fewer rows where that leaves fewer of them empty.
inline void add_tile(Unit& unit, const Tile& tile, const Tile* next) {
    if (padded(unit.count, ROWS - 1) < padded(unit.count, ROWS)) add_tile_by<ROWS - 1>(unit, tile, next);
    else add_tile_by<ROWS>(unit, tile, next);
}

}  // namespace ucm
