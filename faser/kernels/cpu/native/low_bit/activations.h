// Activations of low-bit products: rows of signed bytes, one scale for every kScaled values.
//
// Defined in kernels/interface/low_bit/product.py, which gives the same bits.
#pragma once

#include <vector>

#include "../pool.h"
#include "../product.h"
#include "layout.h"

namespace faser {

constexpr int64_t kScaled = 64;

struct Activations {
    int64_t depth;
    const int8_t* codes;       // [rows, depth]
    const float* scales;       // [rows, depth / kScaled, rounded up]
    const int32_t* sums;       // [rows, depth / 32] of codes
    const int32_t* sums_of_16;  // [rows, depth / 16]

    int64_t scales_stride() const { return (depth + kScaled - 1) / kScaled; }
};

template <class T>
void quantise_row(const T* x, int64_t depth, int8_t* codes, float* scales, int32_t* sums, int32_t* sums_of_16) {
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to the nearest integer, ties to even
    for (int64_t first = 0; first < depth; first += kScaled) {
        const int64_t end = std::min(first + kScaled, depth);
        vu most{};
        for (int64_t k = first; k < end; k += kLanes) {
            vu bits = (vu)load(x + k) & 0x7fffffffu;
            most = bits > most ? bits : most;
        }
        uint32_t bits = 0x0d800000u;  // 2^-100: neither scale nor inverse of it overflows
        for (int i = 0; i < kLanes; i++) bits = std::max(bits, uint32_t(most[i]));
        if (bits >= 0x7f800000u) {  // an infinity or no number: no product of the row is finite
            std::memset(codes + first, 0, end - first);
            scales[first / kScaled] = __builtin_nanf("");
            continue;
        }
        float largest;
        std::memcpy(&largest, &bits, 4);
        const float inverse = 127.0f / largest;
        scales[first / kScaled] = largest / 127.0f;
        for (int64_t k = first; k < end; k += kLanes) {
            store_bytes(codes + k, (vi)(load(x + k) * inverse + magic) - 0x4b400000);
        }
    }
    for (int64_t group = 0; group < depth / 16; group++) {
        int32_t total = 0;
        for (int i = 0; i < 16; i++) total += codes[group * 16 + i];
        sums_of_16[group] = total;
    }
    for (int64_t group = 0; group < depth / 32; group++) {
        sums[group] = sums_of_16[2 * group] + sums_of_16[2 * group + 1];
    }
}

// The rows of a call, in memory of the calling thread that its next call overwrites.
inline Activations quantise(Pool& pool, const FaserProduct& call, int32_t x_dtype, int64_t depth) {
    static thread_local std::vector<char> memory;
    const int64_t row_bytes = (depth + 63) / 64 * 64, rows = call.rows;
    const int64_t scales = (depth + kScaled - 1) / kScaled, groups = depth / 32;
    const int64_t bytes = rows * (row_bytes + 4 * (scales + 3 * groups)) + 64;
    if (int64_t(memory.size()) < bytes) memory.resize(bytes);
    int8_t* codes = (int8_t*)memory.data();
    float* at = (float*)(codes + (rows * depth + 63) / 64 * 64);
    int32_t* sums = (int32_t*)(at + rows * scales);
    int32_t* sums_of_16 = sums + rows * groups;
    pool.run(rows, [&](int64_t row) {
        int8_t* to = codes + row * depth;
        float* row_scales = at + row * scales;
        if (x_dtype == kFloat32) {
            quantise_row((const float*)call.x + row * call.x_stride, depth, to, row_scales, sums + row * groups,
                         sums_of_16 + row * 2 * groups);
        } else {
            quantise_row((const bf16*)call.x + row * call.x_stride, depth, to, row_scales, sums + row * groups,
                         sums_of_16 + row * 2 * groups);
        }
    });
    return {depth, codes, at, sums, sums_of_16};
}

}  // namespace faser
