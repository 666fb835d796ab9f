// Which of the threads of a parallel region this one is; alone in a build without OpenMP.
#pragma once

#if defined(_OPENMP)
#include <omp.h>
#endif

#include <cstdint>

namespace ucm {

struct Member {
    int64_t thread = 0, threads = 1;
};

inline Member member() {
#if defined(_OPENMP)
    return {omp_get_thread_num(), omp_get_num_threads()};
#else
    return {};
#endif
}

}  // namespace ucm
