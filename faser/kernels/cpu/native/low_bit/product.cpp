// Products with low-bit weights: integer sums in every group, then floats in the order of their groups.
//
// No operation is fused and no sum is split, so a row gets the same bits in every batch, on any number of threads and
// on every CPU: those of kernels/interface/low_bit/product.py.

#include "activations.h"
#include "dot.h"
#include "layout.h"
#include "../tile.h"

using namespace faser;

namespace {

// Integer and float sums of a tile share the registers. A single row waits for memory, from more panels at a time.
constexpr int kMostRows = kLanes == 16 ? 6 : kLanes == 8 ? 3 : 2;
constexpr int kFewPanels = kLanes == 16 ? 2 : 1;
constexpr int kSinglePanels = kLanes == 16 ? 4 : kLanes == 8 ? 2 : 1;
static_assert(kPanelsTogether % kFewPanels == 0 && kPanelsTogether % kSinglePanels == 0, "no panel is left over");
constexpr int64_t kBlockRows = 96;
constexpr int64_t kPieceBytes = 64 * 1024;
constexpr int64_t kFetchBytes = 2048;

template <int F>
struct FormOf {
    static constexpr bool kHalves = F == kNibbles || F == kTable;
    static constexpr bool kSmall = F == kNibbles;
    static constexpr int kGroup = F == kBytes16 ? 16 : 32;
    static constexpr int kVectors = F == kBytes ? 8 : 4;  // 64-byte vectors of a group
};

#if defined(__AVX2__)
inline vi table_codes(vi nibbles) {
    const __m128i table = _mm_loadu_si128((const __m128i*)kCodesOfNibbles);
#if defined(__AVX512BW__)
    return (vi)_mm512_shuffle_epi8(_mm512_maskz_broadcast_i32x4(0xffff, table), (__m512i)nibbles);
#else
    return (vi)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), (__m256i)nibbles);
#endif
}
#else
inline vi table_codes(vi nibbles) {
    uint8_t bytes[sizeof(vi)];
    std::memcpy(bytes, &nibbles, sizeof(vi));
    for (auto& byte : bytes) byte = kCodesOfNibbles[byte];
    std::memcpy(&nibbles, bytes, sizeof(vi));
    return nibbles;
}
#endif

