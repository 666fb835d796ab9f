// Estimates of blocks whose summaries are sign codes in the directions of a rotation, each with a gain; see
// ops/block_selection/features.py. Keys lie in the lanes of a vector: a few bits of a code choose the sum of as many
// elements of the query, each with its sign, from a table that is as large as a register.
#pragma once

#include <cmath>

#include "block_selection.h"
#include "memory.h"

namespace ucm {

constexpr int64_t MEAN_VECTORS = 8;  // the last ones of CODES_AND_MEAN: one byte for each direction
constexpr float STEPS_OF_GAIN = 124;  // of the mean's bytes
constexpr int64_t AT_ONCE = 4;       // query heads that are multiplied while codes are in registers
constexpr int64_t BITS = LANES == 16 ? 4 : LANES == 8 ? 3 : 2;  // of a code, with which a table is asked
constexpr int64_t TABLES = 8;                                   // that a word of a code asks: BITS bytes of it

inline bool is_coded(const Scoring& task) { return task.type >= CODES; }

inline int64_t boxes_of(const Scoring& task) { return task.vectors - (task.type == CODES_AND_MEAN ? MEAN_VECTORS : 0); }

inline int64_t words_of(const Scoring& task) { return (task.dim / 8 + BITS - 1) / BITS; }

// Floats of a query head: its elements in the directions of the codes, and the tables of these.
inline int64_t turned_size(const Scoring& task) { return padded(task.dim, LANES) + words_of(task) * TABLES * LANES; }

struct Gains {
    float of[256] = {};
    Gains() {
        for (int level = 1; level < 256; ++level) of[level] = std::exp2(float(level - 128) / 16);
    }
};

inline const Gains GAINS;

// Four bytes of a vector, of which `left` are there.
inline uint32_t word_at(const uint8_t* bytes, int64_t left) {
    uint32_t word = 0;
    if (left >= 4) std::memcpy(&word, bytes, 4);
    else
        for (int64_t i = 0; i < left; ++i) word |= uint32_t(bytes[i]) << 8 * i;
    return word;
}

// A query head, scaled, to [turned_size].
inline void turn(const Scoring& task, const float* from, float* to) {
    const int64_t depth = padded(task.dim, LANES), whole = task.turned / LANES * LANES;
    for (int64_t d = 0; d < depth; ++d) {
        const float* direction = task.rotation + d * task.turned;
        float found = d < task.dim ? sum(dot(direction, from, whole)) : 0.0f;
        for (int64_t i = whole; d < task.dim && i < task.turned; ++i) found += direction[i] * from[i];
        to[d] = found * task.scale;
    }
    float* tables = to + depth;
    for (int64_t table = 0; table < words_of(task) * TABLES; ++table)
        for (int64_t entry = 0; entry < LANES; ++entry) {
            float found = 0.0f;
            for (int64_t bit = 0, d = table * BITS; bit < BITS && d < task.dim; ++bit, ++d) found += (entry >> bit & 1) ? to[d] : -to[d];
            tables[table * LANES + entry] = found;
        }
}

// The mean of a block, fp32 [dim], from vectors of bytes that are `stride` apart.
inline void load_mean(const Scoring& task, const uint8_t* vectors, int64_t stride, float* mean) {
    const int64_t bytes = task.dim / 8;
    for (int64_t piece = 0; piece < MEAN_VECTORS; ++piece) {
        const uint8_t* from = vectors + piece * stride;
        const float step = GAINS.of[from[bytes]] / STEPS_OF_GAIN;
        for (int64_t i = 0; i < bytes; ++i) mean[piece * bytes + i] = float(int(from[i]) - 128) * step;
    }
}

// Estimates of a block's keys for COUNT query heads: to [COUNT, padded boxes]; those behind the last key are -inf.
template <int64_t COUNT>
inline void estimate_keys(const Scoring& task, const uint8_t* vectors, int64_t stride, const float* query, const float* mean,
                          float* to) {
    const int64_t boxes = boxes_of(task), width = padded(boxes, LANES), bytes = task.dim / 8, depth = padded(task.dim, LANES);
    const int64_t step = turned_size(task);
    float middle[COUNT];
    for (int64_t i = 0; i < COUNT; ++i) middle[i] = sum(dot(query + i * step, mean, depth));
    for (int64_t first = 0; first < boxes; first += LANES) {
        const uint8_t* code[LANES];
        float gains[LANES];
        Floats sums[COUNT] = {};
        for (int64_t lane = 0; lane < LANES; ++lane) {
            code[lane] = vectors + (first + lane < boxes ? first + lane : first) * stride;
            gains[lane] = GAINS.of[code[lane][bytes]];
        }
        for (int64_t word = 0; word < words_of(task); ++word) {
            const int64_t left = bytes + 1 - word * BITS;
            uint32_t words[LANES];
            for (int64_t lane = 0; lane < LANES; ++lane) words[lane] = word_at(code[lane] + word * BITS, left);
            Words bits;
            std::memcpy(&bits, words, sizeof bits);
            const float* tables = query + depth + word * TABLES * LANES;
            for (int64_t table = 0; table < TABLES; ++table, bits >>= BITS)
                for (int64_t i = 0; i < COUNT; ++i)
                    sums[i] += __builtin_shuffle(load(tables + i * step + table * LANES), (Ints)bits);
        }
        for (int64_t i = 0; i < COUNT; ++i) {
            float* row = to + i * width + first;
            store(row, sums[i] * load(gains) + middle[i]);
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

// Floats of memory that `estimate_codes` needs.
inline int64_t code_room(const Scoring& task) { return padded(task.dim, LANES) + AT_ONCE * padded(boxes_of(task), LANES); }

// One estimate of a block for each of the query heads, which are turned_size apart; the results are `apart`.
inline void estimate_codes(const Scoring& task, int64_t block, int64_t head, const float* query, int64_t queries, float* room,
                           float* to, int64_t apart) {
    const int64_t bytes = task.dim / 8 + 1, stride = task.kv_heads * bytes, width = padded(boxes_of(task), LANES);
    const uint8_t* vectors = reinterpret_cast<const uint8_t*>(task.summaries) + (block * task.vectors * task.kv_heads + head) * bytes;
    float *mean = room, *keys = room + padded(task.dim, LANES);
    std::memset(mean, 0, (keys - mean) * sizeof(float));
    if (task.type == CODES_AND_MEAN) load_mean(task, vectors + boxes_of(task) * stride, stride, mean);
    for (int64_t i = 0; i < queries;) {
        const int64_t count = queries - i >= AT_ONCE ? AT_ONCE : 1;
        const float* mine = query + i * turned_size(task);
        if (count == 1) estimate_keys<1>(task, vectors, stride, mine, mean, keys);
        else estimate_keys<AT_ONCE>(task, vectors, stride, mine, mean, keys);
        for (int64_t k = 0; k < count; ++k, ++i) to[i * apart] = log_sum(keys + k * width, width);
    }
}

}  // namespace ucm
