// New keys and values to their slots of a cache. Elements are copied as they are: both sides have one dtype.
#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t SERIAL = 1 << 17;  // bytes for which waking other threads costs more than it saves

// Strides and sizes in bytes; rows of new tokens, or of the cache.
struct Rows {
    char* data;
    int64_t row_stride, head_stride;

    char* at(int64_t row) const { return data + row * row_stride; }
};

void copy_heads(const char* from, char* to, int64_t heads, int64_t size, int64_t from_stride, int64_t to_stride) {
    if (from_stride == size && to_stride == size) {
        std::memcpy(to, from, heads * size);
        return;
    }
    for (int64_t head = 0; head < heads; ++head) std::memcpy(to + head * to_stride, from + head * from_stride, size);
}

}  // namespace

// strides: bytes, of key and value [row, head] and of their caches [slot, head]. key_size, value_size: bytes of a head.
// Nothing is written if a slot is outside of the cache; then its row is returned, else -1.
extern "C" int64_t ucm_write_kv(
    const char* key, const char* value, char* key_rows, char* value_rows, const int64_t* slots, int64_t rows,
    int64_t heads, int64_t key_size, int64_t value_size, int64_t num_slots, const int64_t* strides) {
    for (int64_t row = 0; row < rows; ++row)
        if (slots[row] < 0 || slots[row] >= num_slots) return row;
    const Rows keys{key_rows, strides[4], strides[5]}, values{value_rows, strides[6], strides[7]};
    // Rows that share a slot are pads, whose slots are the dummy block's: its content does not matter.
#pragma omp parallel for if (rows * heads * (key_size + value_size) > SERIAL)
    for (int64_t row = 0; row < rows; ++row) {
        copy_heads(key + row * strides[0], keys.at(slots[row]), heads, key_size, strides[1], keys.head_stride);
        copy_heads(value + row * strides[2], values.at(slots[row]), heads, value_size, strides[3], values.head_stride);
    }
    return -1;
}
