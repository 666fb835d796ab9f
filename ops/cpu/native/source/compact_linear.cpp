// A few rows times a weight that is kept in fewer bits than its values have, without changing one of them: 16 bits, or
// codes of 4 or 8 bits with a scale (and an offset) for every 32 inputs. Few rows are multiplied while the codes are
// read; for more a panel is first written out into the cache, and then multiplied as any other.
#include <type_traits>
#include <utility>
#include <vector>

#include "memory.h"
#include "panel_product.h"
#include "prefetch.h"
#include "team.h"

using namespace ucm;

namespace {

constexpr int64_t GROUP = 32;
constexpr int64_t FEW_ROWS = LANES == 16 ? 16 : 4;  // their sums, and weights in the making, have room in registers

typedef uint8_t Bytes __attribute__((vector_size(LANES)));
typedef int8_t SignedBytes __attribute__((vector_size(LANES)));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));

// LANES codes from memory as integers. The compiler's own conversion goes through half-width steps.
template <typename Vector>
inline Ints widened(const uint8_t* from) {
#if defined(__AVX512F__)
    if constexpr (sizeof(Vector) == 32) return (Ints)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from));
    else if constexpr (std::is_same_v<Vector, Bytes>)
        return (Ints)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from));
    else return (Ints)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from));
#elif defined(__AVX2__)
    if constexpr (sizeof(Vector) == 16) return (Ints)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from));
    else if constexpr (std::is_same_v<Vector, Bytes>)
        return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from));
    else return (Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
    Vector v;
    std::memcpy(&v, from, sizeof v);
    return __builtin_convertvector(v, Ints);
#endif
}

inline Floats floats(Ints v) { return __builtin_convertvector(v, Floats); }

// Panels [in, width]. scales, offsets: [in / 32, width], or null where a form has none.
struct Codes {
    const uint8_t* codes;
    const float *scales, *offsets;
};

// Each form hands take(k, j, weight) the weights of 32 inputs from `first` on, for VECTORS * LANES columns.
struct BFloat16 {
    static constexpr int64_t PER_TWO = 4;  // bytes of two codes
    template <int VECTORS, typename Take>
    static void group(const Codes& panel, int64_t width, int64_t first, int64_t column, Take take) {
        const uint8_t* at = panel.codes + (first * width + column) * 2;
        for (int64_t k = first; k < first + GROUP; ++k, at += width * 2)
            for (int j = 0; j < VECTORS; ++j) take(k, j, (Floats)(widened<Halves>(at + j * LANES * 2) << 16));
    }
};

struct Float16 {
    static constexpr int64_t PER_TWO = 4;
    template <int VECTORS, typename Take>
    static void group(const Codes& panel, int64_t width, int64_t first, int64_t column, Take take) {
        const uint8_t* at = panel.codes + (first * width + column) * 2;
        for (int64_t k = first; k < first + GROUP; ++k, at += width * 2)
            for (int j = 0; j < VECTORS; ++j) take(k, j, value(at + j * LANES * 2));
    }

private:
    static Floats value(const uint8_t* from) {
#if defined(__AVX512F__)
        return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__AVX__) && defined(__F16C__)
        return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#else
        uint16_t halves[LANES];
        std::memcpy(halves, from, sizeof halves);
        Floats v;
        for (int lane = 0; lane < LANES; ++lane) v[lane] = widen(halves[lane]);
        return v;
#endif
    }
};

// code * scale + offset; two inputs in a byte, the first in its low half. The product is exact, so it rounds once.
struct Affine4 {
    static constexpr int64_t PER_TWO = 1;
    template <int VECTORS, typename Take>
    static void group(const Codes& panel, int64_t width, int64_t first, int64_t column, Take take) {
        const int64_t entry = first / GROUP * width + column;
        Floats scale[VECTORS], offset[VECTORS];
        for (int j = 0; j < VECTORS; ++j) {
            scale[j] = load(panel.scales + entry + j * LANES);
            offset[j] = load(panel.offsets + entry + j * LANES);
        }
        const uint8_t* at = panel.codes + first / 2 * width + column;
        for (int64_t k = first; k < first + GROUP; k += 2, at += width)
            for (int j = 0; j < VECTORS; ++j) {
                const Ints both = widened<Bytes>(at + j * LANES);
                take(k, j, floats(both & 15) * scale[j] + offset[j]);
                take(k + 1, j, floats(both >> 4) * scale[j] + offset[j]);
            }
    }
};

