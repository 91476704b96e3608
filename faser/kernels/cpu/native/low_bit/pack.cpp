// Packs rows as files store them into panels, and reads single rows out of panels.

#include "../pool.h"
#include "stored.h"

using namespace faser;

namespace {

// Writes a value for every column of a group, in the order of the columns.
template <class T, class Value>
void put(char* to, const Value& value) {
    for (int64_t n = 0; n < kPanel; n++) {
        const T each = value(n);
        std::memcpy(to + n * sizeof(T), &each, sizeof(T));
    }
}

void put_codes(const FaserLowBitPart& part, const SpanOfRow* rows, int64_t values, char* to) {
    const bool halves = part.form == kNibbles || part.form == kTable;
    for (int64_t k = 0; k < values; k += halves ? 32 : 4) {
        for (int64_t at = k; at < k + (halves ? 16 : 4); at += 4) {
            for (int64_t n = 0; n < kPanel; n++, to += 4) {
                uint32_t codes, upper = 0;
                std::memcpy(&codes, rows[n].codes + at, 4);
                if (halves) std::memcpy(&upper, rows[n].codes + at + 16, 4);
                codes |= upper << 4;  // bytes of four bits: none reaches the next
                std::memcpy(to, &codes, 4);
            }
        }
    }
}

void put_span(const FaserLowBitPart& part, const SpanOfRow* rows, int64_t values, char* to) {
    const SpanLayout layout = span_layout(part, values);
    const int64_t groups = values / group_of(part.form);
    put_codes(part, rows, values, to);
    if (!part.has_superblocks) {
        for (int64_t g = 0; g < groups; g++) {
            put<uint16_t>(to + layout.scales + g * kPanel * 2, [&](int64_t n) { return rows[n].scales[g]; });
            if (!part.has_minimums) continue;
            put<uint16_t>(to + layout.minimums + g * kPanel * 2, [&](int64_t n) { return rows[n].minimums[g]; });
        }
        return;
    }
    put<uint16_t>(to + layout.super_scales, [&](int64_t n) { return rows[n].super_scale; });
    for (int64_t g = 0; g < groups; g++) {
        put<int8_t>(to + layout.scales + g * kPanel, [&](int64_t n) { return rows[n].small_scales[g]; });
    }
    if (!part.has_minimums) return;
    put<uint16_t>(to + layout.super_minimums, [&](int64_t n) { return rows[n].super_minimum; });
    for (int64_t g = 0; g < groups; g++) {
        put<int8_t>(to + layout.minimums + g * kPanel, [&](int64_t n) { return rows[n].small_minimums[g]; });
    }
}

float factor_of(const FaserLowBitPart& part, const char* at, const char* super_at, int64_t group, int64_t column) {
    uint16_t bits;
    if (!part.has_superblocks) {
        std::memcpy(&bits, at + (group * kPanel + column) * 2, 2);
        return half(bits);
    }
    std::memcpy(&bits, super_at + column * 2, 2);
    return float(int8_t(at[group * kPanel + column])) * half(bits);
}

template <class Out>
void read_row(const FaserLowBitPart& part, int64_t depth, int64_t row, Out* out) {
    const char* span = part.panels + row / kPanel * low_bit_panel_bytes(part, depth);
    const bool halves = part.form == kNibbles || part.form == kTable;
    const int64_t column = row % kPanel, group_values = group_of(part.form);
    for (int64_t first = 0; first < depth; first += kSpan) {
        const int64_t values = std::min(kSpan, depth - first);
        const SpanLayout layout = span_layout(part, values);
        for (int64_t group = 0; group < values / group_values; group++) {
            const float scale = factor_of(part, span + layout.scales, span + layout.super_scales, group, column);
            const float minimum = part.has_minimums ? factor_of(part, span + layout.minimums,
                                                                span + layout.super_minimums, group, column)
                                                    : 0.0f;
            const uint8_t* codes = (const uint8_t*)span + group * group_values * kPanel / (halves ? 2 : 1);
            for (int64_t k = 0; k < group_values; k++) {
                const int64_t place = halves ? k % 16 : k;
                int32_t code = codes[place / 4 * 64 + column * 4 + place % 4];
                if (halves) code = k < 16 ? code & 15 : code >> 4;
                if (part.form == kTable) code = kCodesOfNibbles[code];
                float value = scale * float(code - part.zero_point);
                if (part.has_minimums) value += minimum;
                narrow(value, out++);
            }
        }
        span += layout.bytes;
    }
}

template <class Out>
void embed_rows(Pool& pool, const FaserLowBit& linear, const int64_t* ids, int64_t rows, Out* out) {
    const int64_t block = 4;
    pool.run((rows + block - 1) / block, [&](int64_t piece) {
        for (int64_t r = piece * block; r < std::min(rows, (piece + 1) * block); r++) {
            const FaserLowBitPart* part = linear.parts;
            while (ids[r] >= part->first + part->columns) part++;
            read_row(*part, linear.depth, ids[r] - part->first, out + r * linear.depth);
        }
    });
}

}  // namespace

extern "C" {

int64_t faser_low_bit_bytes(const FaserLowBitPart* part, int64_t depth) {
    return low_bit_panels(*part) * low_bit_panel_bytes(*part, depth);
}

// blocks: [columns of the part, row_bytes], as a file stores them; stored: ggml's number of their type.
void faser_low_bit_pack(Pool* pool, const FaserLowBitPart* part, int64_t depth, int32_t stored,
                        const uint8_t* blocks) {
    const int64_t row_bytes = depth / stored_block_values(stored) * stored_block_bytes(stored);
    pool->run(low_bit_panels(*part), [&](int64_t panel) {
        char* to = part->panels + panel * low_bit_panel_bytes(*part, depth);
        SpanOfRow rows[kPanel];
        std::memset(rows, 0, sizeof(rows));  // columns past the last one
        for (int64_t first = 0; first < depth; first += kSpan) {
            const int64_t values = std::min(kSpan, depth - first);
            const int64_t columns = std::min<int64_t>(kPanel, part->columns - panel * kPanel);
            for (int64_t n = 0; n < columns; n++) {
                read_span(stored, blocks + (panel * kPanel + n) * row_bytes, first, values, rows[n]);
            }
            put_span(*part, rows, values, to);
            to += span_layout(*part, values).bytes;
        }
    });
}

// out: [rows, K] of out_dtype, contiguous.
void faser_low_bit_embed(Pool* pool, const FaserLowBit* linear, const int64_t* ids, int64_t rows, void* out,
                         int32_t out_dtype) {
    if (out_dtype == kFloat32) return embed_rows(*pool, *linear, ids, rows, (float*)out);
    embed_rows(*pool, *linear, ids, rows, (bf16*)out);
}
}
