// Unified Attention over a paged cache: new tokens, shared and unique blocks in one online softmax, sums in fp32.
// Tokens that a row does not see are never read for it; a score or result that is not finite is reported.
#include <omp.h>

#include <algorithm>
#include <vector>

#include "attention_unit.h"
#include "half.h"

using namespace ucm;

namespace {

constexpr int64_t SERIAL = 1024;  // scores for which waking other threads costs more than it saves

// take(key, value, position) of each cached token that the job's rows see.
template <typename Take>
void each_cached(const Layer& layer, const Tensors& tensors, const Job& job, const TokenRange* ranges, int64_t head, Take take) {
    const int64_t size = bytes_of(layer.cache_type);
    for (int64_t s = job.range_lo; s < job.range_hi; ++s) {
        const int64_t block = ranges[s].block_of(tensors.selected);
        const char* key = tensors.key_cache + (block * layer.key_block + head * layer.key_cache_head) * size;
        const char* value = tensors.value_cache + (block * layer.value_block + head * layer.value_cache_head) * size;
        for (int64_t t = ranges[s].lo; t < ranges[s].hi; ++t)
            take(key + t * layer.key_token * size, value + t * layer.value_token * size, ranges[s].position + t);
    }
}

const Row* local_rows(const Plan& plan, const Job& job) { return job.is_local ? plan.rows + job.row_lo : nullptr; }

void add_cached(Tiles& tiles, const Layer& layer, const Tensors& tensors, const Plan& plan, const Job& job, int64_t head) {
    tiles.begin(layer.cache_type, -1, 0, local_rows(plan, job), job.row_hi - job.row_lo - 1);
    each_cached(layer, tensors, job, plan.ranges, head, 
                [&](const char* key, const char* value, int64_t at) { tiles.take(key, value, at); });
}

void add_new(Tiles& tiles, const Layer& layer, const Tensors& tensors, const Plan& plan, const Job& job, int64_t head) {
    if (job.causal_first < 0) return;
    const int64_t first_row = plan.rows[job.row_lo].row, position = plan.rows[job.row_lo].position;
    const int64_t end = first_row + job.row_hi - job.row_lo;
    tiles.begin(layer.type, job.causal_first, first_row, local_rows(plan, job), job.row_hi - job.row_lo - 1);
    const int64_t size = bytes_of(layer.type);
    for (int64_t row = job.causal_first; row < end; ++row)
        tiles.take(tensors.key + (row * layer.key_row + head * layer.key_head) * size,
                   tensors.value + (row * layer.value_row + head * layer.value_head) * size, position + row - first_row);
}

// The share of a row's whole sum that its tokens have: all of it without a sink. top: their maximum, total: their sum.
float share(float top, float total, const float* sinks, int64_t query_head) {
    return sinks ? 1.0f / (1.0f + std::exp(sinks[query_head] - top) / total) : 1.0f;
}

char* place_of(const Layer& layer, const Tensors& tensors, int64_t row, int64_t query_head) {
    return tensors.out + (row * layer.heads + query_head) * layer.value_dim * bytes_of(layer.type);
}

// The job's result for one kv head, normalised into the output or as a partial. False: something is not finite.
bool leave(const Unit& unit, const Layer& layer, const Tensors& tensors, const Plan& plan, const Job& job, int64_t head) {
    bool finite = unit.finite;
    const int64_t rows = job.row_hi - job.row_lo, size = layer.value_dim + 2;
    for (int64_t i = 0; i < rows * unit.group; ++i) {
        const Row row = plan.rows[job.row_lo + i / unit.group];
        const int64_t query_head = head * unit.group + i % unit.group;
        const float total = sum(load(unit.total + i * LANES));
        const bool whole = row.partial < 0;
        const float* from = unit.out + i * unit.value_width;
        finite = finite && within(all(total), FLT_MAX);
        for (int64_t d = 0; d < unit.value_width; d += LANES) finite = finite && within(load(from + d), FLT_MAX);
        if (whole) {
            const float factor = total != 0.0f ? share(unit.top[i], total, tensors.sinks, query_head) / total : 1.0f;
            leave_as(layer.type, from, factor, layer.value_dim, place_of(layer, tensors, row.row, query_head));
        } else {
            float* to = plan.partials + (row.partial * layer.heads + query_head) * size;
            std::memcpy(to, from, layer.value_dim * sizeof(float));
            to[layer.value_dim] = unit.top[i], to[layer.value_dim + 1] = total;
        }
    }
    return finite;
}

bool run(const Layer& layer, const Tensors& tensors, const Plan& plan, const Job& job, int64_t head) {
    Unit unit = unit_of(layer, job);
    const MatrixUnit matrix = lay_out(unit);
    take_queries(unit, layer, tensors, plan.rows + job.row_lo, head);
    matrix.work(unit, [&] {
        Tiles tiles(unit, matrix);
        add_cached(tiles, layer, tensors, plan, job, head);
        add_new(tiles, layer, tensors, plan, job, head);
    });
    return leave(unit, layer, tensors, plan, job, head);
}

void add_few_new(Unit& unit, const Layer& layer, const Tensors& tensors, const Plan& plan, const Job& job, int64_t head) {
    const MatrixUnit none;
    Tiles tiles(unit, none);
    add_new(tiles, layer, tensors, plan, job, head);
}

// The same for few query vectors of several kv heads.
bool run_few(const Layer& layer, const Tensors& tensors, const Plan& plan, const Job& job, int64_t first, int64_t last) {
    Heads heads;
    heads.count = last - first, heads.key_bytes = layer.key_cache_head * 4, heads.value_bytes = layer.value_cache_head * 4;
    lay_out(heads, unit_of(layer, job));
    for (int64_t h = 0; h < heads.count; ++h)
        take_queries(heads.units[h], layer, tensors, plan.rows + job.row_lo, first + h);
    Tile tile;
    tile.type = FP32, tile.first_key = -1, tile.count = 0;
    each_cached(layer, tensors, job, plan.ranges, first, [&](const char* key, const char* value, int64_t at) {
        tile.key[tile.count] = key, tile.value[tile.count] = value, tile.position[tile.count] = float(at);
        if (++tile.count == KEYS) add_tile_to_few(heads, tile), tile.count = 0;
    });
    if (tile.count) add_tile_to_few(heads, tile);
    bool finite = true;
    for (int64_t h = 0; h < heads.count; ++h) {
        add_few_new(heads.units[h], layer, tensors, plan, job, first + h);
        finite = leave(heads.units[h], layer, tensors, plan, job, first + h) && finite;
    }
    return finite;
}

// Normalised softmax over the partial results of a row.
void merge(const Layer& layer, const Tensors& tensors, const Plan& plan, const Merge& row, int64_t head) {
    const int64_t size = layer.value_dim + 2;
    static thread_local Scratch scratch;
    float* out = scratch.take(layer.value_dim);
    float top = NOTHING, total = 0.0f;
    for (int64_t p = row.partial_lo; p < row.partial_hi; ++p)
        top = std::fmax(top, plan.partials[(p * layer.heads + head) * size + layer.value_dim]);
    std::memset(out, 0, layer.value_dim * sizeof(float));
    for (int64_t p = row.partial_lo; p < row.partial_hi && top != NOTHING; ++p) {
        const float* partial = plan.partials + (p * layer.heads + head) * size;
        const float weight = std::exp(partial[layer.value_dim] - top);
        total += weight * partial[layer.value_dim + 1];
        for (int64_t d = 0; d < layer.value_dim; ++d) out[d] += weight * partial[d];
    }
    const float factor = total != 0.0f ? share(top, total, tensors.sinks, head) / total : 1.0f;
    leave_as(layer.type, out, factor, layer.value_dim, place_of(layer, tensors, row.row, head));
}

// What a thread takes at once: kv heads first..last of a job, one where it has many query vectors.
struct Share {
    int64_t job, first, last;
};

// Heads that take turns are as many as leave shares enough for all threads.
std::vector<Share> shares_of(const Plan& plan, const Layer& layer) {
    int64_t few = 0;
    for (int64_t j = 0; j < plan.num_jobs; ++j) few += is_few(layer, plan.jobs[j]);
    const int64_t wanted = few * layer.kv_heads / (2 * omp_get_max_threads());
    const int64_t turns = std::max<int64_t>(1, std::min({wanted, layer.kv_heads, MOST_HEADS}));
    std::vector<Share> shares;
    for (int64_t j = 0; j < plan.num_jobs; ++j) {
        const int64_t step = is_few(layer, plan.jobs[j]) ? turns : 1;
        for (int64_t head = 0; head < layer.kv_heads; head += step)
            shares.push_back({j, head, std::min(head + step, layer.kv_heads)});
    }
    return shares;
}

}  // namespace

