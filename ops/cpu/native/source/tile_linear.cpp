// Rows times a weight on the matrix unit. The weight is read as it is kept for a few rows, and laid out a few columns at
// a time while they are multiplied: nothing more is stored, and little is read from memory.
#include "memory.h"
#include "team.h"
#include "tile_chunk.h"

using namespace ucm;

#if defined(UCM_MATRIX_TILES)

namespace {

// At most so much is multiplied between two barriers: split rows of 0.9 MB, which stay in a second cache of 2 MB.
constexpr int64_t MOST_BLOCKS = 16;
constexpr int64_t MOST_STEPS = 18;

template <typename Form>
void multiply_all(const Linear& task, const TileWeight& weight) {
    const int64_t steps = (task.in + TILE_DEPTH - 1) / TILE_DEPTH, deep = (steps + MOST_STEPS - 1) / MOST_STEPS;
    const int64_t blocks = (task.rows + TILE - 1) / TILE, high = (blocks + MOST_BLOCKS - 1) / MOST_BLOCKS;
    const int64_t room = std::min(blocks, MOST_BLOCKS) * std::min(steps, MOST_STEPS) * TILE;
    thread_local Scratch scratch;
    float* data = scratch.take(room * (TileRows::TILE_FLOATS + 1));
#pragma omp parallel
    {
        const auto [thread, threads] = member();
        const MatrixTiles tiles;
        thread_local Scratch own;
        char* laid_out = reinterpret_cast<char*>(own.take(MOST_TILES * MOST_STEPS * Form::KEPT * TILE_BYTES / 4));
        for (int64_t i = 0; i < high * deep; ++i) {
            const Part rows = Part::of(blocks, i / deep, high), depth = Part::of(steps, i % deep, deep);
            const Chunk chunk{task, weight, {reinterpret_cast<char*>(data + room), data, depth.size()}, rows, depth};
            if (i) {
#pragma omp barrier
            }
            const Part mine = Part::of(rows.size() * TILE, thread, threads);
            for (int64_t row = mine.from; row < mine.to; ++row)
                split_row<Form::OFFSET>(task, rows.from * TILE + row, depth.from, chunk.rows, row);
#pragma omp barrier
            multiply_chunk<Form>(chunk, Part::of(task.outputs / TILE, thread, threads), laid_out);
        }
    }
}

}  // namespace

// As ucm_compact_linear, and form 3: fp32 panels, where `codes` are the values. Outputs and width are multiples of 16.
extern "C" void ucm_tile_linear(
    const float* x, int64_t x_stride, int64_t form, const char* codes, const float* scales, const float* offsets,
    const float* bias, float* out, int64_t rows, int64_t in, int64_t outputs, int64_t width) {
    if (rows == 0) return;
    const Linear task{x, x_stride, bias, out, rows, in, outputs, width};
    const TileWeight weight{codes, scales, offsets, in, width};
    if (form == 0) multiply_all<BFloat16Tiles>(task, weight);
    else if (form == 1) multiply_all<Affine4Tiles>(task, weight);
    else if (form == 2) multiply_all<Symmetric8Tiles>(task, weight);
    else multiply_all<FloatTiles>(task, weight);
}

#else

// Never called: ucm_uses_matrix_tiles says no.
extern "C" void ucm_tile_linear(
    const float*, int64_t, int64_t, const char*, const float*, const float*, const float*, float*, int64_t, int64_t,
    int64_t, int64_t) {}

#endif
