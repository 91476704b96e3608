// The attention of one span over keys and values in int8.
//
// Queries, and weights times the scales of values, are rounded to 15 bits with one unit a query (and span); then
// scores and sums of values are exact integers. So it does not matter in which order or company they are added.
// kernels/interface/kv_cache.py states what the rounding costs.
#pragma once

#include "int8.h"
#include "int8_tiles.h"
#include "span.h"

namespace faser {

// Rows of the next tile when `left` remain, as even as possible.
template <int Most>
int even_rows(int64_t left) {
    const int64_t tiles = (left + Most - 1) / Most;
    return int((left + tiles - 1) / tiles);
}

// Queries of a tile as integers, [rows * group, D]. units: what one is worth; offsets: makes up for the 128 that keys
// are stored with.
template <class T>
void round_queries(const Call& call, const Tile& tile, int64_t head, Scratch& scratch) {
    const int64_t width = call.cache.head_dim;
    for (int64_t q = 0; q < tile.rows * call.group(); q++) {
        const T* query = query_at<T>(call, tile, head, q);
        const Rounding rounding(largest_bits(query, width), kMostQuery);
        char* to = scratch.queries.data() + q * 2 * width;
        vu total{};
        for (int64_t d = 0; d < width; d += kLanes) {
            const vi x = round_to_int(load(query + d) * rounding.factor);
            Wide<true>::put(to, d, width, x);
            total += (vu)x;
        }
        uint32_t sum = 0;
        for (int i = 0; i < kLanes; i++) sum += total[i];
        scratch.units[q] = rounding.unit;
        scratch.offsets[q] = int32_t(-128 * sum);
    }
}

// scores[query][key] = query . key in units of the query, from chunk c on. Prefetches values.
template <int Most, int Panels>
void score_int8_chunks(const FaserCache& cache, const Scratch& scratch, int64_t num_queries, const Chunks& chunks,
                       int c, float* scores) {
    const int64_t width = cache.head_dim;
    const char* ahead[Panels];
    for (int p = 0; p < Panels; p++) ahead[p] = chunks.keys[std::min(c + kAhead + p, chunks.count - 1)];
    vf scales[Panels * kParts];
    for (int i = 0; i < Panels * kParts; i++) scales[i] = load(chunks.key_scales[c + i / kParts] + i % kParts * kLanes);
    for (int64_t q = 0; q < num_queries;) {
        const int rows = even_rows<Most>(num_queries - q);
        with_count<Most>(rows, [&](auto count) {
            WideSums<true, count.value, Panels> sums;
#pragma GCC unroll 8
            for (int r = 0; r < count.value; r++) {
#pragma GCC unroll 16
                for (int i = 0; i < Panels * kParts; i++) sums.at[r][i] = Wide<true>::start(scratch.offsets[q + r]);
            }
            multiply_wide<true, count.value, Panels, true>(scratch.queries.data() + q * 2 * width, width, 0,
                                                           chunks.keys + c, keys_step(cache), width / 4, sums,
                                                           chunks.values + c, ahead);
#pragma GCC unroll 8
            for (int r = 0; r < count.value; r++) {
#pragma GCC unroll 16
                for (int i = 0; i < Panels * kParts; i++) {
                    store(scores + (q + r) * kSpan + c * kChunk + i * kLanes, Wide<true>::total(sums.at[r][i]) * scales[i]);
                }
            }
        });
        q += rows;
    }
}

template <int Most, int Panels>
void score_int8(const FaserCache& cache, const Scratch& scratch, int64_t num_queries, const Chunks& chunks,
                float* scores) {
    int c = 0;
    for (; c + Panels <= chunks.count; c += Panels) {
        score_int8_chunks<Most, Panels>(cache, scratch, num_queries, chunks, c, scores);
    }
    for (; c < chunks.count; c++) score_int8_chunks<Most, 1>(cache, scratch, num_queries, chunks, c, scores);
}

// Scores to weights 2^(c * score - most) times the scales of values, as integers. What has weight 0 stays 0 whatever
// the scale: it may be unseen, and stale.
inline void soften_int8(const Call& call, int64_t num_queries, const Chunks& chunks, Scratch& scratch,
                        Partial& partial) {
    const int64_t keys = int64_t(chunks.count) * kChunk;
    const auto unit = [&](int64_t q) { return scratch.units[q] * (call.heads.scale * kLog2e); };
    for (int64_t q = 0; q < num_queries; q++) {  // as in soften
        partial.most[q] = most_of(scratch.scores.data() + q * kSpan, keys, unit(q));
    }
    for (int64_t q = 0; q < num_queries; q++) {
        float* row = scratch.scores.data() + q * kSpan;
        const float c = unit(q);
        partial.total[q] = 0;
        vu largest{};
        if (partial.most[q] == kNothing) {
            std::fill(row, row + keys, 0.0f);
        } else {
            vf total = {};
            const vf shift = splat(-partial.most[q]);
            for (int64_t k = 0; k < keys; k += kLanes) {
                const vf weight = exp2_bounded(fma(load(row + k), splat(c), shift));
                const vf scale = load(chunks.value_scales[k / kChunk] + k % kChunk);
                total += weight;
                const vf scaled = weight == 0.0f ? vf{} : weight * scale;
                largest = larger_bits(largest, scaled);
                store(row + k, scaled);
            }
            partial.total[q] = sum(total);
        }
        const Rounding rounding(largest_bits(largest), kMostWeight);
        char* to = scratch.weights.data() + q * 2 * kSpan;
        for (int64_t k = 0; k < keys; k += kLanes) {
            Wide<false>::put(to, k, kSpan, round_to_int(load(row + k) * rounding.factor));
        }
        scratch.weight_units[q] = rounding.unit;
    }
}

// values[query][channel] = sum over keys of weight times value, for Panels * 16 channels.
template <int Most, int Panels>
void mix_int8_channels(const Scratch& scratch, int64_t num_queries, int64_t width, const Chunks& chunks,
                       int64_t channel, float* values) {
    constexpr int steps = kChunk / 4;
    for (int64_t q = 0; q < num_queries;) {
        const int rows = even_rows<Most>(num_queries - q);
        with_count<Most>(rows, [&](auto count) {
            WideSums<false, count.value, Panels> sums;
#pragma GCC unroll 8
            for (int r = 0; r < count.value; r++) {
#pragma GCC unroll 16
                for (int i = 0; i < Panels * kParts; i++) sums.at[r][i] = Wide<false>::start(0);
            }
            for (int c = 0; c < chunks.count; c++) {
                const char* w[Panels];
                for (int p = 0; p < Panels; p++) w[p] = chunks.values[c] + channel * 4 + p * kStepBytes;
                multiply_wide<false, count.value, Panels>(scratch.weights.data() + q * 2 * kSpan, kSpan, c * steps, w,
                                                          width * 4, steps, sums);
            }
#pragma GCC unroll 8
            for (int r = 0; r < count.value; r++) {
#pragma GCC unroll 16
                for (int i = 0; i < Panels * kParts; i++) {
                    store(values + (q + r) * width + channel + i * kLanes,
                          Wide<false>::total(sums.at[r][i]) * scratch.weight_units[q + r]);
                }
            }
        });
        q += rows;
    }
}

template <int Most, int Panels>
void mix_int8(const Scratch& scratch, int64_t num_queries, int64_t width, const Chunks& chunks, float* values) {
    int64_t channel = 0;
    for (; channel + Panels * kPanel <= width; channel += Panels * kPanel) {
        mix_int8_channels<Most, Panels>(scratch, num_queries, width, chunks, channel, values);
    }
    for (; channel < width; channel += kPanel) {
        mix_int8_channels<Most, 1>(scratch, num_queries, width, chunks, channel, values);
    }
}

template <class T>
struct Int8Span {
    static void gather(const Call& call, const Tile& tile, int64_t head, Scratch& scratch) {
        round_queries<T>(call, tile, head, scratch);
    }

