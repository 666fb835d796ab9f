// How much of a span's attention each block is estimated to get: a softmax over summaries of its blocks, for each row and
// query head, averaged over these. ops/block_selection/impl/reference.py defines it.
#include <cmath>
#include <vector>

#include "block_codes.h"

using namespace ucm;

namespace {

constexpr int64_t SERIAL = 1 << 17;  // products for which waking other threads costs more than it saves

// The candidates by span: those of span s are order[starts[s]:starts[s + 1]].
struct Order {
    std::vector<int64_t> order, starts;
};

bool make_order(const Scoring& task, Order& by) {
    by.starts.assign(task.num_spans + 1, 0), by.order.resize(task.candidates);
    for (int64_t c = 0; c < task.candidates; ++c) {
        const int64_t span = task.spans[c];
        if (span < 0 || span >= task.num_spans || task.blocks[c] < 0 || task.blocks[c] >= task.num_blocks) return false;
        ++by.starts[span];
    }
    for (int64_t s = 0; s < task.num_spans; ++s)
        if (task.num_rows[s] > 0 && (task.first_rows[s] < 0 || task.first_rows[s] + task.num_rows[s] > task.rows)) return false;
    int64_t end = 0;
    for (int64_t s = 0; s <= task.num_spans; ++s) {
        const int64_t count = by.starts[s];
        by.starts[s] = end, end += count;
    }
    std::vector<int64_t> next(by.starts);
    for (int64_t c = 0; c < task.candidates; ++c) by.order[next[task.spans[c]]++] = c;
    return true;
}

// Estimates that the softmax gets of each block.
int64_t estimates_of(const Scoring& task) { return task.bounds || is_coded(task) ? 1 : task.vectors; }

// One span and kv head: estimates of all boxes for all query vectors, and the mass that each candidate gets from them.
struct Unit {
    int64_t first, count, queries, width, depth;  // width, depth: count and dim, padded to whole vectors
    float *query, *estimates, *mass;  // [queries, boxes of the query, depth] or turned, [vectors, width], [width]
    std::vector<char> broken;
};

void load_query(const Scoring& task, int64_t span, int64_t head, Unit& unit) {
    const int64_t group = task.heads / task.kv_heads;
    for (int64_t i = 0; i < unit.queries; ++i) {
        const float* from = task.query + (task.first_rows[span] + i / group) * task.query_row +
                            (head * group + i % group) * task.query_head;
        if (task.rotation) {
            turn(task, from, unit.query + i * turned_size(task));
            continue;
        }
        for (int64_t v = 0; v < (task.bounds ? 2 : 1); ++v)
            for (int64_t d = 0; d < unit.depth; ++d)
                unit.query[(i * 2 + v) * unit.depth + d] = d < task.dim ? from[v * task.dim + d] * task.scale : 0.0f;
    }
}

// Estimates [queries, boxes, width] of LANES candidates from `at` on.
void estimate(const Scoring& task, const Order& by, int64_t head, int64_t at, Unit& unit, float* room) {
    const int64_t size = bytes_of(task.type), boxes = estimates_of(task);
    if (is_coded(task)) {
        for (int64_t c = at; c < at + LANES && c < unit.count; ++c)
            estimate_codes(task, task.blocks[by.order[unit.first + c]], head, unit.query, unit.queries, room, unit.estimates + c,
                           unit.width);
        return;
    }
    for (int64_t v = 0; v < task.vectors; ++v) {
        const float* from[LANES];
        for (int lane = 0; lane < LANES; ++lane) {
            const int64_t c = by.order[unit.first + (at + lane < unit.count ? at + lane : at)];
            const int64_t place = ((task.blocks[c] * task.vectors + v) * task.kv_heads + head) * task.dim;
            from[lane] = as_floats(task.summaries + place * size, task.type, task.dim, room + lane * unit.depth);
            if (task.type == FP32 && unit.depth != task.dim) {
                std::memcpy(room + lane * unit.depth, from[lane], task.dim * sizeof(float));
                from[lane] = room + lane * unit.depth;
            }
            const int64_t next = at + lane + LANES;
            if (next < unit.count) {
                const int64_t later = by.order[unit.first + next];
                const int64_t there = ((task.blocks[later] * task.vectors + v) * task.kv_heads + head) * task.dim;
                prefetch(task.summaries + there * size, task.dim * size);
            }
        }
        for (int64_t i = 0; i < unit.queries; ++i) {
            Floats parts[LANES];
            const float* query = unit.query + (i * 2 + (task.bounds ? v : 0)) * unit.depth;
            for (int lane = 0; lane < LANES; ++lane) parts[lane] = dot(query, from[lane], unit.depth);
            float* to = unit.estimates + (i * boxes + (task.bounds ? 0 : v)) * unit.width + at;
            const Floats found = sum_each(parts) + (v == 0 && boxes > 1 ? task.first_more : 0.0f);
            store(to, task.bounds && v == 1 ? load(to) + found : found);
        }
    }
}

// Takes candidates whose estimate for this query vector is not finite out of the softmax, and notes them.
void drop_broken(Unit& unit, float* estimates, int64_t boxes) {
    bool fine = true;
    for (int64_t e = 0; e < boxes * unit.width; e += LANES) fine = fine && within(load(estimates + e), FLT_MAX);
    for (int64_t c = 0; c < unit.count && !fine; ++c) {
        bool bad = false, nothing = true;  // boxes of weight 0 are no harm, unless all are
        for (int64_t v = 0; v < boxes; ++v) {
            const float x = estimates[v * unit.width + c];
            bad = bad || !(x <= FLT_MAX), nothing = nothing && x == -INFINITY;
        }
        if (!bad && !nothing) continue;
        unit.broken[c] = 1;
        for (int64_t v = 0; v < boxes; ++v) estimates[v * unit.width + c] = -INFINITY;
    }
    for (int64_t v = 0; v < boxes; ++v)
        for (int64_t c = unit.count; c < unit.width; ++c) estimates[v * unit.width + c] = -INFINITY;
}

void add_mass(Unit& unit, float* estimates, int64_t boxes, float share) {
    Floats top = all(-INFINITY), sums = {};
    for (int64_t e = 0; e < boxes * unit.width; e += LANES) top = maximum(top, load(estimates + e));
    const float shift = largest(top);
    if (shift == -INFINITY) return;
    for (int64_t e = 0; e < unit.width; e += LANES) {
        Floats weight = exponential(load(estimates + e) - shift);
        for (int64_t v = 1; v < boxes; ++v) weight += exponential(load(estimates + v * unit.width + e) - shift);
        store(estimates + e, weight);
        sums += weight;
    }
    const float factor = share / sum(sums);
    for (int64_t e = 0; e < unit.width; e += LANES)
        store(unit.mass + e, load(unit.mass + e) + load(estimates + e) * factor);
}

// mass [candidates, in the order by span] from one kv head; -1 marks a broken candidate.
void run(const Scoring& task, const Order& by, int64_t span, int64_t head, float* mass) {
    static thread_local Scratch scratch;
    Unit unit;
    unit.first = by.starts[span], unit.count = by.starts[span + 1] - unit.first;
    if (task.num_rows[span] <= 0 || unit.count == 0) return;
    const int64_t boxes = estimates_of(task);
    unit.queries = task.num_rows[span] * (task.heads / task.kv_heads);
    unit.width = padded(unit.count, LANES), unit.depth = padded(task.dim, LANES);
    const int64_t asked = unit.queries * (is_coded(task) ? turned_size(task) : 2 * unit.depth);
    const int64_t converted = is_coded(task) ? code_room(task) : LANES * unit.depth;
    unit.query = scratch.take(asked + converted + (unit.queries * boxes + 1) * unit.width);
    float* room = unit.query + asked;
    unit.estimates = room + converted;
    unit.mass = unit.estimates + unit.queries * boxes * unit.width;
    unit.broken.assign(unit.count, 0);
    std::memset(unit.mass, 0, unit.width * sizeof(float));
    std::memset(room, 0, converted * sizeof(float));
    load_query(task, span, head, unit);
    for (int64_t at = 0; at < unit.count; at += LANES) estimate(task, by, head, at, unit, room);
    const float share = 1.0f / (float(task.num_rows[span]) * float(task.heads));
    for (int64_t i = 0; i < unit.queries; ++i) {
        float* estimates = unit.estimates + i * boxes * unit.width;
        drop_broken(unit, estimates, boxes);
        add_mass(unit, estimates, boxes, share);
    }
    for (int64_t c = 0; c < unit.count; ++c) mass[unit.first + c] = unit.broken[c] ? -1.0f : unit.mass[c];
}

}  // namespace

namespace ucm {

bool score_blocks(const Scoring& task) {
    Order by;
    if (!make_order(task, by)) return false;
    const int64_t heads = task.kv_heads, size = task.candidates;
    std::vector<float> mass(heads * size, 0.0f);
    const bool serial = size * task.vectors * task.heads * task.dim < SERIAL;
#pragma omp parallel for schedule(dynamic, 1) if (!serial)
    for (int64_t u = 0; u < task.num_spans * heads; ++u) run(task, by, u / heads, u % heads, mass.data() + u % heads * size);
    for (int64_t i = 0; i < size; ++i) {
        float total = 0.0f;
        bool broken = false;
        for (int64_t head = 0; head < heads; ++head) {
            broken = broken || mass[head * size + i] < 0.0f;
            total += mass[head * size + i];
        }
        task.out[by.order[i]] = broken ? 1.0f : total;
    }
    return true;
}

}  // namespace ucm

// 0: done. 2: a block, a span or a row is outside of its tensor; nothing is written.
extern "C" int64_t ucm_block_scores(const Scoring* task) { return score_blocks(*task) ? 0 : 2; }
