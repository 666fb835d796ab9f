// bfloat16 rows times a bfloat16 weight on the matrix unit (AMX). Both are read where they lie: a row of a left tile is 32
// inputs of a row of x, and a right tile is 16 columns of a panel of pairs, as bf16_linear.cpp has them.
#include "half.h"
#include "matrix_tiles.h"
#include "panel_product.h"
#include "team.h"

using namespace ucm;

#if defined(UCM_MATRIX_TILES)

namespace {

constexpr int64_t STEPS_AHEAD = 2;  // a step of four tiles is 4 KB: fetched while two others are multiplied

struct PairTask {
    LinearOf<uint16_t> rows;
    const uint16_t* panels;

    const uint16_t* x(int64_t row) const { return rows.x + row * rows.x_stride; }
    // Inputs 0 and 1 of a column.
    const uint16_t* weight(int64_t column) const {
        return panels + column / rows.width * rows.width * rows.in + column % rows.width * 2;
    }
    int64_t height() const { return std::min<int64_t>(rows.rows, TILE); }
};

template <int I, int END, typename Work>
inline void unrolled(Work work) {
    if constexpr (I < END) {
        work(std::integral_constant<int, I>{});
        unrolled<I + 1, END>(work);
    }
}

// Leaves sums of COLUMNS tiles, of rows from `row` on, as bfloat16.
template <int COLUMNS>
inline void leave(const PairTask& task, const float (*sums)[TILE * TILE], int64_t row, int64_t column) {
    for (int j = 0; j < COLUMNS; ++j)
        for (int64_t line = 0; line < task.height(); ++line) {
            uint16_t* out = task.rows.out + (row + line) * task.rows.outputs + column + j * TILE;
            for (int i = 0; i < TILE; ++i) out[i] = Brain::narrow(sums[j][line * TILE + i]);
        }
}

// BLOCKS x COLUMNS tiles of the result; blocks of rows begin at first and second. Tiles 0 to 3 are sums, 4 (and 5) rows,
// the others columns. Sums begin with the bias, and are added in the order of the inputs, however many rows there are.
template <int BLOCKS, int COLUMNS>
void multiply(const PairTask& task, int64_t first, int64_t second, int64_t column, bool fetches) {
    alignas(64) float sums[BLOCKS * COLUMNS][TILE * TILE];
    alignas(64) float start[COLUMNS][TILE] = {};
    if (task.rows.bias)
        for (int i = 0; i < COLUMNS * TILE; ++i) start[i / TILE][i % TILE] = Brain::widen(task.rows.bias[column + i]);
    unrolled<0, BLOCKS * COLUMNS>([&](auto i) { load_tile<i>(start[i % COLUMNS], 0); });
    const uint16_t *weight = task.weight(column), *x = task.x(first), *other = task.x(second);
    const int64_t x_bytes = task.rows.x_stride * 2, width = task.rows.width, step = TILE_DEPTH * width;
    for (int64_t k = 0; k < task.rows.in; k += TILE_DEPTH, weight += step) {
        if (fetches)
            for (int64_t pair = 0; pair < TILE_DEPTH / 2; ++pair)
                for (int64_t at = 0; at < COLUMNS * TILE * 2; at += 32)
                    __builtin_prefetch(weight + STEPS_AHEAD * step + pair * width * 2 + at);
        load_tile<4>(x + k, x_bytes);
        if constexpr (BLOCKS == 2) load_tile<5>(other + k, x_bytes);
        unrolled<0, COLUMNS>([&](auto j) {
            constexpr int right = BLOCKS == 2 ? 6 + j : 5 + j % 3;
            load_tile<right>(weight + j * TILE * 2, width * 4);
            add_product<j, 4, right>();
            if constexpr (BLOCKS == 2) add_product<COLUMNS + j, 5, right>();
        });
    }
    unrolled<0, BLOCKS * COLUMNS>([&](auto i) { store_tile<i>(sums[i]); });
    leave<COLUMNS>(task, sums, first, column);
    if constexpr (BLOCKS == 2) leave<COLUMNS>(task, sums + COLUMNS, second, column);
}

template <int BLOCKS>
void multiply_columns(
    int64_t count, const PairTask& task, int64_t first, int64_t second, int64_t column, bool fetches) {
    if constexpr (BLOCKS == 2) {
        for (; count >= 2; count -= 2, column += 2 * TILE) multiply<2, 2>(task, first, second, column, fetches);
        if (count) multiply<2, 1>(task, first, second, column, fetches);
    } else {
        const auto work = count == 4 ? multiply<1, 4> : count == 3 ? multiply<1, 3> : count == 2 ? multiply<1, 2> : multiply<1, 1>;
        work(task, first, second, column, fetches);
    }
}

// All rows times `count` tiles of columns of one panel. The last block has its 16 rows, too: some are computed twice.
void multiply_group(int64_t count, const PairTask& task, int64_t column) {
    const int64_t blocks = (task.rows.rows + TILE - 1) / TILE, last = task.rows.rows - task.height();
    for (int64_t block = 0; block < blocks; block += 2) {
        const int64_t first = std::min(block * TILE, last), second = std::min((block + 1) * TILE, last);
        const auto work = block + 1 < blocks ? multiply_columns<2> : multiply_columns<1>;
        work(count, task, first, second, column, block == 0);
    }
}

}  // namespace

// As ucm_bf16_linear; in is a multiple of 32, width one of 16.
extern "C" void ucm_bf16_tile_linear(
    const uint16_t* x, int64_t x_stride, const uint16_t* panels, const uint16_t* bias, uint16_t* out, int64_t rows,
    int64_t in, int64_t outputs, int64_t width) {
    if (rows == 0) return;
    const PairTask task{{x, x_stride, bias, out, rows, in, outputs, width}, panels};
#pragma omp parallel
    {
        const auto [thread, threads] = member();
        const MatrixTiles tiles(task.height());
        const int64_t all = outputs / TILE, panel = width / TILE, to = all * (thread + 1) / threads;
        for (int64_t at = all * thread / threads; at < to;) {
            const int64_t count = std::min({int64_t(4), to - at, panel - at % panel});
            multiply_group(count, task, at * TILE);
            at += count;
        }
    }
}

#else

// Never called: ucm_uses_matrix_tiles says no.
extern "C" void ucm_bf16_tile_linear(
    const uint16_t*, int64_t, const uint16_t*, const uint16_t*, uint16_t*, int64_t, int64_t, int64_t, int64_t) {}

#endif
