// Products of fp32 operands that lie split in strips of matrix tiles.
//
// A strip is 16 rows (left operand) or 16 columns (right operand), [steps of 32][parts][1 KiB]. Of the 32 numbers of a step,
// number i of the first half and of the second half are a pair; both operands have them in this order, so sums are the same.
#pragma once

#include "matrix_tiles.h"

#if defined(UCM_MATRIX_TILES)

namespace ucm {

constexpr int64_t TILE_BYTES = 1024;

// 2 x 16 floats as P vectors of 16 pairs of bfloat16 whose sum is exact: 3 for any floats, 2 for what half precision
// holds, 1 for what bfloat16 holds. All but the last are rounded to nearest. Unlike in `Split`, a value that is not finite
// leaves NaN in some part: for those who only want to see it.
template <int P>
struct Pairs {
    __m512i part[P];

    Pairs(Floats first, Floats second) {
        const Words half = 0x8000 - Words{}, upper = 0xffff0000 - Words{};
        for (int i = 0; i < P; ++i) {
            const bool last = i + 1 == P;
            const Words a = last ? (Words)first : ((Words)first + half) & upper;
            const Words b = last ? (Words)second : ((Words)second + half) & upper;
            part[i] = _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32((__m512i)a, 16), (__m512i)b);
            first -= (Floats)a, second -= (Floats)b;
        }
    }

    // As rows of tiles that lie one after the other.
    void store(char* to) const {
        for (int i = 0; i < P; ++i) _mm512_store_si512(to + i * TILE_BYTES, part[i]);
    }
};

// 2 x 16 floats as 16 pairs of bfloat16, each rounded to the nearest; `kept` is what they are then.
struct RoundedPairs {
    Floats kept[2];

    RoundedPairs(Floats first, Floats second) : kept{rounded(first), rounded(second)} {}

    // A value that is not a number stays one.
    static Floats rounded(Floats value) {
        const Words bits = (Words)value, even = (bits >> 16) & 1;
        return value == value ? (Floats)((bits + 0x7fff + even) & 0xffff0000) : value;
    }

    void store(char* to) const { Pairs<1>(kept[0], kept[1]).store(to); }
};

// The accumulators are tiles 0 and 1 for the first 16 rows, 2 and 3 for the next 16; 4 and 5 are left operands, 6 and 7
// right ones.
template <int R>
struct Accumulators {
    static void clear() {
        zero_tile<0>();
        zero_tile<1>();
        if constexpr (R == 1) return;
        zero_tile<2>();
        zero_tile<3>();
    }

    static void load(const float* from, int64_t stride) {
        load_tile<0>(from, stride * 4);
        load_tile<1>(from + TILE, stride * 4);
        if constexpr (R == 1) return;
        load_tile<2>(from + TILE * stride, stride * 4);
        load_tile<3>(from + TILE * stride + TILE, stride * 4);
    }

    static void store(float* to, int64_t stride) {
        store_tile<0>(to, stride * 4);
        store_tile<1>(to + TILE, stride * 4);
        if constexpr (R == 2) {
            store_tile<2>(to + TILE * stride, stride * 4);
            store_tile<3>(to + TILE * stride + TILE, stride * 4);
        }
    }
};

// Two strips that are multiplied at once, and how far they lie apart.
struct Strips {
    const char* first;
    int64_t apart;
};

// Accumulators += left * right: products of parts i and j with i + j < PARTS. Small products come first within a step.
// LEFT_PARTS: all of them, or 1, as RIGHT_PARTS is then. beside() is called between the products, for work of the vector
// unit meanwhile.
template <int R, int LEFT_PARTS, int RIGHT_PARTS, typename Beside>
inline void multiply_tiles(Strips left, Strips right, int64_t steps, Beside beside) {
    const auto take_left = [&](int part) {
        load_tile<4>(left.first + part * TILE_BYTES);
        if constexpr (R == 2) load_tile<5>(left.first + left.apart + part * TILE_BYTES);
    };
    const auto take_right = [&](int part) {
        load_tile<6>(right.first + part * TILE_BYTES);
        load_tile<7>(right.first + right.apart + part * TILE_BYTES);
    };
    const auto multiply = [&] {
        add_product<0, 4, 6>();
        add_product<1, 4, 7>();
        if constexpr (R == 2) {
            add_product<2, 5, 6>();
            add_product<3, 5, 7>();
        }
        beside();
    };
    static_assert(LEFT_PARTS == PARTS || (LEFT_PARTS == 1 && RIGHT_PARTS == 1));
    for (int64_t step = 0; step < steps; ++step) {
        if constexpr (LEFT_PARTS == 1) {
            take_left(0), take_right(0), multiply();
            left.first += TILE_BYTES, right.first += TILE_BYTES;
            continue;
        }
        if constexpr (RIGHT_PARTS == 3) take_left(0), take_right(2), multiply();
        if constexpr (RIGHT_PARTS >= 2) {
            if constexpr (RIGHT_PARTS == 2) take_left(0);
            take_right(1), multiply();
            take_left(1), multiply();
        }
        take_right(0);
        if constexpr (RIGHT_PARTS == 1) take_left(1);
        multiply();
        take_left(0), multiply();
        take_left(2), multiply();
        left.first += PARTS * TILE_BYTES, right.first += RIGHT_PARTS * TILE_BYTES;
    }
}

}  // namespace ucm

#endif
