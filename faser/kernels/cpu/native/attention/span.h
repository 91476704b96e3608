// What the attention of one span works on: the call, a thread's memory, the chunks to read, the partial result.
#pragma once

#include <algorithm>
#include <limits>

#include "../pool.h"
#include "../tile.h"
#include "cache.h"
#include "plan.h"

extern "C" {

// Mirrored field by field in library.py.
struct FaserHeads {
    int64_t num_heads;
    float scale;
    int64_t window;      // 0: all
    float score_cap;     // c: a score s becomes c tanh(s / c); 0: it stays
    const float* sinks;  // [num_heads], scores that weigh in the sum of the weights and have no value; or null
};
}

namespace faser {

constexpr float kNothing = -std::numeric_limits<float>::infinity();
constexpr float kLog2e = 1.4426950408889634f;
constexpr int kSpanChunks = kSpan / kChunk;

struct Call {
    const FaserCache& cache;
    const FaserPlan& plan;
    const FaserHeads& heads;
    const WorkList& work;
    const char* q;
    int64_t q_stride;  // values
    char* out;
    int64_t out_stride;

    int64_t group() const { return heads.num_heads / cache.num_kv_heads; }
};

// A partial result of `queries` queries: maximum and sum of the weights [queries], then weighted values [queries, D].
struct Partial {
    float* most;
    float* total;
    float* values;

    static int64_t floats(int64_t queries, int64_t width) { return queries * (width + 2); }
    static Partial at(float* memory, int64_t queries) { return {memory, memory + queries, memory + 2 * queries}; }
};

// Memory of one thread, grown to the largest tile it has met. units, offsets, weight_units, tiles (of values): of int8.
struct Scratch {
    std::vector<char> queries, weights, edges, tiles;
    std::vector<float> scores, sums, span, units, weight_units;
    std::vector<int32_t> offsets;

    static Scratch& of(const Call& call, int64_t queries) {
        thread_local Scratch mine;
        const int64_t width = call.cache.head_dim;
        grow(mine.queries, queries * width * 4);
        grow(mine.weights, queries * kSpan * 4);
        grow(mine.edges, 2 * values_bytes(call.cache));
        grow(mine.scores, queries * kSpan);
        grow(mine.sums, Partial::floats(queries, width));
        grow(mine.span, Partial::floats(queries, width));
        grow(mine.units, queries);
        grow(mine.offsets, queries);
        grow(mine.weight_units, queries);
        return mine;
    }

    template <class V>
    static void grow(std::vector<V>& memory, size_t size) {
        if (memory.size() < size) memory.resize(size);
    }
};

// The chunks of one span that a tile reads. Scales: of int8 only.
struct Chunks {
    int64_t first;  // position of the first chunk
    int count;
    const char* keys[kSpanChunks];
    const char* values[kSpanChunks];
    const bf16* key_scales[kSpanChunks];
    const bf16* value_scales[kSpanChunks];
};

inline Chunks find_chunks(const Call& call, const Tile& tile, int64_t head, int span) {
    const FaserCache& cache = call.cache;
    const int32_t* table = call.plan.block_table.data() + tile.sequence * call.plan.table_width;
    const int64_t begin = std::max<int64_t>(tile.begin, int64_t(span) * kSpan) / kChunk * kChunk;
    const int64_t end = std::min<int64_t>(tile.end, int64_t(span + 1) * kSpan);
    Chunks chunks{begin, 0, {}, {}, {}, {}};
    for (int64_t at = begin; at < end; at += kChunk) {
        const char* block = block_at(cache, table[at / cache.block_size], head);
        const int64_t chunk = at % cache.block_size / kChunk;
        const char* scales = block + keys_bytes(cache) + chunk * kChunk * sizeof(bf16);
        const int i = chunks.count++;
        chunks.keys[i] = block + chunk * kStepBytes;
        chunks.values[i] = block + values_from(cache) + chunk * values_bytes(cache);
        chunks.key_scales[i] = (const bf16*)scales;
        chunks.value_scales[i] = (const bf16*)(scales + scales_bytes(cache));
    }
    return chunks;
}

// Mask the positions that each row does not see: those after the last one it sees, and those before its window.
inline void hide_unseen(const Call& call, const Tile& tile, const Chunks& chunks, float* scores) {
    const int64_t keys = int64_t(chunks.count) * kChunk;
    for (int64_t q = 0; q < tile.rows * call.group(); q++) {
        const int64_t position = call.plan.positions[tile.row + q / call.group()];
        const int64_t seen_to = call.plan.seen_to[tile.row + q / call.group()];
        const int64_t seen_from = call.heads.window ? position - call.heads.window + 1 : 0;
        float* row = scores + q * kSpan;
        std::fill(row, row + std::clamp<int64_t>(seen_from - chunks.first, 0, keys), kNothing);
        std::fill(row + std::clamp<int64_t>(seen_to + 1 - chunks.first, 0, keys), row + keys, kNothing);
    }
}

// Scores in units of 1 / factor: x becomes cap tanh(x factor / cap) in these units.
inline void cap_scores(float cap, float factor, float* row, int64_t keys) {
    if (factor == 0) return;  // all scores are 0
    const vf in = splat(2 * kLog2e * factor / cap), out = splat(cap / factor);
    for (int64_t k = 0; k < keys; k += kLanes) {
        store(row + k, out * (1.0f - 2.0f / (exp2(load(row + k) * in) + 1.0f)));
    }
}

// c times the largest of `keys` scores.
inline float most_of(const float* row, int64_t keys, float c) {
    vf most = load(row);
    for (int64_t k = kLanes; k < keys; k += kLanes) {
        vf next = load(row + k);
        most = next > most ? next : most;
    }
    return largest(most) * c;
}

// Query q of a tile: D values of a row and head.
template <class T>
const T* query_at(const Call& call, const Tile& tile, int64_t head, int64_t q) {
    const int64_t group = call.group();
    return (const T*)call.q + (tile.row + q / group) * call.q_stride +
           (head * group + q % group) * call.cache.head_dim;
}

}  // namespace faser
