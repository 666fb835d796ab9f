// New keys and values to their slots of a paged cache. Elements are copied as they are: both sides have one dtype.
#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t SERIAL = 1 << 17;  // bytes for which waking other threads costs more than it saves

struct Cache {
    char* data;
    int64_t block_stride, token_stride, head_stride;  // bytes
};

void copy_heads(const char* from, char* to, int64_t heads, int64_t size, int64_t from_stride, int64_t to_stride) {
    for (int64_t head = 0; head < heads; ++head) std::memcpy(to + head * to_stride, from + head * from_stride, size);
}

}  // namespace

// strides: bytes, of key and value [row, head] and of their caches [block, token, head]. key_size, value_size: bytes of
// a head. Nothing is written if a slot is outside of the cache; then its row is returned, else -1.
extern "C" int64_t ucm_write_kv(
    const char* key, const char* value, char* key_cache, char* value_cache, const int64_t* slots, int64_t rows,
    int64_t heads, int64_t key_size, int64_t value_size, int64_t blocks, int64_t block_size, const int64_t* strides) {
    for (int64_t row = 0; row < rows; ++row)
        if (slots[row] < 0 || slots[row] >= blocks * block_size) return row;
    const Cache keys{key_cache, strides[4], strides[5], strides[6]};
    const Cache values{value_cache, strides[7], strides[8], strides[9]};
    // Rows that share a slot are pads, whose slots are the dummy block's: what it then holds is nobody's.
#pragma omp parallel for if (rows * heads * (key_size + value_size) > SERIAL)
    for (int64_t row = 0; row < rows; ++row) {
        const int64_t block = slots[row] / block_size, token = slots[row] % block_size;
        copy_heads(key + row * strides[0], keys.data + block * keys.block_stride + token * keys.token_stride, heads,
                   key_size, strides[1], keys.head_stride);
        copy_heads(value + row * strides[2], values.data + block * values.block_stride + token * values.token_stride,
                   heads, value_size, strides[3], values.head_stride);
    }
    return -1;
}
