// Rows times a weight that lies in panels, as most releases of oneDNN pack it. Decode steps are bound by reading the
// weights: every panel is read once, in order, and the next one is fetched while this one is multiplied.
#include "panel_product.h"
#include "team.h"

using namespace ucm;

// out [rows, outputs], dense, = x [rows, in] * weight + bias. width is a multiple of the lanes and divides outputs.
extern "C" void ucm_linear(
    const float* x, int64_t x_stride, const float* panels, const float* bias, float* out, int64_t rows, int64_t in,
    int64_t outputs, int64_t width) {
    const Linear task{x, x_stride, bias, out, rows, in, outputs, width};
    const int64_t count = outputs / width, size = in * width;
#pragma omp parallel
    {
        const auto [thread, threads] = member();
        for (int64_t row = 0; row < rows; row += MOST_ROWS) {
            const Linear part = task.rows_from(row);
            share_panels(count, width, thread, threads, [&](int64_t index, int64_t from, int64_t to) {
                const float* weight = panels + index * size;
                // one row is faster with the hardware's prefetcher alone
                const float* next = part.rows > 1 && index + 1 < count ? weight + size : nullptr;
                multiply_panel<FloatProduct>(part, {index, weight, next}, from, to);
            });
        }
    }
}

// Vector lanes of this build: the width of a panel must be a multiple.
extern "C" int64_t ucm_lanes() { return LANES; }