    static void score_all(const Call& call, int64_t queries, const Chunks& chunks, Scratch& scratch) {
        float* scores = scratch.scores.data();
#if defined(FASER_TILES)
        if (is_for_byte_tiles(queries)) {
            return with_tiles([&](auto tiles) {
                score_int8_in_tiles<decltype(tiles)>(call.cache, scratch, queries, chunks, scores);
            });
        }
#endif
        if (queries <= kFewRows) return score_int8<kFewRows, kFewRowsPanels>(call.cache, scratch, queries, chunks, scores);
        score_int8<kWideRows, kWidePanels>(call.cache, scratch, queries, chunks, scores);
    }

    static void mix_all(const Call& call, int64_t queries, const Chunks& chunks, Scratch& scratch, float* values) {
        const int64_t width = call.cache.head_dim;
#if defined(FASER_TILES)
        if (is_for_byte_tiles(queries)) {
            return with_tiles([&](auto tiles) {
                mix_int8_in_tiles<decltype(tiles)>(call.cache, scratch, queries, chunks, values);
            });
        }
#endif
        if (queries <= kFewRows) return mix_int8<kFewRows, kFewRowsPanels>(scratch, queries, width, chunks, values);
        mix_int8<kWideRows, kWidePanels>(scratch, queries, width, chunks, values);
    }

    static void attend(const Call& call, const Tile& tile, int64_t head, int span, Scratch& scratch,
                       Partial partial) {
        const int64_t queries = tile.rows * call.group();
        float* scores = scratch.scores.data();
        const Chunks chunks = find_chunks(call, tile, head, span);
        score_all(call, queries, chunks, scratch);
        if (call.heads.score_cap) {
            for (int64_t q = 0; q < queries; q++) {
                cap_scores(call.heads.score_cap, scratch.units[q] * call.heads.scale, scores + q * kSpan,
                           chunks.count * kChunk);
            }
        }
        hide_unseen(call, tile, chunks, scores);
        soften_int8(call, queries, chunks, scratch, partial);
        mix_all(call, queries, chunks, scratch, partial.values);
    }
};

}  // namespace faser
