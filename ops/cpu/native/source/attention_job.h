// What one layer of Unified Attention is asked to do: tensors, and the jobs that ops/unified_attention/impl/cpu/native.py
// plans once per step.
#pragma once

#include <cstdint>

namespace ucm {

// Rows rows[row_lo:row_hi] see the cached tokens of ranges[range_lo:range_hi] and, if causal_first >= 0, the new tokens
// causal_first..row; then the rows are consecutive. is_local: some rows see less, by their `skip` and `first_new`.
struct Job {
    int64_t row_lo, row_hi, range_lo, range_hi, causal_first, is_local;
};

// Tokens [lo, hi) of a block of the cache: of `block`, or of the layer's own choice if entry >= 0. position: of the block's
// first token, for layers with slopes.
struct TokenRange {
    int64_t block, lo, hi, entry, position;

    int64_t block_of(const int64_t* selected) const { return entry < 0 ? block : selected[entry]; }
};

// Row `row` is the merge of the partial results partial_lo..partial_hi.
struct Merge {
    int64_t row, partial_lo, partial_hi;
};

// Where a job leaves a row: at its place in the output (partial < 0), or as a partial result to be merged.
// In a local job it sees the cached tokens except the first `skip`, and no new token before row `first_new`. position: in
// its request, for layers with slopes.
struct Row {
    int64_t row, partial, skip, first_new, position;
};

struct Plan {
    const Job* jobs;
    int64_t num_jobs;
    const Row* rows;
    const TokenRange* ranges;
    const Merge* merges;
    int64_t num_merges;
    const int64_t* empty;  // rows that see nothing
    int64_t num_empty;
    float* partials;  // [partials, heads, value_dim + 2]: un-normalised out, max, sum
};

// Sizes are in elements, strides in elements of the tensor. type: of query, new keys and values, and the output.
struct Layer {
    int64_t heads, kv_heads, dim, value_dim, blocks, block_size, cache_type, type;
    int64_t query_row, query_head, key_row, key_head, value_row, value_head;
    int64_t key_block, key_token, key_cache_head, value_block, value_token, value_cache_head;
    float scale, cap;  // cap: 0 without a soft cap
};

struct Tensors {
    const char *query, *key, *value, *key_cache, *value_cache;
    char* out;                // [rows, heads, value_dim], dense
    const int64_t* selected;  // a block per entry of the selected part
    const float* sinks;       // [heads]; null: there are none
    const float* slopes;      // [heads]; null: distances do not count
};

}  // namespace ucm
