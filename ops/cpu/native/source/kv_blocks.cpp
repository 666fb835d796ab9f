// Whole blocks of paged caches, copied as they are: both sides hold the bytes of a block in the same order.
#include <cstdint>
#include <cstring>

// sources, targets: address of block 0 of each layer. pairs: [count, 2] (source block, target block). bytes: of a block;
// strides: bytes from one block to the next. Nothing is written if a pair is outside of the caches; then its index is
// returned, otherwise -1. One thread: callers copy during a computation that uses the others.
extern "C" int64_t ucm_swap_blocks(
    const int64_t* sources, const int64_t* targets, int64_t layers, const int64_t* pairs, int64_t count, int64_t bytes,
    int64_t source_stride, int64_t target_stride, int64_t source_blocks, int64_t target_blocks) {
    for (int64_t i = 0; i < count; ++i) {
        const int64_t from = pairs[2 * i], to = pairs[2 * i + 1];
        if (from < 0 || from >= source_blocks || to < 0 || to >= target_blocks) return i;
    }
    for (int64_t layer = 0; layer < layers; ++layer) {
        const char* source = reinterpret_cast<const char*>(sources[layer]);
        char* target = reinterpret_cast<char*>(targets[layer]);
        for (int64_t i = 0; i < count; ++i)
            std::memcpy(target + pairs[2 * i + 1] * target_stride, source + pairs[2 * i] * source_stride, bytes);
    }
    return -1;
}
