// Rounding to integers with one scale, and exact sums of products of stored bytes and 16-bit numbers.
//
// Queries and weights get 15 bits next to bytes of 8, so that rounding them costs little next to the rounding of keys
// and values. VNNI's products take bytes: a number is two of them there, each with sums of its own.
#pragma once

#include "../simd.h"

namespace faser {

constexpr int kMostQuery = 127 * 128;  // the high byte is signed, the low one -64 … 63
constexpr int kMostWeight = 32767;     // the low byte is unsigned
constexpr int64_t kMostHeadDim = 1024;  // so that the sum of a key's products fits into 32 bits
constexpr int kAhead = 4;  // chunks from the keys in use to those that are prefetched
constexpr uint32_t kLeastBits = 0x0d800000u;  // 2^-100: neither it nor kMostWeight over it overflows

// The bits of each lane's largest magnitude so far; more than an infinity's where one is no number.
inline vu larger_bits(vu most, vf x) {
    const vu bits = (vu)x & 0x7fffffffu;
    return bits > most ? bits : most;
}

inline uint32_t largest_bits(vu most) {
    uint32_t bits = most[0];
    for (int i = 1; i < kLanes; i++) bits = most[i] > bits ? most[i] : bits;
    return bits;
}

template <class T>
uint32_t largest_bits(const T* x, int64_t count) {
    vu most{};
    for (int64_t i = 0; i < count; i += kLanes) most = larger_bits(most, load(x + i));
    return largest_bits(most);
}

inline float as_float(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

// To nearest, ties to even, of magnitudes below 2^22.
inline vi round_to_int(vf x) { return (vi)(x + 12582912.0f) - 0x4b400000; }

// How numbers become integers up to `most`: their factor, and what one integer is worth. NaN where one is not finite.
struct Rounding {
    float factor, unit;

    Rounding(uint32_t bits, int most) {
        if (bits >= 0x7f800000u) {
            factor = 0;
            unit = __builtin_nanf("");
            return;
        }
        const float largest = as_float(bits < kLeastBits ? kLeastBits : bits);
        factor = float(most) / largest;
        unit = largest / float(most);
    }
};

inline vi splat_word(const char* four) {
    int32_t word;
    std::memcpy(&word, four, 4);
    return vi{} + word;
}

typedef vi vi_any __attribute__((aligned(1), may_alias));

// Unsigned: bytes are keys, hence unsigned, and numbers are signed; else bytes are signed and numbers are not.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)

#if defined(__AVX512VNNI__)
inline vi four_products(vi sum, vi codes, vi x) {
    return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, (__m512i)x);
}
#else
inline vi four_products(vi sum, vi codes, vi x) {
    return (vi)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)codes, (__m256i)x);
}
#endif

// Numbers in memory: the high bytes of all, then the low ones.
template <bool Unsigned>
struct Wide {
    static constexpr int kShift = Unsigned ? 7 : 8;
    static constexpr int kSums = 2;
    typedef vi Bytes;
    struct Sum {
        vi high, low;
    };

    // Writes kLanes numbers from index `at` on, of `count`.
    static void put(char* to, int64_t at, int64_t count, vi x) {
        const vi high = Unsigned ? (x + 64) >> kShift : x >> kShift;
        store_bytes((int8_t*)to + at, high);
        store_bytes((int8_t*)to + count + at, x - (vi)((vu)high << kShift));
    }
    static Bytes bytes(const char* from) { return *(const vi_any*)from; }
    static Sum start(int32_t value) { return {vi{}, vi{} + value}; }
    // Numbers 4 * step to 4 * step + 3 of `count`.
    static void add(Sum* sums, const Bytes* bytes, int vectors, const char* x, int64_t step, int64_t count) {
        const vi high = splat_word(x + 4 * step), low = splat_word(x + count + 4 * step);
#pragma GCC unroll 8
        for (int i = 0; i < vectors; i++) {
            sums[i].high = Unsigned ? four_products(sums[i].high, bytes[i], high)
                                    : four_products(sums[i].high, high, bytes[i]);
        }
#pragma GCC unroll 8
        for (int i = 0; i < vectors; i++) {
            sums[i].low =
                Unsigned ? four_products(sums[i].low, bytes[i], low) : four_products(sums[i].low, low, bytes[i]);
        }
    }
    static vf total(Sum sum) {
        return __builtin_convertvector((vi)(((vu)sum.high << kShift) + (vu)sum.low), vf);
    }
};

#else

