// Rankings of blocks by score. ops/block_selection/impl/reference.py defines them.
#include <algorithm>
#include <cfloat>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#include "block_selection.h"

using namespace ucm;

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

namespace ucm {

bool choose_blocks(const Choosing& task) {
    const int64_t places = task.spans * task.width, most = task.most;
    std::vector<std::vector<uint64_t>> ranks(task.spans);
    for (int64_t c = 0; c < task.candidates; ++c) {
        const int64_t place = task.places[c];
        if (place < 0 || place > places) return false;
        if (place < places) ranks[place / task.width].push_back(rank(task.scores[c], place % task.width));
    }
#pragma omp parallel for if (task.candidates > SERIAL)
    for (int64_t s = 0; s < task.spans; ++s) {
        auto& mine = ranks[s];
        const int64_t found = std::min<int64_t>(most, mine.size());
        std::nth_element(mine.begin(), mine.begin() + found, mine.end(), std::greater<uint64_t>());
        std::sort(mine.begin(), mine.begin() + found, std::greater<uint64_t>());
        for (int64_t i = 0; i < most; ++i)
            task.out[s * most + i] = i < found ? int64_t(0xffffffffu - uint32_t(mine[i])) : -1;
    }
    return true;
}

}  // namespace ucm

// 0: done. 2: a place is outside of the table.
extern "C" int64_t ucm_choose_blocks(const Choosing* task) { return choose_blocks(*task) ? 0 : 2; }
