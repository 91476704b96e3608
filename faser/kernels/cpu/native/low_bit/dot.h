// Sums of four products of an unsigned code and a signed byte, added to 32-bit integers: exact on every CPU.
//
// Small: no code exceeds 63, so that two products fit into a signed 16-bit integer, which AVX2's instruction fills.
// kSmallDiffers: whether that makes another instruction. kInPairs: whether small codes are summed in pairs first.
// kLowered: by how much codes are less when they are multiplied; sums have to start with as many times the sum of their
// activations.
#pragma once

#include "../simd.h"

namespace faser {

inline vi splat_int(int32_t x) { return vi{} + x; }

// The low 16 bits of each integer, in both halves of it.
inline vi in_both_halves(vi x) {
#if defined(__AVX2__)
    const __m128i places = _mm_setr_epi8(0, 1, 0, 1, 4, 5, 4, 5, 8, 9, 8, 9, 12, 13, 12, 13);
#if defined(__AVX512BW__)
    return (vi)_mm512_shuffle_epi8((__m512i)x, _mm512_maskz_broadcast_i32x4(0xffff, places));
#else
    return (vi)_mm256_shuffle_epi8((__m256i)x, _mm256_broadcastsi128_si256(places));
#endif
#else
    return (vi)(((vu)x & 0xffffu) | (vu)x << 16);
#endif
}

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)

constexpr bool kSmallDiffers = false, kInPairs = false;

template <bool Small>
struct Dot {
    static constexpr int32_t kLowered = 0;
    typedef vi Codes;
    typedef vi Factor;
    static Codes codes(vi bytes) { return bytes; }
    static Factor factor(int32_t four) { return splat_int(four); }
    static vi add(vi sum, Codes codes, Factor x) {
#if defined(__AVX512VNNI__)
        return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, (__m512i)x);
#else
        return (vi)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)codes, (__m256i)x);
#endif
    }
};

#elif defined(__AVX2__)

constexpr bool kSmallDiffers = true, kInPairs = true;

#if defined(__AVX512BW__)
inline vi pairs(vi a, vi b) { return (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b); }
inline vi bytes_to_pairs(vi a, vi b) { return (vi)_mm512_maddubs_epi16((__m512i)a, (__m512i)b); }
#else
inline vi pairs(vi a, vi b) { return (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b); }
inline vi bytes_to_pairs(vi a, vi b) { return (vi)_mm256_maddubs_epi16((__m256i)a, (__m256i)b); }
#endif

typedef int16_t vs __attribute__((vector_size(kLanes * 4)));
typedef uint16_t vus __attribute__((vector_size(kLanes * 4)));

template <bool Small>
struct Dot;

template <>
struct Dot<true> {
    static constexpr int32_t kLowered = 0;
    typedef vi Codes;
    typedef vi Factor;
    static Codes codes(vi bytes) { return bytes; }
    static Factor factor(int32_t four) { return splat_int(four); }

    // In steps: sums of two products, 16 bits each, several of which are added before they are widened: 8 of them for
    // codes up to 15, 4 for codes up to 31, as 2 n * 127 * code is below 2^15. 4 also for codes up to 63 that have
    // the zero point 32, if they start with -32 times the sum of their activations.
    typedef vs Pairs;
    static Pairs products(Codes codes, Factor x) { return (vs)bytes_to_pairs(codes, x); }
    // factors: the same one in both halves of 32 bits.
    static vi add_pairs(vi sum, Pairs two, vi factors) { return sum + pairs((vi)two, factors); }
};

// Bytes at even and at odd places, widened to 16 bits.
template <>
struct Dot<false> {
    static constexpr int32_t kLowered = 0;
    struct Codes {
        vi even, odd;
    };
    typedef Codes Factor;
    static Codes codes(vi bytes) { return {bytes & 0x00ff00ff, (vi)((vus)bytes >> 8)}; }
    static Factor factor(int32_t four) {
        vi bytes = splat_int(four);
        return {(vi)((vs)((vus)bytes << 8) >> 8), (vi)((vs)bytes >> 8)};
    }
    static vi add(vi sum, Codes codes, Factor x) { return sum + pairs(codes.even, x.even) + pairs(codes.odd, x.odd); }
};

#elif defined(__ARM_FEATURE_DOTPROD)

constexpr bool kSmallDiffers = true, kInPairs = false;

// Signed by signed: codes of eight bits are lowered by 128.
template <bool Small>
struct Dot {
    static constexpr int32_t kLowered = Small ? 0 : 128;
    typedef vi Codes;
    typedef vi Factor;
    static Codes codes(vi bytes) { return Small ? bytes : (vi)((vu)bytes ^ 0x80808080u); }
    static Factor factor(int32_t four) { return splat_int(four); }
    static vi add(vi sum, Codes codes, Factor x) {
        return (vi)vdotq_s32((int32x4_t)sum, (int8x16_t)codes, (int8x16_t)x);
    }
};

#else

#define MANY_INSTRUCTIONS
constexpr bool kSmallDiffers = false, kInPairs = false;

template <bool Small>
struct Dot {
    static constexpr int32_t kLowered = 0;
    typedef vi Codes;
    struct Factor {
        int32_t at[4];
    };
    static Codes codes(vi bytes) { return bytes; }
    static Factor factor(int32_t four) {
        Factor x;
        for (int i = 0; i < 4; i++) x.at[i] = int8_t(uint32_t(four) >> 8 * i);
        return x;
    }
    static vi add(vi sum, Codes codes, const Factor& x) {
        for (int i = 0; i < 4; i++) sum += (vi)((vu)codes >> 8 * i & 0xff) * x.at[i];
        return sum;
    }
};

#endif

// The loops of a tile. Where one sum takes many instructions they stay loops: unrolled, they take ten times as long to
// compile and are slower.
#ifdef MANY_INSTRUCTIONS
#define UNROLLED _Pragma("GCC unroll 2")
#define IN_TILE __attribute__((noinline))
#else
#define UNROLLED _Pragma("GCC unroll 8")
#define IN_TILE inline __attribute__((always_inline))
#endif

}  // namespace faser