// Sums of two products of adjacent signed 16-bit integers.
inline vi two_products(vi a, vi b) {
#if defined(__AVX512BW__)
    return (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__) && !defined(__AVX__)
    return (vi)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
    return (vi)((vu)((a << 16 >> 16) * (b << 16 >> 16)) + (vu)((a >> 16) * (b >> 16)));
#endif
}

typedef int16_t vs __attribute__((vector_size(kLanes * 4)));
typedef uint16_t vus __attribute__((vector_size(kLanes * 4)));

// Numbers in memory: 16 bits each, the second and third of four exchanged, as bytes at even places are widened apart
// from those at odd ones.
template <bool Unsigned>
struct Wide {
    static constexpr int kSums = 1;
    struct Bytes {
        vi even, odd;
    };
    typedef vi Sum;

    static void put(char* to, int64_t at, int64_t, vi x) {
#if defined(__AVX512BW__)
        const __m256i narrow = _mm512_maskz_cvtepi32_epi16(0xffff, (__m512i)x);
        _mm256_storeu_si256((__m256i*)(to + 2 * at), _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(narrow, 0xd8), 0xd8));
#elif defined(__AVX2__)
        const __m128i narrow = (__m128i)__builtin_convertvector(x, vh);
        _mm_storeu_si128((__m128i*)(to + 2 * at), _mm_shufflehi_epi16(_mm_shufflelo_epi16(narrow, 0xd8), 0xd8));
#else
        static constexpr int kPlaces[4] = {0, 2, 1, 3};
        for (int i = 0; i < kLanes; i++) {
            const int16_t narrow = int16_t(x[i]);
            std::memcpy(to + 2 * (at + (i & ~3) + kPlaces[i & 3]), &narrow, 2);
        }
#endif
    }
    static Bytes bytes(const char* from) {
        const vi four = *(const vi_any*)from;
        if (Unsigned) return {four & 0x00ff00ff, (vi)((vus)four >> 8)};
        return {(vi)((vs)((vus)four << 8) >> 8), (vi)((vs)four >> 8)};
    }
    static Sum start(int32_t value) { return vi{} + value; }
    static void add(Sum* sums, const Bytes* bytes, int vectors, const char* x, int64_t step, int64_t) {
        const vi even = splat_word(x + 8 * step), odd = splat_word(x + 8 * step + 4);
#pragma GCC unroll 8
        for (int i = 0; i < vectors; i++) {
            sums[i] = (vi)((vu)sums[i] + (vu)two_products(bytes[i].even, even) + (vu)two_products(bytes[i].odd, odd));
        }
    }
    static vf total(Sum sum) { return __builtin_convertvector(sum, vf); }
};

#endif

// Rows and panels of sums that fit into the registers; with few rows more panels, so that there are chains enough.
constexpr int kWideRows = kLanes == 16 ? 6 : kLanes == 8 ? 3 : 2;
constexpr int kWidePanels = kLanes == 16 ? 2 : 1;
constexpr int kFewRows = 3;
constexpr int kFewRowsPanels = kLanes == 16 && Wide<true>::kSums == 2 ? 4 : kWidePanels;

template <bool Unsigned, int Rows, int Panels>
struct WideSums {
    typename Wide<Unsigned>::Sum at[Rows][Panels * kParts];
};

// Adds bytes w[p] times the numbers of each row from step `first` on. Rows lie 2 * count bytes apart. Fetch: meanwhile
// prefetch, a step each, `later` and `ahead`, which lie as w does.
template <bool Unsigned, int Rows, int Panels, bool Fetch = false>
inline __attribute__((always_inline)) void multiply_wide(const char* x, int64_t count, int64_t first,
                                                         const char* const* w, ptrdiff_t w_step, int64_t steps,
                                                         WideSums<Unsigned, Rows, Panels>& sums,
                                                         const char* const* later = nullptr,
                                                         const char* const* ahead = nullptr) {
    using W = Wide<Unsigned>;
    for (int64_t step = 0; step < steps; step++) {
        typename W::Bytes bytes[Panels * kParts];
#pragma GCC unroll 8
        for (int p = 0; p < Panels; p++) {
            if (Fetch) {
                __builtin_prefetch(later[p] + step * kStepBytes, 0, 2);
                __builtin_prefetch(ahead[p] + step * w_step, 0, 2);
            }
#pragma GCC unroll 4
            for (int i = 0; i < kParts; i++) bytes[p * kParts + i] = W::bytes(w[p] + step * w_step + i * sizeof(vi));
        }
#pragma GCC unroll 8
        for (int r = 0; r < Rows; r++) W::add(sums.at[r], bytes, Panels * kParts, x + r * 2 * count, first + step, count);
    }
}

}  // namespace faser
