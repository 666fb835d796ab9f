// A unit on the CPU's matrix unit: queries, keys and values split into strips of tiles.
#pragma once

#include "attention_tile.h"
#include "matrix_products.h"

namespace ucm {

// Query vectors from which on splitting keys and values pays, for heads of MATRIX_WIDE and more, and for smaller ones.
constexpr int64_t MATRIX_LEAST = 32, MATRIX_LEAST_NARROW = 96, MATRIX_WIDE = 128;
// For bfloat16 the unit has to make up for pairs, which multiply twice as fast as fp32 instructions and need no strips.
constexpr int64_t MATRIX_LEAST_PAIRS = 2 * MATRIX_LEAST_NARROW;
constexpr int64_t MATRIX_DEPTH = 32;  // head sizes are multiples of it
constexpr int64_t MATRIX_ROWS = 32;   // query vectors that are multiplied at once

#if defined(UCM_MATRIX_TILES)

inline int64_t strip_bytes(int64_t depth, int64_t parts) { return depth / TILE_DEPTH * parts * TILE_BYTES; }

// Data of a unit in addition to its results: operands as strips.
struct MatrixUnit {
    // of [count] vectors, [KEYS] tokens, [value_dim] columns, [2 * MATRIX_ROWS] vectors; null: fp32 instructions are used
    char *query = nullptr, *keys = nullptr, *values = nullptr, *weights = nullptr;

    static bool pays(const Unit& unit) {
        const int64_t least = unit.in_pairs ? MATRIX_LEAST_PAIRS
                              : unit.dim + unit.value_dim < 2 * MATRIX_WIDE ? MATRIX_LEAST_NARROW : MATRIX_LEAST;
        return use_matrix_tiles() && unit.count >= least && unit.dim % MATRIX_DEPTH == 0 &&
               unit.value_dim % MATRIX_DEPTH == 0;
    }

    static int64_t bytes(const Unit& unit) {
        return (padded(unit.count, MATRIX_ROWS) + KEYS) / TILE * strip_bytes(unit.dim, PARTS) +
               (unit.value_dim + 2 * MATRIX_ROWS) / TILE * strip_bytes(KEYS, PARTS);
    }

    MatrixUnit() = default;
    MatrixUnit(const Unit& unit, char* room) : query(room) {
        keys = query + padded(unit.count, MATRIX_ROWS) / TILE * strip_bytes(unit.dim, PARTS);
        values = keys + KEYS / TILE * strip_bytes(unit.dim, PARTS);
        weights = values + unit.value_dim / TILE * strip_bytes(KEYS, PARTS);
    }

    bool used() const { return query; }

    // add() with the thread's tiles, the queries split for them; or just add().
    template <typename Add>
    void work(const Unit& unit, Add add) const;
};

// A vector of `size` numbers as row `row` of a strip, in P parts.
template <int P>
void split_row(const float* from, int64_t size, char* strip, int64_t row) {
    for (int64_t d = 0; d < size; d += TILE_DEPTH, strip += P * TILE_BYTES) {
        const Pairs<P> pairs(load(from + d), load(from + d + LANES));
        pairs.store(strip + row * 64);
    }
}

template <typename Add>
void MatrixUnit::work(const Unit& unit, Add add) const {
    if (!used()) return add();
    const auto split = unit.rounded ? split_row<1> : split_row<PARTS>;
    for (int64_t i = 0; i < padded(unit.count, MATRIX_ROWS); ++i)
        split(unit.query + i * unit.dim, unit.dim, query + i / TILE * strip_bytes(unit.dim, PARTS), i % TILE);
    const MatrixTiles tiles;
    add();
}

// The tokens' keys as columns.
template <int P>
void split_keys(const Unit& unit, const Tile& tile, char* to, Ahead& ahead) {
    float room[LANES][LARGEST_HEAD];
    for (int64_t t = 0; t < padded(tile.count, TILE_DEPTH); t += TILE) {
        const float* rows[TILE];
        for (int i = 0; i < TILE; ++i)
            rows[i] = t + i < tile.count ? as_floats(tile.key[t + i], tile.type, unit.dim, room[i]) : nullptr;
        for (int64_t d = 0; d < unit.dim; d += TILE_DEPTH, to += P * TILE_BYTES) {
            Floats split[P][TILE];
            for (int i = 0; i < TILE; ++i) {
                const Pairs<P> pairs(rows[i] ? load(rows[i] + d) : Floats{}, rows[i] ? load(rows[i] + d + LANES) : Floats{});
                for (int part = 0; part < P; ++part) split[part][i] = (Floats)pairs.part[part];
            }
            ahead.fetch();
            for (int part = 0; part < P; ++part) {
                transpose_level<LANES / 2>(split[part]);
                for (int i = 0; i < TILE; ++i)
                    store(reinterpret_cast<float*>(to + part * TILE_BYTES + i * 64), split[part][i]);
            }
        }
    }
}

// The tokens' values as rows, zeros beyond the tile's tokens.
template <int P>
void split_values(const Unit& unit, const Tile& tile, char* to, Ahead& ahead) {
    float room[2][LARGEST_HEAD];
    const int64_t strip = strip_bytes(KEYS, P);
    for (int64_t t = 0; t < padded(tile.count, TILE_DEPTH); t += TILE_DEPTH, to += P * TILE_BYTES) {
        for (int i = 0; i < TILE; ++i) {
            const float* rows[2];
            for (int h = 0; h < 2; ++h) {
                const int64_t at = t + h * TILE + i;
                rows[h] = at < tile.count ? as_floats(tile.value[at], tile.type, unit.value_dim, room[h]) : nullptr;
            }
            ahead.fetch();
            for (int64_t d = 0; d < unit.value_dim; d += TILE) {
                const Pairs<P> pairs(rows[0] ? load(rows[0] + d) : Floats{}, rows[1] ? load(rows[1] + d) : Floats{});
                pairs.store(to + d / TILE * strip + i * 64);
            }
        }
    }
}

#else

struct MatrixUnit {
    MatrixUnit() = default;
    MatrixUnit(const Unit&, char*) {}
    static bool pays(const Unit&) { return false; }
    static int64_t bytes(const Unit&) { return 0; }
    static bool used() { return false; }
    template <typename Add>
    void work(const Unit&, Add add) const { add(); }
};

#endif

}  // namespace ucm
