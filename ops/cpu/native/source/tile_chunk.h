// Part of a matrix product on the matrix unit: some rows and inputs, which are split, times columns that are laid out a few
// at a time.
#pragma once

#include <algorithm>

#include "tile_product.h"

#if defined(UCM_MATRIX_TILES)

namespace ucm {

// Blocks of 16 rows, blocks of 16 columns and steps of 32 inputs, [from, to).
struct Part {
    int64_t from, to;

    int64_t size() const { return to - from; }
    // Part i of about equally large ones.
    static Part of(int64_t size, int64_t i, int64_t parts) { return {size * i / parts, size * (i + 1) / parts}; }
};

struct Chunk {
    Linear task;
    TileWeight weight;
    TileRows rows;  // of `blocks` and `steps`
    Part blocks, steps;
};

// The lines that a result goes to, which may take as long to arrive as its products.
inline void prefetch_result(const Linear& task, int64_t row, int64_t column, int64_t rows, int64_t columns) {
    for (int64_t i = row; i < std::min(row + rows, task.rows); ++i)
        for (int64_t j = 0; j < columns; j += LANES) __builtin_prefetch(task.out + i * task.outputs + column + j, 1, 3);
}

template <int COUNT, int COLUMNS>
inline void add_to_result(const Chunk& chunk, const TileSums& total, int64_t row, int64_t column) {
    const Linear& task = chunk.task;
    const bool first = chunk.steps.from == 0;
    for (int i = 0; i < COUNT; ++i) {
        const int64_t from = row + i / COLUMNS * TILE, at = column + i % COLUMNS * TILE;
        const Floats start = first && task.bias ? load(task.bias + at) : Floats{};
        for (int64_t line = 0; line < TILE && from + line < task.rows; ++line) {
            float* out = task.out + (from + line) * task.outputs + at;
            store(out, load(total.tile[i] + line * TILE) + (first ? start : load(out)));
        }
    }
}

// Blocks of columns from `column` on, which lie in one panel.
template <typename Form, int BLOCKS, int COLUMNS>
void multiply_block(const Chunk& chunk, int64_t column, int64_t block, const char* tiles, TilesAhead& ahead) {
    const TileWeight& weight = chunk.weight;
    const int64_t row = (chunk.blocks.from + block) * TILE, depth = chunk.rows.steps;
    TilePass pass{chunk.rows.tile(block, 0), tiles, depth * PARTS * TILE_BYTES, depth};
    if constexpr (Form::SCALED) {
        const int64_t groups = column / weight.width * (weight.in / TILE_DEPTH) + chunk.steps.from;
        pass.scales = weight.scales + groups * weight.width + column % weight.width;
        pass.offsets = weight.offsets + groups * weight.width + column % weight.width;
        pass.sums = chunk.rows.sum(block, 0);
        pass.width = weight.width, pass.sums_block = depth * TILE;
    }
    prefetch_result(chunk.task, row, column, BLOCKS * TILE, COLUMNS * TILE);
    TileSums total;
    multiply_tiles<Form, BLOCKS, COLUMNS>(pass, total, ahead);
    add_to_result<BLOCKS * COLUMNS, COLUMNS>(chunk, total, row, column);
}

template <typename Form, int COLUMNS>
void multiply_columns(const Chunk& chunk, int64_t column, char* tiles, TilesAhead& ahead) {
    const int64_t depth = chunk.rows.steps;
    for (int64_t step = 0; step < depth; ++step) {
        ahead.fetch();
        for (int i = 0; i < COLUMNS; ++i)
            lay_out<Form>(
                chunk.weight, column + i * TILE, chunk.steps.from + step,
                tiles + (i * depth + step) * Form::KEPT * TILE_BYTES);
    }
    int64_t block = 0;
    if constexpr (COLUMNS <= MOST_TILES / 2)
        for (; block + 1 < chunk.blocks.size(); block += 2)
            multiply_block<Form, 2, COLUMNS>(chunk, column, block, tiles, ahead);
    for (; block < chunk.blocks.size(); ++block) multiply_block<Form, 1, COLUMNS>(chunk, column, block, tiles, ahead);
}

// Blocks of columns [from, to), as many at once as fill the tiles and lie in one panel.
template <typename Form>
void multiply_chunk(const Chunk& chunk, Part columns, char* tiles) {
    const int64_t most = chunk.blocks.size() > 1 ? MOST_TILES / 2 : MOST_TILES, panel = chunk.weight.width / TILE;
    const auto count_at = [&](int64_t column) { return std::min({most, columns.to - column, panel - column % panel}); };
    const int64_t calls = chunk.rows.steps * ((chunk.blocks.size() + 1) / 2 + 1);
    for (int64_t at = columns.from; at < columns.to;) {
        const int64_t count = count_at(at), next = at + count;
        TilesAhead ahead;
        if (next < columns.to)
            ahead = TilesAhead::of<Form>(
                chunk.weight, next * TILE, count_at(next) * TILE, chunk.steps.from, chunk.steps.to, calls);
        const auto work = count >= 4   ? multiply_columns<Form, 4>
                          : count == 3 ? multiply_columns<Form, 3>
                          : count == 2 ? multiply_columns<Form, 2>
                                       : multiply_columns<Form, 1>;
        work(chunk, at * TILE, tiles, ahead);
        at = next;
    }
}

}  // namespace ucm

#endif
