// Floats as they lie in memory: scratch of a thread, fetching ahead, half precision, products.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "vector.h"

namespace ucm {

enum Type : int64_t { FP32 = 0, BF16 = 1, FP16 = 2, E4M3 = 3 };

inline int64_t bytes_of(int64_t type) { return type == FP32 ? 4 : type == E4M3 ? 1 : 2; }

constexpr int64_t LARGEST_HEAD = 576;  // of 16 and 8 bits, which are converted in a buffer of this size

inline int64_t padded(int64_t size, int64_t to) { return (size + to - 1) / to * to; }

// Memory of one thread, grown and kept.
struct Scratch {
    float* data = nullptr;
    int64_t size = 0;
    ~Scratch() { std::free(data); }
    float* take(int64_t wanted) {
        if (wanted > size) {
            std::free(data);
            size = padded(wanted, 1024);
            data = static_cast<float*>(std::aligned_alloc(64, size * sizeof(float)));
        }
        return data;
    }
};

// Into the second cache: what is fetched is used a tile later, and the first one is full of this tile.
inline void prefetch(const char* from, int64_t bytes) {
    for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(from + byte, 0, 2);
}

inline float widen(uint16_t half) {
    const uint32_t magnitude = (half & 0x7fffu) << 13, sign = uint32_t(half & 0x8000u) << 16;
    float value;
    std::memcpy(&value, &magnitude, 4);
    value *= 0x1p112f;
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    bits = (half & 0x7c00u) == 0x7c00u ? (magnitude | 0x7f800000u) : bits;
    bits |= sign;
    std::memcpy(&value, &bits, 4);
    return value;
}

// e4m3: four bits of exponent with a bias of 7, three of mantissa, no infinities. The eight smallest are multiples of
// 2^-9; as denormal floats they would be slow to multiply, or 0.
inline float widen(uint8_t byte) {
    const uint32_t magnitude = byte & 0x7fu, sign = uint32_t(byte & 0x80u) << 24;
    float value = float(int32_t(magnitude)) * 0x1p-9f;
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    bits = magnitude < 8 ? bits : (magnitude << 20) + (120u << 23);
    bits = magnitude == 0x7fu ? 0x7fc00000u : bits;
    bits |= sign;
    std::memcpy(&value, &bits, 4);
    return value;
}

// A token's head as fp32: in place, or converted into `room`.
inline const float* as_floats(const char* data, int64_t type, int64_t size, float* room) {
    if (type == FP32) return reinterpret_cast<const float*>(data);
    if (type == E4M3) {
        const uint8_t* bytes = reinterpret_cast<const uint8_t*>(data);
        for (int64_t i = 0; i < size; ++i) room[i] = widen(bytes[i]);
        return room;
    }
    const uint16_t* half = reinterpret_cast<const uint16_t*>(data);
    for (int64_t i = 0; i < size; ++i) {
        if (type == FP16) {
            room[i] = widen(half[i]);
        } else {
            const uint32_t bits = uint32_t(half[i]) << 16;
            std::memcpy(room + i, &bits, 4);
        }
    }
    return room;
}

inline Floats dot(const float* a, const float* b, int64_t size) {
    Floats total = {};
    for (int64_t i = 0; i < size; i += LANES) total += load(a + i) * load(b + i);
    return total;
}

}  // namespace ucm
