// Rows of a matrix split into bfloat16, as the matrix unit reads them: tiles [blocks of 16 rows, steps of 32, 3 parts].
#pragma once

#include "matrix_tiles.h"
#include "panel_product.h"

#if defined(UCM_MATRIX_TILES)

namespace ucm {

// `sums`: of each row and step, [blocks, steps, 16].
struct TileRows {
    static constexpr int64_t TILE_FLOATS = PARTS * TILE_DEPTH / 2;  // of a row and step

    char* tiles;
    float* sums;
    int64_t steps;

    char* tile(int64_t block, int64_t step) const { return tiles + (block * steps + step) * TILE * TILE_FLOATS * 4; }
    float* sum(int64_t block, int64_t step) const { return sums + (block * steps + step) * TILE; }
};

// Splits row `row` of x, from step `first` on, into row `to` of the tiles: zeros beyond x.
template <bool SUMS>
inline void split_row(const Linear& task, int64_t row, int64_t first, const TileRows& rows, int64_t to) {
    const int64_t block = to / TILE, line = to % TILE;
    for (int64_t step = 0; step < rows.steps; ++step) {
        const int64_t k = (first + step) * TILE_DEPTH, left = row < task.rows ? task.in - k : 0;
        const uint32_t mask = left >= TILE_DEPTH ? ~0u : (1u << left) - 1;
        const float* from = left ? task.x + row * task.x_stride + k : task.x;
        const Floats low = (Floats)_mm512_maskz_loadu_ps(mask & 0xffff, from);
        const Floats high = (Floats)_mm512_maskz_loadu_ps(mask >> 16, from + LANES);
        const Split split(low, high);
        char* tile = rows.tile(block, step) + line * 64;
        for (int i = 0; i < PARTS; ++i) _mm512_store_si512(tile + i * TILE * 64, split.part[i]);
        if constexpr (SUMS) rows.sum(block, step)[line] = sum(low + high);
    }
}

}  // namespace ucm

#endif
