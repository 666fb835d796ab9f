// One tile of the online softmax: KEYS tokens against all query vectors of a unit (rows of a job x heads of a kv head).
#pragma once

#include <cmath>

#include "attention_job.h"
#include "memory.h"

namespace ucm {

constexpr int KEYS = 64;                         // tokens of a tile: transposed keys and values stay in the L1 cache
constexpr int VECTORS = LANES == 16 ? 4 : 2;     // of a register block ROWS x VECTORS, which leaves registers for operands
constexpr int WIDTH = VECTORS * LANES;
constexpr int ROWS = 6;
constexpr int FEW = 8;                           // up to this many query vectors, keys are not worth transposing
constexpr int FETCH = 8;                         // multiplications between two fetches of what comes next
constexpr float SLACK = 16.0f;                   // a weight may be e^SLACK before the results so far are rescaled
constexpr float NOTHING = -INFINITY;

// State of a unit: `count` query vectors, already scaled except for pairs, and their un-normalised results.
struct Unit {
    int64_t count, dim, value_dim, value_width, group;
    float *query, *out, *top, *total;  // [count, dim], [count, value_width], [count], [count, LANES]
    float *keys, *values, *scores;     // [dim, KEYS], [KEYS, value_width], [max(ROWS, FEW), KEYS]
    float cap = 0;                     // of scores; 0: there is none
    const float* slopes = nullptr;     // [group] of distances; null: there are none
    const Row* places = nullptr;       // with slopes: of the rows, whose positions count
    bool in_pairs = false;             // query, keys and values are pairs of bfloat16, and the query is not scaled yet
    bool rounded = false;              // on the matrix unit: all are bfloat16, and so are weights
    float scale = 1;                   // of scores, with pairs and what is rounded
    bool finite = true;                // every score so far
};

// The tokens of a tile. For new tokens first_key is the row of the first one, and row i sees those <= i; else it is -1.
// rows: `last` + 1 of a local job; null in others. place: of the first token among the job's cached ones.
struct Tile {
    int64_t count, first_key, first_row, place = 0, last = 0;
    const Row* rows = nullptr;
    int64_t type;
    const char* key[KEYS];
    const char* value[KEYS];
    float position[KEYS] = {};  // of the tokens

    // How many tokens query vector i sees.
    int64_t limit(int64_t i, int64_t group) const {
        if (first_key < 0) return count;
        const int64_t seen = first_row + i / group - first_key + 1;
        return seen < 0 ? 0 : seen < count ? seen : count;
    }

    // How many of the first tokens query vector i does not see.
    int64_t hidden(int64_t i, int64_t group) const {
        if (!rows) return 0;
        const Row& row = rows[i / group < last ? i / group : last];
        const int64_t before = first_key < 0 ? row.skip - place : row.first_new - first_key;
        return before < 0 ? 0 : before < count ? before : count;
    }
};

// The keys and values of the tile after this one, fetched from memory a few at a time between multiplications.
struct Ahead {
    const Tile* tile;  // null: none
    int64_t key_size, value_size, pace, at = 0;

    // calls: how often `fetch` is called, about, while this tile is multiplied
    Ahead(const Unit& unit, const Tile* next, int64_t calls) : tile(next), pace((2 * KEYS + calls - 1) / calls) {
        const int64_t size = next ? bytes_of(next->type) : 4;
        key_size = unit.dim * size, value_size = unit.value_dim * size;
    }