// code * scale, codes with a sign.
struct Symmetric8 {
    static constexpr int64_t PER_TWO = 2;
    template <int VECTORS, typename Take>
    static void group(const Codes& panel, int64_t width, int64_t first, int64_t column, Take take) {
        Floats scale[VECTORS];
        for (int j = 0; j < VECTORS; ++j) scale[j] = load(panel.scales + first / GROUP * width + column + j * LANES);
        const uint8_t* at = panel.codes + first * width + column;
        for (int64_t k = first; k < first + GROUP; ++k, at += width)
            for (int j = 0; j < VECTORS; ++j) take(k, j, floats(widened<SignedBytes>(at + j * LANES)) * scale[j]);
    }
};

template <typename Form>
constexpr Codes panel_of(const Codes& whole, int64_t index, int64_t in, int64_t width) {
    const int64_t groups = index * (in / GROUP) * width;
    return {whole.codes + index * in / 2 * width * Form::PER_TWO, whole.scales ? whole.scales + groups : nullptr,
            whole.offsets ? whole.offsets + groups : nullptr};
}

// Has the next panel brought near while this one is multiplied: a form is read once, and its codes come in short runs.
class Ahead {
public:
    // `calls`: of group(), in which all of it is fetched.
    template <typename Form>
    static Ahead of(const Codes& next, int64_t in, int64_t width, int64_t calls) {
        const int64_t entries = in / GROUP * width * sizeof(float);
        return {{region(next.codes, in / 2 * width * Form::PER_TWO, calls), region(next.scales, entries, calls),
                 region(next.offsets, Form::PER_TWO == 1 ? entries : 0, calls)}};
    }

    void group() {
        for (Region& region : regions)
            for (int64_t line = 0; line < region.lines && region.at < region.end; ++line, region.at += 64)
                __builtin_prefetch(region.at, 0, 2);
    }

    struct Region {
        const char *at, *end;
        int64_t lines;
    } regions[3];

private:
    static Region region(const void* from, int64_t bytes, int64_t calls) {
        const char* at = static_cast<const char*>(from);
        return {at, at ? at + bytes : at, (bytes + 64 * calls - 1) / (64 * calls)};
    }
};

template <typename Form, int VECTORS>
void expand(const Codes& panel, int64_t in, int64_t width, int64_t from, int64_t to, float* weight) {
    for (int64_t first = 0; first < in; first += GROUP)
        for (int64_t column = from; column < to; column += VECTORS * LANES)
            Form::template group<VECTORS>(panel, width, first, column, [&](int64_t k, int j, Floats w) {
                store(weight + k * width + column + j * LANES, w);
            });
}

template <typename Form, int VECTORS>
void multiply_one_row(const Linear& task, const Codes& panel, int64_t index, int64_t from, int64_t to) {
    for (int64_t column = from; column < to; column += VECTORS * LANES) {
        const int64_t output = index * task.width + column;
        // sums of even and of odd inputs: one chain of additions would wait for itself
        Floats sums[2][VECTORS] = {};
        if (task.bias)
            for (int j = 0; j < VECTORS; ++j) sums[0][j] = load(task.bias + output + j * LANES);
        for (int64_t first = 0; first < task.in; first += GROUP)
            Form::template group<VECTORS>(panel, task.width, first, column, [&](int64_t k, int j, Floats w) {
                sums[k & 1][j] += task.x[k] * w;
            });
        for (int j = 0; j < VECTORS; ++j) store(task.out + output + j * LANES, sums[0][j] + sums[1][j]);
    }
}

// Rows whose inputs lie side by side, x [in, ROWS]: at distances of their own they would need more addresses than there
// are registers. Each weight is made once, in a register, and multiplied with all of them: writing it out would take
// longer. Rows from task.rows on are pads.
template <typename Form, int ROWS, int VECTORS>
void multiply_rows_at_once(
    const Linear& task, const Codes& panel, int64_t index, int64_t column, const float* x, Ahead& ahead,
    Prefetcher& prefetcher) {
    const int64_t output = index * task.width + column;
    Floats sums[ROWS][VECTORS];
    for (int j = 0; j < VECTORS; ++j) {
        const Floats start = task.bias ? load(task.bias + output + j * LANES) : Floats{};
        for (int i = 0; i < ROWS; ++i) sums[i][j] = start;
    }
    for (int64_t first = 0; first < task.in; first += GROUP) {
        ahead.group(), prefetcher.some();
        Form::template group<VECTORS>(panel, task.width, first, column, [&](int64_t k, int j, Floats w) {
            for (int i = 0; i < ROWS; ++i) sums[i][j] += x[k * ROWS + i] * w;
        });
    }
    for (int i = 0; i < ROWS; ++i)
        if (i < task.rows)
            for (int j = 0; j < VECTORS; ++j) store(task.out + i * task.outputs + output + j * LANES, sums[i][j]);
}

