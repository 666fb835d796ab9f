// Numbers of half precision to floats and back, one by one: in loops that the compiler makes vectors of.
#pragma once

#include <cmath>

#include "memory.h"

namespace ucm {

inline uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

inline float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

struct Brain {
    static float widen(uint16_t half) { return float_of(uint32_t(half) << 16); }
    static uint16_t narrow(float value) {
        const uint32_t bits = bits_of(value), rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
        return value == value ? rounded >> 16 : (bits >> 16) | 0x40u;
    }
};

struct Half {
    static float widen(uint16_t half) { return ucm::widen(half); }
    // To the nearest, ties to even: a number is added that leaves just the bits of a half in the sum.
    static uint16_t narrow(float value) {
        const uint32_t bits = bits_of(value), doubled = bits + bits, sign = bits & 0x80000000u;
        const uint32_t exponent = doubled & 0xff000000u, bias = exponent < 0x71000000u ? 0x71000000u : exponent;
        const float base = float_of((bias >> 1) + 0x07800000u) + (std::fabs(value) * 0x1p112f) * 0x1p-110f;
        const uint32_t found = bits_of(base), whole = ((found >> 13) & 0x7c00u) + (found & 0x0fffu);
        return (sign >> 16) | (doubled > 0xff000000u ? 0x7e00u : whole);
    }
};

// Floats, each multiplied, to `size` numbers of a type, rounded to the nearest.
inline void leave_as(int64_t type, const float* from, float factor, int64_t size, char* to) {
    uint16_t* half = reinterpret_cast<uint16_t*>(to);
    if (type == BF16)
        for (int64_t i = 0; i < size; ++i) half[i] = Brain::narrow(from[i] * factor);
    else if (type == FP16)
        for (int64_t i = 0; i < size; ++i) half[i] = Half::narrow(from[i] * factor);
    else
        for (int64_t i = 0; i < size; ++i) reinterpret_cast<float*>(to)[i] = from[i] * factor;
}

}  // namespace ucm
