// Whether kernels may use the matrix unit: what the machine allows, and what the process wants.
#include "matrix_tiles.h"

namespace ucm {

std::atomic<bool> matrix_tiles_wanted{true};

}  // namespace ucm

// 0: built for a CPU without tiles, or by a compiler that does not know them. 1: Linux did not grant them. 2: there.
extern "C" int64_t ucm_matrix_tiles() {
#if defined(UCM_MATRIX_TILES)
    return ucm::have_matrix_tiles() ? 2 : 1;
#else
    return 0;
#endif
}

extern "C" void ucm_use_matrix_tiles(int64_t wanted) { ucm::matrix_tiles_wanted = wanted != 0; }

extern "C" int64_t ucm_uses_matrix_tiles() { return ucm::use_matrix_tiles(); }
