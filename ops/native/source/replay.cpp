// Runs kernels one after the other as they were recorded once, with the same arguments: a step without Python.
#include <cstdint>
#include <cstring>
#include <utility>

#include "attention_job.h"

using namespace ucm;

extern "C" {
void ucm_rms_norm(const float*, int64_t, float*, int64_t, const float*, float*, int64_t, int64_t, float);
int64_t ucm_rotary(
    float*, int64_t, int64_t, float*, int64_t, int64_t, const int64_t*, int64_t, const float*, int64_t, int64_t,
    int64_t);
void ucm_silu_and_mul(const float*, int64_t, float*, int64_t, int64_t);
int64_t ucm_write_kv(
    const char*, const char*, char*, char*, const int64_t*, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
    const int64_t*);
void ucm_linear(const float*, int64_t, const float*, const float*, float*, int64_t, int64_t, int64_t, int64_t);
void ucm_compact_linear(
    const float*, int64_t, int64_t, const uint8_t*, const float*, const float*, const float*, float*, int64_t, int64_t,
    int64_t, int64_t);
void ucm_tile_linear(
    const float*, int64_t, int64_t, const char*, const float*, const float*, const float*, float*, int64_t, int64_t,
    int64_t, int64_t);
int64_t ucm_attend(const Plan*, const Layer*, const Tensors*);
}

namespace {

constexpr int64_t MOST_ARGUMENTS = 12;

// An argument as it was given: an integer, an address, or the bits of a float.
struct Word {
    int64_t bits;

    operator int64_t() const { return bits; }
    operator float() const {
        const int32_t low = int32_t(bits);
        float value;
        std::memcpy(&value, &low, sizeof value);
        return value;
    }
    template <typename T>
    operator T*() const { return reinterpret_cast<T*>(bits); }
};

struct Call {
    int64_t kernel, done;  // what it returns if it did its work; 0 where it returns nothing
    Word arguments[MOST_ARGUMENTS];
};

template <typename... Types, size_t... Index>
int64_t call(int64_t (*kernel)(Types...), const Word* words, std::index_sequence<Index...>) {
    return kernel(static_cast<Types>(words[Index])...);
}

template <typename... Types, size_t... Index>
int64_t call(void (*kernel)(Types...), const Word* words, std::index_sequence<Index...>) {
    return kernel(static_cast<Types>(words[Index])...), 0;
}

template <typename Result, typename... Types>
int64_t call(Result (*kernel)(Types...), const Word* words) {
    static_assert(sizeof...(Types) <= MOST_ARGUMENTS, "a call has no room for so many arguments");
    return call(kernel, words, std::index_sequence_for<Types...>{});
}

int64_t run(const Call& recorded) {
    const Word* words = recorded.arguments;
    switch (recorded.kernel) {
        case 0: return call(ucm_rms_norm, words);
        case 1: return call(ucm_rotary, words);
        case 2: return call(ucm_silu_and_mul, words);
        case 3: return call(ucm_write_kv, words);
        case 4: return call(ucm_linear, words);
        case 5: return call(ucm_compact_linear, words);
        case 6: return call(ucm_tile_linear, words);
        case 7: return call(ucm_attend, words);
    }
    return ~recorded.done;
}

}  // namespace

// The first call that did not do its work; those after it did not run. -1: all ran.
extern "C" int64_t ucm_replay(const Call* calls, int64_t count) {
    for (int64_t i = 0; i < count; ++i)
        if (run(calls[i]) != calls[i].done) return i;
    return -1;
}
