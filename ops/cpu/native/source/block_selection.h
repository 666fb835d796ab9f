// What one layer of block selection is asked to do, as ops/block_selection/impl/native*.py fill it in.
#pragma once

#include <cstdint>

namespace ucm {

// Types of summaries in addition to those of floats: sign codes, and sign codes behind which the mean of the block is.
enum Coded : int64_t { CODES = 4, CODES_AND_MEAN = 5 };

struct Scoring {
    const float* query;     // [rows, heads, features]: a vector of dim, with bounds one for each of the two; or `turned`
    const char* summaries;  // [blocks, vectors, kv_heads, dim], dense; of codes dim / 8 bytes, and one of the gain
    const int64_t *blocks, *spans, *first_rows, *num_rows;
    float* out;  // [candidates]
    int64_t query_row, query_head, rows, heads, kv_heads, dim, vectors, type, num_blocks, candidates, num_spans;
    int64_t bounds;  // whether both vectors of a block are one estimate (smallest and largest values), not one each
    float scale;
    float first_more;  // added to the estimate of the first of several boxes: the log of how many keys it counts as
    const float* rotation;  // null, or [dim, turned]: directions of sign codes, into which the query is turned
    int64_t turned;         // elements of a query head before that
};

struct Choosing {
    const float* scores;
    const int64_t* places;  // span * width + block number, or spans * width for what may not be chosen
    int64_t candidates, spans, width, most;
    int64_t* out;  // [spans, most]: block numbers from the highest score on, then -1
};

// A layer's choice: the fresh ranking of each span or the stored one, and the blocks that are then attended.
struct Selecting {
    Scoring scoring;
    Choosing choosing;
    // [spans], and for each of the selected entries: its place in the rankings, its span, whether it is seen
    const int64_t *modes, *counts, *thresholds, *slots, *choice_places, *choice_spans, *choice_hi;
    const int64_t* table;  // physical block of each place
    int64_t* stored;       // [slots, most] rankings of the layer
    int64_t* checks;       // [2] rankings that were kept and replaced, added to
    double* recall;        // null, or [2] mass of the chosen and of all candidates, added to
    int64_t* chosen;       // [selected] physical blocks
    int64_t num_slots, selected;
};

// False: a block, a span or a row is outside of its tensor; nothing is written.
bool score_blocks(const Scoring& task);

// False: a place is outside of the table.
bool choose_blocks(const Choosing& task);

}  // namespace ucm
