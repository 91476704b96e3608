// Products with low-bit weights: integer sums in every group, then floats in the order of their groups.
//
// Every multiply-add is rounded once and no sum is split, so a row gets the same bits in every batch, on any number of
// threads and on every CPU: those of kernels/interface/low_bit/product.py.

#include "activations.h"
#include "dot.h"
#include "layout.h"
#include "../shares.h"
#include "../tile.h"

using namespace faser;

namespace {

// Integer and float sums of a tile share the registers. A single row waits for memory, from more panels at a time.
constexpr int kMostRows = kLanes == 16 ? 6 : kLanes == 8 ? 3 : 2;
constexpr int kManyRows = kLanes == 16 ? 5 : kMostRows;  // where tiles follow one another
constexpr int kFewPanels = kLanes == 16 ? 2 : 1;
constexpr int kSinglePanels = kLanes == 16 ? 4 : kLanes == 8 ? 2 : 1;
constexpr int64_t kUnitPanels = 2;  // the least that a piece of work holds
static_assert(kPanelsTogether % kUnitPanels == 0 && kUnitPanels % kFewPanels == 0, "no panel is left over");
constexpr int64_t kBlockRows = 64;
constexpr int64_t kPieceBytes = 64 * 1024;  // of weights, at most or one unit: with more than a block of rows
constexpr int64_t kFetchBytes = 256 * 1024;  // of the next product, by each thread that waits for it

// What a tile reads: the forms in memory, and nibbles that have been unpacked to bytes.
enum Codes { kOfNibbles = kNibbles, kOfTable = kTable, kOfBytes = kBytes, kOfBytes16 = kBytes16, kOfSmallBytes };

template <int C>
struct CodesOf {
    static constexpr bool kHalves = C == kOfNibbles || C == kOfTable;
    static constexpr bool kSmall = kSmallDiffers && (C == kOfNibbles || C == kOfSmallBytes);
    static constexpr int kGroup = C == kOfBytes16 ? 16 : 32;
    static constexpr int kVectors = C == kOfBytes || C == kOfSmallBytes ? 8 : 4;  // 64-byte vectors of a group
    static constexpr int kUnpacked = kSmallDiffers && C == kOfNibbles ? kOfSmallBytes : kOfBytes;
    using D = Dot<kSmall>;
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

// Codes of nibbles: those in the low halves of bytes and those in the high ones.
template <int C>
inline void split(const char* from, vi& low, vi& high) {
    const vi bytes = (vi) * (const vu_any*)from;
    low = bytes & 0x0f0f0f0f;
    high = (vi)((vu)bytes >> 4) & 0x0f0f0f0f;
    if (C == kOfTable) {
        low = table_codes(low);
        high = table_codes(high);
    }
}

// Nibbles of one panel's groups to bytes.
template <int C>
void unpack(const char* from, int64_t groups, char* to) {
    for (int64_t group = 0; group < groups; group++, from += 4 * kStepBytes, to += 8 * kStepBytes) {
#pragma GCC unroll 4
        for (int v = 0; v < 4; v++) {
#pragma GCC unroll 4
            for (int i = 0; i < kParts; i++) {
                const int64_t at = v * kStepBytes + i * sizeof(vf);
                vi low, high;
                split<C>(from + at, low, high);
                *(vu_any*)(to + at) = (vu)low;
                *(vu_any*)(to + 4 * kStepBytes + at) = (vu)high;
            }
        }
    }
}

// Scales and minimums of one span as floats: [group][panel][16], scales before minimums.
template <int Group, int Panels>
struct Factors {
    static constexpr int64_t kGroups = kSpan / Group, kFloats = Panels * kPanel;
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
        const int64_t repeats = part.factor_values / Group;
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

// a * b + c, rounded once on every CPU.
inline vf fused(vf a, vf b, vf c) {
#if defined(__FMA__) || defined(__AVX512F__) || defined(__aarch64__)
    return fma(a, b, c);
#else
    for (int i = 0; i < kLanes; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#endif
}

// A float in every lane. (Adding it to zeros, as splat does, takes time here.)
inline vf everywhere(const float* x) {
    int32_t bits;
    std::memcpy(&bits, x, 4);
    return (vf)splat_int(bits);
}

// A tile of rows and panels over one span. Places in x are those of its first row.
struct TileSpan {
    const char* codes;       // of the first panel
    int64_t panel_bytes;     // from the codes of one panel to those of the next
    const float* scales;     // Factors; or where the codes' panel stores them as half floats, which are read directly
    const float* minimums;
    const int8_t* x;         // [rows, kSpan]
    const float* x_scales;   // [rows, kStretches]
    const float* x_sums;     // [rows, kGroups32]
    const int32_t* starts;   // [rows, groups of a span]
    const char* ahead;       // weights to fetch meanwhile, or null
    int64_t ahead_lines;     // of them, for each group
    int64_t ahead_tiles;     // how many tiles share them out
    float* totals;           // [rows, panels, 16]

    // What follows those of so many groups.
    const char* ahead_from(int64_t groups) const { return ahead + groups * ahead_lines * kStepBytes; }
};

// One group of a tile: sums[r][q] += codes * x[r].
template <int C, int Rows, int Panels>
inline __attribute__((always_inline)) void add_group(const TileSpan& tile, int64_t group,
                                                     vi (&sums)[Rows][Panels * kParts]) {
    using D = typename CodesOf<C>::D;
    constexpr int kVectors = CodesOf<C>::kVectors;
    const int8_t* x = tile.x + group * CodesOf<C>::kGroup;
    const char* codes = tile.codes + group * kVectors * kStepBytes;
    auto four = [&](int row, int k) {
        int32_t bytes;
        std::memcpy(&bytes, x + row * kSpan + k, 4);
        return D::factor(bytes);
    };
    if (tile.ahead) {
        const char* ahead = tile.ahead + group * tile.ahead_lines * kStepBytes;
        for (int64_t line = 0; line < tile.ahead_lines; line++) __builtin_prefetch(ahead + line * kStepBytes, 0, 2);
    }
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; v++) {
        typename D::Codes low[Panels * kParts], high[Panels * kParts];
#pragma GCC unroll 4
        for (int p = 0; p < Panels; p++) {
            const char* from = codes + p * tile.panel_bytes + v * kStepBytes;
#pragma GCC unroll 4
            for (int i = 0; i < kParts; i++) {
                if constexpr (CodesOf<C>::kHalves) {
                    vi first, second;
                    split<C>(from + i * sizeof(vf), first, second);
                    low[p * kParts + i] = D::codes(first);
                    high[p * kParts + i] = D::codes(second);
                } else {
                    low[p * kParts + i] = D::codes((vi) * (const vu_any*)(from + i * sizeof(vf)));
                }
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < Rows; r++) {
            auto x_low = four(r, 4 * v);
#pragma GCC unroll 8
            for (int q = 0; q < Panels * kParts; q++) sums[r][q] = D::add(sums[r][q], low[q], x_low);
            if constexpr (CodesOf<C>::kHalves) {
                auto x_high = four(r, 16 + 4 * v);
#pragma GCC unroll 8
                for (int q = 0; q < Panels * kParts; q++) sums[r][q] = D::add(sums[r][q], high[q], x_high);
            }
        }
    }
}

// One stretch of a tile, values with one scale a row: totals += x's scales * (its groups, summed in order). A sum of
// one addend is that addend: zeros of either sign are the same in totals.
template <int C, bool Minimums, bool Halves, int Rows, int Panels, int Groups>
inline __attribute__((always_inline)) void add_stretch(const TileSpan& tile, int64_t stretch) {
    constexpr int kAll = Panels * kParts, kSpanGroups = kSpan / CodesOf<C>::kGroup;
    auto factor = [&](const float* from, int64_t group, int q) {
        if constexpr (!Halves) return load(from + group * Panels * kPanel + q * kLanes);
        const int64_t place = group * kPanel + q % kParts * kLanes;
        return load_halves((const char*)from + q / kParts * tile.panel_bytes + place * 2);
    };
    vf partial[Rows][kAll];
#pragma GCC unroll 4
    for (int number = 0; number < Groups; number++) {
        const int64_t group = stretch * (kScaled / CodesOf<C>::kGroup) + number;
        vi sums[Rows][kAll];
#pragma GCC unroll 8
        for (int r = 0; r < Rows; r++) {
            const vi start = splat_int(tile.starts[r * kSpanGroups + group]);
#pragma GCC unroll 8
            for (int q = 0; q < kAll; q++) sums[r][q] = start;
        }
        add_group<C, Rows, Panels>(tile, group, sums);
#pragma GCC unroll 8
        for (int q = 0; q < kAll; q++) {
            const vf scale = factor(tile.scales, group, q);
#pragma GCC unroll 8
            for (int r = 0; r < Rows; r++) {
                const vf sum = __builtin_convertvector(sums[r][q], vf);
                partial[r][q] = number == 0 ? scale * sum : fused(scale, sum, partial[r][q]);
            }
        }
        if constexpr (Minimums) {
#pragma GCC unroll 8
            for (int q = 0; q < kAll; q++) {
                const vf minimum = factor(tile.minimums, group, q);
#pragma GCC unroll 8
                for (int r = 0; r < Rows; r++) {
                    partial[r][q] = fused(minimum, everywhere(tile.x_sums + r * kGroups32 + group), partial[r][q]);
                }
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; r++) {
        const vf scale = everywhere(tile.x_scales + r * kStretches + stretch);
#pragma GCC unroll 8
        for (int q = 0; q < kAll; q++) {
            float* at = tile.totals + r * Panels * kPanel + q * kLanes;
            store(at, fused(scale, partial[r][q], load(at)));
        }
    }
}

// `count` tiles of `Rows` rows each over one span; tile: the first.
template <int C, bool Minimums, bool Halves, int Rows, int Panels>
__attribute__((noinline)) void add_tiles(TileSpan tile, int64_t values, int64_t count) {
    constexpr int kGroups = kScaled / CodesOf<C>::kGroup;
    for (; count > 0; count--) {
        int64_t stretch = 0;
        for (; stretch < values / kScaled; stretch++) {
            add_stretch<C, Minimums, Halves, Rows, Panels, kGroups>(tile, stretch);
        }
        if (values % kScaled) add_stretch<C, Minimums, Halves, Rows, Panels, kGroups / 2>(tile, stretch);
        tile.ahead = --tile.ahead_tiles > 0 ? tile.ahead_from(values / CodesOf<C>::kGroup) : nullptr;
        tile.x += Rows * kSpan;
        tile.x_scales += Rows * kStretches;
        tile.x_sums += Rows * kGroups32;
        tile.starts += Rows * (kSpan / CodesOf<C>::kGroup);
        tile.totals += Rows * Panels * kPanel;
    }
}

// Whether a tile reads scales and minimums directly: where it has all rows, each is read only once.
template <int Group>
bool reads_halves(const FaserLowBitPart& part, int64_t rows) {
    return rows <= kMostRows && part.factors == kHalves && part.factor_values == Group;
}

// All rows of a block over one span; tile: its first rows. Tiles are as even as possible, the higher ones first.
template <int C, int Panels>
void add_block(TileSpan tile, const FaserLowBitPart& part, int64_t values, int64_t rows) {
    const int64_t most = rows > 2 * kMostRows ? kManyRows : kMostRows;
    const int64_t tiles = (rows + most - 1) / most, height = rows / tiles, higher = rows % tiles;
    tile.ahead_tiles = std::min(tile.ahead_tiles, tiles);
    tile.ahead_lines = (tile.ahead_lines + tile.ahead_tiles - 1) / tile.ahead_tiles;
    auto add = [&](int64_t first, int64_t tile_rows, int64_t count) {
        TileSpan at = tile;
        if (tile.ahead && first > 0) {
            at.ahead_tiles -= higher;
            at.ahead = at.ahead_tiles > 0 ? tile.ahead_from(values / CodesOf<C>::kGroup * higher) : nullptr;
        }
        at.x += first * kSpan;
        at.x_scales += first * kStretches;
        at.x_sums += first * kGroups32;
        at.starts += first * (kSpan / CodesOf<C>::kGroup);
        at.totals += first * Panels * kPanel;
        with_count<Panels == kFewPanels ? kMostRows : 1>(int(tile_rows), [&](auto number) {
            constexpr bool kMinimums = C == kOfNibbles || C == kOfBytes || C == kOfSmallBytes;
            const bool minimums = kMinimums && part.has_minimums;
            if (reads_halves<CodesOf<C>::kGroup>(part, rows)) {
                if (minimums) return add_tiles<C, kMinimums, true, number.value, Panels>(at, values, count);
                return add_tiles<C, false, true, number.value, Panels>(at, values, count);
            }
            if (minimums) return add_tiles<C, kMinimums, false, number.value, Panels>(at, values, count);
            add_tiles<C, false, false, number.value, Panels>(at, values, count);
        });
    };
    if (higher > 0) add(0, height + 1, higher);
    add(higher * (height + 1), height, tiles - higher);
}

// Rows [row, end), at most kBlockRows, with Panels panels from `panel` on. Nibbles are unpacked for more than one tile
// of rows. ahead: weights that this thread needs next, or null; as many are fetched as are read.
template <int C, int Panels>
void multiply_rows(const FaserLowBit& linear, const FaserLowBitPart& part, const FaserProduct& call,
                   const Activations& x, const int32_t* starts, int64_t panel, int64_t row, int64_t end,
                   const char* ahead) {
    constexpr int64_t kWidth = Panels * kPanel;
    constexpr int kGroup = CodesOf<C>::kGroup, kSpanGroups = kSpan / kGroup;
    const int64_t panel_bytes = low_bit_panel_bytes(part, linear.depth);
    const char* span = part.panels + panel * panel_bytes;
    alignas(64) float totals[(Panels == kFewPanels ? kBlockRows : 1) * kWidth];
    alignas(64) char unpacked[CodesOf<C>::kHalves && Panels == kFewPanels ? Panels * kPanel * kSpan : 1];
    for (int64_t i = 0; i < (end - row) * kWidth; i += kLanes) store(totals + i, vf{});
    Factors<kGroup, Panels> factors;
    for (int64_t first = 0, place = row; first < linear.depth; first += kSpan, place += x.rows) {
        const int64_t values = std::min(kSpan, linear.depth - first);
        const SpanLayout layout = span_layout(part, values);
        const bool halves = reads_halves<kGroup>(part, end - row);
        if (!halves) factors.read(part, layout, span, panel_bytes, values / kGroup);
        TileSpan tile{span,
                      panel_bytes,
                      halves ? (const float*)(span + layout.scales) : factors.scales,
                      halves ? (const float*)(span + layout.minimums) : factors.minimums,
                      x.codes + place * kSpan,
                      x.scales + place * kStretches,
                      x.sums + place * kGroups32,
                      starts + place * kSpanGroups,
                      ahead,
                      (Panels * layout.bytes / kStepBytes * kGroup + values - 1) / values,
                      kBlockRows,
                      totals};
        if (ahead) ahead += Panels * layout.bytes;
        if constexpr (CodesOf<C>::kHalves && Panels == kFewPanels) {
            if (end - row > kMostRows) {
                for (int p = 0; p < Panels; p++) {
                    unpack<C>(span + p * panel_bytes, values / kGroup, unpacked + p * kPanel * kSpan);
                }
                tile.codes = unpacked;
                tile.ahead_tiles = 1;  // measured: sharing them out is slower here
                tile.panel_bytes = kPanel * kSpan;
                add_block<CodesOf<C>::kUnpacked, Panels>(tile, part, values, end - row);
                span += layout.bytes;
                continue;
            }
        }
        add_block<C, Panels>(tile, part, values, end - row);
        span += layout.bytes;
    }
    finish(call, linear.bias, part.first + part.columns, row, int(end - row), part.first + panel * kPanel, totals,
           int(kWidth));
}

// Panels [panel, last) of a part. after: weights that this thread needs next, or null.
template <int C>
void multiply_panels(const FaserLowBit& linear, const FaserLowBitPart& part, const FaserProduct& call,
                     const Activations& x, int64_t panel, int64_t last, int64_t row, int64_t end, const char* after) {
    const int32_t* starts = x.starts_of(CodesOf<C>::D::kLowered - part.zero_point, kSpan / CodesOf<C>::kGroup);
    const int64_t panel_bytes = low_bit_panel_bytes(part, linear.depth);
    const auto ahead = [&](int64_t next) { return next < last ? part.panels + next * panel_bytes : after; };
    if (end - row == 1) {
        for (; panel + kSinglePanels <= last; panel += kSinglePanels) {
            const char* next = ahead(panel + kSinglePanels);
            multiply_rows<C, kSinglePanels>(linear, part, call, x, starts, panel, row, end, next);
        }
    }
    for (; panel < last; panel += kFewPanels) {
        multiply_rows<C, kFewPanels>(linear, part, call, x, starts, panel, row, end, ahead(panel + kFewPanels));
    }
}

using Multiply = decltype(&multiply_panels<kOfNibbles>);

Multiply multiply_of(int32_t form) {
    switch (form) {
        case kNibbles:
            return multiply_panels<kOfNibbles>;
        case kTable:
            return multiply_panels<kOfTable>;
        case kBytes:
            return multiply_panels<kOfBytes>;
        default:
            return multiply_panels<kOfBytes16>;
    }
}

int32_t lowered(const FaserLowBitPart& part) {
    return part.form == kNibbles ? CodesOf<kOfNibbles>::D::kLowered : CodesOf<kOfBytes>::D::kLowered;
}

// Units of kUnitPanels panels, those of all parts counted on.
int64_t num_units(const FaserLowBit& linear) {
    int64_t panels = 0;
    for (int64_t i = 0; i < linear.num_parts; i++) panels += low_bit_panels(linear.parts[i]);
    return panels / kUnitPanels;
}

// The part that holds a unit, and the panel of the part that it begins with.
const FaserLowBitPart& part_of(const FaserLowBit& linear, int64_t unit, int64_t& panel) {
    const FaserLowBitPart* part = linear.parts;
    for (panel = unit * kUnitPanels; panel >= low_bit_panels(*part); part++) panel -= low_bit_panels(*part);
    return *part;
}

const char* weights_of(const FaserLowBit& linear, int64_t unit) {
    int64_t panel;
    const FaserLowBitPart& part = part_of(linear, unit, panel);
    return part.panels + panel * low_bit_panel_bytes(part, linear.depth);
}

// What each thread does of a product with a block of rows. following: the product after this one, or null.
struct SharedProduct {
    const FaserLowBit& linear;
    const FaserProduct& call;
    const Activations& x;
    const FaserLowBit* following;
    Pool& pool;
    Shares& shares;

    void operator()(int64_t, int thread) const {
        const int threads = pool.num_threads();
        const char* next = following ? weights_of(*following, begin_of_following(thread)) : nullptr;
        for (int64_t first, last; shares.claim(thread, first, last);) {
            multiply(first, last, last < shares.end(thread) ? weights_of(linear, last) : next);
        }
        for (int other = thread + 1; other < thread + threads; other++) {
            for (int64_t first, last; shares.claim(other % threads, first, last);) multiply(first, last, nullptr);
        }
        if (next) pool.fetch_while_waiting(thread, next, next + bytes_of_following(thread));
    }

  private:
    int64_t begin_of_following(int thread) const {
        return Shares::begin(num_units(*following), thread, pool.num_threads());
    }

    // Of the thread's share of it: those in one part.
    int64_t bytes_of_following(int thread) const {
        const int64_t unit = begin_of_following(thread), units = begin_of_following(thread + 1) - unit;
        int64_t panel;
        const FaserLowBitPart& part = part_of(*following, unit, panel);
        const int64_t panels = std::min(units * kUnitPanels, low_bit_panels(part) - panel);
        return std::min(panels * low_bit_panel_bytes(part, following->depth), kFetchBytes);
    }

    // Units of one part: those of a claim are, for every part has an even number.
    void multiply(int64_t first, int64_t last, const char* after) const {
        int64_t panel;
        const FaserLowBitPart& part = part_of(linear, first, panel);
        const int64_t end = panel + (last - first) * kUnitPanels;
        multiply_of(part.form)(linear, part, call, x, panel, end, 0, call.rows, after);
    }
};

// More rows: blocks of them, and pieces of a part's units.
void multiply_blocks(Pool& pool, const FaserLowBit& linear, const FaserProduct& call, const Activations& x) {
    const int64_t row_blocks = (call.rows + kBlockRows - 1) / kBlockRows;
    const int64_t block = (call.rows + row_blocks - 1) / row_blocks;
    int64_t largest = 1;
    for (int64_t i = 0; i < linear.num_parts; i++) {
        largest = std::max(largest, low_bit_panel_bytes(linear.parts[i], linear.depth) * kUnitPanels);
    }
    const int64_t size = kPieceBytes / largest > 1 ? kPieceBytes / largest & ~int64_t(1) : 1, units = num_units(linear);
    pool.run((units + size - 1) / size * row_blocks, [&](int64_t piece) {
        const int64_t row = piece % row_blocks * block, end = std::min(row + block, call.rows);
        int64_t unit = piece / row_blocks * size;
        for (const int64_t last = std::min(unit + size, units); unit < last;) {
            int64_t panel;
            const FaserLowBitPart& part = part_of(linear, unit, panel);
            const int64_t until = std::min(panel + (last - unit) * kUnitPanels, low_bit_panels(part));
            multiply_of(part.form)(linear, part, call, x, panel, until, row, end, nullptr);
            unit += (until - panel) / kUnitPanels;
        }
    });
}

}  // namespace

extern "C" {

// following: the product after this one, or null; its first weights are fetched by threads that wait.
void faser_low_bit_linear(Pool* pool, const FaserLowBit* linear, const void* x, int64_t x_stride, int32_t x_dtype,
                          int64_t rows, void* out, int64_t out_stride, int32_t out_dtype, const void* residual,
                          int64_t residual_stride, const FaserLowBit* following) {
    if (rows == 0) return;
    const FaserProduct call{x, x_stride, rows, out, out_stride, residual, residual_stride, out_dtype};
    const Activations quantised = quantise(*pool, call, x_dtype, *linear, lowered);
    if (rows > kBlockRows) return multiply_blocks(*pool, *linear, call, quantised);
    static thread_local Shares shares;
    shares.deal(num_units(*linear), pool->num_threads());
    pool->run(pool->num_threads(), SharedProduct{*linear, call, quantised, following, *pool, shares});
}
}
