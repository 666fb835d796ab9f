// A unit's memory, its query vectors, and the tokens that it sees, passed in tiles to the kernel that suits its size.
#pragma once

#include "attention_few.h"
#include "attention_floats.h"
#include "attention_matrix.h"
#include "attention_pairs.h"

namespace ucm {

// A tile of the online softmax added to a unit: scores, weights and weighted values, in register blocks.
template <int R, typename Products>
void add_tile_by(Unit& unit, const Tile& tile, const Tile* next) {
    const int64_t width = unit.value_width;
    const int64_t products = (unit.count + R - 1) / R * (unit.dim + KEYS) / FETCH, packs = KEYS / LANES * (unit.dim / LANES);
    Ahead ahead(unit, next, products + packs + 1);
    const Products by(unit, tile, ahead);
    for (int64_t first = 0; first < unit.count; first += R) {
        const int64_t depth = tile.limit(first + R - 1, unit.group);
        if (depth == 0) continue;
        for (int64_t t = 0; t < depth; t += WIDTH) {
            Floats c[R][VECTORS] = {};
            by.score(first, t, c);
            for (int i = 0; i < R; ++i)
                for (int j = 0; j < VECTORS; ++j) store(unit.scores + i * KEYS + t + j * LANES, c[i][j]);
        }
        float kept[R];
        for (int i = 0; i < R; ++i)
            kept[i] = weigh<typename Products::Weights>(
                unit, tile, first + i, unit.scores + i * KEYS, tile.hidden(first + i, unit.group),
                tile.limit(first + i, unit.group), padded(depth, LANES));
        for (int64_t d = 0; d < width; d += WIDTH) {
            float* out = unit.out + first * width + d;
            Floats c[R][VECTORS];
            for (int i = 0; i < R; ++i)
                for (int j = 0; j < VECTORS; ++j) c[i][j] = load(out + i * width + j * LANES) * kept[i];
            by.add(d, depth, c);
            for (int i = 0; i < R; ++i)
                for (int j = 0; j < VECTORS; ++j) store(out + i * width + j * LANES, c[i][j]);
        }
    }
}

// Many query vectors: both products in register blocks, of fewer rows where that leaves fewer of them empty.
template <typename Products>
void add_tile_in_blocks(Unit& unit, const Tile& tile, const Tile* next) {
    if (padded(unit.count, ROWS - 1) < padded(unit.count, ROWS)) add_tile_by<ROWS - 1, Products>(unit, tile, next);
    else add_tile_by<ROWS, Products>(unit, tile, next);
}

inline void add_tile(Unit& unit, const Tile& tile, const Tile* next) {
#if defined(__AVX512BF16__)
    if (unit.in_pairs) return add_tile_in_blocks<PairProducts>(unit, tile, next);
#endif
    add_tile_in_blocks<FloatProducts>(unit, tile, next);
}

// The thread's memory for units, until its next ones.
inline Scratch& unit_scratch() {
    static thread_local Scratch scratch;
    return scratch;
}

inline Unit unit_of(const Layer& layer, const Job& job) {
    Unit unit;
    unit.dim = layer.dim, unit.value_dim = layer.value_dim, unit.group = layer.heads / layer.kv_heads;
    unit.cap = layer.cap;
    unit.count = (job.row_hi - job.row_lo) * unit.group;
    unit.value_width = padded(unit.value_dim, WIDTH);
    unit.rounded = layer.type == BF16 && layer.cache_type == BF16;
    unit.in_pairs = MULTIPLIES_PAIRS && unit.rounded && layer.dim % 2 == 0;
    unit.scale = layer.scale;
    return unit;
}

// State of `room` query vectors, results zero, and scores of `vectors` of them; returns the end of the memory that it takes.
inline float* place_state(Unit& unit, float* at, int64_t room, int64_t vectors) {
    unit.scores = at;
    unit.out = unit.scores + KEYS * vectors;
    unit.query = unit.out + room * unit.value_width;
    unit.total = unit.query + room * unit.dim;
    unit.top = unit.total + room * LANES;
    std::memset(unit.out, 0, room * (unit.value_width + unit.dim + LANES) * sizeof(float));
    for (int64_t i = 0; i < room; ++i) unit.top[i] = NOTHING;
    return unit.top + padded(room, LANES);
}

inline int64_t state_size(const Unit& unit, int64_t room, int64_t vectors) {
    return KEYS * vectors + room * (unit.value_width + unit.dim + LANES) + padded(room, LANES);
}

inline int64_t packed_size(const Unit& unit) { return KEYS * (unit.dim + unit.value_width); }

inline void place_packed(Unit& unit, float* at) { unit.keys = at, unit.values = at + KEYS * unit.dim; }

inline MatrixUnit lay_out(Unit& unit) {
    const bool tiles = MatrixUnit::pays(unit);
    const int64_t strips = tiles ? MatrixUnit::bytes(unit) / sizeof(float) : packed_size(unit);
    unit.in_pairs = unit.in_pairs && !tiles, unit.rounded = unit.rounded && tiles;
    const int64_t room = padded(unit.count, tiles ? MATRIX_ROWS : ROWS), vectors = tiles ? 2 * MATRIX_ROWS : ROWS;
    float* const start = unit_scratch().take(strips + state_size(unit, room, vectors));
    place_state(unit, start + strips, room, vectors);
    if (tiles) return MatrixUnit(unit, reinterpret_cast<char*>(start));
    place_packed(unit, start);
    return MatrixUnit();
}

// They share what a tile of new tokens is packed into.
inline void lay_out(Heads& heads, const Unit& unit) {
    const int64_t room = padded(unit.count, ROWS), vectors = FEW > ROWS ? FEW : ROWS;
    float* const start = unit_scratch().take(packed_size(unit) + heads.count * state_size(unit, room, vectors));
    float* at = start + packed_size(unit);
    for (int64_t h = 0; h < heads.count; ++h) {
        heads.units[h] = unit;
        place_packed(heads.units[h], start);
        at = place_state(heads.units[h], at, room, vectors);
    }
}

inline void take_queries(Unit& unit, const Layer& layer, const Tensors& tensors, const Row* rows, int64_t head) {
    unit.slopes = tensors.slopes ? tensors.slopes + head * unit.group : nullptr, unit.places = rows;
    float room[LARGEST_HEAD];
    for (int64_t i = 0; i < unit.count; ++i) {
        const int64_t row = rows[i / unit.group].row, query_head = head * unit.group + i % unit.group;
        const char* from = tensors.query + (row * layer.query_row + query_head * layer.query_head) * bytes_of(layer.type);
        if (unit.in_pairs) {
            std::memcpy(reinterpret_cast<char*>(unit.query) + i * unit.dim * 2, from, unit.dim * 2);
            continue;
        }
        const float *query = as_floats(from, layer.type, unit.dim, room), scale = unit.rounded ? 1.0f : layer.scale;
        for (int64_t d = 0; d < unit.dim; ++d) unit.query[i * unit.dim + d] = query[d] * scale;
    }
}

// Tokens to tiles. Each is multiplied while the one after it is fetched; the last ones when the object dies.
class Tiles {
public:
    Tiles(Unit& of, const MatrixUnit& by) : unit(of), matrix(by) { tiles[0].count = tiles[1].count = 0; }
    ~Tiles() {
        if (tile->count) pass_on();
        if (before) add(*before, nullptr);
    }

