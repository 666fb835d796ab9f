// Unified Attention over a paged cache: new tokens, shared and unique blocks in one online softmax, fp32 inside.
// Tokens that a row does not see are never read for it; a score or result that is not finite is reported.
#include "attention_products.h"

using namespace ucm;

namespace {

constexpr int64_t SERIAL = 1024;  // scores for which waking other threads costs more than it saves

void add_cached(Unit& unit, const Layer& layer, const Tensors& tensors, const Job& job, const Span* spans, int64_t head) {
    const bool few = unit.count <= FEW && layer.cache_type == FP32 && unit.dim % LANES == 0 && unit.value_dim % LANES == 0;
    const int64_t size = layer.cache_type == FP32 ? 4 : 2;
    Tile tiles[2], *tile = tiles, *before = nullptr;  // a tile is multiplied while the one after it is fetched
    tiles[0].first_key = tiles[1].first_key = -1, tiles[0].type = tiles[1].type = layer.cache_type;
    tile->count = 0;
    const auto add = [&](const Tile& full, const Tile* next) {
        few ? add_tile_to_few(unit, full) : add_tile(unit, full, next);
    };
    for (int64_t s = job.span_lo; s < job.span_hi; ++s) {
        const int64_t block = spans[s].block_of(tensors.selected);
        const char* key = tensors.key_cache + (block * layer.key_block + head * layer.key_cache_head) * size;
        const char* value = tensors.value_cache + (block * layer.value_block + head * layer.value_cache_head) * size;
        for (int64_t t = spans[s].lo; t < spans[s].hi; ++t) {
            tile->key[tile->count] = key + t * layer.key_token * size;
            tile->value[tile->count] = value + t * layer.value_token * size;
            const bool last = s + 1 == job.span_hi && t + 1 == spans[s].hi;
            if (++tile->count < KEYS && !last) continue;
            if (before) add(*before, tile);
            before = tile;
            tile = tile == tiles ? tiles + 1 : tiles;
            tile->count = 0;
        }
    }
    if (before) add(*before, nullptr);
}

void add_new(Unit& unit, const Layer& layer, const Tensors& tensors, int64_t first, int64_t first_row, int64_t last_row,
             int64_t head) {
    Tile tile;
    tile.type = FP32, tile.first_row = first_row;
    for (int64_t key = first; key <= last_row; key += KEYS) {
        tile.first_key = key;
        tile.count = last_row + 1 - key < KEYS ? last_row + 1 - key : KEYS;
        for (int64_t t = 0; t < tile.count; ++t) {
            tile.key[t] = reinterpret_cast<const char*>(
                tensors.key + (key + t) * layer.key_row + head * layer.key_head);
            tile.value[t] = reinterpret_cast<const char*>(
                tensors.value + (key + t) * layer.value_row + head * layer.value_head);
        }
        add_tile(unit, tile, nullptr);
    }
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
        float* to = whole ? tensors.out + (row.row * layer.heads + query_head) * layer.value_dim
                          : plan.partials + (row.partial * layer.heads + query_head) * size;
        const float factor = whole && total != 0.0f ? 1.0f / total : 1.0f;
        const float* from = unit.out + i * unit.value_width;
        finite = finite && within(all(total), FLT_MAX);
        for (int64_t d = 0; d < unit.value_width; d += LANES) finite = finite && within(load(from + d), FLT_MAX);
        for (int64_t d = 0; d < layer.value_dim; ++d) to[d] = from[d] * factor;
        if (!whole) to[layer.value_dim] = unit.top[i], to[layer.value_dim + 1] = total;
    }
    return finite;
}

