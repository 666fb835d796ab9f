// Prefetching what later kernels read, a few cache lines at a time, in kernels that are bound by arithmetic.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace ucm {

constexpr int64_t LINE = 64;

struct Run {
    const char* at;
    int64_t lines;
};

// Lines [first, last) of runs, counted through all of them.
struct PrefetchLines {
    const std::vector<Run>* runs = nullptr;
    int64_t first = 0, last = 0;
};

// What the kernel that this thread calls next is asked to fetch. It asks once, before its other threads start.
inline PrefetchLines& prefetch_of_next_kernel() {
    static thread_local PrefetchLines lines;
    return lines;
}

// A thread's part of it.
class Prefetcher {
public:
    // calls: of some(), about, in which all of it is fetched.
    Prefetcher(const PrefetchLines& lines, int64_t thread, int64_t threads, int64_t calls) {
        const int64_t count = lines.last - lines.first;
        left = count * (thread + 1) / threads - count * thread / threads;
        if (left <= 0) return;
        pace = (left + calls - 1) / std::max<int64_t>(calls, 1);
        run = lines.runs->data(), line = lines.first + count * thread / threads;
        while (line >= run->lines) line -= run->lines, ++run;
    }

    void some() {
        for (int64_t i = 0; i < pace && left > 0; ++i, --left) {
            __builtin_prefetch(run->at + line * LINE, 0, 2);
            if (++line == run->lines && left > 1) line = 0, ++run;
        }
    }

private:
    const Run* run = nullptr;
    int64_t line = 0, left = 0, pace = 0;
};

}  // namespace ucm
