// Low-bit products of a block of rows by the tiles of AMX, with the bits of product.cpp: sums of bytes are exact in
// both, and floats take them in the same order.
//
// A job is up to 16 rows times a span of a panel: a dot and a store for every group, as each has its own scale. The
// floats of the job before stand between them, so that tiles and vectors work at the same time. Sums of two jobs stay
// in the first-level cache; a span is unpacked once for all rows of the block.
#pragma once

#include "../tiles.h"

#if defined(FASER_TILES)

#include "activations.h"
#include "codes.h"

namespace faser {

constexpr int64_t kTileBlockRows = 256;  // most rows of a block

// A span of a panel as tiles read it. Codes are less their zero point: 4 values of 16 columns a line of a tile.
struct TileWeights {
    alignas(64) int8_t codes[kSpan * kPanel];
    FactorTable<1, kGroups16> factors;
    alignas(64) float super_scales[kPanel], super_minimums[kPanel];
};

template <int C>
void unpack(const FaserLowBitPart& part, const char* span, int64_t values, TileWeights& to) {
    using Codes = CodesOf<C>;
    const SpanLayout layout = span_layout(part, values);
    const __m512i zero = _mm512_set1_epi8(char(part.zero_point));
    const auto put = [&](int64_t value, vi codes) {
        _mm512_store_si512((__m512i*)(to.codes + value * kPanel), _mm512_sub_epi8((__m512i)codes, zero));
    };
    for (int64_t value = 0; value < values; value += Codes::kGroup, span += Codes::kBytes) {
#pragma GCC unroll 4
        for (int pair = 0; pair < Codes::kPairs; pair++) {
            vi first, second;
            read_pair<C>(span, pair, 0, first, second);
            put(value + Codes::first(pair), first);
            put(value + Codes::second(pair), second);
        }
    }
    span -= layout.scales;
    to.factors.read<Codes::kGroup>(part, layout, span, 0, values / Codes::kGroup);
    if (part.factors != kIntegers) return;
    store(to.super_scales, load_halves(span + layout.super_scales));
    if (part.has_minimums) store(to.super_minimums, load_halves(span + layout.super_minimums));
}

inline decltype(&unpack<kNibbles>) unpack_of(int32_t form) {
    switch (form) {
        case kNibbles:
            return unpack<kNibbles>;
        case kTable:
            return unpack<kTable>;
        case kBytes:
            return unpack<kBytes>;
        case kSixes:
            return unpack<kSixes>;
        case kFloats4:
            return unpack<kFloats4>;
        default:
            return unpack<kSixes16>;
    }
}

// Rows of a tile times a span. Those before `first` have been added by the job before. ahead: weights to fetch.
struct TileJob {
    const TileWeights* weights;
    const int8_t* x;        // [rows, kSpan]
    const float* x_scales;  // [rows, kStretches]
    const float* x_sums;    // [rows, kGroups32]; with superblocks times x_scales
    float* totals;          // [rows, 16]
    int32_t* sums;          // [groups][16 rows][16]
    int first, rows, groups;
    const char* ahead;
    int ahead_lines;
};

// What follows the sums of a row, in the order of add_stretch and add_superblock.
template <int Group, bool Super, bool Minimums>
struct TileRow {
    const TileJob& job;
    const float *scales, *minimums, *x_scales, *x_sums;
    const int32_t* sums;

    TileRow(const TileJob& of, int row)
        : job(of), scales(of.weights->factors.scales), minimums(of.weights->factors.minimums),
          x_scales(of.x_scales + row * kStretches), x_sums(of.x_sums + row * kGroups32), sums(of.sums + row * kPanel) {}

    vf sum(int g) const { return floats_of(*(const vi*)(sums + g * kTileSums)); }
    vf first(int g) const { return load(scales + g * kPanel) * sum(g); }
    vf next(int g, vf partial) const { return fma(load(scales + g * kPanel), sum(g), partial); }
    vf lowered(int g, vf partial) const {
        return fma(load(minimums + g * kPanel), everywhere(x_sums + g), partial);
    }

    // Without superblocks; groups: a number, or a constant.
    template <class Groups>
    vf add_stretches(vf total, Groups groups) const {
#pragma GCC unroll 4
        for (int s = 0; 2 * s < groups; s++) {
            vf partial = first(2 * s);
            if (Minimums) partial = lowered(2 * s, partial);
            if (2 * s + 1 < groups) {
                partial = next(2 * s + 1, partial);
                if (Minimums) partial = lowered(2 * s + 1, partial);
            }
            total = fma(everywhere(x_scales + s), partial, total);
        }
        return total;
    }

