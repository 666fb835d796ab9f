// Rankings of blocks by score. ops/block_selection/impl/reference.py defines them.
#include <algorithm>
#include <cfloat>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

namespace {

constexpr int64_t SERIAL = 1 << 13;  // candidates for which waking other threads costs more than it saves

// Larger for what comes first: NaN, then the larger score (below -FLT_MAX all are equal), then the lower number.
uint64_t rank(float score, int64_t number) {
    uint32_t bits = 0xffffffffu;
    if (score == score) {
        const float clamped = (score < -FLT_MAX ? -FLT_MAX : score) + 0.0f;  // -0 becomes 0
        std::memcpy(&bits, &clamped, 4);
        bits = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    }
    return uint64_t(bits) << 32 | (0xffffffffu - uint32_t(number));
}

}  // namespace

// out [spans, most]: block numbers from the highest score on, then -1. Returns 2 if a place is outside of the table.
extern "C" int64_t ucm_choose_blocks(
    const float* scores, const int64_t* places, int64_t candidates, int64_t spans, int64_t width, int64_t most, int64_t* out) {
    std::vector<std::vector<uint64_t>> ranks(spans);
    for (int64_t c = 0; c < candidates; ++c) {
        if (places[c] < 0 || places[c] > spans * width) return 2;
        if (places[c] < spans * width) ranks[places[c] / width].push_back(rank(scores[c], places[c] % width));
    }
#pragma omp parallel for if (candidates > SERIAL)
    for (int64_t s = 0; s < spans; ++s) {
        auto& mine = ranks[s];
        const int64_t found = std::min<int64_t>(most, mine.size());
        std::nth_element(mine.begin(), mine.begin() + found, mine.end(), std::greater<uint64_t>());
        std::sort(mine.begin(), mine.begin() + found, std::greater<uint64_t>());
        for (int64_t i = 0; i < most; ++i)
            out[s * most + i] = i < found ? int64_t(0xffffffffu - uint32_t(mine[i])) : -1;
    }
    return 0;
}
