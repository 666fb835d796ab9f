// A tile of the online softmax added to a unit of many query vectors on the CPU's matrix unit. If queries, keys and values
// are bfloat16, weights are rounded to it, too, and so is their sum, as in attention_pairs.h: one product instead of three.
#pragma once

#include <type_traits>

#include "attention_strips.h"

namespace ucm {

#if defined(UCM_MATRIX_TILES)

constexpr float LARGEST_WEIGHT = 8886110.0f;  // e^SLACK

// Up to MATRIX_ROWS query vectors on their way through a tile: scores, then weights, then weighted values.
struct Block {
    int64_t first = 0, rows = 0, depth = 0;  // depth: tokens that some of them see; no rows: nothing to do
    bool whole = false;                      // all of them see all tokens of the tile
    float* scores = nullptr;
    char* weights = nullptr;
};

// Weights in fp32 that bfloat16 holds.
struct RoundedWeights {
    static Floats keep(float* weights, int64_t t, Floats w) {
        const Floats rounded = RoundedPairs::rounded(w);
        store(weights + t, rounded);
        return rounded;
    }
};

// A row's scores to weights wherever a mask or a new maximum is needed. LEFT: parts of a weight.
template <int LEFT>
void weigh_again(Unit& unit, const Tile& tile, const Block& block, int64_t row) {
    const int64_t i = block.first + row;
    float* scores = block.scores + row * KEYS;
    using Weights = std::conditional_t<LEFT == 1, RoundedWeights, FloatWeights>;
    const int64_t hidden = tile.hidden(i, unit.group), limit = tile.limit(i, unit.group);
    const float kept = weigh<Weights>(unit, tile, i, scores, hidden, limit, block.depth);
    char* to = block.weights + row / TILE * strip_bytes(KEYS, PARTS);
    split_row<LEFT>(scores, block.depth, to, row % TILE);
    float* out = unit.out + i * unit.value_width;
    for (int64_t d = 0; kept != 1.0f && d < unit.value_dim; d += LANES) store(out + d, load(out + d) * kept);
}

// Scores to weights in small steps of 32 tokens, few instructions each: more would keep the tiles waiting. A row that
// turns out to need a new maximum is weighed again.
template <int LEFT>
struct SoftmaxWeights {
    const Block& block;
    const float *scores, *top;
    float* total;
    char* to;
    int64_t token = 0, row = 0;
    Floats sums;

    SoftmaxWeights(Unit& unit, const Block& of)
        : block(of), scores(of.scores), top(unit.top + of.first), total(unit.total + of.first * LANES), to(of.weights),
          sums(load(total)) {}

    bool done() const { return row == block.rows; }

    __attribute__((always_inline)) void step(Unit& unit, const Tile& tile) {
        const Floats origin = all(top[row]);
        const Floats low = exponential(load(scores + token) - origin);
        const Floats high = exponential(load(scores + token + LANES) - origin);
        char* const strip = to + token * (LEFT * TILE_BYTES / TILE_DEPTH);
        if constexpr (LEFT == 1) {
            const RoundedPairs pairs(low, high);
            sums += pairs.kept[0] + pairs.kept[1];
            pairs.store(strip);
        } else {
            sums += low + high;
            Pairs<PARTS>(low, high).store(strip);
        }
        token += TILE_DEPTH;
        const Floats larger = maximum(high, low);
        const bool too_large = _mm512_cmp_ps_mask((__m512)larger, (__m512)all(LARGEST_WEIGHT), _CMP_NLE_UQ);
        if (__builtin_expect(too_large || !block.whole, 0)) return again(unit, tile);
        if (token < block.depth) return;
        store(total, sums);
        next_row();
    }

    void again(Unit& unit, const Tile& tile) {
        weigh_again<LEFT>(unit, tile, block, row);
        next_row();
    }

