// Rows times one panel of a weight, in register blocks. How numbers are multiplied is a kind of product: `FloatProduct`
// here, pairs of bfloat16 in bf16_linear.cpp.
#pragma once

#include <algorithm>

#include "vector.h"

namespace ucm {

constexpr int REGISTERS = LANES == 16 ? 24 : 12;  // accumulators that leave room for operands
constexpr int64_t MOST_ROWS = 1024;  // that all panels pass at once; more do not stay in the third cache

// out [rows, outputs], dense, = x [rows, in] * weight + bias; the weight lies in panels [outputs / width, in, width].
template <typename Number>
struct LinearOf {
    const Number* x;
    int64_t x_stride;
    const Number* bias;
    Number* out;
    int64_t rows, in, outputs, width;

    // The task's rows from `first` on, as many as are multiplied at once.
    LinearOf rows_from(int64_t first) const {
        LinearOf part = *this;
        part.x += first * x_stride, part.out += first * outputs;
        part.rows = std::min(MOST_ROWS, rows - first);
        return part;
    }
};

using Linear = LinearOf<float>;

// A panel in memory, and the one that is fetched while this one is multiplied (null: none).
template <typename Number>
struct PanelOf {
    int64_t index;
    const Number *weight, *next;
};

struct FloatProduct {
    using Number = float;
    static constexpr int64_t DEPTH = 1;  // inputs that are multiplied at once, and lie side by side in a panel
    static Floats widened(const float* from) { return load(from); }
    static Floats weights(const float* from) { return load(from); }
    static Floats input(const float* from) { return all(*from); }
    static Floats add(Floats sum, Floats input, Floats weights) { return sum + input * weights; }
    static void leave(float* to, Floats sum) { store(to, sum); }
};

// What is fetched while a block of rows is multiplied: `step` bytes per step over the inputs.
struct Fetch {
    const char* at;
    int64_t step;
};

// out[ROWS][VECTORS] = bias + x * panel. FETCHES: without it the loop is a twentieth faster.
template <typename Kind, int ROWS, int VECTORS, bool FETCHES, typename Number = typename Kind::Number>
void multiply(const LinearOf<Number>& task, const PanelOf<Number>& panel, int64_t row, int64_t column, Fetch next) {
    const Number* x = task.x + row * task.x_stride;
    const Number* weight = panel.weight + column * Kind::DEPTH;
    const int64_t output = panel.index * task.width + column;
    Floats c[ROWS][VECTORS];
    for (int j = 0; j < VECTORS; ++j) {
        const Floats start = task.bias ? Kind::widened(task.bias + output + j * LANES) : Floats{};
        for (int i = 0; i < ROWS; ++i) c[i][j] = start;
    }
    for (int64_t k = 0; k < task.in; k += Kind::DEPTH, weight += Kind::DEPTH * task.width) {
        if constexpr (FETCHES) {
            for (int64_t byte = 0; byte < next.step; byte += 64) __builtin_prefetch(next.at + byte, 0, 2);
            next.at += next.step;
        }
        decltype(Kind::weights(weight)) w[VECTORS];
        for (int j = 0; j < VECTORS; ++j) w[j] = Kind::weights(weight + j * LANES * Kind::DEPTH);
        for (int i = 0; i < ROWS; ++i) {
            const auto a = Kind::input(x + i * task.x_stride + k);
            for (int j = 0; j < VECTORS; ++j) c[i][j] = Kind::add(c[i][j], a, w[j]);
        }
    }
    Number* out = task.out + row * task.outputs + output;
    for (int i = 0; i < ROWS; ++i)
        for (int j = 0; j < VECTORS; ++j) Kind::leave(out + i * task.outputs + j * LANES, c[i][j]);
}

template <typename Kind, int ROWS, int VECTORS, bool FETCHES, typename Number = typename Kind::Number>
void multiply_rows(
    int64_t rows, const LinearOf<Number>& task, const PanelOf<Number>& panel, int64_t row, int64_t column, Fetch next) {
    if constexpr (ROWS > 1) {
        if (rows < ROWS) return multiply_rows<Kind, ROWS - 1, VECTORS, FETCHES>(rows, task, panel, row, column, next);
    }
    multiply<Kind, ROWS, VECTORS, FETCHES>(task, panel, row, column, next);
}

// Columns [from, to) of a panel, in register blocks of about equally many rows.
template <typename Kind, int VECTORS, typename Number = typename Kind::Number>
void multiply_columns(const LinearOf<Number>& task, const PanelOf<Number>& panel, int64_t from, int64_t to) {
    constexpr int64_t most = REGISTERS / VECTORS;
    const int64_t blocks = (task.rows + most - 1) / most, steps = task.in / Kind::DEPTH;
    const int64_t passes = blocks * ((to - from) / (VECTORS * LANES));
    // whole cache lines per step and pass; the last passes may have nothing left to fetch
    const int64_t bytes = (to - from) * Kind::DEPTH * sizeof(Number);
    const int64_t step = panel.next ? (bytes / passes + 63) / 64 * 64 : 0;
    const char* next = reinterpret_cast<const char*>(panel.next);
    const char* end = panel.next ? next + task.width * task.in * sizeof(Number) : next;
    for (int64_t column = from; column < to; column += VECTORS * LANES)
        for (int64_t block = 0; block < blocks; ++block) {
            const int64_t first = task.rows * block / blocks, last = task.rows * (block + 1) / blocks;
            const bool fetches = step && end - next >= step * steps;
            const auto rows = fetches ? multiply_rows<Kind, most, VECTORS, true> : multiply_rows<Kind, most, VECTORS, false>;
            rows(last - first, task, panel, first, column, {next, step});
            next += fetches ? step * steps : 0;
        }
}

template <typename Kind, typename Number = typename Kind::Number>
void multiply_panel(const LinearOf<Number>& task, const PanelOf<Number>& panel, int64_t from, int64_t to) {
    const int64_t vectors = (to - from) / LANES;
    if (vectors % 4 == 0) multiply_columns<Kind, 4>(task, panel, from, to);
    else if (vectors % 3 == 0) multiply_columns<Kind, 3>(task, panel, from, to);
    else if (vectors % 2 == 0) multiply_columns<Kind, 2>(task, panel, from, to);
    else multiply_columns<Kind, 1>(task, panel, from, to);
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
