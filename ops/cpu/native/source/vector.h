// Vectors as wide as the CPU's registers, in GCC's vector extension: one source for AVX-512, AVX2, SSE and NEON.
#pragma once

#include <cfloat>
#include <cstdint>
#include <cstring>

#if defined(__AVX__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define UCM_LANES 16
#elif defined(__AVX__)
#define UCM_LANES 8
#else
#define UCM_LANES 4
#endif

namespace ucm {

constexpr int LANES = UCM_LANES;
typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));  // bits of floats: sums that overflow are defined

inline Floats load(const float* from) {
    Floats v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

inline void store(float* to, Floats v) { std::memcpy(to, &v, sizeof v); }

inline Floats all(float x) { return x - Floats{}; }

inline Floats maximum(Floats a, Floats b) { return a > b ? a : b; }

// v with the lanes of every group of 2 * STEP exchanged half by half.
template <int STEP>
inline Floats exchanged(Floats v) {
    Ints other;
    for (int lane = 0; lane < LANES; ++lane) other[lane] = lane ^ STEP;
    return __builtin_shuffle(v, other);
}

template <int STEP = LANES / 2>
inline float sum(Floats v) {
    if constexpr (STEP == 0) return v[0];
    else return sum<STEP / 2>(v + exchanged<STEP>(v));
}

template <int STEP = LANES / 2>
inline float largest(Floats v) {
    if constexpr (STEP == 0) return v[0];
    else return largest<STEP / 2>(maximum(v, exchanged<STEP>(v)));
}

// Whether every lane is finite and at most `bound`.
inline bool within(Floats v, float bound) {
#if defined(__AVX512F__)
    const __mmask16 large_enough = _mm512_cmp_ps_mask((__m512)v, (__m512)all(-FLT_MAX), _CMP_GE_OQ);
    return _mm512_mask_cmp_ps_mask(large_enough, (__m512)v, (__m512)all(bound), _CMP_LE_OQ) == 0xffff;
#else
    const Ints inside = (v >= -FLT_MAX) & (v <= bound);
#if defined(__AVX__)
    return _mm256_movemask_ps((__m256)inside) == 0xff;
#else
    int64_t outside = 0;
    for (int lane = 0; lane < LANES; ++lane) outside += inside[lane] == 0;
    return outside == 0;
#endif
#endif
}

// One lane of the result per input vector: the sum of its lanes. Halves the number of vectors at every level.
template <int STEP>
inline void sum_each_level(Floats* v) {
    if constexpr (STEP > 0) {
        Ints low, high;
        for (int lane = 0; lane < LANES; ++lane) {
            const int source = (lane & STEP) ? LANES : 0;
            low[lane] = source + (lane & ~STEP);
            high[lane] = source + (lane | STEP);
        }
        for (int i = 0; i < STEP; ++i)
            v[i] = __builtin_shuffle(v[i], v[i + STEP], low) + __builtin_shuffle(v[i], v[i + STEP], high);
        sum_each_level<STEP / 2>(v);
    }
}

inline Floats sum_each(Floats* v) {
    sum_each_level<LANES / 2>(v);
    return v[0];
}

// LANES vectors as the rows of a square, in place: lane j of vector i becomes lane i of vector j.
template <int STEP>
inline void transpose_level(Floats* v) {
    if constexpr (STEP > 0) {
        Ints first, second;
        for (int lane = 0; lane < LANES; ++lane) {
            first[lane] = (lane & STEP) ? LANES + (lane ^ STEP) : lane;
            second[lane] = (lane & STEP) ? LANES + lane : (lane ^ STEP);
        }
        for (int i = 0; i < LANES; ++i) {
            if (i & STEP) continue;
            const Floats a = v[i], b = v[i + STEP];
            v[i] = __builtin_shuffle(a, b, first);
            v[i + STEP] = __builtin_shuffle(a, b, second);
        }
        transpose_level<STEP / 2>(v);
    }
}

inline void transpose(Floats (&v)[LANES]) { transpose_level<LANES / 2>(v); }

// e^x to about one unit in the last place; 0 below -87, where it would be denormal, e^88 above 88. NaN stays NaN.
// Cody-Waite reduction to |r| <= ln(2)/2 and a polynomial of degree 6 (the coefficients of Cephes' expf).
inline Floats exponential(Floats x) {
    constexpr float rounder = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
#if defined(__AVX512F__)
    const Floats clamped = (Floats)_mm512_min_ps((__m512)all(88.0f), (__m512)x);  // NaN stays
#else
    const Floats above = x < -87.0f ? all(-87.0f) : x, clamped = above > 88.0f ? all(88.0f) : above;
#endif
    const Floats shifted = clamped * 1.44269504088896341f + rounder;
    const Floats n = shifted - rounder;
    const Floats r = (clamped - n * 0.693359375f) - n * -2.12194440e-4f;
    Floats p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
#if defined(__AVX512F__)
    const __mmask16 seen = _mm512_cmp_ps_mask((__m512)x, (__m512)all(-87.0f), _CMP_NLT_UQ);
    return (Floats)_mm512_maskz_scalef_ps(seen, (__m512)p, (__m512)n);
#else
    const Words exponent = ((Words)shifted - (Words)all(rounder)) << 23;
    const Floats scaled = (Floats)((Words)p + exponent);
    const Floats result = x < -87.0f ? Floats{} : scaled;
    return x == x ? result : x;
#endif
}

}  // namespace ucm
