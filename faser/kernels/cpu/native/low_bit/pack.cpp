// Packs rows that are quantised, as files store them or as codes and scales; reads single rows out of panels.

#include "../calls.h"
#include "../product.h"
#include "pack.h"

using namespace faser;

namespace {

float factor_of(const FaserLowBitPart& part, const char* at, const char* super_at, int64_t group, int64_t column) {
    uint16_t bits;
    if (part.factors == kFloats) {
        float value;
        std::memcpy(&value, at + (group * kPanel + column) * 4, 4);
        return value;
    }
    if (part.factors == kHalves) {
        std::memcpy(&bits, at + (group * kPanel + column) * 2, 2);
        return half(bits);
    }
    if (part.factors == kExponents) return power_of_two(uint8_t(at[group * kPanel + column]));
    std::memcpy(&bits, super_at + column * 2, 2);
    return float(int8_t(at[group * kPanel + column])) * half(bits);
}

// The code of value k of a group, of a column of its panel.
int32_t code_of(int32_t form, const uint8_t* group, int64_t k, int64_t column) {
    const auto byte = [&](int64_t vector, int64_t value) { return group[vector * 64 + column * 4 + value % 4]; };
    if (form == kBytes) return byte(k / 4, k);
    if (form == kSixes || form == kSixes16) {
        const int64_t vectors = k / 16 * 3, place = k % 16;
        const int low = byte(vectors + place / 8, k), upper = byte(vectors + 2, k) >> place / 4 * 2 & 3;
        return (place % 8 < 4 ? low & 15 : low >> 4) | upper << 4;
    }
    const int both = byte(k % 16 / 4, k), code = k < 16 ? both & 15 : both >> 4;
    return form == kTable ? kCodesOfNibbles[code] : form == kFloats4 ? kCodesOfFloats4[code] : code;
}

template <class Out>
void read_row(const FaserLowBitPart& part, int64_t depth, int64_t row, Out* out) {
    const char* span = part.panels + row / kPanel * low_bit_panel_bytes(part, depth);
    const int64_t column = row % kPanel, group_values = group_of(part.form);
    for (int64_t first = 0; first < depth; first += kSpan) {
        const int64_t values = std::min(kSpan, depth - first);
        const SpanLayout layout = span_layout(part, values);
        for (int64_t group = 0; group < values / group_values; group++) {
            const int64_t factor = group * group_values / part.factor_values;
            const float scale = factor_of(part, span + layout.scales, span + layout.super_scales, factor, column);
            const float minimum = part.has_minimums ? factor_of(part, span + layout.minimums,
                                                                span + layout.super_minimums, factor, column)
                                                    : 0.0f;
            const uint8_t* codes = (const uint8_t*)span + group * group_values * kPanel * bits_of(part.form) / 8;
            for (int64_t k = 0; k < group_values; k++) {
                float value = scale * float(code_of(part.form, codes, k, column) - part.zero_point);
                if (part.has_minimums) value += minimum;
                narrow(value, out++);
            }
        }
        span += layout.bytes;
    }
}

uint16_t* factors_of(uint16_t* halves, float*, uint16_t) { return halves; }
float* factors_of(uint16_t*, float* floats, float) { return floats; }

// Packs a part. read(row, first, values, span): codes, scales and minimums of a span of one row.
template <class Read>
void pack_rows(Pool& pool, const FaserLowBitPart& part, int64_t depth, const Read& read) {
    pack_part(pool, part, depth, [&](int64_t row, int64_t columns, int64_t first, int64_t values, SpanOfRow* spans) {
        for (int64_t n = 0; n < columns; n++) read(row + n, first, values, spans[n]);
    });
}

// Packs codes that take a byte each. scales, minimums: [columns, per_row], of the type that panels hold.
template <class T>
void pack_codes(Pool& pool, const FaserLowBitPart& part, int64_t depth, const uint8_t* codes, const T* scales,
                const T* minimums) {
    const int64_t per_row = (depth + part.factor_values - 1) / part.factor_values;
    pack_rows(pool, part, depth, [&](int64_t row, int64_t first, int64_t values, SpanOfRow& span) {
        std::memcpy(span.codes, codes + row * depth + first, values);
        const int64_t from = row * per_row + first / part.factor_values;
        const int64_t count = (values + part.factor_values - 1) / part.factor_values;
        std::memcpy(factors_of(span.scales, span.wide_scales, T()), scales + from, count * sizeof(T));
        if (!part.has_minimums) return;
        std::memcpy(factors_of(span.minimums, span.wide_minimums, T()), minimums + from, count * sizeof(T));
    });
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
    pack_rows(*pool, *part, depth, [&](int64_t row, int64_t first, int64_t values, SpanOfRow& span) {
        read_span(stored, blocks + row * row_bytes, first, values, span);
    });
}

// codes: [columns of the part, depth], a byte each. scales, minimums: [columns, depth / factor_values, rounded up], half
// floats or floats as the part holds them.
void faser_low_bit_pack_codes(Pool* pool, const FaserLowBitPart* part, int64_t depth, const uint8_t* codes,
                              const void* scales, const void* minimums) {
    if (part->factors == kHalves) {
        pack_codes(*pool, *part, depth, codes, (const uint16_t*)scales, (const uint16_t*)minimums);
    } else {
        pack_codes(*pool, *part, depth, codes, (const float*)scales, (const float*)minimums);
    }
}

// out: [rows, K] of out_dtype, contiguous. Returns as faser_embed does.
int64_t faser_low_bit_embed(Pool* pool, const FaserLowBit* linear, const int64_t* ids, int64_t rows, void* out,
                            int32_t out_dtype) {
    const FaserLowBitPart& last = linear->parts[linear->num_parts - 1];
    const int64_t outside = first_outside(ids, rows, last.first + last.columns);
    if (outside >= 0) return outside;
    if (out_dtype == kFloat32) {
        embed_rows(*pool, *linear, ids, rows, (float*)out);
    } else {
        embed_rows(*pool, *linear, ids, rows, (bf16*)out);
    }
    return -1;
}
}
