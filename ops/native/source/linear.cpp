// A few rows times a weight that lies in panels, as oneDNN packs it: [out / width, in, width]. Decode steps are bound by
// reading the weights: every panel is read once, in order, and the next one is fetched while this one is multiplied.
#if defined(_OPENMP)
#include <omp.h>
#endif

#include "vector.h"

using namespace ucm;

namespace {

constexpr int REGISTERS = LANES == 16 ? 24 : 12;  // accumulators that leave room for operands

struct Linear {
    const float* x;
    int64_t x_stride;
    const float *panels, *bias;
    float* out;
    int64_t rows, in, outputs, width;
};

// out[ROWS][VECTORS] = bias + x * panel. `step` bytes per input are fetched from `next` on.
template <int ROWS, int VECTORS>
void multiply(const Linear& task, int64_t row, int64_t panel, int64_t column, const char* next, int64_t step) {
    const float* x = task.x + row * task.x_stride;
    const float* weight = task.panels + panel * task.width * task.in + column;
    Floats c[ROWS][VECTORS];
    for (int j = 0; j < VECTORS; ++j) {
        const Floats start = task.bias ? load(task.bias + panel * task.width + column + j * LANES) : Floats{};
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
    float* out = task.out + row * task.outputs + panel * task.width + column;
    for (int i = 0; i < ROWS; ++i)
        for (int j = 0; j < VECTORS; ++j) store(out + i * task.outputs + j * LANES, c[i][j]);
}

template <int ROWS, int VECTORS>
void multiply_rows(
    int64_t rows, const Linear& task, int64_t row, int64_t panel, int64_t column, const char* next, int64_t step) {
    if constexpr (ROWS > 1) {
        if (rows < ROWS) return multiply_rows<ROWS - 1, VECTORS>(rows, task, row, panel, column, next, step);
    }
    multiply<ROWS, VECTORS>(task, row, panel, column, next, step);
}

// Columns [from, to) of a panel, in register blocks of about equally many rows.
template <int VECTORS>
void multiply_columns(const Linear& task, int64_t panel, int64_t from, int64_t to) {
    constexpr int64_t most = REGISTERS / VECTORS;
    const int64_t blocks = (task.rows + most - 1) / most;
    const int64_t passes = blocks * ((to - from) / (VECTORS * LANES));
    const bool fetch = task.rows > 1 && (panel + 1) * task.width < task.outputs;
    // whole cache lines per input and pass; the last passes may have nothing left to fetch
    const int64_t bytes = (to - from) * 4, step = fetch ? (bytes / passes + 63) / 64 * 64 : 0;
    const char* next = reinterpret_cast<const char*>(task.panels + (panel + 1) * task.width * task.in);
    const char* end = next + task.width * task.in * 4;
    for (int64_t column = from; column < to; column += VECTORS * LANES)
        for (int64_t block = 0; block < blocks; ++block) {
            const int64_t first = task.rows * block / blocks, last = task.rows * (block + 1) / blocks;
            const int64_t here = next + step * task.in <= end ? step : 0;
            multiply_rows<most, VECTORS>(last - first, task, first, panel, column, next, here);
            next += here * task.in;
        }
}

void multiply_panel(const Linear& task, int64_t panel, int64_t from, int64_t to) {
    const int64_t vectors = (to - from) / LANES;
    if (vectors % 4 == 0) multiply_columns<4>(task, panel, from, to);
    else if (vectors % 3 == 0) multiply_columns<3>(task, panel, from, to);
    else if (vectors % 2 == 0) multiply_columns<2>(task, panel, from, to);
    else multiply_columns<1>(task, panel, from, to);
}

}  // namespace

// out [rows, outputs], dense, = x [rows, in] * weight + bias. width is a multiple of the lanes and divides outputs.
extern "C" void ucm_linear(
    const float* x, int64_t x_stride, const float* panels, const float* bias, float* out, int64_t rows, int64_t in,
    int64_t outputs, int64_t width) {
    const Linear task{x, x_stride, panels, bias, out, rows, in, outputs, width};
    const int64_t count = outputs / width;
    const int64_t halves = width % (2 * LANES) == 0 ? 2 : 1;
#pragma omp parallel
    {
        int64_t thread = 0, threads = 1;
#if defined(_OPENMP)
        thread = omp_get_thread_num(), threads = omp_get_num_threads();
#endif
        // Equally many whole panels for every thread; what is left over is shared in halves.
        const int64_t each = count / threads, rest = (count - each * threads) * halves;
        for (int64_t panel = thread * each; panel < (thread + 1) * each; ++panel) multiply_panel(task, panel, 0, width);
        for (int64_t piece = thread; piece < rest; piece += threads) {
            const int64_t from = piece % halves * (width / halves);
            multiply_panel(task, each * threads + piece / halves, from, from + width / halves);
        }
    }
}

// Vector lanes of this build: the width of a panel must be a multiple.
extern "C" int64_t ucm_lanes() { return LANES; }
