// How low-bit weights lie in memory: panels of 16 columns, cut into spans of 256 values of depth.
//
// A weight stands for (code - zero point) * scale + minimum. Codes are unsigned; products sum them in groups of 32 (or
// 16) consecutive values. A scale and a minimum are those of a group, or of 2, 4 or 8 of a span, the last ones perhaps
// of fewer. A span, the last of a panel perhaps shorter, holds
//
//     codes | scales | minimums          padded to 64 bytes
//
//     codes       64-byte vectors, each 4 values of 16 columns. Nibbles: 8 values; vector v of a group holds values
//                 4 v ... 4 v + 3 in the low halves of its bytes and values 16 + 4 v ... in the high halves. Six bits: three
//                 vectors for 16 values. Two hold the low halves of codes, of values 8 v ... 8 v + 3 in the low halves of
//                 their bytes and of 8 v + 4 ... in the high ones; the third has the upper two bits of values 4 v ... at
//                 bit 2 v of its bytes
//     scales      16 half floats, 16 floats or 16 exponents; or, of formats with superblocks, 16 small integers, followed
//                 by 16 half floats of the span, which multiply them. Each is exactly a float.
//     minimums    as the scales, if the format has them
#pragma once

#include <algorithm>

#include "../simd.h"

extern "C" {

// Mirrored in library.py, as the next.
struct FaserLowBitPart {
    char* panels;
    int64_t first;    // column of the product that is this part's first
    int64_t columns;
    int32_t form;
    int32_t zero_point;
    int32_t factors;
    int32_t has_minimums;
    int32_t factor_values;  // values of a row with one scale: a group of the form, or 2, 4 or 8 of them
};

struct FaserLowBit {
    const FaserLowBitPart* parts;
    int64_t num_parts;
    const float* bias;  // [N rounded up to 16], or null
    int64_t depth;      // K, a multiple of 32; of 256 with superblocks
};
}

namespace faser {

enum Form : int32_t {
    kNibbles = 0,  // groups of 32; codes 0 ... 15
    kTable = 1,    // nibbles that name one of 16 codes (IQ4)
    kBytes = 2,    // groups of 32; codes 0 ... 255
    kSixes = 3,    // groups of 32; codes 0 ... 31, of which six bits could hold more
    kSixes16 = 4,  // groups of 16; codes 0 ... 63. Only with superblocks
    kFloats4 = 5,  // nibbles that are floats of four bits (E2M1)
};

// How scales and minimums are stored.
enum Factors : int32_t {
    kHalves = 0,
    kIntegers = 1,  // multiplied by half floats of the span
    kFloats = 2,
    kExponents = 3,  // a byte e that stands for 2^(e - 128): half of what it is in E8M0
};

constexpr int64_t kSpan = 256;

// Codes of the nibbles of IQ4_NL and IQ4_XS: its table of signed values, 128 added.
constexpr uint8_t kCodesOfNibbles[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
// Codes of floats of four bits: twice their values 0, 0.5, 1, 1.5, 2, 3, 4, 6 and the negative ones, 12 added.
constexpr uint8_t kCodesOfFloats4[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

// Where the pieces of a span lie, in bytes from its start.
struct SpanLayout {
    int64_t scales, super_scales, minimums, super_minimums, bytes;
};

inline int64_t group_of(int32_t form) { return form == kSixes16 ? 16 : 32; }

inline int64_t bits_of(int32_t form) { return form == kBytes ? 8 : form == kSixes || form == kSixes16 ? 6 : 4; }

inline int64_t factor_bytes(const FaserLowBitPart& part) {
    return part.factors == kHalves ? 2 : part.factors == kFloats ? 4 : 1;
}

inline SpanLayout span_layout(const FaserLowBitPart& part, int64_t values) {
    const int64_t count = (values + part.factor_values - 1) / part.factor_values, size = factor_bytes(part);
    const bool has_superblocks = part.factors == kIntegers;
    SpanLayout layout;
    layout.scales = values * kPanel * bits_of(part.form) / 8;
    layout.super_scales = layout.scales + count * kPanel * size;
    layout.minimums = layout.super_scales + (has_superblocks ? kPanel * 2 : 0);
    layout.super_minimums = layout.minimums + (part.has_minimums ? count * kPanel * size : 0);
    const int64_t end = layout.super_minimums + (part.has_minimums && has_superblocks ? kPanel * 2 : 0);
    layout.bytes = (end + 63) / 64 * 64;
    return layout;
}

inline int64_t low_bit_panel_bytes(const FaserLowBitPart& part, int64_t depth) {
    const int64_t rest = depth % kSpan;
    return depth / kSpan * span_layout(part, kSpan).bytes + (rest ? span_layout(part, rest).bytes : 0);
}

// Panels of a part: as many as tiles of any width can share, the last ones perhaps empty.
constexpr int64_t kPanelsTogether = 4;

inline int64_t low_bit_panels(const FaserLowBitPart& part) {
    constexpr int64_t columns = kPanel * kPanelsTogether;
    return (part.columns + columns - 1) / columns * kPanelsTogether;
}

// Half floats to floats, exactly.
inline float half(uint16_t bits) {
    const uint32_t sign = uint32_t(bits & 0x8000) << 16, exponent = bits >> 10 & 31, mantissa = bits & 0x3ff;
    uint32_t wide;
    if (exponent == 0) {
        float value = float(mantissa) * 0x1p-24f;
        return sign ? -value : value;
    }
    wide = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | mantissa << 13;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
}

// Exponents of kExponents to floats, exactly; the byte 255, which is no number in E8M0, to infinity.
inline float power_of_two(uint8_t exponent) {
    const uint32_t bits = exponent ? uint32_t(exponent) << 23 : 0x00400000u;
    float twice;
    std::memcpy(&twice, &bits, 4);
    return 0.5f * twice;
}

inline vf load_exponents(const char* from) {
#if defined(__AVX512F__)
    const vu exponents = (vu)_mm512_maskz_cvtepu8_epi32(0xffff, _mm_loadu_si128((const __m128i*)from));
#elif defined(__AVX2__)
    const vu exponents = (vu)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
    vu exponents;
    for (int i = 0; i < kLanes; i++) exponents[i] = uint8_t(from[i]);
#endif
    return 0.5f * (vf)(exponents << 23 | ((vu)(exponents == 0) & 0x00400000u));
}

inline vf load_halves(const char* from) {
#if defined(__AVX512F__)
    return _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256((const __m256i*)from));
#elif defined(__F16C__)
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#else
    vf wide;
    for (int i = 0; i < kLanes; i++) {
        uint16_t bits;
        std::memcpy(&bits, from + 2 * i, 2);
        wide[i] = half(bits);
    }
    return wide;
#endif
}

// Signed bytes.
inline vi load_integers(const char* from) {
#if defined(__AVX512F__)
    return (vi)_mm512_maskz_cvtepi8_epi32(0xffff, _mm_loadu_si128((const __m128i*)from));
#elif defined(__AVX2__)
    return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
    return __builtin_convertvector(*(const vc_any*)from, vi);
#endif
}

}  // namespace faser