    vf add_superblock(vf total) const {
        vf scaled = {};
#pragma GCC unroll 4
        for (int s = 0; s < kStretches; s++) {
            constexpr int n = kScaled / Group;
            vf weighed = next(n * s + 1, first(n * s));
            if (n == 4) weighed += next(n * s + 3, first(n * s + 2));
            scaled = fma(everywhere(x_scales + s), weighed, scaled);
        }
        total = fma(load(job.weights->super_scales), scaled, total);
        if (!Minimums) return total;
        vf all = {};
#pragma GCC unroll 8
        for (int g = 0; g < kGroups32; g++) all = lowered(g, all);
        return fma(load(job.weights->super_minimums), all, total);
    }
};

template <int Group, bool Super, bool Minimums>
inline __attribute__((always_inline)) void add_row(const TileJob& job, int row) {
    const TileRow<Group, Super, Minimums> of(job, row);
    float* at = job.totals + row * kPanel;
    if constexpr (Super) {
        store(at, of.add_superblock(load(at)));
    } else if (job.groups == kSpan / Group) {
        store(at, of.add_stretches(load(at), std::integral_constant<int, kGroups32>()));
    } else {
        store(at, of.add_stretches(load(at), job.groups));
    }
}

// Sums of tiles 0 ... 3 in turn; A: 4 and 5, B: 6 and 7. groups: a number, or the constant of a whole span, whose sums
// are stored two groups after their dot, which does not wait for them then.
template <class Tiles, int Group, bool Super, bool Minimums, class Groups>
inline __attribute__((always_inline)) void run_job(const TileJob& job, const TileJob& before, Groups groups) {
    constexpr bool kWhole = !std::is_same_v<Groups, int>;
    constexpr int kRowsAGroup = kTileHeight * Group / kSpan;
    int row = before.first;
    const auto step = [&](int first, auto place) {
        constexpr int C = decltype(place)::value, A = 4 + C % 2, B = 6 + C % 2;
        const int g = first + C;
        if (!kWhole && g >= groups) return;
        Tiles::template zero<C>();
        Tiles::template load<A>(job.x + g * Group, kSpan);
        Tiles::template load<B>(job.weights->codes + g * Group * kPanel, kTileBytes);
        Tiles::template dot_ss<C, A, B>();
        if (!kWhole) {
            Tiles::template store<C>(job.sums + g * kTileSums, kTileBytes);
        } else if (C >= 2 || first > 0) {
            Tiles::template store<(C + 2) % 4>(job.sums + (g - 2) * kTileSums, kTileBytes);
        }
        for (int line = g; line < job.ahead_lines; line += groups) {
            __builtin_prefetch(job.ahead + line * kStepBytes, 0, 2);
        }
#pragma GCC unroll 2
        for (int i = 0; i < kRowsAGroup; i++) {
            if (row < before.rows) add_row<Group, Super, Minimums>(before, row++);
        }
    };
    for (int g = 0; g < groups; g += 4) {
        step(g, std::integral_constant<int, 0>());
        step(g, std::integral_constant<int, 1>());
        step(g, std::integral_constant<int, 2>());
        step(g, std::integral_constant<int, 3>());
    }
    if (kWhole) {
        Tiles::template store<2>(job.sums + (groups - 2) * kTileSums, kTileBytes);
        Tiles::template store<3>(job.sums + (groups - 1) * kTileSums, kTileBytes);
    } else {
        for (; row < before.rows; row++) add_row<Group, Super, Minimums>(before, row);
    }
}

// Of one thread.
struct TileMemory {
    TileWeights weights[2];  // of this span and the one before
    alignas(64) int32_t sums[2][kGroups16 * kTileSums];
    alignas(64) float totals[kTileBlockRows * kPanel];

