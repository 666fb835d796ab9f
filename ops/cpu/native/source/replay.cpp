// Runs kernels one after the other as they were recorded once, with the same arguments: a step without Python.
#include <cstdint>
#include <cstring>
#include <utility>

#include "attention_job.h"
#include "block_selection.h"
#include "prefetch.h"

using namespace ucm;

extern "C" {
void ucm_rms_norm(const float*, int64_t, float*, int64_t, const float*, float*, int64_t, int64_t, float);
int64_t ucm_rotary(
    float*, int64_t, int64_t, float*, int64_t, int64_t, const int64_t*, int64_t, const float*, int64_t, int64_t,
    int64_t);
void ucm_silu_and_mul(const float*, int64_t, float*, int64_t, int64_t);
int64_t ucm_write_kv(
    const char*, const char*, char*, char*, const int64_t*, int64_t, int64_t, int64_t, int64_t, int64_t,
    const int64_t*);
void ucm_linear(const float*, int64_t, const float*, const float*, float*, int64_t, int64_t, int64_t, int64_t);
void ucm_compact_linear(
    const float*, int64_t, int64_t, const uint8_t*, const float*, const float*, const float*, float*, int64_t, int64_t,
    int64_t, int64_t);
void ucm_tile_linear(
    const float*, int64_t, int64_t, const char*, const float*, const float*, const float*, float*, int64_t, int64_t,
    int64_t, int64_t);
void ucm_rms_norm_half(
    const uint16_t*, int64_t, uint16_t*, int64_t, const uint16_t*, uint16_t*, int64_t, int64_t, float, int64_t);
int64_t ucm_rotary_half(
    uint16_t*, int64_t, int64_t, uint16_t*, int64_t, int64_t, const int64_t*, int64_t, const uint16_t*, int64_t,
    int64_t, int64_t, int64_t);
void ucm_silu_and_mul_half(const uint16_t*, int64_t, uint16_t*, int64_t, int64_t, int64_t);
void ucm_widen_rows(const uint16_t*, int64_t, float*, int64_t, int64_t, int64_t);
void ucm_narrow_rows(const float*, uint16_t*, int64_t, int64_t, int64_t, int64_t);
void ucm_bf16_linear(
    const uint16_t*, int64_t, const uint16_t*, const uint16_t*, uint16_t*, int64_t, int64_t, int64_t, int64_t);
void ucm_bf16_tile_linear(
    const uint16_t*, int64_t, const uint16_t*, const uint16_t*, uint16_t*, int64_t, int64_t, int64_t, int64_t);
void ucm_int8_linear(
    const float*, int64_t, const float*, int64_t, const int8_t*, const float*, const int32_t*, const float*, float*,
    int64_t, int64_t, int64_t);
int64_t ucm_attend(const Plan*, const Layer*, const Tensors*);
int64_t ucm_select_blocks(const Selecting*);
}

namespace {

constexpr int64_t MOST_ARGUMENTS = 13;
constexpr int64_t COMPACT_LINEAR = 5, ATTEND = 7;  // kernels that are looked for, as ops/cpu/native/call_list.py numbers all

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
        case COMPACT_LINEAR: return call(ucm_compact_linear, words);
        case 6: return call(ucm_tile_linear, words);
        case ATTEND: return call(ucm_attend, words);
        case 8: return call(ucm_select_blocks, words);
        case 9: return call(ucm_rms_norm_half, words);
        case 10: return call(ucm_rotary_half, words);
        case 11: return call(ucm_silu_and_mul_half, words);
        case 12: return call(ucm_widen_rows, words);
        case 13: return call(ucm_narrow_rows, words);
        case 14: return call(ucm_bf16_linear, words);
        case 15: return call(ucm_int8_linear, words);
        case 16: return call(ucm_bf16_tile_linear, words);
    }
    return ~recorded.done;
}

constexpr int64_t MOST_BYTES = 8 << 20;  // more is not in the caches any more when it is needed

// The cached tokens that an attention reads first, if a block's tokens are contiguous in memory: keys, and values, which are
// another tensor.
void runs_of(const Call& attend, std::vector<Run>& runs) {
    const Plan& plan = *static_cast<const Plan*>(attend.arguments[0]);
    const Layer& layer = *static_cast<const Layer*>(attend.arguments[1]);
    const Tensors& tensors = *static_cast<const Tensors*>(attend.arguments[2]);
    runs.clear();
    if (layer.key_token != layer.kv_heads * layer.dim || layer.value_token != layer.kv_heads * layer.value_dim) return;
    const int64_t size = layer.cache_type == 0 ? 4 : 2;
    int64_t bytes = 0;
    const auto add = [&](const char* cache, const TokenRange& range, int64_t block, int64_t token) {
        const int64_t length = (range.hi - range.lo) * token * size;
        bytes += length;
        runs.push_back({cache + (range.block * block + range.lo * token) * size, (length + LINE - 1) / LINE});
    };
    for (int64_t j = 0; j < plan.num_jobs; ++j)
        for (int64_t s = plan.jobs[j].range_lo; s < plan.jobs[j].range_hi; ++s) {
            const TokenRange& range = plan.ranges[s];
            if (range.entry >= 0 || range.block < 0 || range.block >= layer.blocks || range.hi <= range.lo) continue;
            add(tensors.key_cache, range, layer.key_block, layer.key_token);
            add(tensors.value_cache, range, layer.value_block, layer.value_token);
            if (bytes >= MOST_BYTES) return;
        }
}

int64_t work_of(const Call& linear) { return int64_t(linear.arguments[9]) * int64_t(linear.arguments[10]); }

// Has the linear layers before an attention fetch what it reads, each in proportion to its work: they are bound by
// arithmetic from a few rows on.
class Ahead {
public:
    Ahead(const Call* calls, int64_t count) : calls(calls), count(count) {}

    void before(int64_t i) {
        if (i == end) look_ahead(i);
        if (calls[i].kernel != COMPACT_LINEAR || runs.empty()) return;
        const int64_t first = lines * done / work;
        done += work_of(calls[i]);
        prefetch_of_next_kernel() = {&runs, first, lines * done / work};
    }

private:
    const Call* calls;
    const int64_t count;
    int64_t end = 0, work = 0, done = 0, lines = 0;
    std::vector<Run> runs;

    // From call i on up to the next attention.
    void look_ahead(int64_t i) {
        work = done = lines = 0, runs.clear();
        for (end = i; end < count && calls[end].kernel != ATTEND; ++end)
            if (calls[end].kernel == COMPACT_LINEAR) work += work_of(calls[end]);
        if (end == count) return;
        if (work) runs_of(calls[end], runs);
        for (const Run& run : runs) lines += run.lines;
        ++end;
    }
};

}  // namespace

// The first call that did not do its work; those after it did not run. -1: all ran.
extern "C" int64_t ucm_replay(const Call* calls, int64_t count) {
    Ahead ahead(calls, count);
    for (int64_t i = 0; i < count; ++i) {
        ahead.before(i);
        const int64_t returned = run(calls[i]);
        prefetch_of_next_kernel() = PrefetchLines();  // a kernel that does not ask
        if (returned != calls[i].done) return i;
    }
    return -1;
}
