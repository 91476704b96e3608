// Scores and weighted values of one span over keys and values in int8, by tiles of bytes: sums are exact, so their bits
// are those of VNNI.
//
// Numbers of queries and weights are two bytes, with sums of their own in two tiles. Depth is cut into tiles of one
// height that divides it; a tile of values is 64 tokens.
#pragma once

#include "../tiles.h"

#if defined(FASER_TILES)

#include "int8.h"
#include "span.h"

namespace faser {

constexpr int kChunksOfTile = kTileBytes / kChunk;  // of values

// Whether tiles multiply this many queries. Eight take 4 dots and 4 stores of some 10 cycles where VNNI takes 256 or more
// products of half a cycle; a configuration takes some 250 cycles for a span.
inline bool is_for_byte_tiles(int64_t queries) { return tile_kind != kEmulatedTiles && queries >= 8; }

// Rows [first, first + height) at a time: all alike, the last ones perhaps within those before.
template <class Tiles, class Multiply>
inline void for_byte_tiles(int64_t rows, int64_t depth, const Multiply& multiply) {
    const int64_t tiles = (rows + kTileHeight - 1) / kTileHeight, height = (rows + tiles - 1) / tiles;
    TileConfig config;
    for (int t = 0; t < 4; t++) config.set(t, int(height), kTileBytes);
    for (int t = 4; t < 6; t++) config.set(t, int(height), int(depth));
    for (int t = 6; t < 8; t++) config.set(t, int(depth / 4), kTileBytes);
    const TileScope<Tiles> scope(config);
    for (int64_t t = 0; t < tiles; t++) multiply(std::min(t * height, rows - height), height);
}

template <class Tiles, bool Unsigned, int C, int A, int B>
inline __attribute__((always_inline)) void dot_wide() {
    if constexpr (Unsigned) {
        Tiles::template dot_su<C, A, B>();
    } else {
        Tiles::template dot_us<C, A, B>();
    }
}

// sums [panel][high, low][16 rows][16] = numbers x times one or two panels of bytes w; see Wide. A row of x is `count`
// high bytes, then the low ones. A step is `depth` values; its lines of bytes lie `stride` apart, steps w_step.
template <class Tiles, bool Unsigned, int Panels>
inline void multiply_bytes(const char* x, int64_t count, int64_t depth, int64_t steps, const char* const* w,
                           int64_t w_step, int64_t stride, int32_t* sums) {
    const char* first = w[0];
    const char* second = w[Panels - 1];
    Tiles::template zero<0>();
    Tiles::template zero<1>();
    if constexpr (Panels > 1) {
        Tiles::template zero<2>();
        Tiles::template zero<3>();
    }
    for (int64_t s = 0; s < steps; s++, x += depth, first += w_step, second += w_step) {
        Tiles::template load<4>(x, 2 * count);
        Tiles::template load<6>(first, stride);
        dot_wide<Tiles, Unsigned, 0, 4, 6>();
        Tiles::template load<5>(x + count, 2 * count);
        dot_wide<Tiles, Unsigned, 1, 5, 6>();
        if constexpr (Panels > 1) {
            Tiles::template load<7>(second, stride);
            dot_wide<Tiles, Unsigned, 2, 4, 7>();
            dot_wide<Tiles, Unsigned, 3, 5, 7>();
        }
    }
    Tiles::template store<0>(sums, kTileBytes);
    Tiles::template store<1>(sums + kTileSums, kTileBytes);
    if constexpr (Panels > 1) {
        Tiles::template store<2>(sums + 2 * kTileSums, kTileBytes);
        Tiles::template store<3>(sums + 3 * kTileSums, kTileBytes);
    }
}

// What a row's sums are together, modulo 2^32. sums: of a panel.
template <bool Unsigned>
inline vu whole(const int32_t* sums, int64_t row) {
    const vu *high = (const vu*)(sums + row * kPanel), *low = (const vu*)(sums + kTileSums + row * kPanel);
    return (*high << Wide<Unsigned>::kShift) + *low;
}

// As score_int8.
template <class Tiles>
void score_int8_in_tiles(const FaserCache& cache, const Scratch& scratch, int64_t num_queries, const Chunks& chunks,
                         float* scores) {
    alignas(64) int32_t sums[4 * kTileSums];
    const int64_t width = cache.head_dim, stride = keys_step(cache);
    int64_t steps = (width + kTileBytes - 1) / kTileBytes;
    while (width / 4 % steps) steps++;
    const int64_t depth = width / steps, step = depth / 4 * stride;
    for_byte_tiles<Tiles>(num_queries, depth, [&](int64_t first, int64_t rows) {
        const char* x = scratch.queries.data() + first * 2 * width;
        const int32_t* offsets = scratch.offsets.data() + first;
        for (int c = 0; c < chunks.count; c += 2) {
            const int panels = std::min(2, chunks.count - c);
            for (int p = 0; first == 0 && p < panels; p++) {
                const char* ahead = chunks.keys[std::min(c + p + kAhead, chunks.count - 1)];
                for (int64_t line = 0; line < width / 4; line++) {
                    __builtin_prefetch(chunks.values[c + p] + line * kStepBytes, 0, 2);
                    __builtin_prefetch(ahead + line * stride, 0, 2);
                }
            }
            if (panels > 1) {
                multiply_bytes<Tiles, true, 2>(x, width, depth, steps, chunks.keys + c, step, stride, sums);
            } else {
                multiply_bytes<Tiles, true, 1>(x, width, depth, steps, chunks.keys + c, step, stride, sums);
            }
            for (int p = 0; p < panels; p++) {
                const vf scale = load(chunks.key_scales[c + p]);
                float* to = scores + first * kSpan + (c + p) * kChunk;
                for (int64_t r = 0; r < rows; r++, to += kSpan) {
                    const vu sum = whole<true>(sums + 2 * p * kTileSums, r) + uint32_t(offsets[r]);
                    store(to, __builtin_convertvector((vi)sum, vf) * scale);
                }
            }
        }
    });
}

// As mix_int8. Weights are set to zero up to a whole tile; values there may be anything. Values that do not lie together
// are copied.
template <class Tiles>
void mix_int8_in_tiles(const FaserCache& cache, Scratch& scratch, int64_t num_queries, const Chunks& chunks,
                       float* values) {
    alignas(64) int32_t sums[4 * kTileSums];
    const int64_t width = cache.head_dim, bytes = values_bytes(cache), step = kChunksOfTile * bytes;
    const int64_t steps = (chunks.count + kChunksOfTile - 1) / kChunksOfTile;
    const int64_t keys = int64_t(chunks.count) * kChunk, rest = steps * kTileBytes - keys;
    bool together = rest == 0;
    for (int c = 1; c < chunks.count; c++) together &= chunks.values[c] == chunks.values[0] + c * bytes;
    if (!together) Scratch::grow(scratch.tiles, steps * step);
    char* copy = scratch.tiles.data();
    for (int c = 0; !together && c < chunks.count; c++) std::memcpy(copy + c * bytes, chunks.values[c], bytes);
    const char* from = together ? chunks.values[0] : copy;
    for (int64_t half = 0; rest && half < 2 * num_queries; half++) {
        std::memset(scratch.weights.data() + half * kSpan + keys, 0, rest);
    }
    for_byte_tiles<Tiles>(num_queries, kTileBytes, [&](int64_t first, int64_t rows) {
        const char* x = scratch.weights.data() + first * 2 * kSpan;
        const float* units = scratch.weight_units.data() + first;
        for (int64_t channel = 0; channel < width; channel += 2 * kPanel) {
            const int panels = int(std::min<int64_t>(2, (width - channel) / kPanel));
            const char* const w[] = {from + channel * 4, from + channel * 4 + kStepBytes};
            if (panels > 1) {
                multiply_bytes<Tiles, false, 2>(x, kSpan, kTileBytes, steps, w, step, width * 4, sums);
            } else {
                multiply_bytes<Tiles, false, 1>(x, kSpan, kTileBytes, steps, w, step, width * 4, sums);
            }
            for (int p = 0; p < panels; p++) {
                float* to = values + first * width + channel + p * kPanel;
                for (int64_t r = 0; r < rows; r++, to += width) {
                    const vu sum = whole<false>(sums + 2 * p * kTileSums, r);
                    store(to, __builtin_convertvector((vi)sum, vf) * units[r]);
                }
            }
        }
    });
}

}  // namespace faser

#endif
