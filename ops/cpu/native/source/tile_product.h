// Split rows times a weight that is laid out for the matrix unit: at most four tiles of the result at a time.
#pragma once

#include <type_traits>

#include "matrix_tiles.h"
#include "panel_product.h"
#include "tile_weight.h"

#if defined(UCM_MATRIX_TILES)

namespace ucm {

// Rows of a matrix split into bfloat16, as the matrix unit reads them: tiles [blocks of 16 rows, steps of 32, 3 parts].
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

// Some blocks of 16 rows times some of 16 columns over some steps. b: [columns, steps, parts] tiles.
struct TilePass {
    const char *a, *b;
    int64_t a_block, steps;                // bytes between blocks of rows
    const float *scales, *offsets, *sums;  // of the first step and column; of the first step and block of rows
    int64_t width, sums_block;             // floats between steps of scales, and between blocks of rows
};

constexpr int MOST_TILES = 4;  // of results
struct alignas(64) TileSums {
    float tile[MOST_TILES][TILE * TILE];
};

template <int I, int END, typename Work>
inline void unrolled(Work work) {
    if constexpr (I < END) {
        work(std::integral_constant<int, I>{});
        unrolled<I + 1, END>(work);
    }
}

// Step `step` added to tiles 0..3: the six products of parts i, j with i + j < 3, or the three of a weight of one part.
// meanwhile(from, to) is work on results [from, to) for the vector units, which run in parallel with the matrix unit.
template <int KEPT, int BLOCKS, int COLUMNS, typename Work>
inline void add_step(const TilePass pass, int64_t step, Work meanwhile) {
    const char* a = pass.a + step * PARTS * TILE_BYTES;
    const char* b = pass.b + step * KEPT * TILE_BYTES;
    const int64_t b_column = pass.steps * KEPT * TILE_BYTES;
    constexpr int COUNT = BLOCKS * COLUMNS;
    if constexpr (BLOCKS == 1) {
        unrolled<0, PARTS>([&](auto part) { load_tile<4 + part>(a + part * TILE_BYTES); });
        unrolled<0, COLUMNS>([&](auto column) {
            // in the order of two blocks, so that a result does not depend on how many rows there are
            unrolled<0, KEPT>([&](auto i) {
                constexpr int part = KEPT - 1 - i;
                load_tile<7>(b + column * b_column + part * TILE_BYTES);
                constexpr bool second_first = KEPT > 1 && part == 0;
                add_product<column, 4 + second_first, 7>();
                if constexpr (part < 2) add_product<column, 5 - second_first, 7>();
                if constexpr (part < 1) add_product<column, 6, 7>();
            });
            meanwhile(column, column + 1);
        });
    } else {
        const auto load_rows = [&](int part) {
            load_tile<4>(a + part * TILE_BYTES);
            load_tile<5>(a + part * TILE_BYTES + pass.a_block);
        };
        const auto load_columns = [&](int part) {
            const char* from = b + part * TILE_BYTES;
            unrolled<0, COLUMNS>([&](auto column) { load_tile<6 + column>(from + column * b_column); });
        };
        const auto multiply = [&] {
            unrolled<0, COLUMNS>([&](auto column) { add_product<column, 4, 6 + column>(); });
            unrolled<0, COLUMNS>([&](auto column) { add_product<COLUMNS + column, 5, 6 + column>(); });
        };
        // ordered so that what is loaded is used again
        if constexpr (KEPT > 1) {
            load_rows(0), load_columns(2), multiply();
            load_columns(1), multiply();
            load_rows(1), multiply();
            load_columns(0), multiply();
            load_rows(0), multiply();
            load_rows(2), multiply();
        } else {
            load_columns(0), load_rows(0), multiply();
            meanwhile(0, COUNT * 1 / 3);
            load_rows(1), multiply();
            meanwhile(COUNT / 3, COUNT * 2 / 3);
            load_rows(2), multiply();
            meanwhile(COUNT * 2 / 3, COUNT);
        }
    }
}

template <int COUNT>
inline void zero_tiles() {
    unrolled<0, COUNT>([](auto i) { zero_tile<i>(); });
}

template <int COUNT>
inline void store_tiles(TileSums& to) {
    unrolled<0, COUNT>([&](auto i) { store_tile<i>(to.tile[i]); });
}

// total += step's products * scale + step's sum of the row * offset
template <typename Form, int BLOCKS, int COLUMNS>
inline void add_scaled(
    const TilePass pass, int64_t step, const TileSums& products, TileSums& total, int from, int to) {
    for (int i = from; i < to; ++i) {
        const int64_t entry = step * pass.width + i % COLUMNS * TILE;
        const Floats scale = load(pass.scales + entry);
        Floats offset = {};
        if constexpr (Form::OFFSET) offset = load(pass.offsets + entry) + scale * Form::CENTRE;
        const float* sums = pass.sums + i / COLUMNS * pass.sums_block + step * TILE;
#pragma GCC unroll 16
        for (int row = 0; row < TILE; ++row) {
            Floats sum = load(total.tile[i] + row * TILE) + load(products.tile[i] + row * TILE) * scale;
            if constexpr (Form::OFFSET) sum += offset * sums[row];
            store(total.tile[i] + row * TILE, sum);
        }
    }
}

template <typename Form, int BLOCKS, int COLUMNS>
void multiply_tiles(const TilePass pass, TileSums& total, TilesAhead& ahead) {
    constexpr int COUNT = BLOCKS * COLUMNS;
    const auto nothing = [](int, int) {};
    if constexpr (Form::SCALED) {
        TileSums products[2];  // of this step, and of the last one, which is scaled meanwhile
        std::memset(&total, 0, COUNT * sizeof total.tile[0]);
        zero_tiles<COUNT>();
        add_step<Form::KEPT, BLOCKS, COLUMNS>(pass, 0, nothing);
        store_tiles<COUNT>(products[0]);
        for (int64_t step = 1; step < pass.steps; ++step) {
            const auto scale = [&](int from, int to) {
                add_scaled<Form, BLOCKS, COLUMNS>(pass, step - 1, products[(step - 1) % 2], total, from, to);
            };
            ahead.fetch();
            zero_tiles<COUNT>();
            add_step<Form::KEPT, BLOCKS, COLUMNS>(pass, step, scale);
            store_tiles<COUNT>(products[step % 2]);
        }
        const int64_t last = pass.steps - 1;
        add_scaled<Form, BLOCKS, COLUMNS>(pass, last, products[last % 2], total, 0, COUNT);
    } else {
        zero_tiles<COUNT>();
        for (int64_t step = 0; step < pass.steps; ++step) {
            ahead.fetch();
            add_step<Form::KEPT, BLOCKS, COLUMNS>(pass, step, nothing);
        }
        store_tiles<COUNT>(total);
    }
}

}  // namespace ucm

#endif
