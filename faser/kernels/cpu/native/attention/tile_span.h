// Scores and weighted values of one span by the tiles of AMX, over keys and values in bf16: blocks of the cache hold B
// tiles as they lie.
//
// Tiles of values are 32 tokens that begin at multiples of 32 positions, whatever the size of blocks: a row's bits
// depend on its keys alone. Tokens that are not among the chunks weigh 0.
#pragma once

#include "span.h"
#include "../tile_product.h"

namespace faser {

// The place of a row's first weight, so that those of a tile's tokens lie together.
template <class T>
inline int first_weight(const Chunks& chunks) {
    return kInTiles<T> ? chunks.first / kChunk % 2 * kChunk : 0;
}

}  // namespace faser

#if defined(FASER_TILES)

namespace faser {

constexpr int kTokensOfTile = 2 * kChunk;
constexpr int kSpanTiles = kSpan / kTokensOfTile + 1;  // at most: the first may begin with its second chunk

// Values from one query to the next: the head's width, with zeros up to whole tiles.
inline int64_t padded_width(int64_t width) { return (width + kTileDepth - 1) / kTileDepth * kTileDepth; }

// Queries of a tile of rows, [rows * group, padded_width].
inline void gather_padded(const Call& call, const Tile& tile, int64_t head, bf16* to) {
    const int64_t width = call.cache.head_dim, padded = padded_width(width);
    for (int64_t q = 0; q < tile.rows * call.group(); q++, to += padded) {
        std::memcpy((void*)to, query_at<bf16>(call, tile, head, q), width * 2);
        std::memset((void*)(to + width), 0, (padded - width) * 2);
    }
}

// Calls multiply(first, rows) for all queries, in as few tiles as hold them.
template <class Tiles, class Multiply>
inline void for_tiles_of_rows(int64_t count, const Multiply& multiply) {
    for (int64_t first = 0; first < count; first += kTilesRows) {
        const int rows = int(std::min<int64_t>(kTilesRows, count - first));
        const TileScope<Tiles> scope(product_tiles(rows));
        multiply(first, rows);
    }
}

// scores[query][key] = query . key; rows of scores lie kSpan apart, queries padded_width. Meanwhile values are
// prefetched, which are needed next.
template <class Tiles>
void score_in_tiles(const FaserCache& cache, const char* queries, int64_t num_queries, const Chunks& chunks,
                    float* scores) {
    alignas(64) static thread_local char rest[kSpanChunks][kTileHeight * kTileBytes];
    const int64_t steps = cache.head_dim / kTileDepth, lines = cache.head_dim % kTileDepth / 2;
    const int64_t stride = keys_step(cache), bytes = padded_width(cache.head_dim) * 2;
    for (int c = 0; lines && c < chunks.count; c++) {
        pad_lines(chunks.keys[c] + steps * kTileHeight * stride, stride, lines, rest[c]);
    }
    for_tiles_of_rows<Tiles>(num_queries, [&](int64_t first, int rows) {
        const char* x = queries + first * bytes;
        for (int c = 0; c < chunks.count; c += tile_panels(rows)) {
            const int panels = std::min(tile_panels(rows), chunks.count - c);
            for (int p = 0; first == 0 && p < panels; p++) {
                for (int64_t at = 0; at < values_bytes(cache); at += 64) __builtin_prefetch(chunks.values[c + p] + at, 0, 2);
            }
            float* to = scores + first * kSpan + c * kChunk;
            const auto at = [&](int p, int64_t s) { return chunks.keys[c + p] + s * kTileHeight * stride; };
            if (steps) multiply_tiles<Tiles>(TileOperands{x, bytes, at, stride}, rows, panels, steps, to, kSpan, false);
            if (!lines) continue;
            const auto last = [&](int p, int64_t) { return rest[c + p]; };
            const TileOperands of{x + steps * kTileBytes, bytes, last, kTileBytes};
            multiply_tiles<Tiles>(of, rows, panels, 1, to, kSpan, steps > 0);
        }
    });
}

// Tiles of the values of a span: two chunks each, where they lie if they are neighbours, else copies.
struct ValueTiles {
    int count;
    const char* at[kSpanTiles];

    ValueTiles(const FaserCache& cache, const Chunks& chunks, std::vector<char>& memory) {
        const int64_t bytes = values_bytes(cache);
        const int odd = chunks.first / kChunk % 2;
        count = (odd + chunks.count + 1) / 2;
        if (int64_t(memory.size()) < count * 2 * bytes) memory.resize(count * 2 * bytes);
        char* copy = memory.data();
        for (int i = 0; i < count; i++, copy += 2 * bytes) {
            const int first = 2 * i - odd, second = first + 1;
            const bool has_first = first >= 0, has_second = second < chunks.count;
            if (has_first && has_second && chunks.values[second] == chunks.values[first] + bytes) {
                at[i] = chunks.values[first];
                continue;
            }
            at[i] = copy;
            put(has_first ? chunks.values[first] : nullptr, bytes, copy);
            put(has_second ? chunks.values[second] : nullptr, bytes, copy + bytes);
        }
    }

  private:
    static void put(const char* from, int64_t bytes, char* to) {
        if (from) return (void)std::memcpy(to, from, bytes);
        std::memset(to, 0, bytes);
    }
};

// values[query][channel] = sum over keys of weight times value. weights: [query][kSpan], those of the chunks from
// first_weight on.
template <class Tiles>
void mix_in_tiles(const FaserCache& cache, char* weights, int64_t num_queries, const Chunks& chunks,
                  std::vector<char>& memory, float* values) {
    const int64_t width = cache.head_dim;
    const ValueTiles tiles(cache, chunks, memory);
    const int from = first_weight<bf16>(chunks), until = from + chunks.count * kChunk;
    for (int64_t q = 0; q < num_queries; q++) {
        char* row = weights + q * kSpan * 2;
        std::memset(row, 0, from * 2);
        std::memset(row + until * 2, 0, (tiles.count * kTokensOfTile - until) * 2);
    }
    for_tiles_of_rows<Tiles>(num_queries, [&](int64_t first, int rows) {
        for (int64_t channel = 0; channel < width; channel += tile_panels(rows) * kPanel) {
            const int panels = int(std::min<int64_t>(tile_panels(rows), (width - channel) / kPanel));
            const auto at = [&](int p, int64_t s) { return tiles.at[s] + (channel + p * kPanel) * 4; };
            const TileOperands of{weights + first * kSpan * 2, kSpan * 2, at, width * 4};
            multiply_tiles<Tiles>(of, rows, panels, tiles.count, values + first * width + channel, width, false);
        }
    });
}

}  // namespace faser

#endif
