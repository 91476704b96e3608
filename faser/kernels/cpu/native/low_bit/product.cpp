// Products with low-bit weights: integer sums in every group, then floats in the order of their groups. With superblocks
// the integer scales of groups weigh the sums of a stretch, which is a float once.
//
// Every multiply-add is rounded once and no sum is split, so a row gets the same bits in every batch, on any number of
// threads and on every CPU: those of kernels/interface/low_bit/product.py.

#include "activations.h"
#include "codes.h"
#include "dot.h"
#include "layout.h"
#include "tile_block.h"
#include "../calls.h"
#include "../shares.h"
#include "../tile.h"

using namespace faser;

namespace {

// Integer and float sums of a tile share the registers.
constexpr int kMostRows = kLanes == 16 ? 6 : kLanes == 8 ? 5 : 2;
constexpr int kUsualRows = kLanes == 8 ? 4 : kMostRows;  // where more than one tile is needed
constexpr int kPanels = kLanes == 16 ? 2 : 1;  // of a tile
constexpr int64_t kUnitPanels = 2;             // the least that a piece of work holds
static_assert(kPanelsTogether % kUnitPanels == 0 && kUnitPanels % kPanels == 0, "no panel is left over");
constexpr int64_t kWidth = kPanels * kPanel;
constexpr int kAll = kPanels * kParts;  // vectors of a tile's row
constexpr int64_t kBlockRows = 64;
constexpr int64_t kPieceBytes = 64 * 1024;  // of weights, at most or one unit: with more than a block of rows
constexpr int64_t kFetchBytes = 256 * 1024;  // of the next product, by each thread that waits for it

// a * b + c, rounded once on every CPU.
inline vf fused(vf a, vf b, vf c) {
#if defined(__FMA__) || defined(__AVX512F__) || defined(__aarch64__)
    return fma(a, b, c);
#else
    for (int i = 0; i < kLanes; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#endif
}

// A tile of rows and panels over one span. Places in x are those of its first row.
struct TileSpan {
    const char* codes;           // of the first panel
    int64_t panel_bytes;         // from the codes of one panel to those of the next
    const char* scales;          // of a FactorTable; or in the first panel, where they are read directly
    const char* minimums;
    const char* super_scales;    // in the first panel
    const char* super_minimums;
    const int8_t* x;             // [rows, kSpan]
    const float* x_scales;       // [rows, kStretches]
    const float* x_sums;         // [rows, kGroups32]; with superblocks times x_scales
    const int32_t* starts;       // [rows, groups of a span]
    const char* ahead;           // weights to fetch meanwhile, or null
    int64_t ahead_lines;         // of them, for each group
    float* totals;               // [rows, panels, 16]

    // Part q of a row of columns: number `factor` of those that lie at a place of the panels, of `size` bytes each.
    const char* in_panel(const char* place, int64_t factor, int q, int64_t size) const {
        return place + q / kParts * panel_bytes + (factor * kPanel + q % kParts * kLanes) * size;
    }

    // What follows those of `groups` groups, or null.
    const char* ahead_from(int64_t groups) const {
        return ahead ? ahead + groups * ahead_lines * kStepBytes : nullptr;
    }
};

struct NoPairs {
    typedef int Pairs;
};

// One group of a tile: sums[r][q] += codes * x[r]. factors(q): what sums in pairs are multiplied by.
template <int C, int Rows, class PairFactors>
IN_TILE void add_group(const TileSpan& tile, int64_t group, const PairFactors& factors, vi (&sums)[Rows][kAll]) {
    using Codes = CodesOf<C>;
    using D = typename Codes::D;
    constexpr int kPairs = Codes::kPairs, kTogether = Codes::kTogether;
    const int8_t* x = tile.x + group * Codes::kGroup;
    const char* codes = tile.codes + group * Codes::kBytes;
    const char* ahead = tile.ahead + group * tile.ahead_lines * kStepBytes;
    const int64_t ahead_lines = tile.ahead ? tile.ahead_lines : 0;
    auto four = [&](int row, int k) {
        int32_t bytes;
        std::memcpy(&bytes, x + row * kSpan + k, 4);
        return D::factor(bytes);
    };
    [[maybe_unused]] typename std::conditional_t<Codes::kInPairs, D, NoPairs>::Pairs whole[Rows][kAll];
UNROLLED
    for (int pair = 0; pair < kPairs; pair++) {
        for (int64_t line = pair; line < ahead_lines; line += kPairs) {
            __builtin_prefetch(ahead + line * kStepBytes, 0, 2);
        }
        typename D::Codes first[kAll], second[kAll];
UNROLLED
        for (int p = 0; p < kPanels; p++) {
UNROLLED
            for (int i = 0; i < kParts; i++) {
                vi one, other;
                read_pair<C>(codes + p * tile.panel_bytes, pair, i, one, other);
                first[p * kParts + i] = D::codes(one);
                second[p * kParts + i] = D::codes(other);
            }
        }
UNROLLED
        for (int r = 0; r < Rows; r++) {
            const auto x_first = four(r, Codes::first(pair)), x_second = four(r, Codes::second(pair));
            if constexpr (Codes::kInPairs) {
                typename D::Pairs start{};
                if constexpr (Codes::kStartsInPairs) {
                    start = (typename D::Pairs)splat_int(tile.starts[r * (kSpan / Codes::kGroup) + group]);
                }
UNROLLED
                for (int q = 0; q < kAll; q++) {
                    const auto two = D::products(first[q], x_first) + D::products(second[q], x_second);
                    whole[r][q] = two + (pair % kTogether == 0 ? start : whole[r][q]);
                }
            } else {
UNROLLED
                for (int q = 0; q < kAll; q++) sums[r][q] = D::add(sums[r][q], first[q], x_first);
UNROLLED
                for (int q = 0; q < kAll; q++) sums[r][q] = D::add(sums[r][q], second[q], x_second);
            }
        }
        if constexpr (Codes::kInPairs) {
            if ((pair + 1) % kTogether != 0) continue;
UNROLLED
            for (int q = 0; q < kAll; q++) {
                const vi factor = factors(q);
UNROLLED
                for (int r = 0; r < Rows; r++) sums[r][q] = D::add_pairs(sums[r][q], whole[r][q], factor);
            }
        }
    }
}

// The integer sums of one group of a tile.
template <int C, int Rows>
inline __attribute__((always_inline)) void sum_group(const TileSpan& tile, int64_t group, vi (&sums)[Rows][kAll]) {
UNROLLED
    for (int r = 0; r < Rows; r++) {
        const vi start = splat_int(tile.starts[r * (kSpan / CodesOf<C>::kGroup) + group]);
UNROLLED
        for (int q = 0; q < kAll; q++) sums[r][q] = start;
    }
    add_group<C, Rows>(tile, group, [](int) { return splat_int(0x10001); }, sums);
}

// Part q of a group's scales or minimums.
template <int Stored>
inline __attribute__((always_inline)) vf factor_of(const TileSpan& tile, const char* from, int64_t group, int q) {
    if constexpr (Stored == kHalves) return load_halves(tile.in_panel(from, group, q, 2));
    if constexpr (Stored == kIntegers) {
        return __builtin_convertvector(load_integers(tile.in_panel(from, group, q, 1)), vf);
    }
    return load((const float*)from + group * kWidth + q * kLanes);
}

// One stretch of a tile, values with one scale a row: totals += x's scales * (its groups, summed in order). A sum of
// one addend is that addend: zeros of either sign are the same in totals.
template <int C, bool Minimums, int Stored, int Rows, int Groups>
inline __attribute__((always_inline)) void add_stretch(const TileSpan& tile, int64_t stretch) {
    vf partial[Rows][kAll];
UNROLLED
    for (int number = 0; number < Groups; number++) {
        const int64_t group = stretch * (kScaled / CodesOf<C>::kGroup) + number;
        vi sums[Rows][kAll];
        sum_group<C, Rows>(tile, group, sums);
UNROLLED
        for (int q = 0; q < kAll; q++) {
            const vf scale = factor_of<Stored>(tile, tile.scales, group, q);
UNROLLED
            for (int r = 0; r < Rows; r++) {
                const vf sum = __builtin_convertvector(sums[r][q], vf);
                partial[r][q] = number == 0 ? scale * sum : fused(scale, sum, partial[r][q]);
            }
        }
        if constexpr (Minimums) {
UNROLLED
            for (int q = 0; q < kAll; q++) {
                const vf minimum = factor_of<Stored>(tile, tile.minimums, group, q);
UNROLLED
                for (int r = 0; r < Rows; r++) {
                    partial[r][q] = fused(minimum, everywhere(tile.x_sums + r * kGroups32 + group), partial[r][q]);
                }
            }
        }
    }
UNROLLED
    for (int r = 0; r < Rows; r++) {
        const vf scale = everywhere(tile.x_scales + r * kStretches + stretch);
UNROLLED
        for (int q = 0; q < kAll; q++) {
            float* at = tile.totals + r * kWidth + q * kLanes;
            store(at, fused(scale, partial[r][q], load(at)));
        }
    }
}

// The integer of a stretch in a superblock, scales * (codes * x) of its groups, rounded once.
template <int C, int Rows>
inline __attribute__((always_inline)) void weigh_stretch(const TileSpan& tile, int64_t stretch,
                                                         vf (&weighed)[Rows][kAll]) {
    constexpr int kGroups = kScaled / CodesOf<C>::kGroup;
    if constexpr (CodesOf<C>::kInPairs) {
        vi sums[Rows][kAll] = {};
UNROLLED
        for (int number = 0; number < kGroups; number++) {
            const int64_t group = stretch * kGroups + number;
            const auto scale = [&](int q) {
                return in_both_halves(load_integers(tile.in_panel(tile.scales, group, q, 1)));
            };
            add_group<C, Rows>(tile, group, scale, sums);
        }
UNROLLED
        for (int r = 0; r < Rows; r++) {
UNROLLED
            for (int q = 0; q < kAll; q++) weighed[r][q] = __builtin_convertvector(sums[r][q], vf);
        }
    } else {
        // Two groups at a time: floats hold the integers of 32 values exactly, and the last addition rounds.
        vf two[Rows][kAll];
UNROLLED
        for (int number = 0; number < kGroups; number++) {
            const int64_t group = stretch * kGroups + number;
            vi sums[Rows][kAll];
            sum_group<C, Rows>(tile, group, sums);
UNROLLED
            for (int q = 0; q < kAll; q++) {
                const vf scale = factor_of<kIntegers>(tile, tile.scales, group, q);
UNROLLED
                for (int r = 0; r < Rows; r++) {
                    const vf sum = __builtin_convertvector(sums[r][q], vf);
                    two[r][q] = number % 2 == 0 ? scale * sum : fused(scale, sum, two[r][q]);
                    if (number % 2 == 1) weighed[r][q] = number == 1 ? two[r][q] : weighed[r][q] + two[r][q];
                }
            }
        }
    }
}

// One superblock of a tile: totals += its scale * (x's scales * integers of stretches) + its minimum * (...).
template <int C, bool Minimums, int Rows>
inline __attribute__((always_inline)) void add_superblock(const TileSpan& tile) {
    vf scaled[Rows][kAll] = {};
    for (int64_t stretch = 0; stretch < kStretches; stretch++) {
        vf weighed[Rows][kAll];
        weigh_stretch<C, Rows>(tile, stretch, weighed);
UNROLLED
        for (int r = 0; r < Rows; r++) {
            const vf scale = everywhere(tile.x_scales + r * kStretches + stretch);
UNROLLED
            for (int q = 0; q < kAll; q++) scaled[r][q] = fused(scale, weighed[r][q], scaled[r][q]);
        }
    }
    [[maybe_unused]] vf lowered[Rows][kAll] = {};
    if constexpr (Minimums) {
        for (int64_t group = 0; group < kGroups32; group++) {
UNROLLED
            for (int q = 0; q < kAll; q++) {
                const vf minimum = factor_of<kIntegers>(tile, tile.minimums, group, q);
UNROLLED
                for (int r = 0; r < Rows; r++) {
                    lowered[r][q] = fused(minimum, everywhere(tile.x_sums + r * kGroups32 + group), lowered[r][q]);
                }
            }
        }
    }
UNROLLED
    for (int q = 0; q < kAll; q++) {
        const vf super_scale = load_halves(tile.in_panel(tile.super_scales, 0, q, 2));
UNROLLED
        for (int r = 0; r < Rows; r++) {
            float* at = tile.totals + r * kWidth + q * kLanes;
            vf total = fused(super_scale, scaled[r][q], load(at));
            if constexpr (Minimums) {
                total = fused(load_halves(tile.in_panel(tile.super_minimums, 0, q, 2)), lowered[r][q], total);
            }
            store(at, total);
        }
    }
}

// `count` tiles of `Rows` rows each over one span; tile: the first.
template <int C, bool Minimums, int Stored, int Rows>
__attribute__((noinline)) void add_tiles(TileSpan tile, int64_t values, int64_t count) {
    constexpr int kGroups = kScaled / CodesOf<C>::kGroup;
    for (; count > 0; count--) {
        if constexpr (Stored == kIntegers) {
            add_superblock<C, Minimums, Rows>(tile);
        } else {
            int64_t stretch = 0;
            for (; stretch < values / kScaled; stretch++) {
                add_stretch<C, Minimums, Stored, Rows, kGroups>(tile, stretch);
            }
            if (values % kScaled) add_stretch<C, Minimums, Stored, Rows, kGroups / 2>(tile, stretch);
        }
        tile.ahead = tile.ahead_from(values / CodesOf<C>::kGroup);
        tile.x += Rows * kSpan;
        tile.x_scales += Rows * kStretches;
        tile.x_sums += Rows * kGroups32;
        tile.starts += Rows * (kSpan / CodesOf<C>::kGroup);
        tile.totals += Rows * kWidth;
    }
}

// How tiles read scales and minimums: half floats and integers where they lie, others out of a FactorTable.
int32_t read_as(const FaserLowBitPart& part) {
    const bool is_in_place = part.factors == kIntegers || (part.factors == kHalves && part.factor_values == 32);
    return is_in_place ? part.factors : int32_t(kFloats);
}

// Tiles that a block of rows is divided into.
int64_t tiles_of(int64_t rows) {
    const int64_t most = rows <= kMostRows ? kMostRows : kUsualRows;
    return (rows + most - 1) / most;
}

// All rows of a block over one span; tile: its first rows. Tiles are as even as possible, the higher ones first.
template <int C>
void add_block(TileSpan tile, const FaserLowBitPart& part, int64_t values, int64_t rows) {
    const int64_t tiles = tiles_of(rows), height = rows / tiles, higher = rows % tiles;
    tile.ahead_lines = (tile.ahead_lines + tiles - 1) / tiles;  // tiles share them out
    auto add = [&](int64_t first, int64_t tile_rows, int64_t count) {
        TileSpan at = tile;
        if (first > 0) at.ahead = tile.ahead_from(values / CodesOf<C>::kGroup * higher);
        at.x += first * kSpan;
        at.x_scales += first * kStretches;
        at.x_sums += first * kGroups32;
        at.starts += first * (kSpan / CodesOf<C>::kGroup);
        at.totals += first * kWidth;
        with_count<kMostRows>(int(tile_rows), [&](auto number) {
            constexpr bool kMinimums = !CodesOf<C>::kNamed && C != kSixes16;
            const int32_t stored = read_as(part);
            if constexpr (C != kBytes && C != kFloats4) {  // with superblocks the form says whether there are minimums
                if (stored == kIntegers) return add_tiles<C, kMinimums, kIntegers, number.value>(at, values, count);
            }
            if constexpr (C != kSixes16) {
                const bool minimums = kMinimums && part.has_minimums;
                if (C != kFloats4 && stored == kHalves) {
                    constexpr int kStored = C == kFloats4 ? kFloats : kHalves;
                    if (minimums) return add_tiles<C, kMinimums, kStored, number.value>(at, values, count);
                    return add_tiles<C, false, kStored, number.value>(at, values, count);
                }
                if (minimums) return add_tiles<C, kMinimums, kFloats, number.value>(at, values, count);
                add_tiles<C, false, kFloats, number.value>(at, values, count);
            }
        });
    };
    if (higher > 0) add(0, height + 1, higher);
    add(higher * (height + 1), height, tiles - higher);
}

// Rows [row, end), at most kBlockRows, with kPanels panels from `panel` on. ahead: weights that this thread needs next,
// or null; as many are fetched as are read.
template <int C>
void multiply_rows(const FaserLowBit& linear, const FaserLowBitPart& part, const FaserProduct& call,
                   const Activations& x, const int32_t* starts, int64_t panel, int64_t row, int64_t end,
                   const char* ahead) {
    constexpr int kGroup = CodesOf<C>::kGroup, kSpanGroups = kSpan / kGroup;
    const bool is_in_place = read_as(part) != kFloats, has_superblocks = part.factors == kIntegers;
    const int64_t panel_bytes = low_bit_panel_bytes(part, linear.depth);
    const char* span = part.panels + panel * panel_bytes;
    alignas(64) float totals[kBlockRows * kWidth];
    for (int64_t i = 0; i < (end - row) * kWidth; i += kLanes) store(totals + i, vf{});
    FactorTable<kPanels, kGroups32> table;
    for (int64_t first = 0, place = row; first < linear.depth; first += kSpan, place += x.rows) {
        const int64_t values = std::min(kSpan, linear.depth - first);
        const SpanLayout layout = span_layout(part, values);
        if (!is_in_place) table.read<32>(part, layout, span, panel_bytes, values / kGroup);
        const TileSpan tile{span,
                            panel_bytes,
                            is_in_place ? span + layout.scales : (const char*)table.scales,
                            is_in_place ? span + layout.minimums : (const char*)table.minimums,
                            span + layout.super_scales,
                            span + layout.super_minimums,
                            x.codes + place * kSpan,
                            x.scales + place * kStretches,
                            (has_superblocks ? x.scaled_sums : x.sums) + place * kGroups32,
                            starts + place * kSpanGroups,
                            ahead,
                            (kPanels * layout.bytes / kStepBytes * kGroup + values - 1) / values,
                            totals};
        add_block<C>(tile, part, values, end - row);
        if (ahead) ahead += kPanels * layout.bytes;
        span += layout.bytes;
    }
    finish(call, linear.bias, part.first + part.columns, row, int(end - row), part.first + panel * kPanel, totals,
           int(kWidth));
}

Start start_of(const FaserLowBitPart& part) {
    const bool has_eight_bits = part.form == kTable || part.form == kBytes;
    const int32_t lowered = has_eight_bits ? CodesOf<kBytes>::D::kLowered : CodesOf<kNibbles>::D::kLowered;
    const bool in_pairs = part.form == kSixes16 && CodesOf<kSixes16>::kStartsInPairs;
    return {lowered - part.zero_point, kSpan / group_of(part.form), in_pairs};
}

// Panels [panel, last) of a part. after: weights that this thread needs next, or null.
template <int C>
void multiply_panels(const FaserLowBit& linear, const FaserLowBitPart& part, const FaserProduct& call,
                     const Activations& x, int64_t panel, int64_t last, int64_t row, int64_t end, const char* after) {
    const int32_t* starts = x.starts_of(start_of(part));
    const int64_t panel_bytes = low_bit_panel_bytes(part, linear.depth);
    for (; panel < last; panel += kPanels) {
        const int64_t next = panel + kPanels;
        const char* ahead = next < last ? part.panels + next * panel_bytes : after;
        multiply_rows<C>(linear, part, call, x, starts, panel, row, end, ahead);
    }
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
        case kSixes:
            return multiply_panels<kSixes>;
        case kFloats4:
            return multiply_panels<kFloats4>;
        default:
            return multiply_panels<kSixes16>;
    }
}

// Most rows of a block.
int64_t most_rows() {
#if defined(FASER_TILES)
    return most_block_rows(kBlockRows);
#endif
    return kBlockRows;
}

// Rows [row, end), at most most_rows, with panels [panel, last) of a part. after: weights that this thread needs next,
// or null.
void multiply_part(const FaserLowBit& linear, const FaserLowBitPart& part, const FaserProduct& call,
                   const Activations& x, int64_t panel, int64_t last, int64_t row, int64_t end, const char* after) {
    const Multiply multiply = multiply_of(part.form);
#if defined(FASER_TILES)
    if (is_for_tiles(part, end - row)) {
        return multiply_in_tiles(linear, part, call, x, panel, last, row, end, after);
    }
    for (; end - row > kBlockRows; row += kBlockRows) {
        multiply(linear, part, call, x, panel, last, row, row + kBlockRows, nullptr);
    }
#endif
    multiply(linear, part, call, x, panel, last, row, end, after);
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
        multiply_part(linear, part, call, x, panel, end, 0, call.rows, after);
    }
};

