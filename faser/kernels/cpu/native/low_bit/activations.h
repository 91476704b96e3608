// Activations of low-bit products: signed bytes, one scale for every kScaled values of a row.
//
// Defined in kernels/interface/low_bit/product.py, which gives the same bits. Everything lies span by span, and within
// a span row by row, at distances that the compiler knows.
#pragma once

#include <vector>

#include "../pool.h"
#include "../product.h"
#include "layout.h"

namespace faser {

constexpr int64_t kScaled = 64;
constexpr int64_t kStretches = kSpan / kScaled;  // of a span
constexpr int64_t kGroups32 = kSpan / 32, kGroups16 = kSpan / 16;

// What the integer sums of a part's groups start with: a multiple of the sum of the group's activations. in_pairs: two
// of 16 bits, of the activations whose products each half of 32 bits adds up.
struct Start {
    int32_t factor;
    int64_t groups;  // of a span
    bool in_pairs;   // only groups of 16

    bool operator==(const Start& other) const {
        return factor == other.factor && groups == other.groups && in_pairs == other.in_pairs;
    }
};

struct Starts {
    Start start;
    const int32_t* at;  // [spans, rows, groups]
};

struct Activations {
    int64_t rows;
    const int8_t* codes;  // [spans, rows, kSpan]
    const float* scales;  // [spans, rows, kStretches]
    const float* sums;    // [spans, rows, kGroups32] of codes
    const float* scaled_sums;  // sums times the scales of their stretches
    std::vector<Starts>& starts;

    const int32_t* starts_of(const Start& start) const {
        for (const Starts& each : starts) {
            if (each.start == start) return each.at;
        }
        return nullptr;
    }
};

inline uint32_t most_of(vu x) {
#pragma GCC unroll 4
    for (int half = kLanes / 2; half > 0; half /= 2) {
        vu other;
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; i++) other[i] = x[i ^ half];
        x = other > x ? other : x;
    }
    return x[0];
}

// Of 16 activations, and of those at places 0, 1, 4, 5 … and at 2, 3, 6, 7 … of them: what products in pairs add up.
struct Sum16 {
    int32_t all, in_pairs[2];
};

// Stores 64 integers of a byte each, and sums of 16 of them, in pairs only where products are.
inline void put_codes(const vi (&codes)[kScaled / kLanes], int8_t* to, Sum16* sums) {
#if defined(__AVX512VNNI__)
    // Packing interleaves 128-bit lanes: put them back in order. Then sums of 4, 8 and 16 neighbours.
    const __m512i low = _mm512_packs_epi32((__m512i)codes[0], (__m512i)codes[1]);
    const __m512i high = _mm512_packs_epi32((__m512i)codes[2], (__m512i)codes[3]);
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i bytes = _mm512_maskz_permutexvar_epi32(0xffff, order, _mm512_packs_epi16(low, high));
    _mm512_storeu_si512(to, bytes);
    const __m512i fours = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), bytes);
    const __m512i eights = _mm512_add_epi32(fours, _mm512_maskz_shuffle_epi32(0xffff, fours, (_MM_PERM_ENUM)0xb1));
    const __m512i all = _mm512_add_epi32(eights, _mm512_maskz_shuffle_epi32(0xffff, eights, (_MM_PERM_ENUM)0x4e));
    const __m512i first = _mm512_setr_epi32(0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12);
    int32_t of_16[4];
    _mm_storeu_si128((__m128i*)of_16, _mm512_castsi512_si128(_mm512_maskz_permutexvar_epi32(0xffff, first, all)));
    for (int64_t group = 0; group < kScaled / 16; group++) sums[group].all = of_16[group];
#else
    constexpr int64_t vectors = 16 / kLanes;
    for (int64_t group = 0; group < kScaled / 16; group++) {
        vi total{};
        for (int64_t i = group * vectors; i < (group + 1) * vectors; i++) {
            store_bytes(to + i * kLanes, codes[i]);
            total += codes[i];
        }
        Sum16& sum = sums[group] = {};
        for (int i = 0; i < kLanes; i++) sum.in_pairs[i / 2 % 2] += total[i];
        sum.all = sum.in_pairs[0] + sum.in_pairs[1];
    }
#endif
}

// One stretch, `values` values and zeros after them: its codes, their sums of 16 and its scale.
template <class T>
void quantise_stretch(const T* x, int64_t values, int8_t* to, float* scale, Sum16* sums) {
    constexpr int64_t kVectors = kScaled / kLanes;
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to the nearest integer, ties to even
    vf wide[kVectors];
    vu most{};
#pragma GCC unroll 16
    for (int64_t i = 0; i < kVectors; i++) {
        wide[i] = i * kLanes < values ? load(x + i * kLanes) : vf{};
        const vu bits = (vu)wide[i] & 0x7fffffffu;
        most = bits > most ? bits : most;
    }
    const uint32_t bits = std::max(0x0d800000u, most_of(most));  // 2^-100: neither scale nor inverse of it overflows
    vi codes[kVectors] = {};
    if (bits >= 0x7f800000u) {  // an infinity or no number: no product of the row is finite
        *scale = __builtin_nanf("");
    } else {
        float largest;
        std::memcpy(&largest, &bits, 4);
        const float inverse = 127.0f / largest;
        *scale = largest / 127.0f;
#pragma GCC unroll 16
        for (int64_t i = 0; i < kVectors; i++) codes[i] = (vi)(wide[i] * inverse + magic) - 0x4b400000;
    }
    put_codes(codes, to, sums);
}