    static TileMemory& mine() {
        static thread_local TileMemory memory;
        return memory;
    }
};

// Rows [row, end), at most kTileBlockRows, with a panel. Tiles are as high as each other: the last one begins within
// the one before. ahead: as many bytes as the panel has to fetch meanwhile, or null.
template <class Tiles, int Group, bool Super, bool Minimums>
void multiply_panel_in_tiles(const FaserLowBit& linear, const FaserLowBitPart& part, const Activations& x,
                             const char* span, int64_t row, int64_t height, int64_t count, const char* ahead,
                             TileMemory& memory) {
    const auto read = unpack_of(part.form);
    const int64_t tiles = (count + height - 1) / height;
    std::memset((void*)memory.totals, 0, count * kPanel * sizeof(float));
    TileJob before{};
    int64_t number = 0;
    for (int64_t depth = 0, place = row; depth < linear.depth; depth += kSpan, place += x.rows) {
        const int64_t values = std::min(kSpan, linear.depth - depth), bytes = span_layout(part, values).bytes;
        TileWeights& weights = memory.weights[depth / kSpan % 2];
        read(part, span, values, weights);
        for (int64_t tile = 0; tile < tiles; tile++, number++) {
            const int64_t at = std::min(tile * height, count - height), lines = ahead ? bytes / kStepBytes : 0;
            const int64_t fetched = lines * tile / tiles;
            const TileJob job{&weights,
                              x.codes + (place + at) * kSpan,
                              x.scales + (place + at) * kStretches,
                              (Super ? x.scaled_sums : x.sums) + (place + at) * kGroups32,
                              memory.totals + at * kPanel,
                              memory.sums[number % 2],
                              int(tile * height - at),
                              int(height),
                              int(values / Group),
                              ahead + fetched * kStepBytes,
                              int(lines * (tile + 1) / tiles - fetched)};
            if (Super || values == kSpan) {
                run_job<Tiles, Group, Super, Minimums>(job, before, std::integral_constant<int, kSpan / Group>());
            } else {
                run_job<Tiles, Group, Super, Minimums>(job, before, job.groups);
            }
            before = job;
        }
        span += bytes;
        if (ahead) ahead += bytes;
    }
    for (int r = before.first; r < before.rows; r++) add_row<Group, Super, Minimums>(before, r);
}

// Whether tiles are faster for codes of a form and this many rows. A store takes longer than its dot, so they gain less
// over VNNI the cheaper its codes are to read.
inline bool gains_by_tiles(int32_t form, int64_t rows) {
    return tile_kind != kEmulatedTiles && rows >= (bits_of(form) == 4 ? 12 : 64);
}

// Whether tiles multiply a part with this many rows. Codes less their zero point have to be signed bytes.
inline bool is_for_tiles(const FaserLowBitPart& part, int64_t rows) {
    static constexpr int kLargest[] = {15, 241, 255, 63, 63, 24};  // codes of each form
    if (!gains_by_tiles(part.form, rows)) return false;
    return part.zero_point <= 128 && kLargest[part.form] - part.zero_point <= 127;
}

// Most rows of a block.
inline int64_t most_block_rows(int64_t without_tiles) {
    return tile_kind == kEmulatedTiles ? without_tiles : kTileBlockRows;
}

// Rows [row, end), at most kTileBlockRows, with panels [panel, last) of a part. after: weights that this thread needs
// next, or null.
inline void multiply_in_tiles(const FaserLowBit& linear, const FaserLowBitPart& part, const FaserProduct& call,
                              const Activations& x, int64_t panel, int64_t last, int64_t row, int64_t end,
                              const char* after) {
    const int64_t count = end - row, tiles = (count + kTileHeight - 1) / kTileHeight;
    const int height = int((count + tiles - 1) / tiles), group = int(group_of(part.form));
    const int64_t bytes = low_bit_panel_bytes(part, linear.depth);
    TileConfig config;
    for (int t = 0; t < 4; t++) config.set(t, height, kTileBytes);
    for (int t = 4; t < 6; t++) config.set(t, height, group);
    for (int t = 6; t < 8; t++) config.set(t, group / 4, kTileBytes);
    TileMemory& memory = TileMemory::mine();
    with_tiles([&](auto kind) {
        using Tiles = decltype(kind);
        const TileScope<Tiles> scope(config);
        for (; panel < last && panel * kPanel < part.columns; panel++) {
            const auto multiply = [&](auto function) {
                const char* ahead = panel + 1 < last ? part.panels + (panel + 1) * bytes : after;
                function(linear, part, x, part.panels + panel * bytes, row, height, count, ahead, memory);
            };
            if (part.form == kSixes16) {
                multiply(multiply_panel_in_tiles<Tiles, 16, true, false>);
            } else if (part.factors == kIntegers) {
                multiply(part.has_minimums ? multiply_panel_in_tiles<Tiles, 32, true, true>
                                           : multiply_panel_in_tiles<Tiles, 32, true, false>);
            } else {
                multiply(part.has_minimums ? multiply_panel_in_tiles<Tiles, 32, false, true>
                                           : multiply_panel_in_tiles<Tiles, 32, false, false>);
            }
            finish(call, linear.bias, part.first + part.columns, row, int(count), part.first + panel * kPanel,
                   memory.totals, kPanel);
        }
    });
}

}  // namespace faser

#endif