// 0: done. 1: something was not finite, the output is not valid. 2: a block or token is outside of the cache.
extern "C" int64_t ucm_attend(const Plan* plan, const Layer* layer, const Tensors* tensors) {
    int64_t pairs = 0;  // of a row and a token that it sees
    for (int64_t j = 0; j < plan->num_jobs; ++j) {
        const Job& job = plan->jobs[j];
        const int64_t rows = job.row_hi - job.row_lo;
        if (job.causal_first >= 0) pairs += rows * (plan->rows[job.row_lo].row - job.causal_first + rows);
        for (int64_t s = job.range_lo; s < job.range_hi; ++s) {
            const TokenRange& range = plan->ranges[s];
            pairs += rows * (range.hi - range.lo);
            const int64_t block = range.block_of(tensors->selected);
            if (block < 0 || block >= layer->blocks || range.lo < 0 || range.hi > layer->block_size) return 2;
        }
    }
    const std::vector<Share> shares = shares_of(*plan, *layer);
    const int64_t count = shares.size();
    bool finite = true;
#pragma omp parallel for schedule(dynamic, 1) reduction(&& : finite) if (pairs * layer->heads > SERIAL)
    for (int64_t i = 0; i < count; ++i) {
        const Job& job = plan->jobs[shares[i].job];
        const int64_t first = shares[i].first, last = shares[i].last;
        finite = (is_few(*layer, job) ? run_few(*layer, *tensors, *plan, job, first, last)
                                      : run(*layer, *tensors, *plan, job, first)) && finite;
    }
    if (!finite) return 1;
#pragma omp parallel for collapse(2) if (plan->num_merges > 4)
    for (int64_t m = 0; m < plan->num_merges; ++m)
        for (int64_t head = 0; head < layer->heads; ++head) merge(*layer, *tensors, *plan, plan->merges[m], head);
    const int64_t row_bytes = layer->heads * layer->value_dim * bytes_of(layer->type);
    for (int64_t i = 0; i < plan->num_empty; ++i) std::memset(tensors->out + plan->empty[i] * row_bytes, 0, row_bytes);
    return 0;
}
