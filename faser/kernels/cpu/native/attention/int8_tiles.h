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

// sums [panel][high, low][16 rows][16] = numbers x times one or two panels of bytes; see Wide. A row of x is `count` high
// bytes, then the low ones. at(p, s): step s of a panel, `depth` values of lines that lie `stride` apart.
template <class Tiles, bool Unsigned, int Panels, class At>
void multiply_bytes(const char* x, int64_t count, int64_t depth, int64_t steps, const At& at, int64_t stride,
                    int32_t* sums) {
    Tiles::template zero<0>();
    Tiles::template zero<1>();
    if constexpr (Panels > 1) {
        Tiles::template zero<2>();
        Tiles::template zero<3>();
    }
    for (int64_t s = 0; s < steps; s++, x += depth) {
        Tiles::template load<4>(x, 2 * count);
        Tiles::template load<6>(at(0, s), stride);
        dot_wide<Tiles, Unsigned, 0, 4, 6>();
        Tiles::template load<5>(x + count, 2 * count);
        dot_wide<Tiles, Unsigned, 1, 5, 6>();
        if constexpr (Panels > 1) {
            Tiles::template load<7>(at(1, s), stride);
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

// Calls write(row, panel, whole number) for the sums of `panels` panels, of 1 or 2.
template <class Tiles, bool Unsigned, class At, class Write>
inline void multiply_panels(const char* x, int64_t count, int64_t depth, int64_t steps, const At& at, int64_t stride,
                            int64_t rows, int panels, const Write& write) {
    alignas(64) int32_t sums[4 * kTileSums];
    if (panels > 1) {
        multiply_bytes<Tiles, Unsigned, 2>(x, count, depth, steps, at, stride, sums);
    } else {
        multiply_bytes<Tiles, Unsigned, 1>(x, count, depth, steps, at, stride, sums);
    }
    for (int p = 0; p < panels; p++) {
        for (int64_t r = 0; r < rows; r++) {
            const vu* high = (const vu*)(sums + 2 * p * kTileSums + r * kPanel);
            const vu* low = (const vu*)(sums + (2 * p + 1) * kTileSums + r * kPanel);
            write(r, p, (*high << Wide<Unsigned>::kShift) + *low);
        }
    }
}

// As score_int8.
template <class Tiles>
void score_int8_in_tiles(const FaserCache& cache, const Scratch& scratch, int64_t num_queries, const Chunks& chunks,
                         float* scores) {
    const int64_t width = cache.head_dim, stride = keys_step(cache);
    int64_t steps = (width + kTileBytes - 1) / kTileBytes;
    while (width / 4 % steps) steps++;
    const int64_t depth = width / steps;
    for_byte_tiles<Tiles>(num_queries, depth, [&](int64_t first, int64_t rows) {
        const char* x = scratch.queries.data() + first * 2 * width;
        for (int c = 0; c < chunks.count; c += 2) {
            const int panels = std::min(2, chunks.count - c);
            for (int p = 0; first == 0 && p < panels; p++) {
                const char* ahead = chunks.keys[std::min(c + p + kAhead, chunks.count - 1)];
                for (int64_t line = 0; line < width / 4; line++) {
                    __builtin_prefetch(chunks.values[c + p] + line * kStepBytes, 0, 2);
                    __builtin_prefetch(ahead + line * stride, 0, 2);
                }
            }
            const auto at = [&](int p, int64_t s) { return chunks.keys[c + p] + s * (depth / 4) * stride; };
            multiply_panels<Tiles, true>(x, width, depth, steps, at, stride, rows, panels, [&](int64_t r, int p, vu sum) {
                const vf score = __builtin_convertvector((vi)(sum + uint32_t(scratch.offsets[first + r])), vf);
                store(scores + (first + r) * kSpan + (c + p) * kChunk, score * load(chunks.key_scales[c + p]));
            });
        }
    });
}

// As mix_int8. Weights are set to zero up to a whole tile; values there may be anything. Values of chunks that are not
// neighbours in memory are copied.
template <class Tiles>
void mix_int8_in_tiles(const FaserCache& cache, Scratch& scratch, int64_t num_queries, const Chunks& chunks,
                       float* values) {
    const int64_t width = cache.head_dim, bytes = values_bytes(cache);
    const int64_t steps = (chunks.count + kChunksOfTile - 1) / kChunksOfTile;
    const int64_t keys = int64_t(chunks.count) * kChunk, rest = steps * kTileBytes - keys;
    for (int64_t half = 0; rest && half < 2 * num_queries; half++) {
        std::memset(scratch.weights.data() + half * kSpan + keys, 0, rest);
    }
    Scratch::grow(scratch.tiles, steps * kChunksOfTile * bytes);
    const char* tiles[kSpanChunks / kChunksOfTile];
    for (int64_t s = 0; s < steps; s++) {
        const char* const* from = chunks.values + s * kChunksOfTile;
        const int count = int(std::min<int64_t>(kChunksOfTile, chunks.count - s * kChunksOfTile));
        bool together = count == kChunksOfTile;
        for (int i = 1; i < count; i++) together &= from[i] == from[0] + i * bytes;
        char* copy = scratch.tiles.data() + s * kChunksOfTile * bytes;
        for (int i = 0; !together && i < count; i++) std::memcpy(copy + i * bytes, from[i], bytes);
        tiles[s] = together ? from[0] : copy;
    }
    for_byte_tiles<Tiles>(num_queries, kTileBytes, [&](int64_t first, int64_t rows) {
        const char* x = scratch.weights.data() + first * 2 * kSpan;
        for (int64_t channel = 0; channel < width; channel += 2 * kPanel) {
            const int panels = int(std::min<int64_t>(2, (width - channel) / kPanel));
            const auto at = [&](int p, int64_t s) { return tiles[s] + (channel + p * kPanel) * 4; };
            multiply_panels<Tiles, false>(x, kSpan, kTileBytes, steps, at, width * 4, rows, panels,
                                          [&](int64_t r, int p, vu sum) {
                const vf value = __builtin_convertvector((vi)sum, vf) * scratch.weight_units[first + r];
                store(values + (first + r) * width + channel + p * kPanel, value);
            });
        }
    });
}

}  // namespace faser

#endif