bool run(const Layer& layer, const Tensors& tensors, const Plan& plan, const Job& job, int64_t head) {
    static thread_local Scratch scratch;
    Unit unit;
    const int64_t rows = job.row_hi - job.row_lo;
    unit.dim = layer.dim, unit.value_dim = layer.value_dim, unit.group = layer.heads / layer.kv_heads;
    unit.count = rows * unit.group;
    unit.value_width = padded(unit.value_dim, WIDTH);
    const int64_t room = padded(unit.count, ROWS), vectors = ROWS > FEW ? ROWS : FEW;
    unit.keys = scratch.take(KEYS * (unit.dim + unit.value_width + vectors) + room * (unit.dim + unit.value_width + 1 + LANES));
    unit.values = unit.keys + KEYS * unit.dim;
    unit.scores = unit.values + KEYS * unit.value_width;
    unit.out = unit.scores + KEYS * vectors;
    unit.query = unit.out + room * unit.value_width;
    unit.total = unit.query + room * unit.dim;
    unit.top = unit.total + room * LANES;
    std::memset(unit.out, 0, room * (unit.value_width + unit.dim + LANES) * sizeof(float));
    for (int64_t i = 0; i < room; ++i) unit.top[i] = NOTHING;
    for (int64_t i = 0; i < unit.count; ++i) {
        const int64_t row = plan.rows[job.row_lo + i / unit.group].row;
        const float* from =
            tensors.query + row * layer.query_row + (head * unit.group + i % unit.group) * layer.query_head;
        for (int64_t d = 0; d < unit.dim; ++d) unit.query[i * unit.dim + d] = from[d] * layer.scale;
    }
    add_cached(unit, layer, tensors, job, plan.spans, head);
    const int64_t first_row = plan.rows[job.row_lo].row;
    if (job.causal_first >= 0) add_new(unit, layer, tensors, job.causal_first, first_row, first_row + rows - 1, head);
    return leave(unit, layer, tensors, plan, job, head);
}

// Normalised softmax over the partial results of a row.
void merge(const Layer& layer, const Tensors& tensors, const Plan& plan, const Merge& row, int64_t head) {
    const int64_t size = layer.value_dim + 2;
    float* out = tensors.out + (row.row * layer.heads + head) * layer.value_dim;
    float top = NOTHING, total = 0.0f;
    for (int64_t p = row.partial_lo; p < row.partial_hi; ++p)
        top = std::fmax(top, plan.partials[(p * layer.heads + head) * size + layer.value_dim]);
    std::memset(out, 0, layer.value_dim * sizeof(float));
    if (top == NOTHING) return;
    for (int64_t p = row.partial_lo; p < row.partial_hi; ++p) {
        const float* partial = plan.partials + (p * layer.heads + head) * size;
        const float weight = std::exp(partial[layer.value_dim] - top);
        total += weight * partial[layer.value_dim + 1];
        for (int64_t d = 0; d < layer.value_dim; ++d) out[d] += weight * partial[d];
    }
    for (int64_t d = 0; d < layer.value_dim; ++d) out[d] /= total;
}

}  // namespace

// 0: done. 1: something was not finite, the output is not valid. 2: a block or token is outside of the cache.
extern "C" int64_t ucm_attend(const Plan* plan, const Layer* layer, const Tensors* tensors) {
    int64_t pairs = 0;  // of a row and a token that it sees
    for (int64_t j = 0; j < plan->num_jobs; ++j) {
        const Job& job = plan->jobs[j];
        const int64_t rows = job.row_hi - job.row_lo;
        if (job.causal_first >= 0) pairs += rows * (plan->rows[job.row_lo].row - job.causal_first + rows);
        for (int64_t s = job.span_lo; s < job.span_hi; ++s) {
            const Span& span = plan->spans[s];
            pairs += rows * (span.hi - span.lo);
            const int64_t block = span.block_of(tensors->selected);
            if (block < 0 || block >= layer->blocks || span.lo < 0 || span.hi > layer->block_size) return 2;
        }
    }
    const int64_t units = plan->num_jobs * layer->kv_heads;
    bool finite = true;
#pragma omp parallel for schedule(dynamic, 1) reduction(&& : finite) if (pairs * layer->heads > SERIAL)
    for (int64_t u = 0; u < units; ++u)
        finite = run(*layer, *tensors, *plan, plan->jobs[u / layer->kv_heads], u % layer->kv_heads) && finite;
    if (!finite) return 1;
#pragma omp parallel for collapse(2) if (plan->num_merges > 4)
    for (int64_t m = 0; m < plan->num_merges; ++m)
        for (int64_t head = 0; head < layer->heads; ++head) merge(*layer, *tensors, *plan, plan->merges[m], head);
    for (int64_t i = 0; i < plan->num_empty; ++i)
        std::memset(tensors->out + plan->empty[i] * layer->heads * layer->value_dim, 0,
                    layer->heads * layer->value_dim * sizeof(float));
    return 0;
}
