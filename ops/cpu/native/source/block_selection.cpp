// A layer's choice of blocks in one call: scores, rankings, the stored choice, and what is attended. The same as
// vllm_gaudi_ucm/sparse/selection/block_selector.py does with operations of ops/block_selection.
#include "block_selection.h"

#include <algorithm>
#include <vector>

using namespace ucm;

namespace {

enum Mode : int64_t { SELECT = 0, REUSE = 1, CHECK = 2 };

// Whether the first blocks of both rankings differ in at most the threshold, and the stored one has as many as asked for.
bool is_close(const Selecting& task, int64_t span, const int64_t* stored, const int64_t* fresh) {
    const int64_t width = task.choosing.width, count = std::min(task.counts[span], task.choosing.most);
    std::vector<char> in(width, 0);
    int64_t valid = 0, different = 0;
    const auto is_block = [&](int64_t number) { return number >= 0 && number < width; };
    for (int64_t i = 0; i < count; ++i)
        if (is_block(stored[i])) in[stored[i]] |= 1, ++valid;
    for (int64_t i = 0; i < count; ++i)
        if (is_block(fresh[i])) in[fresh[i]] |= 2;
    for (int64_t number = 0; number < width; ++number) different += in[number] == 1 || in[number] == 2;
    return valid >= task.counts[span] && different <= task.thresholds[span];
}

// The rankings that hold from now on, in `rankings`; they are stored.
void keep_or_replace(const Selecting& task, int64_t* rankings) {
    const int64_t most = task.choosing.most;
    for (int64_t s = 0; s < task.choosing.spans; ++s) {
        int64_t* stored = task.stored + task.slots[s] * most;
        int64_t* fresh = rankings + s * most;
        const bool check = task.modes[s] == CHECK, kept = check && is_close(task, s, stored, fresh);
        if (check) ++task.checks[kept ? 0 : 1];
        if (kept || task.modes[s] == REUSE) std::copy(stored, stored + most, fresh);
        else std::copy(fresh, fresh + most, stored);
    }
}

void add_recall(const Selecting& task, const int64_t* rankings) {
    const Choosing& choosing = task.choosing;
    const int64_t places = choosing.spans * choosing.width;
    std::vector<float> mass(places, 0.0f);
    for (int64_t c = 0; c < choosing.candidates; ++c) {
        if (choosing.places[c] == places) continue;
        mass[choosing.places[c]] = choosing.scores[c];
        task.recall[1] += choosing.scores[c];
    }
    for (int64_t i = 0; i < task.selected; ++i) {
        const int64_t number = std::max<int64_t>(rankings[task.choice_places[i]], 0);
        if (task.choice_hi[i] > 0) task.recall[0] += mass[task.choice_spans[i] * choosing.width + number];
    }
}

bool is_inside(const Selecting& task) {
    for (int64_t s = 0; s < task.choosing.spans; ++s)
        if (task.slots[s] < 0 || task.slots[s] >= task.num_slots) return false;
    for (int64_t i = 0; i < task.selected; ++i) {
        if (task.choice_places[i] < 0 || task.choice_places[i] >= task.choosing.spans * task.choosing.most) return false;
        if (task.choice_spans[i] < 0 || task.choice_spans[i] >= task.choosing.spans) return false;
    }
    return true;
}

}  // namespace

// 0: done. 2: an id is outside of its tensor.
extern "C" int64_t ucm_select_blocks(const Selecting* task) {
    const Choosing& choosing = task->choosing;
    if (!is_inside(*task)) return 2;
    std::vector<int64_t> rows(choosing.spans);
    bool all_reused = true;
    for (int64_t s = 0; s < choosing.spans; ++s) {
        const bool reused = task->modes[s] == REUSE || task->scoring.num_rows[s] == 0;
        all_reused = all_reused && reused;
        // what is used again needs no score, unless its recall is asked for
        rows[s] = task->modes[s] == REUSE && !task->recall ? 0 : task->scoring.num_rows[s];
    }
    if (!all_reused) {
        Scoring scoring = task->scoring;
        scoring.num_rows = rows.data();
        if (!score_blocks(scoring) || !choose_blocks(choosing)) return 2;
    }
    keep_or_replace(*task, choosing.out);
    if (!all_reused && task->recall) add_recall(*task, choosing.out);
    for (int64_t i = 0; i < task->selected; ++i) {
        const int64_t number = std::max<int64_t>(choosing.out[task->choice_places[i]], 0);
        if (number >= choosing.width) return 2;
        task->chosen[i] = task->table[task->choice_spans[i] * choosing.width + number];
    }
    return 0;
}
