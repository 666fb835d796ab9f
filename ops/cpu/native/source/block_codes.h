// Estimates of blocks whose summaries are sign codes in the directions of a rotation, each with a gain; see
// ops/block_selection/features.py.
#pragma once

#include <cmath>

#include "block_selection.h"
#include "memory.h"

namespace ucm {

constexpr int64_t MEAN_VECTORS = 8;  // the last ones of CODES_AND_MEAN: one byte for each direction
constexpr int64_t AT_ONCE = 4;       // query heads that are multiplied while the signs of a key are in registers

inline bool is_coded(const Scoring& task) { return task.type >= CODES; }

inline int64_t boxes_of(const Scoring& task) { return task.vectors - (task.type == CODES_AND_MEAN ? MEAN_VECTORS : 0); }

// What the bytes stand for. signs: the sign bits that a byte of a code turns over, those of its zeros.
struct CodeTables {
    uint32_t signs[256][8];
    float gains[256];
    CodeTables() {
        for (int byte = 0; byte < 256; ++byte) {
            for (int bit = 0; bit < 8; ++bit) signs[byte][bit] = (byte >> bit & 1) ? 0u : 0x80000000u;
            gains[byte] = byte ? std::exp2(float(byte - 128) / 16) : 0.0f;
        }
    }
};

inline const CodeTables CODE_TABLES;

// A query head in the directions of the codes, scaled.
inline void turn(const Scoring& task, const float* from, float* to, int64_t depth) {
    const int64_t whole = task.turned / LANES * LANES;
    for (int64_t d = 0; d < depth; ++d) {
        const float* direction = task.rotation + d * task.turned;
        float found = d < task.dim ? sum(dot(direction, from, whole)) : 0.0f;
        for (int64_t i = whole; d < task.dim && i < task.turned; ++i) found += direction[i] * from[i];
        to[d] = found * task.scale;
    }
}

// The sign bits of LANES directions from `at` on. What lies behind the last direction meets zeros of the query.
inline Words turned_over(const uint8_t* code, int64_t at) {
#if defined(__AVX512F__)
    uint16_t bits;
    std::memcpy(&bits, code + at / 8, sizeof bits);
    return (Words)_mm512_maskz_set1_epi32(__mmask16(~bits), INT32_MIN);
#else
    Words found;
    std::memcpy(&found, CODE_TABLES.signs[code[at / 8]] + at % 8, sizeof found);
    return found;
#endif
}

// The mean of a block, fp32 [depth], from vectors of bytes that are `stride` apart.
inline void load_mean(const Scoring& task, const uint8_t* vectors, int64_t stride, float* mean) {
    const int64_t bytes = task.dim / 8;
    for (int64_t piece = 0; piece < MEAN_VECTORS; ++piece) {
        const uint8_t* from = vectors + piece * stride;
        const float step = CODE_TABLES.gains[from[bytes]] / 32;
        for (int64_t i = 0; i < bytes; ++i) mean[piece * bytes + i] = float(int(from[i]) - 128) * step;
    }
}

// Estimates of a block's keys for COUNT query heads: to [COUNT, padded boxes]; those behind the last key are -inf.
template <int64_t COUNT>
inline void estimate_keys(const Scoring& task, const uint8_t* vectors, int64_t stride, const float* query, int64_t step,
                          int64_t depth, const float* mean, float* to) {
    const int64_t boxes = boxes_of(task), width = padded(boxes, LANES), bytes = task.dim / 8;
    float middle[COUNT];
    for (int64_t i = 0; i < COUNT; ++i) middle[i] = sum(dot(query + i * step, mean, depth));
    for (int64_t first = 0; first < boxes; first += LANES) {
        Floats parts[COUNT][LANES], gains = {};
        for (int64_t lane = 0; lane < LANES; ++lane) {
            const uint8_t* code = vectors + (first + lane < boxes ? first + lane : first) * stride;
            Floats sums[COUNT] = {};
            for (int64_t at = 0; at < depth; at += LANES) {
                const Words signs = turned_over(code, at);
                for (int64_t i = 0; i < COUNT; ++i) sums[i] += (Floats)((Words)load(query + i * step + at) ^ signs);
            }
            gains[lane] = CODE_TABLES.gains[code[bytes]];
            for (int64_t i = 0; i < COUNT; ++i) parts[i][lane] = sums[i];
        }
        for (int64_t i = 0; i < COUNT; ++i) {
            float* row = to + i * width + first;
            store(row, sum_each(parts[i]) * gains + middle[i]);
            for (int64_t lane = boxes - first; lane < LANES; ++lane) row[lane] = -INFINITY;
        }
    }
    if (boxes > 1)
        for (int64_t i = 0; i < COUNT; ++i) to[i * width] += task.first_more;
}

// log(sum(exp(x))), NaN if a number is not finite.
inline float log_sum(const float* numbers, int64_t width) {
    Floats top = all(-INFINITY), total = {};
    for (int64_t e = 0; e < width; e += LANES) top = maximum(top, load(numbers + e));
    const float shift = largest(top);
    for (int64_t e = 0; e < width; e += LANES) total += exponential(load(numbers + e) - shift);
    return shift + std::log(sum(total));
}

// One estimate of a block for each of `queries` heads, `apart` floats from each other. room: see `code_room`.
inline void estimate_codes(const Scoring& task, int64_t block, int64_t head, const float* query, int64_t queries, int64_t step,
                           int64_t depth, float* room, float* to, int64_t apart) {
    const int64_t bytes = task.dim / 8 + 1, stride = task.kv_heads * bytes, width = padded(boxes_of(task), LANES);
    const uint8_t* vectors = reinterpret_cast<const uint8_t*>(task.summaries) + (block * task.vectors * task.kv_heads + head) * bytes;
    float *mean = room, *keys = room + depth;
    std::memset(mean, 0, depth * sizeof(float));
    if (task.type == CODES_AND_MEAN) load_mean(task, vectors + boxes_of(task) * stride, stride, mean);
    for (int64_t i = 0; i < queries;) {
        const int64_t count = queries - i >= AT_ONCE ? AT_ONCE : 1;
        if (count == 1) estimate_keys<1>(task, vectors, stride, query + i * step, step, depth, mean, keys);
        else estimate_keys<AT_ONCE>(task, vectors, stride, query + i * step, step, depth, mean, keys);
        for (int64_t k = 0; k < count; ++k, ++i) to[i * apart] = log_sum(keys + k * width, width);
    }
}

// Floats of memory that `estimate_codes` needs.
inline int64_t code_room(const Scoring& task, int64_t depth) { return depth + AT_ONCE * padded(boxes_of(task), LANES); }

}  // namespace ucm
