// A tile of the online softmax added to a unit of many query vectors on the CPU's matrix unit.
#pragma once

#include "attention_weigher.h"

namespace ucm {

#if defined(UCM_MATRIX_TILES)

template <int R, int P, typename Beside>
void score(const Unit& unit, const MatrixUnit& matrix, const Block& block, Beside beside) {
    const int64_t left = strip_bytes(unit.dim, PARTS), right = strip_bytes(unit.dim, P);
    const char* query = matrix.query + block.first / TILE * left;
    for (int64_t t = 0; t < block.depth; t += 2 * TILE) {
        Accumulators<R>::clear();
        multiply_tiles<R, P>({query, left}, {matrix.keys + t / TILE * right, right}, unit.dim / TILE_DEPTH, beside);
        Accumulators<R>::store(block.scores + t, KEYS);
    }
}

template <int R, int P, typename Beside>
void add_values(const Unit& unit, const MatrixUnit& matrix, const Block& block, Beside beside) {
    const int64_t left = strip_bytes(KEYS, PARTS), right = strip_bytes(KEYS, P), width = unit.value_width;
    for (int64_t d = 0; d < unit.value_dim; d += 2 * TILE) {
        float* out = unit.out + block.first * width + d;
        Accumulators<R>::load(out, width);
        const char* values = matrix.values + d / TILE * right;
        multiply_tiles<R, P>({block.weights, left}, {values, right}, block.depth / TILE_DEPTH, beside);
        Accumulators<R>::store(out, width);
    }
}

// The query vectors from `first` on as a block; empty beyond the last one, and where none sees a token.
inline Block block_of(const Unit& unit, const MatrixUnit& matrix, const Tile& tile, int64_t first) {
    Block block;
    block.first = first;
    if (first >= unit.count) return block;
    const int64_t rows = unit.count - first > TILE ? 2 * TILE : TILE, half = first / MATRIX_ROWS % 2;
    block.depth = padded(tile.limit(first + rows - 1, unit.group), TILE_DEPTH);
    block.rows = block.depth ? rows : 0;
    block.whole = tile.limit(first, unit.group) == block.depth;
    block.scores = unit.scores + half * MATRIX_ROWS * KEYS;
    block.weights = matrix.weights + half * MATRIX_ROWS / TILE * strip_bytes(KEYS, PARTS);
    return block;
}

// While the tiles multiply one block's scores and another one's values, the vector unit weighs the block between them.
template <int P>
void add_split_tile(Unit& unit, const MatrixUnit& matrix, const Tile& tile, const Tile* next) {
    constexpr int64_t products = P == 1 ? 3 : P == 2 ? 5 : 6, step = MATRIX_DEPTH * MATRIX_DEPTH;
    const int64_t blocks = padded(unit.count, MATRIX_ROWS) / MATRIX_ROWS;
    Ahead ahead(unit, next, blocks * KEYS * (unit.dim + unit.value_dim) / step * products);
    split_keys<P>(unit, tile, matrix.keys, ahead);
    split_values<P>(unit, tile, matrix.values, ahead);
    Block scored, weighed, added;
    for (int64_t first = 0; first < (blocks + 2) * MATRIX_ROWS; first += MATRIX_ROWS) {
        added = weighed, weighed = scored, scored = block_of(unit, matrix, tile, first);
        const int64_t beside_calls = (scored.depth * unit.dim + added.depth * unit.value_dim) / step * products;
        const int64_t steps = weighed.rows * weighed.depth / TILE_DEPTH;
        const int64_t pace = beside_calls ? (steps + beside_calls - 1) / beside_calls : 0;
        Weigher weigher(unit, weighed);
        const auto beside = [&] {
            ahead.fetch();
            for (int64_t n = 0; n < pace && !weigher.done(); ++n) weigher.step(unit, tile);
        };
        scored.rows > TILE ? score<2, P>(unit, matrix, scored, beside) : score<1, P>(unit, matrix, scored, beside);
        added.rows > TILE ? add_values<2, P>(unit, matrix, added, beside) : add_values<1, P>(unit, matrix, added, beside);
        while (!weigher.done()) weigher.step(unit, tile);
    }
}

// Many query vectors, on tiles.
inline void add_tile_by_matrix(Unit& unit, const MatrixUnit& matrix, const Tile& tile, const Tile* next) {
    if (tile.type == FP32) add_split_tile<3>(unit, matrix, tile, next);
    else if (tile.type == FP16) add_split_tile<2>(unit, matrix, tile, next);
    else add_split_tile<1>(unit, matrix, tile, next);
}

#else

inline void add_tile_by_matrix(Unit&, const MatrixUnit&, const Tile&, const Tile*) {}

#endif

}  // namespace ucm