inline int32_t packed(int32_t low, int32_t high) { return int32_t(uint32_t(low & 0xffff) | uint32_t(high) << 16); }

// Rows [first, end) of an input [rows, K].
template <class T>
void quantise_rows(const T* x, int64_t stride, int64_t depth, const Activations& to, int64_t first, int64_t end) {
    for (int64_t row = first; row < end; row++) {
        for (int64_t k = 0, span = 0; k < depth; k += kSpan, span++) {
            const int64_t place = span * to.rows + row;
            Sum16 sums_of_16[kGroups16] = {};
            float* scales = (float*)to.scales + place * kStretches;
            for (int64_t at = 0; at < std::min(kSpan, depth - k); at += kScaled) {
                quantise_stretch(x + row * stride + k + at, std::min(kScaled, depth - k - at),
                                 (int8_t*)to.codes + place * kSpan + at,
                                 scales + at / kScaled, sums_of_16 + at / 16);
            }
            int32_t sums_of_32[kGroups32];
            float* sums = (float*)to.sums + place * kGroups32;
            float* scaled = (float*)to.scaled_sums + place * kGroups32;
            for (int64_t g = 0; g < kGroups32; g++) {
                sums_of_32[g] = sums_of_16[2 * g].all + sums_of_16[2 * g + 1].all;
                sums[g] = float(sums_of_32[g]);
                scaled[g] = scales[g * 32 / kScaled] * sums[g];
            }
            for (const auto& [start, at] : to.starts) {
                int32_t* starts = (int32_t*)at + place * start.groups;
                for (int64_t g = 0; g < start.groups; g++) {
                    const Sum16& of = sums_of_16[g];
                    starts[g] = start.in_pairs ? packed(start.factor * of.in_pairs[0], start.factor * of.in_pairs[1])
                                               : start.factor * (start.groups == kGroups16 ? of.all : sums_of_32[g]);
                }
            }
        }
    }
}

// The rows of a call for the products of several weights [N, K] of one K, in memory of the calling thread that its
// next call overwrites. start_of: of a part.
template <class StartOf>
Activations quantise(Pool& pool, const FaserProduct& call, int32_t x_dtype, const FaserLowBit* const* linears,
                     int64_t num_linears, const StartOf& start_of) {
    static thread_local std::vector<char> memory;
    static thread_local std::vector<Starts> starts;
    starts.clear();
    const int64_t depth = linears[0]->depth, places = (depth + kSpan - 1) / kSpan * call.rows;
    int64_t bytes = places * (kSpan + 4 * (kStretches + 2 * kGroups32)) + 64;
    for (int64_t number = 0; number < num_linears; number++) {
        for (int64_t i = 0; i < linears[number]->num_parts; i++) {
            const Start start = start_of(linears[number]->parts[i]);
            if (Activations{0, nullptr, nullptr, nullptr, nullptr, starts}.starts_of(start) != nullptr) continue;
            starts.push_back({start, (const int32_t*)bytes});  // its place, until there is memory
            bytes += places * start.groups * 4;
        }
    }
    if (int64_t(memory.size()) < bytes) memory.resize(bytes);
    char* at = memory.data() + (64 - (uintptr_t)memory.data() % 64) % 64;
    for (Starts& each : starts) each.at = (const int32_t*)(at + (int64_t)each.at - 64);
    const float* scales = (const float*)(at + places * kSpan);
    const float* sums = scales + places * kStretches;
    const Activations found{call.rows, (const int8_t*)at, scales, sums, sums + places * kGroups32, starts};
    const int64_t block = std::max<int64_t>(1, 4096 / depth);
    pool.run((call.rows + block - 1) / block, [&](int64_t piece) {
        const int64_t row = piece * block, end = std::min(row + block, call.rows);
        if (x_dtype == kFloat32) {
            quantise_rows((const float*)call.x, call.x_stride, depth, found, row, end);
        } else {
            quantise_rows((const bf16*)call.x, call.x_stride, depth, found, row, end);
        }
    });
    return found;
}

template <class StartOf>
Activations quantise(Pool& pool, const FaserProduct& call, int32_t x_dtype, const FaserLowBit& linear,
                     const StartOf& start_of) {
    const FaserLowBit* one = &linear;
    return quantise(pool, call, x_dtype, &one, 1, start_of);
}

}  // namespace faser
