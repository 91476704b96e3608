// Writes spans of 16 rows into a panel.
#pragma once

#include "../pool.h"
#include "stored.h"

namespace faser {

// Writes a value for every column of a group, in the order of the columns.
template <class T, class Value>
void put(char* to, const Value& value) {
    for (int64_t n = 0; n < kPanel; n++) {
        const T each = value(n);
        std::memcpy(to + n * sizeof(T), &each, sizeof(T));
    }
}

// Bits that a byte has of two codes or of four never reach the next byte.
inline void put_codes(const FaserLowBitPart& part, const SpanOfRow* rows, int64_t values, char* to) {
    const auto four = [&](int64_t n, int64_t k) {
        uint32_t codes;
        std::memcpy(&codes, rows[n].codes + k, 4);
        return codes;
    };
    const auto put_vector = [&](const auto& of) {
        put<uint32_t>(to, of);
        to += kStepBytes;
    };
    const int64_t bits = bits_of(part.form);
    for (int64_t k = 0; k < values; k += bits == 4 ? 32 : 16) {
        for (int64_t v = k; v < k + 16; v += bits == 6 ? 8 : 4) {
            put_vector([&](int64_t n) {
                if (bits == 8) return four(n, v);
                if (bits == 4) return four(n, v) | four(n, v + 16) << 4;
                return (four(n, v) & 0x0f0f0f0f) | (four(n, v + 4) & 0x0f0f0f0f) << 4;
            });
        }
        if (bits != 6) continue;
        put_vector([&](int64_t n) {
            uint32_t upper = 0;
            for (int v = 0; v < 4; v++) upper |= (four(n, k + 4 * v) >> 4 & 0x03030303) << 2 * v;
            return upper;
        });
    }
}

inline void put_span(const FaserLowBitPart& part, const SpanOfRow* rows, int64_t values, char* to) {
    const SpanLayout layout = span_layout(part, values);
    const int64_t groups = (values + part.factor_values - 1) / part.factor_values;
    put_codes(part, rows, values, to);
    if (part.factors == kHalves) {
        for (int64_t g = 0; g < groups; g++) {
            put<uint16_t>(to + layout.scales + g * kPanel * 2, [&](int64_t n) { return rows[n].scales[g]; });
            if (!part.has_minimums) continue;
            put<uint16_t>(to + layout.minimums + g * kPanel * 2, [&](int64_t n) { return rows[n].minimums[g]; });
        }
        return;
    }
    if (part.factors == kFloats) {
        for (int64_t g = 0; g < groups; g++) {
            put<float>(to + layout.scales + g * kPanel * 4, [&](int64_t n) { return rows[n].wide_scales[g]; });
            if (!part.has_minimums) continue;
            put<float>(to + layout.minimums + g * kPanel * 4, [&](int64_t n) { return rows[n].wide_minimums[g]; });
        }
        return;
    }
    for (int64_t g = 0; g < groups; g++) {
        put<int8_t>(to + layout.scales + g * kPanel, [&](int64_t n) { return rows[n].small_scales[g]; });
    }
    if (part.factors == kExponents) return;
    put<uint16_t>(to + layout.super_scales, [&](int64_t n) { return rows[n].super_scale; });
    if (!part.has_minimums) return;
    put<uint16_t>(to + layout.super_minimums, [&](int64_t n) { return rows[n].super_minimum; });
    for (int64_t g = 0; g < groups; g++) {
        put<int8_t>(to + layout.minimums + g * kPanel, [&](int64_t n) { return rows[n].small_minimums[g]; });
    }
}

// Packs a part. read(row, columns, first, values, spans): codes, scales and minimums of `columns` rows, values [first,
// first + values) of each.
template <class Read>
void pack_part(Pool& pool, const FaserLowBitPart& part, int64_t depth, const Read& read) {
    pool.run(low_bit_panels(part), [&](int64_t panel) {
        char* to = part.panels + panel * low_bit_panel_bytes(part, depth);
        const int64_t columns = std::max<int64_t>(0, std::min<int64_t>(kPanel, part.columns - panel * kPanel));
        SpanOfRow rows[kPanel];
        std::memset(rows, 0, sizeof(rows));  // columns past the last one
        for (int64_t first = 0; first < depth; first += kSpan) {
            const int64_t values = std::min(kSpan, depth - first);
            read(panel * kPanel, columns, first, values, rows);
            put_span(part, rows, values, to);
            to += span_layout(part, values).bytes;
        }
    });
}

}  // namespace faser