    // The tokens that follow are of this type; first_key, first_row, rows and last as in Tile.
    void begin(int64_t type, int64_t first_key, int64_t first_row, const Row* rows, int64_t last) {
        if (tile->count) pass_on();
        tile->type = type, tile->first_key = first_key, tile->first_row = first_row;
        tile->rows = rows, tile->last = last, tile->place = 0;
    }

    void take(const void* key, const void* value, int64_t position) {
        tile->key[tile->count] = static_cast<const char*>(key);
        tile->value[tile->count] = static_cast<const char*>(value);
        tile->position[tile->count] = float(position);
        if (++tile->count == KEYS) pass_on();
    }

private:
    Unit& unit;
    const MatrixUnit& matrix;
    Tile tiles[2], *tile = tiles, *before = nullptr;

    void pass_on() {
        if (before) add(*before, tile);
        before = tile;
        tile = tile == tiles ? tiles + 1 : tiles;
        tile->count = 0, tile->type = before->type, tile->first_row = before->first_row;
        tile->first_key = before->first_key < 0 ? -1 : before->first_key + KEYS;
        tile->rows = before->rows, tile->last = before->last, tile->place = before->place + before->count;
    }

    void add(const Tile& full, const Tile* next) {
        matrix.used() ? add_tile_by_matrix(unit, matrix, full, next) : add_tile(unit, full, next);
    }
};

}  // namespace ucm
