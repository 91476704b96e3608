// The one inner loop of every product: a tile of rows times a few panels, accumulators held in registers.
//
// Every accumulator takes its steps in order, one after another, whatever the tile: a row gets the same bits in
// every batch. No kernel may split the steps of one accumulator.
#pragma once

#include "simd.h"

namespace faser {

template <int Rows, int Panels>
struct Sums {
    vf at[Rows][Panels * kParts];
};

// Adds x[r] times w[p], `steps` steps. Row r of x starts r * x_stride bytes on; a panel's steps lie w_step bytes
// apart. Fetch: meanwhile prefetch as many steps of `prefetched`, data for later, into the second-level cache (in the
// first level they would evict data in use).
template <class T, int Rows, int Panels, bool Fetch = false>
inline __attribute__((always_inline)) void multiply(const char* x, ptrdiff_t x_stride, const char* const* w,
                                                    ptrdiff_t w_step, int64_t steps, Sums<Rows, Panels>& sums,
                                                    const char* const* prefetched = nullptr) {
    using S = Step<T>;
    const char* panels[Panels];
    for (int p = 0; p < Panels; p++) panels[p] = w[p];
    for (int64_t step = 0; step < steps; step++) {
        typename S::Weight weights[Panels * kParts];
#pragma GCC unroll 8
        for (int p = 0; p < Panels; p++) {
            if (Fetch) __builtin_prefetch(prefetched[p] + step * kStepBytes, 0, 2);
#pragma GCC unroll 4
            for (int i = 0; i < kParts; i++) {
                weights[p * kParts + i] = S::weight(panels[p] + i * sizeof(vf));
            }
            panels[p] += w_step;
        }
#pragma GCC unroll 8
        for (int r = 0; r < Rows; r++) {
            auto factor = S::factor(x + r * x_stride);
#pragma GCC unroll 16
            for (int p = 0; p < Panels * kParts; p++) {
                sums.at[r][p] = S::madd(sums.at[r][p], weights[p], factor);
            }
        }
        x += 4;
    }
}

template <int Rows, int Panels>
inline __attribute__((always_inline)) void clear(Sums<Rows, Panels>& sums) {
#pragma GCC unroll 8
    for (int r = 0; r < Rows; r++) {
#pragma GCC unroll 16
        for (int p = 0; p < Panels * kParts; p++) sums.at[r][p] = vf{};
    }
}

// y[r][0 : 16 * Panels] = sums; rows of y lie y_stride floats apart.
template <int Rows, int Panels>
inline __attribute__((always_inline)) void spill(const Sums<Rows, Panels>& sums, float* y, ptrdiff_t y_stride) {
#pragma GCC unroll 8
    for (int r = 0; r < Rows; r++) {
#pragma GCC unroll 16
        for (int p = 0; p < Panels * kParts; p++) store(y + r * y_stride + p * kLanes, sums.at[r][p]);
    }
}

// Calls f(integral_constant-like<count>) for the count at hand, 1 <= count <= Most.
template <int N>
struct Count {
    static constexpr int value = N;
};

template <int Most, class F>
inline void with_count(int count, const F& f) {
    if constexpr (Most > 1) {
        if (count < Most) return with_count<Most - 1>(count, f);
    }
    f(Count<Most>{});
}

// Rows of the next tile when `left` rows remain: as even as possible, so that no last tile has a single row.
inline int tile_rows(int64_t left) {
    int64_t tiles = (left + kTileRows - 1) / kTileRows;
    return int((left + tiles - 1) / tiles);
}

}  // namespace faser
