// Rows as GGUF files store them, in blocks: reads a span of a row into codes, scales and minimums.
//
// The formats are ggml's; kernels/interface/low_bit/formats.py defines what each stands for.
#pragma once

#include "layout.h"

namespace faser {

// ggml's numbers of its types.
enum Stored : int32_t {
    kQ4_0 = 2,
    kQ4_1 = 3,
    kQ5_0 = 6,
    kQ5_1 = 7,
    kQ8_0 = 8,
    kQ4_K = 12,
    kQ5_K = 13,
    kQ6_K = 14,
    kIQ4_NL = 20,
    kIQ4_XS = 23,
    kMXFP4 = 39,
};

// A span of one row. Scales and minimums are half floats or floats; or small integers, which super_scale and
// super_minimum multiply, or which are exponents.
struct SpanOfRow {
    uint8_t codes[kSpan];
    uint16_t scales[kSpan / 16], minimums[kSpan / 16];
    float wide_scales[kSpan / 16], wide_minimums[kSpan / 16];
    int8_t small_scales[kSpan / 16], small_minimums[kSpan / 16];
    uint16_t super_scale, super_minimum;
};

inline int64_t stored_block_values(int32_t stored) {
    return stored == kQ4_K || stored == kQ5_K || stored == kQ6_K || stored == kIQ4_XS ? 256 : 32;
}

inline int64_t stored_block_bytes(int32_t stored) {
    switch (stored) {
        case kMXFP4:
            return 17;
        case kQ4_0:
        case kIQ4_NL:
            return 18;
        case kQ4_1:
            return 20;
        case kQ5_0:
            return 22;
        case kQ5_1:
            return 24;
        case kQ8_0:
            return 34;
        case kQ4_K:
            return 144;
        case kQ5_K:
            return 176;
        case kQ6_K:
            return 210;
        default:
            return 136;  // IQ4_XS
    }
}

inline uint16_t two_bytes(const uint8_t* from) { return uint16_t(from[0] | from[1] << 8); }

inline void read_nibbles(const uint8_t* from, int count, uint8_t* low, uint8_t* high) {
    for (int i = 0; i < count; i++) {
        low[i] = from[i] & 15;
        high[i] = from[i] >> 4;
    }
}

// A block of 32 values; group: its number in the span.
inline void read_block(int32_t stored, const uint8_t* block, int64_t group, SpanOfRow& span) {
    uint8_t* codes = span.codes + group * 32;
    if (stored == kMXFP4) {
        span.small_scales[group] = int8_t(block[0]);
        return read_nibbles(block + 1, 16, codes, codes + 16);
    }
    span.scales[group] = two_bytes(block);
    block += 2;
    if (stored == kQ4_1 || stored == kQ5_1) {
        span.minimums[group] = two_bytes(block);
        block += 2;
    }
    if (stored == kQ8_0) {
        for (int i = 0; i < 32; i++) codes[i] = block[i] ^ 0x80;
        return;
    }
    const bool has_fifth_bits = stored == kQ5_0 || stored == kQ5_1;
    read_nibbles(block + (has_fifth_bits ? 4 : 0), 16, codes, codes + 16);
    if (!has_fifth_bits) return;
    for (int i = 0; i < 32; i++) codes[i] |= (block[i / 8] >> i % 8 & 1) << 4;
}

// Eight scales and eight minimums of six bits each, as Q4_K and Q5_K store them in twelve bytes.
inline void read_six_bits(const uint8_t* from, SpanOfRow& span) {
    for (int i = 0; i < 4; i++) {
        span.small_scales[i] = from[i] & 63;
        span.small_minimums[i] = from[4 + i] & 63;
        span.small_scales[4 + i] = (from[8 + i] & 15) | (from[i] >> 6) << 4;
        span.small_minimums[4 + i] = (from[8 + i] >> 4) | (from[4 + i] >> 6) << 4;
    }
}

inline void read_q4_k(const uint8_t* block, SpanOfRow& span) {
    span.super_scale = two_bytes(block);
    span.super_minimum = two_bytes(block + 2) ^ 0x8000;  // the format subtracts its minimums
    read_six_bits(block + 4, span);
    for (int i = 0; i < 4; i++) read_nibbles(block + 16 + 32 * i, 32, span.codes + 64 * i, span.codes + 64 * i + 32);
}

inline void read_q5_k(const uint8_t* block, SpanOfRow& span) {
    span.super_scale = two_bytes(block);
    span.super_minimum = two_bytes(block + 2) ^ 0x8000;
    read_six_bits(block + 4, span);
    for (int i = 0; i < 4; i++) read_nibbles(block + 48 + 32 * i, 32, span.codes + 64 * i, span.codes + 64 * i + 32);
    for (int i = 0; i < 256; i++) span.codes[i] |= (block[16 + i % 32] >> i / 32 & 1) << 4;
}

inline void read_q6_k(const uint8_t* block, SpanOfRow& span) {
    for (int i = 0; i < 2; i++) read_nibbles(block + 64 * i, 64, span.codes + 128 * i, span.codes + 128 * i + 64);
    for (int i = 0; i < 256; i++) {
        span.codes[i] |= (block[128 + i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3) << 4;
    }
    std::memcpy(span.small_scales, block + 192, 16);
    span.super_scale = two_bytes(block + 208);
}

inline void read_iq4_xs(const uint8_t* block, SpanOfRow& span) {
    span.super_scale = two_bytes(block);
    const uint16_t high = two_bytes(block + 2);
    for (int i = 0; i < 8; i++) {
        const int low = block[4 + i / 2] >> i % 2 * 4 & 15;
        span.small_scales[i] = int8_t((low | (high >> 2 * i & 3) << 4) - 32);
        read_nibbles(block + 8 + 16 * i, 16, span.codes + 32 * i, span.codes + 32 * i + 16);
    }
}

// Values [first, first + values) of a row; first: a multiple of kSpan.
inline void read_span(int32_t stored, const uint8_t* row, int64_t first, int64_t values, SpanOfRow& span) {
    const int64_t block_bytes = stored_block_bytes(stored);
    const uint8_t* block = row + first / stored_block_values(stored) * block_bytes;
    switch (stored) {
        case kQ4_K:
            return read_q4_k(block, span);
        case kQ5_K:
            return read_q5_k(block, span);
        case kQ6_K:
            return read_q6_k(block, span);
        case kIQ4_XS:
            return read_iq4_xs(block, span);
    }
    for (int64_t group = 0; group < values / 32; group++) read_block(stored, block + group * block_bytes, group, span);
}

}  // namespace faser