// One group of a tile: sums[r][q] += codes * x[r]. codes: of each panel's group; x: the group's values of row 0.
template <int F, int Rows, int Panels>
inline __attribute__((always_inline)) void add_group(const char* const* codes, const int8_t* x, int64_t x_stride,
                                                     vi (&sums)[Rows][Panels * kParts]) {
    using D = Dot<FormOf<F>::kSmall>;
    auto four = [&](int row, int k) {
        int32_t bytes;
        std::memcpy(&bytes, x + row * x_stride + k, 4);
        return D::factor(bytes);
    };
#pragma GCC unroll 8
    for (int v = 0; v < FormOf<F>::kVectors; v++) {
        typename D::Codes low[Panels * kParts], high[Panels * kParts];
#pragma GCC unroll 4
        for (int p = 0; p < Panels; p++) {
#pragma GCC unroll 4
            for (int i = 0; i < kParts; i++) {
                vi bytes = (vi) * (const vu_any*)(codes[p] + v * kStepBytes + i * sizeof(vf));
                if constexpr (FormOf<F>::kHalves) {
                    vi first = bytes & 0x0f0f0f0f, second = (vi)((vu)bytes >> 4) & 0x0f0f0f0f;
                    low[p * kParts + i] = D::codes(F == kTable ? table_codes(first) : first);
                    high[p * kParts + i] = D::codes(F == kTable ? table_codes(second) : second);
                } else {
                    low[p * kParts + i] = D::codes(bytes);
                }
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < Rows; r++) {
            auto x_low = four(r, 4 * v);
#pragma GCC unroll 8
            for (int q = 0; q < Panels * kParts; q++) sums[r][q] = D::add(sums[r][q], low[q], x_low);
            if constexpr (FormOf<F>::kHalves) {
                auto x_high = four(r, 16 + 4 * v);
#pragma GCC unroll 8
                for (int q = 0; q < Panels * kParts; q++) sums[r][q] = D::add(sums[r][q], high[q], x_high);
            }
        }
    }
}

// Scales and minimums of one span as floats: [group][panel][16], scales before minimums.
template <int F, int Panels>
struct Factors {
    static constexpr int64_t kGroups = kSpan / FormOf<F>::kGroup, kFloats = Panels * kPanel;
    alignas(64) float scales[kGroups * kFloats];
    alignas(64) float minimums[kGroups * kFloats];

    // span: that of the first panel; the others follow at panel_bytes.
    void read(const FaserLowBitPart& part, const SpanLayout& layout, const char* span, int64_t panel_bytes,
              int64_t groups) {
        for (int p = 0; p < Panels; p++) {
            read_panel(part, span + p * panel_bytes, layout.scales, layout.super_scales, groups, scales + p * kPanel);
            if (part.has_minimums) {
                read_panel(part, span + p * panel_bytes, layout.minimums, layout.super_minimums, groups,
                           minimums + p * kPanel);
            }
        }
    }

  private:
    static void read_panel(const FaserLowBitPart& part, const char* span, int64_t at, int64_t super_at, int64_t groups,
                           float* to) {
        const int64_t repeats = part.factor_values / FormOf<F>::kGroup;
        if (part.factors == kIntegers) {
            vf super[kParts];
            for (int i = 0; i < kParts; i++) super[i] = load_halves(span + super_at + i * kLanes * 2);
            spread(groups, repeats, to, [&](int64_t place, int i) { return load_bytes(span + at + place) * super[i]; });
        } else if (part.factors == kHalves) {
            spread(groups, repeats, to, [&](int64_t place, int) { return load_halves(span + at + place * 2); });
        } else {
            spread(groups, repeats, to, [&](int64_t place, int) { return load((const float*)(span + at) + place); });
        }
    }

    // value(place, i): part i of a factor of the columns, `place` numbers into the span's factors.
    template <class Value>
    static inline __attribute__((always_inline)) void spread(int64_t groups, int64_t repeats, float* to,
                                                             const Value& value) {
        for (int64_t factor = 0, group = 0; group < groups; factor++) {
            const int64_t end = std::min(group + repeats, groups);
            for (int i = 0; i < kParts; i++) {
                const vf each = value(factor * kPanel + i * kLanes, i);
                for (int64_t g = group; g < end; g++) store(to + g * kFloats + i * kLanes, each);
            }
            group = end;
        }
    }
};

// One stretch of a tile, values with one scale a row: totals += x's scales * (its groups, summed in order).
// span: codes of the first panel, its groups first_group ... last_group - 1; sums_of_x: of the groups of row 0.
template <int F, bool Minimums, int Rows, int Panels>
inline __attribute__((always_inline)) void add_stretch(const char* span, int64_t panel_bytes,
                                                       const Factors<F, Panels>& factors, int64_t first_group,
                                                       int64_t last_group, const int8_t* x, int64_t depth,
                                                       const int32_t* sums_of_x, int64_t sums_stride,
                                                       int32_t minus_zero_point, const float* x_scales,
                                                       int64_t scales_stride, bool fetch, float* totals) {
    constexpr int kAll = Panels * kParts, kGroup = FormOf<F>::kGroup;
    constexpr int kGroupBytes = FormOf<F>::kVectors * kStepBytes;
    vf partial[Rows][kAll];
#pragma GCC unroll 8
    for (int r = 0; r < Rows; r++) {
#pragma GCC unroll 8
        for (int q = 0; q < kAll; q++) partial[r][q] = vf{};
    }
    for (int64_t group = first_group; group < last_group; group++) {
        const char* codes[Panels];
        for (int p = 0; p < Panels; p++) {
            codes[p] = span + p * panel_bytes + group * kGroupBytes;
            if (fetch) {
#pragma GCC unroll 8
                for (int line = 0; line < kGroupBytes; line += 64) {
                    __builtin_prefetch(codes[p] + line + kFetchBytes, 0, 2);
                }
            }
        }
        vi sums[Rows][kAll];
#pragma GCC unroll 8
        for (int r = 0; r < Rows; r++) {
            const vi start = splat_int(minus_zero_point * sums_of_x[r * sums_stride + group]);
#pragma GCC unroll 8
            for (int q = 0; q < kAll; q++) sums[r][q] = start;
        }
        add_group<F, Rows, Panels>(codes, x + group * kGroup, depth, sums);
#pragma GCC unroll 8
        for (int q = 0; q < kAll; q++) {
            const vf scale = load(factors.scales + group * Panels * kPanel + q * kLanes);
#pragma GCC unroll 8
            for (int r = 0; r < Rows; r++) partial[r][q] += scale * __builtin_convertvector(sums[r][q], vf);
        }
        if constexpr (Minimums) {
#pragma GCC unroll 8
            for (int q = 0; q < kAll; q++) {
                const vf minimum = load(factors.minimums + group * Panels * kPanel + q * kLanes);
#pragma GCC unroll 8
                for (int r = 0; r < Rows; r++) {
                    partial[r][q] += minimum * splat(float(sums_of_x[r * sums_stride + group]));
                }
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; r++) {
        const vf scale = splat(x_scales[r * scales_stride]);
#pragma GCC unroll 8
        for (int q = 0; q < kAll; q++) {
            float* at = totals + r * Panels * kPanel + q * kLanes;
            store(at, load(at) + scale * partial[r][q]);
        }
    }
}

// One tile over one span: `Rows` rows from `row` on, Panels panels whose span starts at `span`.
template <int F, int Rows, int Panels>
void add_span(const FaserLowBit& linear, const FaserLowBitPart& part, const Activations& x, const char* span,
              int64_t panel_bytes, const Factors<F, Panels>& factors, int64_t first, int64_t values, int64_t row,
              bool fetch, float* totals) {
    constexpr int kGroup = FormOf<F>::kGroup;
    const int64_t sums_stride = linear.depth / kGroup, scales_stride = x.scales_stride();
    const int32_t* sums = (kGroup == 16 ? x.sums_of_16 : x.sums) + row * sums_stride + first / kGroup;
    const int8_t* codes = x.codes + row * linear.depth + first;
    for (int64_t at = 0; at < values; at += kScaled) {
        const int64_t end = std::min(at + kScaled, values) / kGroup;
        const float* scales = x.scales + row * scales_stride + (first + at) / kScaled;
        if (kGroup == 32 && part.has_minimums) {
            add_stretch<F, true, Rows, Panels>(span, panel_bytes, factors, at / kGroup, end, codes, linear.depth, sums,
                                               sums_stride, -part.zero_point, scales, scales_stride, fetch, totals);
        } else {
            add_stretch<F, false, Rows, Panels>(span, panel_bytes, factors, at / kGroup, end, codes, linear.depth,
                                                sums, sums_stride, -part.zero_point, scales, scales_stride, fetch,
                                                totals);
        }
    }
}

// Rows [row, end), at most kBlockRows, with Panels panels from `panel` on. A span of weights is read from memory by the
// first tile of rows; the others find it in the cache.
template <int F, int Panels>
void multiply_rows(const FaserLowBit& linear, const FaserLowBitPart& part, const FaserProduct& call,
                   const Activations& x, int64_t panel, int64_t row, int64_t end) {
    constexpr int64_t kWidth = Panels * kPanel;
    const int64_t panel_bytes = low_bit_panel_bytes(part, linear.depth);
    const char* span = part.panels + panel * panel_bytes;
    alignas(64) float totals[kBlockRows * kWidth];
    std::memset(totals, 0, (end - row) * kWidth * sizeof(float));
    Factors<F, Panels> factors;
    for (int64_t first = 0; first < linear.depth; first += kSpan) {
        const int64_t values = std::min(kSpan, linear.depth - first);
        const SpanLayout layout = span_layout(part, values);
        factors.read(part, layout, span, panel_bytes, values / FormOf<F>::kGroup);
        for (int64_t at = row; at < end;) {
            const int64_t tiles = (end - at + kMostRows - 1) / kMostRows;
            const int rows = int((end - at + tiles - 1) / tiles);
            with_count<Panels == kFewPanels ? kMostRows : 1>(rows, [&](auto count) {
                add_span<F, count.value, Panels>(linear, part, x, span, panel_bytes, factors, first, values, at,
                                                 at == row, totals + (at - row) * kWidth);
            });
            at += rows;
        }
        span += layout.bytes;
    }
    finish(call, linear.bias, part.first + part.columns, row, int(end - row), part.first + panel * kPanel, totals,
           int(kWidth));
}

template <int F>
void multiply_panels(const FaserLowBit& linear, const FaserLowBitPart& part, const FaserProduct& call,
                     const Activations& x, int64_t panel, int64_t last, int64_t row, int64_t end) {
    if (end - row == 1) {
        for (; panel < last; panel += kSinglePanels) {
            multiply_rows<F, kSinglePanels>(linear, part, call, x, panel, row, end);
        }
        return;
    }
    for (; panel < last; panel += kFewPanels) multiply_rows<F, kFewPanels>(linear, part, call, x, panel, row, end);
}

using Multiply = decltype(&multiply_panels<kNibbles>);

Multiply multiply_of(int32_t form) {
    switch (form) {
        case kNibbles:
            return multiply_panels<kNibbles>;
        case kTable:
            return multiply_panels<kTable>;
        case kBytes:
            return multiply_panels<kBytes>;
        default:
            return multiply_panels<kBytes16>;
    }
}

}  // namespace

extern "C" {

void faser_low_bit_linear(Pool* pool, const FaserLowBit* linear, const void* x, int64_t x_stride, int32_t x_dtype,
                          int64_t rows, void* out, int64_t out_stride, int32_t out_dtype, const void* residual,
                          int64_t residual_stride) {
    if (rows == 0) return;
    const FaserProduct call{x, x_stride, rows, out, out_stride, residual, residual_stride, out_dtype};
    const Activations quantised = quantise(*pool, call, x_dtype, linear->depth);
    const int64_t row_blocks = (rows + kBlockRows - 1) / kBlockRows;
    const int64_t block = (rows + row_blocks - 1) / row_blocks;
    int64_t pieces = 0;
    std::vector<int64_t> group(linear->num_parts), begin(linear->num_parts);
    for (int64_t i = 0; i < linear->num_parts; i++) {
        const FaserLowBitPart& part = linear->parts[i];
        const int64_t bytes = low_bit_panel_bytes(part, linear->depth) * kPanelsTogether;
        group[i] = std::max<int64_t>(1, kPieceBytes / bytes) * kPanelsTogether;
        begin[i] = pieces;
        pieces += (low_bit_panels(part) + group[i] - 1) / group[i];
    }
    pool->run(pieces * row_blocks, [&](int64_t piece) {
        const int64_t row = piece % row_blocks * block, end = std::min(row + block, rows);
        const int64_t number = piece / row_blocks;
        int64_t i = linear->num_parts - 1;
        while (number < begin[i]) i--;
        const FaserLowBitPart& part = linear->parts[i];
        const int64_t panel = (number - begin[i]) * group[i];
        const int64_t last = std::min(panel + group[i], low_bit_panels(part));
        multiply_of(part.form)(*linear, part, call, quantised, panel, last, row, end);
    });
}
}
