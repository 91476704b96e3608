// Scores and weighted values of one span by the tiles of AMX, over keys and values in bf16: blocks of the cache hold B
// tiles as they lie.
//
// A step of values is a chunk, half as deep as a tile could be: the chunks of small blocks lie apart. A step of keys is
// 32 channels, or 16 of a head that is no multiple of 32.
#pragma once

#include "span.h"
#include "../tile_product.h"

#if defined(FASER_TILES)

namespace faser {

// Calls multiply(first, rows) for all queries, in as few tiles as hold them.
template <class Tiles, class Multiply>
inline void for_tiles_of_rows(int64_t count, int depth, const Multiply& multiply) {
    for (int64_t first = 0; first < count; first += kTilesRows) {
        const int rows = int(std::min<int64_t>(kTilesRows, count - first));
        const TileScope<Tiles> scope(product_tiles(rows, depth));
        multiply(first, rows);
    }
}

// scores[query][key] = query . key; rows of scores lie kSpan apart. Meanwhile values are prefetched, which are needed
// next.
template <class Tiles>
void score_in_tiles(const FaserCache& cache, const char* queries, int64_t num_queries, const Chunks& chunks,
                    float* scores) {
    const int depth = cache.head_dim % kTileDepth ? kTileDepth / 2 : kTileDepth;
    const int64_t steps = cache.head_dim / depth, stride = keys_step(cache), bytes = cache.head_dim * 2;
    for_tiles_of_rows<Tiles>(num_queries, depth, [&](int64_t first, int rows) {
        for (int c = 0; c < chunks.count; c += tile_panels(rows)) {
            const int panels = std::min(tile_panels(rows), chunks.count - c);
            for (int p = 0; first == 0 && p < panels; p++) {
                for (int64_t at = 0; at < values_bytes(cache); at += 64) __builtin_prefetch(chunks.values[c + p] + at, 0, 2);
            }
            const auto at = [&](int p, int64_t s) { return chunks.keys[c + p] + s * (depth / 2) * stride; };
            const TileOperands of{queries + first * bytes, bytes, at, stride, depth * 2};
            multiply_tiles<Tiles>(of, rows, panels, steps, scores + first * kSpan + c * kChunk, kSpan, false);
        }
    });
}

// values[query][channel] = sum over keys of weight times value.
template <class Tiles>
void mix_in_tiles(const char* weights, int64_t num_queries, int64_t width, const Chunks& chunks, float* values) {
    for_tiles_of_rows<Tiles>(num_queries, kChunk, [&](int64_t first, int rows) {
        for (int64_t channel = 0; channel < width; channel += tile_panels(rows) * kPanel) {
            const int panels = int(std::min<int64_t>(tile_panels(rows), (width - channel) / kPanel));
            const auto at = [&](int p, int64_t c) { return chunks.values[c] + (channel + p * kPanel) * 4; };
            const TileOperands of{weights + first * kSpan * 2, kSpan * 2, at, width * 4, kChunk * 2};
            multiply_tiles<Tiles>(of, rows, panels, chunks.count, values + first * width + channel, width, false);
        }
    });
}

}  // namespace faser

#endif