    void fetch() {
        if (!tile) return;
        for (int64_t end = at + pace; at < end && at < 2 * tile->count; ++at)
            at % 2 ? prefetch(tile->value[at / 2], value_size) : prefetch(tile->key[at / 2], key_size);
    }
};

// Scores beyond a soft cap come near it: cap * tanh(score / cap). A score that is not finite is noted first.
inline void cap_scores(Unit& unit, float* scores, int64_t depth) {
    const Floats scale = all(2.0f / unit.cap), cap = all(unit.cap), one = all(1.0f);
    for (int64_t t = 0; t < depth; t += LANES) {
        const Floats s = load(scores + t);
        unit.finite = unit.finite && within(s, FLT_MAX);
        const Floats e = exponential(s * scale);
        store(scores + t, cap * (e - one) / (e + one));
    }
}

// Scores less the query vector's slope times the distance of each token.
inline void add_slopes(const Unit& unit, const Tile& tile, int64_t i, float* scores, int64_t depth) {
    if (i >= unit.count) return;
    const Floats slope = all(unit.slopes[i % unit.group]), own = all(float(unit.places[i / unit.group].position));
    for (int64_t t = 0; t < depth; t += LANES) store(scores + t, load(scores + t) - slope * (own - load(tile.position + t)));
}

// The largest score of a query vector so far and in this tile, whose scores before `hidden` and beyond `limit` do not
// count.
inline float new_top(Unit& unit, int64_t i, const float* scores, int64_t hidden, int64_t limit, int64_t depth) {
    Ints lane_index;
    for (int lane = 0; lane < LANES; ++lane) lane_index[lane] = lane;
    Floats top = all(NOTHING);
    for (int64_t t = 0; t < depth; t += LANES) {
        const Floats s = load(scores + t);
        unit.finite = unit.finite && within(s, FLT_MAX);
        Floats seen = lane_index < int32_t(limit - t) ? s : all(NOTHING);
        if (hidden > t) seen = lane_index < int32_t(hidden - t) ? all(NOTHING) : seen;
        top = maximum(top, seen);
    }
    const float found = largest(top);
    return found > unit.top[i] ? found : unit.top[i];
}

// Whether a tile that is seen whole needs no new maximum: every score is finite and not much larger than the maximum.
inline bool keeps_top(const Unit& unit, int64_t i, const float* scores, int64_t depth) {
    bool inside = true;
    for (int64_t t = 0; t < depth; t += LANES) inside = inside & within(load(scores + t), unit.top[i] + SLACK);
    return inside;
}

// Raises a query vector's maximum where this tile has a larger one; returns what its earlier result must be multiplied
// with, the sum of its weights already is.
inline float raise_top(Unit& unit, int64_t i, const float* scores, int64_t hidden, int64_t limit, int64_t depth) {
    if (limit <= hidden) return 1.0f;
    const float before = unit.top[i], after = new_top(unit, i, scores, hidden, limit, depth);
    if (before == after) return 1.0f;
    const float kept = std::exp(before - after);
    float* total = unit.total + i * LANES;
    store(total, load(total) * kept);
    unit.top[i] = after;
    return kept;
}

// Weights of the tokens from t on, 0 for those before `hidden` and beyond `limit`.
inline Floats weights_of(const float* scores, int64_t t, int64_t hidden, int64_t limit, float top) {
    Ints lane_index;
    for (int lane = 0; lane < LANES; ++lane) lane_index[lane] = lane;
    const Floats weights = lane_index < int32_t(limit - t) ? exponential(load(scores + t) - top) : Floats{};
    return hidden > t ? (lane_index < int32_t(hidden - t) ? Floats{} : weights) : weights;
}

// Weights as they are multiplied with values: here as they are.
struct FloatWeights {
    static Floats keep(float* weights, int64_t t, Floats w) {
        store(weights + t, w);
        return w;
    }
};

// Scores of one query vector to weights, in place, zeros before `hidden` and from `limit` to `depth`; returns what its
// earlier result must be multiplied with. `depth` is a multiple of the lanes. Weights: how they are kept; their sum is that
// of what is kept.
template <typename Weights = FloatWeights>
inline float weigh(Unit& unit, const Tile& tile, int64_t i, float* scores, int64_t hidden, int64_t limit, int64_t depth) {
    if (unit.cap > 0.0f) cap_scores(unit, scores, depth);
    if (unit.slopes) add_slopes(unit, tile, i, scores, depth);
    const bool whole = limit == depth && hidden == 0 && keeps_top(unit, i, scores, depth);
    const float kept = whole ? 1.0f : raise_top(unit, i, scores, hidden, limit, depth), top = unit.top[i];
    float* total = unit.total + i * LANES;
    Floats sums = load(total);
    for (int64_t t = 0; t < depth; t += LANES) {
        const Floats w = whole ? exponential(load(scores + t) - top) : weights_of(scores, t, hidden, limit, top);
        sums += Weights::keep(scores, t, w);
    }
    store(total, sums);
    return kept;
}

}  // namespace ucm