// Units [unit, last) of a product with rows [row, end), at most most_rows. after: weights that this thread needs next,
// or null.
void multiply_units(const FaserLowBit& linear, const FaserProduct& call, const Activations& x, int64_t unit,
                    int64_t last, int64_t row, int64_t end, const char* after) {
    while (unit < last) {
        int64_t panel;
        const FaserLowBitPart& part = part_of(linear, unit, panel);
        const int64_t until = std::min(panel + (last - unit) * kUnitPanels, low_bit_panels(part));
        unit += (until - panel) / kUnitPanels;
        multiply_part(linear, part, call, x, panel, until, row, end, unit < last ? weights_of(linear, unit) : after);
    }
}

// More rows: blocks of them, and pieces of a part's units.
void multiply_blocks(Pool& pool, const FaserLowBit& linear, const FaserProduct& call, const Activations& x) {
    const int64_t row_blocks = (call.rows + most_rows() - 1) / most_rows();
    const int64_t block = (call.rows + row_blocks - 1) / row_blocks;
    int64_t largest = 1;
    for (int64_t i = 0; i < linear.num_parts; i++) {
        largest = std::max(largest, low_bit_panel_bytes(linear.parts[i], linear.depth) * kUnitPanels);
    }
    const int64_t size = kPieceBytes / largest > 1 ? kPieceBytes / largest & ~int64_t(1) : 1, units = num_units(linear);
    pool.run((units + size - 1) / size * row_blocks, [&](int64_t piece) {
        const int64_t row = piece % row_blocks * block, end = std::min(row + block, call.rows);
        const int64_t unit = piece / row_blocks * size;
        multiply_units(linear, call, x, unit, std::min(unit + size, units), row, end, nullptr);
    });
}

