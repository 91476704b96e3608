// The attention of one span over keys and values in the type of activations, bf16 or float.
#pragma once

#include "span.h"
#include "tile_span.h"

namespace faser {

// Queries of a tile, [rows * group, D] without gaps.
template <class T>
void gather_queries(const Call& call, const Tile& tile, int64_t head, T* to) {
    const int64_t width = call.group() * call.cache.head_dim;
    for (int64_t row = 0; row < tile.rows; row++, to += width) {
        std::memcpy(to, query_at<T>(call, tile, head, row * call.group()), width * sizeof(T));
    }
}

// A copy of a chunk's values in which the positions outside [begin, end) are 0: 0 times NaN would not be 0.
template <class T>
const char* keep_seen(const Call& call, const char* values, int64_t first, const Tile& tile, char* edge) {
    constexpr int n = Step<T>::kValues;
    const int64_t width = call.cache.head_dim;
    std::memcpy(edge, values, values_bytes(call.cache));
    for (int64_t t = 0; t < kChunk; t++) {
        if (first + t >= tile.begin && first + t < tile.end) continue;
        T* unseen = (T*)edge + t / n * n * width + t % n;
        for (int64_t d = 0; d < width; d++) unseen[d * n] = T{};
    }
    return edge;
}

// Replaces the values of chunks that reach beyond what the tile's rows see: at most the first and the last.
template <class T>
void trim(const Call& call, const Tile& tile, Chunks& chunks, Scratch& scratch) {
    char* edge = scratch.edges.data();
    for (int i = 0; i < chunks.count; i++) {
        const int64_t at = chunks.first + i * kChunk;
        if (at >= tile.begin && at + kChunk <= tile.end) continue;
        chunks.values[i] = keep_seen<T>(call, chunks.values[i], at, tile, edge);
        edge += values_bytes(call.cache);
    }
}

// scores[query][key] = query . key, for `Panels` chunks; rows of scores lie kSpan apart. The first queries prefetch the
// chunks' values, which are needed next: blocks are scattered in memory, so the processor cannot predict them.
template <class T, int Panels>
void score_chunks(const FaserCache& cache, const char* queries, int64_t num_queries, const char* const* keys,
                  const char* const* values, float* scores) {
    const int64_t width = cache.head_dim;
    for (int64_t q = 0; q < num_queries;) {
        const int rows = tile_rows(num_queries - q);
        with_count<kTileRows>(rows, [&](auto count) {
            Sums<count.value, Panels> sums;
            clear(sums);
            const char* x = queries + q * width * sizeof(T);
            const int64_t steps = width / Step<T>::kValues, stride = keys_step(cache);
            if (q == 0) {
                multiply<T, count.value, Panels, true>(x, width * sizeof(T), keys, stride, steps, sums, values);
            } else {
                multiply<T, count.value, Panels>(x, width * sizeof(T), keys, stride, steps, sums);
            }
            spill(sums, scores + q * kSpan, kSpan);
        });
        q += rows;
    }
}

template <class T>
void score(const FaserCache& cache, const char* queries, int64_t num_queries, const Chunks& chunks, float* scores) {
    int c = 0;
    for (; c + kTilePanels <= chunks.count; c += kTilePanels) {
        score_chunks<T, kTilePanels>(cache, queries, num_queries, chunks.keys + c, chunks.values + c, scores + c * kChunk);
    }
    for (; c < chunks.count; c++) {
        score_chunks<T, 1>(cache, queries, num_queries, chunks.keys + c, chunks.values + c, scores + c * kChunk);
    }
}

// Scores to weights 2^(c * score - most); most and total of each query go to the partial result. All maxima come
// first: a processor computes those of several queries at once, but not the weights that wait for one.
template <class T>
void soften(const float* scores, int64_t num_queries, int64_t keys, float c, T* weights, Partial& partial) {
    for (int64_t q = 0; q < num_queries; q++) partial.most[q] = most_of(scores + q * kSpan, keys, c);
    for (int64_t q = 0; q < num_queries; q++) {
        const float* row = scores + q * kSpan;
        if (partial.most[q] == kNothing) {
            partial.total[q] = 0;
            std::fill(weights + q * kSpan, weights + q * kSpan + keys, T{});
            continue;
        }
        vf total = {};
        const vf shift = splat(-partial.most[q]);
        for (int64_t k = 0; k < keys; k += kLanes) {
            vf weight = exp2_bounded(fma(load(row + k), splat(c), shift));
            total += weight;
            store_normal(weights + q * kSpan + k, weight);
        }
        partial.total[q] = sum(total);
    }
}

// values[query][channel] = sum over keys of weight times value, for Panels * 16 channels.
template <class T, int Panels>
void mix_channels(const char* weights, int64_t num_queries, int64_t width, const Chunks& chunks, int64_t channel,
                  float* values) {
    constexpr int steps = kChunk / Step<T>::kValues;
    for (int64_t q = 0; q < num_queries;) {
        const int rows = tile_rows(num_queries - q);
        with_count<kTileRows>(rows, [&](auto count) {
            Sums<count.value, Panels> sums;
            clear(sums);
            for (int c = 0; c < chunks.count; c++) {
                const char* w[Panels];
                for (int p = 0; p < Panels; p++) w[p] = chunks.values[c] + channel * 4 + p * kStepBytes;
                multiply<T>(weights + (q * kSpan + c * kChunk) * sizeof(T), kSpan * sizeof(T), w, width * 4, steps,
                            sums);
            }
            spill(sums, values + q * width + channel, width);
        });
        q += rows;
    }
}

template <class T>
void mix(const char* weights, int64_t num_queries, int64_t width, const Chunks& chunks, float* values) {
    int64_t channel = 0;
    for (; channel + kTilePanels * kPanel <= width; channel += kTilePanels * kPanel) {
        mix_channels<T, kTilePanels>(weights, num_queries, width, chunks, channel, values);
    }
    for (; channel < width; channel += kPanel) {
        mix_channels<T, 1>(weights, num_queries, width, chunks, channel, values);
    }
}

inline bool has_nan(const float* values, int64_t count) {
    vi found{};
    for (int64_t i = 0; i < count; i += kLanes) found |= load(values + i) != load(values + i);
    for (int i = 0; i < kLanes; i++) {
        if (found[i]) return true;
    }
    return false;
}

template <class T>
struct FloatSpan {
    static void gather(const Call& call, const Tile& tile, int64_t head, Scratch& scratch) {
        gather_queries(call, tile, head, (T*)scratch.queries.data());
    }

