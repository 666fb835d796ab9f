// Memory of one thread, grown and kept.
#pragma once

#include <cstdint>
#include <cstdlib>

namespace ucm {

struct Scratch {
    float* data = nullptr;
    int64_t size = 0;
    ~Scratch() { std::free(data); }
    float* take(int64_t wanted) {
        if (wanted > size) {
            std::free(data);
            size = (wanted + 1023) / 1024 * 1024;
            data = static_cast<float*>(std::aligned_alloc(64, size * sizeof(float)));
        }
        return data;
    }
};

}  // namespace ucm