    void next_row() {
        token = 0, ++row, total += LANES, scores += KEYS;
        to = block.weights + row / TILE * strip_bytes(KEYS, PARTS) + row % TILE * 64;
        sums = load(total);
    }
};

template <int R, int LEFT, int P, typename Beside>
void score(const Unit& unit, const MatrixUnit& matrix, const Block& block, Beside beside) {
    const int64_t left = strip_bytes(unit.dim, PARTS), right = strip_bytes(unit.dim, P);
    const char* query = matrix.query + block.first / TILE * left;
    for (int64_t t = 0; t < block.depth; t += 2 * TILE) {
        Accumulators<R>::clear();
        multiply_tiles<R, LEFT, P>({query, left}, {matrix.keys + t / TILE * right, right}, unit.dim / TILE_DEPTH, beside);
        Accumulators<R>::store(block.scores + t, KEYS);
    }
    if (LEFT != 1 || unit.scale == 1.0f) return;
    for (int64_t row = 0; row < block.rows; ++row)
        for (float *at = block.scores + row * KEYS, *end = at + block.depth; at < end; at += LANES)
            store(at, load(at) * unit.scale);
}

template <int R, int LEFT, int P, typename Beside>
void add_values(const Unit& unit, const MatrixUnit& matrix, const Block& block, Beside beside) {
    const int64_t left = strip_bytes(KEYS, PARTS), right = strip_bytes(KEYS, P), width = unit.value_width;
    for (int64_t d = 0; d < unit.value_dim; d += 2 * TILE) {
        float* out = unit.out + block.first * width + d;
        Accumulators<R>::load(out, width);
        const char* values = matrix.values + d / TILE * right;
        multiply_tiles<R, LEFT, P>({block.weights, left}, {values, right}, block.depth / TILE_DEPTH, beside);
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
    block.whole = unit.cap == 0.0f && !unit.slopes && tile.limit(first, unit.group) == block.depth &&
                  tile.hidden(first + rows - 1, unit.group) == 0;
    block.scores = unit.scores + half * MATRIX_ROWS * KEYS;
    block.weights = matrix.weights + half * MATRIX_ROWS / TILE * strip_bytes(KEYS, PARTS);
    return block;
}

// While the tiles multiply one block's scores and another one's values, the vector unit weighs the block between them.
template <int LEFT, int P>
void add_split_tile(Unit& unit, const MatrixUnit& matrix, const Tile& tile, const Tile* next) {
    constexpr int64_t products = LEFT == 1 ? 1 : P == 1 ? 3 : P == 2 ? 5 : 6, step = MATRIX_DEPTH * MATRIX_DEPTH;
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
        SoftmaxWeights<LEFT> weights(unit, weighed);
        const auto beside = [&] {
            ahead.fetch();
            for (int64_t n = 0; n < pace && !weights.done(); ++n) weights.step(unit, tile);
        };
        scored.rows > TILE ? score<2, LEFT, P>(unit, matrix, scored, beside)
                           : score<1, LEFT, P>(unit, matrix, scored, beside);
        added.rows > TILE ? add_values<2, LEFT, P>(unit, matrix, added, beside)
                          : add_values<1, LEFT, P>(unit, matrix, added, beside);
        while (!weights.done()) weights.step(unit, tile);
    }
}

// Many query vectors, on tiles.
inline void add_tile_by_matrix(Unit& unit, const MatrixUnit& matrix, const Tile& tile, const Tile* next) {
    if (tile.type == FP32) add_split_tile<PARTS, 3>(unit, matrix, tile, next);
    else if (tile.type == FP16) add_split_tile<PARTS, 2>(unit, matrix, tile, next);
    else if (unit.rounded) add_split_tile<1, 1>(unit, matrix, tile, next);
    else add_split_tile<PARTS, 1>(unit, matrix, tile, next);  // bfloat16, which holds 8-bit floats exactly
}

#else

inline void add_tile_by_matrix(Unit&, const MatrixUnit&, const Tile&, const Tile*) {}

#endif

}  // namespace ucm