    static void score_all(const Call& call, int64_t queries, const Chunks& chunks, Scratch& scratch) {
        const char* from = scratch.queries.data();
#if defined(FASER_TILES)
        if constexpr (kInTiles<T>) {
            return with_tiles([&](auto tiles) {
                score_in_tiles<decltype(tiles)>(call.cache, from, queries, chunks, scratch.scores.data());
            });
        }
#endif
        score<T>(call.cache, from, queries, chunks, scratch.scores.data());
    }

    static void mix_all(const Call& call, int64_t queries, const Chunks& chunks, Scratch& scratch, float* values) {
        const char* weights = scratch.weights.data();
        const int64_t width = call.cache.head_dim;
#if defined(FASER_TILES)
        if constexpr (kInTiles<T>) {
            return with_tiles([&](auto tiles) {
                mix_in_tiles<decltype(tiles)>(weights, queries, width, chunks, values);
            });
        }
#endif
        mix<T>(weights, queries, width, chunks, values);
    }

    static void attend(const Call& call, const Tile& tile, int64_t head, int span, Scratch& scratch,
                       Partial partial) {
        const int64_t queries = tile.rows * call.group(), width = call.cache.head_dim;
        float* scores = scratch.scores.data();
        Chunks chunks = find_chunks(call, tile, head, span);
        trim<T>(call, tile, chunks, scratch);
        score_all(call, queries, chunks, scratch);
        if (call.heads.score_cap) {
            for (int64_t q = 0; q < queries; q++) {
                cap_scores(call.heads.score_cap, call.heads.scale, scores + q * kSpan, chunks.count * kChunk);
            }
        }
        hide_unseen(call, tile, chunks, scores);
        soften(scores, queries, chunks.count * kChunk, call.heads.scale * kLog2e, (T*)scratch.weights.data(), partial);
        mix_all(call, queries, chunks, scratch, partial.values);
        if (tile.rows > 1 && has_nan(partial.values, queries * width)) {
            attend_row_by_row(call, tile, head, span, scratch, partial);
        }
    }

    // A value that is not a number counts only for rows that see it: here the others do not read it at all.
    static void attend_row_by_row(const Call& call, const Tile& tile, int64_t head, int span, Scratch& scratch,
                                  Partial partial) {
        for (int32_t i = 0; i < tile.rows; i++) {
            const int32_t position = call.plan.positions[tile.row + i];
            const int32_t seen_from = call.heads.window ? position - int32_t(call.heads.window) + 1 : 0;
            const int32_t end = call.plan.seen_to[tile.row + i] + 1;
            const Tile own{tile.sequence, tile.row + i, 1, std::max(seen_from, 0), end, -1};
            if (span < own.first_span() || span > own.last_span()) continue;
            const int64_t first = i * call.group();
            gather(call, own, head, scratch);
            attend(call, own, head, span, scratch,
                   {partial.most + first, partial.total + first, partial.values + first * call.cache.head_dim});
        }
        gather(call, tile, head, scratch);
    }
};

}  // namespace faser
