// A tile's products in fp32 instructions. Keys are transposed. Values are read where they lie, unless they have 16 or 8 bits
// or do not fill registers.
#pragma once

#include "attention_tile.h"

namespace ucm {

// keys[d][t], zeros beyond the tile's tokens.
inline void pack_keys(Unit& unit, const Tile& tile, Ahead& ahead) {
    float room[LANES][LARGEST_HEAD];
    for (int64_t t = 0; t < KEYS; t += LANES) {
        const float* rows[LANES];
        for (int lane = 0; lane < LANES; ++lane)
            rows[lane] = t + lane < tile.count ? as_floats(tile.key[t + lane], tile.type, unit.dim, room[lane]) : nullptr;
        int64_t d = 0;
        for (; d + LANES <= unit.dim; d += LANES) {
            Floats v[LANES];
            ahead.fetch();
            for (int lane = 0; lane < LANES; ++lane) v[lane] = rows[lane] ? load(rows[lane] + d) : Floats{};
            transpose(v);
            for (int lane = 0; lane < LANES; ++lane) store(unit.keys + (d + lane) * KEYS + t, v[lane]);
        }
        for (; d < unit.dim; ++d)
            for (int lane = 0; lane < LANES; ++lane) unit.keys[d * KEYS + t + lane] = rows[lane] ? rows[lane][d] : 0.0f;
    }
}

// values[t][d], zeros beyond the tile's tokens and beyond value_dim.
inline void pack_values(Unit& unit, const Tile& tile) {
    float room[LARGEST_HEAD];
    for (int64_t t = 0; t < KEYS; ++t) {
        float* to = unit.values + t * unit.value_width;
        const int64_t size = t < tile.count ? unit.value_dim : 0;
        if (size) std::memcpy(to, as_floats(tile.value[t], tile.type, size, room), size * sizeof(float));
        std::memset(to + size, 0, (unit.value_width - size) * sizeof(float));
    }
}

// c[R][VECTORS] += a[R][depth] * b[depth][WIDTH], where b(k) is row k of b.
template <int R, typename B>
inline void multiply(const float* a, int64_t a_stride, B b, int64_t depth, Floats (&c)[R][VECTORS], Ahead& ahead) {
    for (int64_t k = 0; k < depth; ++k) {
        if (k % FETCH == 0) ahead.fetch();
        const float* from = b(k);
        Floats row[VECTORS];
        for (int j = 0; j < VECTORS; ++j) row[j] = load(from + j * LANES);
        for (int i = 0; i < R; ++i) {
            const Floats x = all(a[i * a_stride + k]);
            for (int j = 0; j < VECTORS; ++j) c[i][j] += x * row[j];
        }
    }
}

class FloatProducts {
public:
    using Weights = FloatWeights;

    FloatProducts(Unit& of, const Tile& by, Ahead& next)
        : unit(of), tile(by), ahead(next), in_place(by.type == FP32 && of.value_dim == of.value_width) {
        pack_keys(unit, tile, ahead);
        if (!in_place) pack_values(unit, tile);
    }

    // c += scores of R query vectors, for tokens from t on.
    template <int R>
    void score(int64_t first, int64_t t, Floats (&c)[R][VECTORS]) const {
        const float* keys = unit.keys + t;
        multiply(unit.query + first * unit.dim, unit.dim, [=](int64_t k) { return keys + k * KEYS; }, unit.dim, c, ahead);
    }

    // c += weights of the scores times the first `depth` values, from column d on.
    template <int R>
    void add(int64_t d, int64_t depth, Floats (&c)[R][VECTORS]) const {
        const float* values = unit.values + d;
        const int64_t width = unit.value_width;
        const auto packed = [=](int64_t k) { return values + k * width; };
        const auto lying = [&](int64_t k) { return reinterpret_cast<const float*>(tile.value[k]) + d; };
        if (in_place) multiply(unit.scores, KEYS, lying, depth, c, ahead);
        else multiply(unit.scores, KEYS, packed, depth, c, ahead);
    }

private:
    Unit& unit;
    const Tile& tile;
    Ahead& ahead;
    const bool in_place;
};

}  // namespace ucm