// x [rows, in] as [in, ROWS], whole squares of it at a time.
template <int ROWS>
void side_by_side(const Linear& task, std::vector<float>& x) {
    static_assert(ROWS <= LANES && GROUP % LANES == 0, "a square holds all rows, and squares hold all inputs");
    x.resize(task.in * ROWS + LANES);  // a vector may be longer than a row of x, and is then overwritten by the next
    for (int64_t k = 0; k < task.in; k += LANES) {
        Floats v[LANES] = {};
        for (int64_t i = 0; i < task.rows; ++i) v[i] = load(task.x + i * task.x_stride + k);
        transpose(v);
        for (int j = 0; j < LANES; ++j) store(x.data() + (k + j) * ROWS, v[j]);
    }
}

template <typename Form, int VECTORS>
void multiply_part(const Linear& task, const Codes& panel, int64_t index, int64_t from, int64_t to, float* weight) {
    if (task.rows == 1) return multiply_one_row<Form, VECTORS>(task, panel, index, from, to);
    expand<Form, VECTORS>(panel, task.in, task.width, from, to, weight);
    multiply_panel<FloatProduct>(task, {index, weight, nullptr}, from, to);
}

template <typename Form, int ROWS>
void multiply_few_rows(const Linear& task, const Codes& whole) {
    constexpr int MOST = ROWS <= 8 ? 2 : 1;  // vectors of sums
    const int64_t count = task.outputs / task.width;
    const PrefetchLines next = std::exchange(prefetch_of_next_kernel(), PrefetchLines());
#pragma omp parallel
    {
        const auto [thread, threads] = member();
        thread_local std::vector<float> x;
        side_by_side<ROWS>(task, x);
        const int64_t groups = count * (task.width / (MOST * LANES)) * (task.in / GROUP) / threads;
        Prefetcher prefetcher(next, thread, threads, groups);
        share_panels(count, task.width, thread, threads, [&](int64_t index, int64_t from, int64_t to) {
            const int64_t vectors = (to - from) / LANES % MOST == 0 ? MOST : 1, step = vectors * LANES;
            const auto multiply =
                vectors == 1 ? multiply_rows_at_once<Form, ROWS, 1> : multiply_rows_at_once<Form, ROWS, MOST>;
            const Codes panel = panel_of<Form>(whole, index, task.in, task.width);
            const Codes next = index + 1 < count ? panel_of<Form>(whole, index + 1, task.in, task.width) : Codes{};
            Ahead ahead = Ahead::of<Form>(next, task.in, task.width, (to - from) / step * (task.in / GROUP));
            for (int64_t column = from; column < to; column += step)
                multiply(task, panel, index, column, x.data(), ahead, prefetcher);
        });
    }
}

template <typename Form>
void multiply_all(const Linear& task, const Codes& whole) {
    if (1 < task.rows && task.rows <= FEW_ROWS) {
        if (task.rows == 2) return multiply_few_rows<Form, 2>(task, whole);
        if (task.rows <= 4) return multiply_few_rows<Form, 4>(task, whole);
        if constexpr (FEW_ROWS == 16) {
            if (task.rows <= 8) return multiply_few_rows<Form, 8>(task, whole);
            if (task.rows <= 12) return multiply_few_rows<Form, 12>(task, whole);
            return multiply_few_rows<Form, 16>(task, whole);
        }
    }
    const int64_t count = task.outputs / task.width;
#pragma omp parallel
    {
        const auto [thread, threads] = member();
        thread_local std::vector<float> weight;
        if (task.rows > FEW_ROWS) weight.resize(task.in * task.width);
        for (int64_t row = 0; row < task.rows; row += MOST_ROWS) {
            const Linear rows = task.rows_from(row);
            share_panels(count, task.width, thread, threads, [&](int64_t index, int64_t from, int64_t to) {
                const Codes panel = panel_of<Form>(whole, index, task.in, task.width);
                const int64_t vectors = (to - from) / LANES;
                const auto part = vectors % 4 == 0   ? multiply_part<Form, 4>
                                  : vectors % 2 == 0 ? multiply_part<Form, 2>
                                                     : multiply_part<Form, 1>;
                part(rows, panel, index, from, to, weight.data());
            });
        }
    }
}

}  // namespace

// As ucm_linear. form: 0 bfloat16, 1 four bits, 2 eight bits, 4 float16. in is a multiple of 32.
extern "C" void ucm_compact_linear(
    const float* x, int64_t x_stride, int64_t form, const uint8_t* codes, const float* scales, const float* offsets,
    const float* bias, float* out, int64_t rows, int64_t in, int64_t outputs, int64_t width) {
    if (rows == 0) return;
    const Linear task{x, x_stride, bias, out, rows, in, outputs, width};
    const Codes whole{codes, scales, offsets};
    if (form == 0) multiply_all<BFloat16>(task, whole);
    else if (form == 1) multiply_all<Affine4>(task, whole);
    else if (form == 4) multiply_all<Float16>(task, whole);
    else multiply_all<Symmetric8>(task, whole);
}
