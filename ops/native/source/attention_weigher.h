// Scores of a block of query vectors to weights, in steps between the products of other blocks.
#pragma once

#include "attention_strips.h"

#if defined(UCM_MATRIX_TILES)

namespace ucm {

constexpr float LARGEST_WEIGHT = 8886110.0f;  // e^SLACK

// Up to MATRIX_ROWS query vectors on their way through a tile: scores, then weights, then weighted values.
struct Block {
    int64_t first = 0, rows = 0, depth = 0;  // depth: tokens that some of them see; no rows: nothing to do
    bool whole = false;                      // all of them see all tokens of the tile
    float* scores = nullptr;
    char* weights = nullptr;
};

// A row's scores to weights wherever a mask or a new maximum is needed.
inline void weigh_again(Unit& unit, const Tile& tile, const Block& block, int64_t row) {
    const int64_t i = block.first + row;
    float* scores = block.scores + row * KEYS;
    const float kept = weigh(unit, i, scores, tile.limit(i, unit.group), block.depth);
    char* to = block.weights + row / TILE * strip_bytes(KEYS, PARTS);
    split_row(scores, block.depth, to, row % TILE);
    float* out = unit.out + i * unit.value_width;
    for (int64_t d = 0; kept != 1.0f && d < unit.value_dim; d += LANES) store(out + d, load(out + d) * kept);
}

// Scores to weights in small steps of 32 tokens, few instructions each: more would keep the tiles waiting. A row that
// turns out to need a new maximum is weighed again.
struct Weigher {
    const Block& block;
    const float *scores, *top;
    float* total;
    char* to;
    int64_t token = 0, row = 0;
    Floats sums;

    Weigher(Unit& unit, const Block& of)
        : block(of), scores(of.scores), top(unit.top + of.first), total(unit.total + of.first * LANES), to(of.weights),
          sums(load(total)) {}

    bool done() const { return row == block.rows; }

    __attribute__((always_inline)) void step(Unit& unit, const Tile& tile) {
        const Floats origin = all(top[row]);
        const Floats low = exponential(load(scores + token) - origin);
        const Floats high = exponential(load(scores + token + LANES) - origin);
        sums += low + high;
        const Pairs<PARTS> pairs(low, high);
        pairs.store(to + token * (PARTS * TILE_BYTES / TILE_DEPTH));
        token += TILE_DEPTH;
        const Floats larger = maximum(high, low);
        const bool too_large = _mm512_cmp_ps_mask((__m512)larger, (__m512)all(LARGEST_WEIGHT), _CMP_NLE_UQ);
        if (__builtin_expect(too_large || !block.whole, 0)) return again(unit, tile);
        if (token < block.depth) return;
        store(total, sums);
        next_row();
    }

    void again(Unit& unit, const Tile& tile) {
        weigh_again(unit, tile, block, row);
        next_row();
    }

    void next_row() {
        token = 0, ++row, total += LANES, scores += KEYS;
        to = block.weights + row / TILE * strip_bytes(KEYS, PARTS) + row % TILE * 64;
        sums = load(total);
    }
};

}  // namespace ucm

#endif
