// Codes, scales and minimums of a panel as vectors.
#pragma once

#include <type_traits>

#include "activations.h"
#include "dot.h"
#include "../tiles.h"

namespace faser {

inline vf floats_of(vi x) { return __builtin_convertvector(x, vf); }

// A float in every lane. (Adding it to zeros, as splat does, takes time here.)
inline vf everywhere(const float* x) {
    int32_t bits;
    std::memcpy(&bits, x, 4);
    return (vf)splat_int(bits);
}

// Of a form's groups.
template <int Form>
struct CodesOf {
    static constexpr bool kNamed = Form == kTable || Form == kFloats4, kHalves = Form == kNibbles || kNamed;
    static constexpr bool kSixBits = Form == kSixes || Form == kSixes16;
    static constexpr bool kSmall = kSmallDiffers && (Form == kNibbles || Form == kFloats4 || kSixBits);
    static constexpr bool kInPairs = kSmall && faser::kInPairs;
    static constexpr int kGroup = Form == kSixes16 ? 16 : 32;
    static constexpr int kPairs = kGroup / 8;  // of vectors with a code a byte
    static constexpr int kTogether = Form == kNibbles ? 4 : 2;  // of them, whose sums fit into 16 bits
    static constexpr bool kStartsInPairs = kInPairs && Form == kSixes16;
    static constexpr int kBytes = kPairs * kStepBytes * (kHalves ? 4 : kSixBits ? 6 : 8) / 4;
    // Where the values of a pair's vectors begin in a group.
    static constexpr int first(int pair) { return kHalves ? 4 * pair : 8 * pair; }
    static constexpr int second(int pair) { return kHalves ? 16 + 4 * pair : 8 * pair + 4; }
    using D = Dot<kSmall>;
};

#if defined(__AVX2__)
inline vi named_codes(vi nibbles, const uint8_t (&codes)[16]) {
    const __m128i table = _mm_loadu_si128((const __m128i*)codes);
#if defined(__AVX512BW__)
    return (vi)_mm512_shuffle_epi8(_mm512_maskz_broadcast_i32x4(0xffff, table), (__m512i)nibbles);
#else
    return (vi)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), (__m256i)nibbles);
#endif
}
#else
inline vi named_codes(vi nibbles, const uint8_t (&codes)[16]) {
    uint8_t bytes[sizeof(vi)];
    std::memcpy(bytes, &nibbles, sizeof(vi));
    for (auto& byte : bytes) byte = codes[byte];
    std::memcpy(&nibbles, bytes, sizeof(vi));
    return nibbles;
}
#endif

// Part i of a pair of a group's vectors, a code a byte.
template <int C>
inline __attribute__((always_inline)) void read_pair(const char* group, int pair, int i, vi& first, vi& second) {
    const auto vector = [&](int at) { return (vi) * (const vu_any*)(group + at * kStepBytes + i * sizeof(vf)); };
    if constexpr (C == kBytes) {
        first = vector(2 * pair);
        second = vector(2 * pair + 1);
        return;
    }
    const vi halves = vector(CodesOf<C>::kHalves ? pair : pair / 2 * 3 + pair % 2);
    first = halves & 0x0f0f0f0f;
    second = (vi)((vu)halves >> 4) & 0x0f0f0f0f;
    if constexpr (CodesOf<C>::kNamed) {
        constexpr auto& codes = C == kTable ? kCodesOfNibbles : kCodesOfFloats4;
        first = named_codes(first, codes);
        second = named_codes(second, codes);
    }
    if constexpr (CodesOf<C>::kSixBits) {
        const vu upper = (vu)vector(pair / 2 * 3 + 2);
        first |= (vi)(pair % 2 == 0 ? upper << 4 : upper) & 0x30303030;
        second |= (vi)(pair % 2 == 0 ? upper << 2 : upper >> 2) & 0x30303030;
    }
}

// Scales and minimums of the groups of one span as floats, [group][panel][16]. Integers: only those of tiles.
template <int Panels, int64_t Groups>
struct FactorTable {
    static constexpr int kWide = Panels * kPanel;
    alignas(64) float scales[Groups * kWide];
    alignas(64) float minimums[Groups * kWide];

    // span: that of the first panel; the others follow at panel_bytes.
    template <int Group>
    void read(const FaserLowBitPart& part, const SpanLayout& layout, const char* span, int64_t panel_bytes,
              int64_t groups) {
        for (int p = 0; p < Panels; p++) {
            read_panel<Group>(part, span + p * panel_bytes + layout.scales, groups, scales + p * kPanel);
            if (part.has_minimums) {
                read_panel<Group>(part, span + p * panel_bytes + layout.minimums, groups, minimums + p * kPanel);
            }
        }
    }

  private:
    template <int Group>
    static void read_panel(const FaserLowBitPart& part, const char* at, int64_t groups, float* to) {
        const int64_t repeats = part.factor_values / Group;
        if (kHasTiles && part.factors == kIntegers) {
            spread(groups, repeats, to, [&](int64_t place) { return floats_of(load_integers(at + place)); });
        } else if (part.factors == kExponents) {
            spread(groups, repeats, to, [&](int64_t place) { return load_exponents(at + place); });
        } else if (part.factors == kHalves) {
            spread(groups, repeats, to, [&](int64_t place) { return load_halves(at + place * 2); });
        } else {
            spread(groups, repeats, to, [&](int64_t place) { return load((const float*)at + place); });
        }
    }

    // value(place): a factor of kLanes columns, `place` numbers into the span's factors.
    template <class Value>
    static inline __attribute__((always_inline)) void spread(int64_t groups, int64_t repeats, float* to,
                                                             const Value& value) {
        for (int64_t factor = 0, group = 0; group < groups; factor++) {
            const int64_t end = std::min(group + repeats, groups);
            for (int i = 0; i < kParts; i++) {
                const vf each = value(factor * kPanel + i * kLanes);
                for (int64_t g = group; g < end; g++) store(to + g * kWide + i * kLanes, each);
            }
            group = end;
        }
    }
};

}  // namespace faser
