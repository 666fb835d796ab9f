// Rows times one panel [in, width] of a weight, in register blocks.
#pragma once

#include "vector.h"

namespace ucm {

constexpr int REGISTERS = LANES == 16 ? 24 : 12;  // accumulators that leave room for operands

// out [rows, outputs], dense, = x [rows, in] * weight + bias; the weight lies in panels [outputs / width, in, width].
struct Linear {
    const float* x;
    int64_t x_stride;
    const float* bias;
    float* out;
    int64_t rows, in, outputs, width;
};

// A panel in memory, and the one that is fetched while this one is multiplied (null: none).
struct Panel {
    int64_t index;
    const float *weight, *next;
};

// out[ROWS][VECTORS] = bias + x * panel. `step` bytes per input are fetched from `next` on.
template <int ROWS, int VECTORS>
void multiply(const Linear& task, const Panel& panel, int64_t row, int64_t column, const char* next, int64_t step) {
    const float* x = task.x + row * task.x_stride;
    const float* weight = panel.weight + column;
    Floats c[ROWS][VECTORS];
    for (int j = 0; j < VECTORS; ++j) {
        const Floats start = task.bias ? load(task.bias + panel.index * task.width + column + j * LANES) : Floats{};
        for (int i = 0; i < ROWS; ++i) c[i][j] = start;
    }
    for (int64_t k = 0; k < task.in; ++k, weight += task.width) {
        for (int64_t byte = 0; byte < step; byte += 64) __builtin_prefetch(next + byte, 0, 2);
        next += step;
        Floats w[VECTORS];
        for (int j = 0; j < VECTORS; ++j) w[j] = load(weight + j * LANES);
        for (int i = 0; i < ROWS; ++i) {
            const Floats a = all(x[i * task.x_stride + k]);
            for (int j = 0; j < VECTORS; ++j) c[i][j] += a * w[j];
        }
    }
    float* out = task.out + row * task.outputs + panel.index * task.width + column;
    for (int i = 0; i < ROWS; ++i)
        for (int j = 0; j < VECTORS; ++j) store(out + i * task.outputs + j * LANES, c[i][j]);
}

template <int ROWS, int VECTORS>
void multiply_rows(
    int64_t rows, const Linear& task, const Panel& panel, int64_t row, int64_t column, const char* next, int64_t step) {
    if constexpr (ROWS > 1) {
        if (rows < ROWS) return multiply_rows<ROWS - 1, VECTORS>(rows, task, panel, row, column, next, step);
    }
    multiply<ROWS, VECTORS>(task, panel, row, column, next, step);
}

// Columns [from, to) of a panel, in register blocks of about equally many rows.
template <int VECTORS>
void multiply_columns(const Linear& task, const Panel& panel, int64_t from, int64_t to) {
    constexpr int64_t most = REGISTERS / VECTORS;
    const int64_t blocks = (task.rows + most - 1) / most;
    const int64_t passes = blocks * ((to - from) / (VECTORS * LANES));
    // whole cache lines per input and pass; the last passes may have nothing left to fetch
    const int64_t bytes = (to - from) * 4, step = panel.next ? (bytes / passes + 63) / 64 * 64 : 0;
    const char* next = reinterpret_cast<const char*>(panel.next);
    const char* end = panel.next ? next + task.width * task.in * 4 : next;
    for (int64_t column = from; column < to; column += VECTORS * LANES)
        for (int64_t block = 0; block < blocks; ++block) {
            const int64_t first = task.rows * block / blocks, last = task.rows * (block + 1) / blocks;
            const int64_t here = step && end - next >= step * task.in ? step : 0;
            multiply_rows<most, VECTORS>(last - first, task, panel, first, column, next, here);
            next += here * task.in;
        }
}

inline void multiply_panel(const Linear& task, const Panel& panel, int64_t from, int64_t to) {
    const int64_t vectors = (to - from) / LANES;
    if (vectors % 4 == 0) multiply_columns<4>(task, panel, from, to);
    else if (vectors % 3 == 0) multiply_columns<3>(task, panel, from, to);
    else if (vectors % 2 == 0) multiply_columns<2>(task, panel, from, to);
    else multiply_columns<1>(task, panel, from, to);
}

// Calls panel(index, from, to) for all columns of all panels: equally many whole panels for every thread, and what is
// left over in halves.
template <typename Work>
void share_panels(int64_t count, int64_t width, int64_t thread, int64_t threads, Work panel) {
    const int64_t halves = width % (2 * LANES) == 0 ? 2 : 1;
    const int64_t each = count / threads, rest = (count - each * threads) * halves;
    for (int64_t index = thread * each; index < (thread + 1) * each; ++index) panel(index, 0, width);
    for (int64_t piece = thread; piece < rest; piece += threads) {
        const int64_t from = piece % halves * (width / halves);
        panel(each * threads + piece / halves, from, from + width / halves);
    }
}

}  // namespace ucm