// One unit of one weight, with the rows of a block.
struct GroupedPiece {
    const FaserLowBit* linear;
    int64_t unit, row, end;
};

// What each thread does of the products of several weights: pieces in order, a stretch of them for each thread.
struct GroupedProducts {
    const std::vector<GroupedPiece>& pieces;
    const FaserProduct& call;
    const Activations& x;
    Pool& pool;
    Shares& shares;

    void operator()(int64_t, int thread) const {
        const int threads = pool.num_threads();
        for (int other = thread; other < thread + threads; other++) {
            const int64_t end = shares.end(other % threads);
            for (int64_t first, last; shares.claim(other % threads, first, last);) {
                for (; first < last; first++) multiply(pieces[first], first + 1 < end ? &pieces[first + 1] : nullptr);
            }
        }
    }

  private:
    void multiply(const GroupedPiece& piece, const GroupedPiece* next) const {
        const char* after = next && next->linear ? weights_of(*next->linear, next->unit) : nullptr;
        multiply_units(*piece.linear, call, x, piece.unit, piece.unit + 1, piece.row, piece.end, after);
    }
};

}  // namespace

extern "C" {

void faser_grouped_low_bit(Pool* pool, const FaserAnyLinear* linears, const FaserGroup* groups, int64_t num_groups,
                           const void* x, int64_t x_stride, int32_t x_dtype, int64_t rows, void* out,
                           int64_t out_stride, int32_t out_dtype) {
    static thread_local std::vector<GroupedPiece> pieces;
    static thread_local std::vector<const FaserLowBit*> used;
    pieces.clear();
    used.clear();
    for (const FaserGroup* group = groups; group < groups + num_groups; group++) {
        const FaserLowBit* linear = linears[group->weight].low_bit;
        const int64_t count = group->end - group->begin, row_blocks = (count + most_rows() - 1) / most_rows();
        const int64_t block = (count + row_blocks - 1) / row_blocks;
        for (int64_t unit = 0; unit < num_units(*linear); unit++) {
            for (int64_t row = group->begin; row < group->end; row += block) {
                pieces.push_back({linear, unit, row, std::min(row + block, group->end)});
            }
        }
        used.push_back(linear);
    }
    const FaserProduct call{x, x_stride, rows, out, out_stride, nullptr, 0, out_dtype};
    const Activations quantised = quantise(*pool, call, x_dtype, used.data(), int64_t(used.size()), start_of);
    static thread_local Shares shares;
    shares.deal(int64_t(pieces.size()), pool->num_threads());
    pool->run(pool->num_threads(), GroupedProducts{pieces, call, quantised, *pool, shares});
}

// Tiles of rows that a product with codes of a form makes of this many rows; blocks of them are taken for one.
int64_t faser_low_bit_tiles(int32_t form, int64_t rows) {
#if defined(FASER_TILES)
    if (gains_by_tiles(form, rows)) return (rows + kTileHeight - 1) / kTileHeight;
#endif
    return tiles_of(rows);
}

// following: the product after this one, or null; its first weights are fetched by threads that wait.
void faser_low_bit_linear(Pool* pool, const FaserLowBit* linear, const void* x, int64_t x_stride, int32_t x_dtype,
                          int64_t rows, void* out, int64_t out_stride, int32_t out_dtype, const void* residual,
                          int64_t residual_stride, const FaserLowBit* following) {
    if (rows == 0) return;
    const FaserProduct call{x, x_stride, rows, out, out_stride, residual, residual_stride, out_dtype};
    const Activations quantised = quantise(*pool, call, x_dtype, *linear, start_of);
    if (rows > most_rows()) return multiply_blocks(*pool, *linear, call, quantised);
    static thread_local Shares shares;
    shares.deal(num_units(*linear), pool->num_threads());
    pool->run(pool->num_threads(), SharedProduct{*linear, call, quantised, following, *pool, shares});
}
}
