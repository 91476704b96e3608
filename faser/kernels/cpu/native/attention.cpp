// Attention of ragged rows over the paged cache.
//
// Keys are taken in spans of 256 positions that start at multiples of 256. Within a span a row has an ordinary softmax:
// all scores, their maximum, weights, sums. Spans are then joined in order by the usual rescaling (Milakov and
// Gimelshein, arXiv:1805.02867; Dao et al., arXiv:2205.14135, section 3.1). A row's result therefore depends on
// its own query and the keys it sees, and on nothing else: not on other rows, nor on which thread computed what.
// Positions that a row does not see weigh exactly 0, and slots that no row of the tile sees are never used.

#include <algorithm>
#include <limits>

#include "cache.h"
#include "plan.h"
#include "pool.h"
#include "tile.h"

using namespace faser;

extern "C" {

// Mirrored field by field in library.py.
struct FaserHeads {
    int64_t num_heads;
    float scale;
    int64_t window;  // 0: all
};
}

namespace {

constexpr float kNothing = -std::numeric_limits<float>::infinity();
constexpr float kLog2e = 1.4426950408889634f;
constexpr int kQueries = 24;  // most queries (rows times heads of a group) of a tile of several rows
constexpr int kSpanChunks = kSpan / kChunk;

struct Call {
    const FaserCache& cache;
    const FaserPlan& plan;
    const FaserHeads& heads;
    const WorkList& work;
    int64_t layer;
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

// Memory of one thread, grown to the largest tile it has met.
struct Scratch {
    std::vector<char> queries, weights, edges;
    std::vector<float> scores, sums, span;

    static Scratch& of(const Call& call, int64_t queries) {
        thread_local Scratch mine;
        const int64_t width = call.cache.head_dim;
        grow(mine.queries, queries * width * 4);
        grow(mine.weights, queries * kSpan * 4);
        grow(mine.edges, 2 * values_bytes(call.cache));
        grow(mine.scores, queries * kSpan);
        grow(mine.sums, Partial::floats(queries, width));
        grow(mine.span, Partial::floats(queries, width));
        return mine;
    }

    template <class V>
    static void grow(std::vector<V>& memory, size_t size) {
        if (memory.size() < size) memory.resize(size);
    }
};

// The chunks of one span that a tile reads.
struct Chunks {
    int64_t first;  // position of the first chunk
    int count;
    const char* keys[kSpanChunks];
    const char* values[kSpanChunks];
};

// Queries of a tile, [rows * group, D] without gaps.
template <class T>
void gather_queries(const Call& call, const Tile& tile, int64_t head, T* to) {
    const int64_t width = call.group() * call.cache.head_dim;
    for (int64_t row = tile.row; row < tile.row + tile.rows; row++, to += width) {
        std::memcpy(to, (const T*)call.q + row * call.q_stride + head * width, width * sizeof(T));
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

template <class T>
Chunks find_chunks(const Call& call, const Tile& tile, int64_t head, int span, Scratch& scratch) {
    const FaserCache& cache = call.cache;
    const int32_t* table = call.plan.block_table.data() + tile.sequence * call.plan.table_width;
    const int64_t begin = std::max<int64_t>(tile.begin, int64_t(span) * kSpan) / kChunk * kChunk;
    const int64_t end = std::min<int64_t>(tile.end, int64_t(span + 1) * kSpan);
    Chunks chunks{begin, 0, {}, {}};
    char* edge = scratch.edges.data();
    for (int64_t at = begin; at < end; at += kChunk) {
        const char* block = block_at(cache, call.layer, table[at / cache.block_size], head);
        const int64_t chunk = at % cache.block_size / kChunk;
        const char* values = block + keys_bytes(cache) + chunk * values_bytes(cache);
        if (at < tile.begin || at + kChunk > tile.end) {
            values = keep_seen<T>(call, values, at, tile, edge);
            edge += values_bytes(cache);
        }
        chunks.keys[chunks.count] = block + chunk * kStepBytes;
        chunks.values[chunks.count++] = values;
    }
    return chunks;
}

// scores[query][key] = query . key, for `Panels` chunks; rows of scores lie kSpan apart. Prefetches the chunks'
// values, which are needed next: blocks are scattered in memory, so the processor cannot predict them.
template <class T, int Panels>
void score_chunks(const FaserCache& cache, const char* queries, int64_t num_queries, const char* const* keys,
                  const char* const* values, float* scores) {
    const int64_t width = cache.head_dim;
    for (int64_t q = 0; q < num_queries;) {
        const int rows = tile_rows(num_queries - q);
        with_count<kTileRows>(rows, [&](auto count) {
            Sums<count.value, Panels> sums;
            clear(sums);
            multiply<T, count.value, Panels, true>(queries + q * width * sizeof(T), width * sizeof(T), keys,
                                                   keys_step(cache), width / Step<T>::kValues, sums, values);
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

// Mask the positions that each row does not see: those after its own, and those before its window.
void hide_unseen(const Call& call, const Tile& tile, const Chunks& chunks, float* scores) {
    const int64_t keys = int64_t(chunks.count) * kChunk;
    for (int64_t q = 0; q < tile.rows * call.group(); q++) {
        const int64_t position = call.plan.positions[tile.row + q / call.group()];
        const int64_t seen_from = call.heads.window ? position - call.heads.window + 1 : 0;
        float* row = scores + q * kSpan;
        std::fill(row, row + std::clamp<int64_t>(seen_from - chunks.first, 0, keys), kNothing);
        std::fill(row + std::clamp<int64_t>(position + 1 - chunks.first, 0, keys), row + keys, kNothing);
    }
}

// Scores to weights 2^(c * score - most); most and total of each query go to the partial result.
template <class T>
void soften(const float* scores, int64_t num_queries, int64_t keys, float c, T* weights, Partial& partial) {
    for (int64_t q = 0; q < num_queries; q++) {
        const float* row = scores + q * kSpan;
        vf most = load(row);
        for (int64_t k = kLanes; k < keys; k += kLanes) {
            vf next = load(row + k);
            most = next > most ? next : most;
        }
        partial.most[q] = largest(most) * c;
        if (partial.most[q] == kNothing) {
            partial.total[q] = 0;
            std::fill(weights + q * kSpan, weights + q * kSpan + keys, T{});
            continue;
        }
        vf total = {};
        const vf shift = splat(-partial.most[q]);
        for (int64_t k = 0; k < keys; k += kLanes) {
            vf weight = exp2(fma(load(row + k), splat(c), shift));
            total += weight;
            store(weights + q * kSpan + k, weight);
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

template <class T>
void attend_span(const Call& call, const Tile& tile, int64_t head, int span, Scratch& scratch, Partial partial) {
    const int64_t queries = tile.rows * call.group(), width = call.cache.head_dim;
    float* scores = scratch.scores.data();
    char* weights = scratch.weights.data();
    const Chunks chunks = find_chunks<T>(call, tile, head, span, scratch);
    score<T>(call.cache, scratch.queries.data(), queries, chunks, scores);
    hide_unseen(call, tile, chunks, scores);
    soften(scores, queries, chunks.count * kChunk, call.heads.scale * kLog2e, (T*)weights, partial);
    mix<T>(weights, queries, width, chunks, partial.values);
}

void forget(Partial& sums, int64_t queries, int64_t width) {
    std::fill(sums.most, sums.most + queries, kNothing);
    std::fill(sums.total, sums.total + queries, 0.0f);
    std::fill(sums.values, sums.values + queries * width, 0.0f);
}

// sums = sums and next, for every query that saw something in next.
void join(Partial& sums, const Partial& next, int64_t queries, int64_t width) {
    for (int64_t q = 0; q < queries; q++) {
        if (next.most[q] == kNothing) continue;
        const float most = std::max(sums.most[q], next.most[q]);
        const vf old_part = exp2(splat(sums.most[q] - most));
        const vf new_part = exp2(splat(next.most[q] - most));
        float* values = sums.values + q * width;
        for (int64_t d = 0; d < width; d += kLanes) {
            store(values + d, fma(load(values + d), old_part, load(next.values + q * width + d) * new_part));
        }
        sums.total[q] = sums.total[q] * old_part[0] + next.total[q] * new_part[0];
        sums.most[q] = most;
    }
}

template <class T>
void write_out(const Call& call, const Tile& tile, int64_t head, const Partial& sums) {
    const int64_t width = call.cache.head_dim;
    for (int64_t q = 0; q < tile.rows * call.group(); q++) {
        T* out = (T*)call.out + (tile.row + q / call.group()) * call.out_stride +
                 (head * call.group() + q % call.group()) * width;
        const float scale = 1.0f / sums.total[q];
        // Adding 0 makes -0 to 0: weights of 0 may have done so or not, depending on other rows.
        for (int64_t d = 0; d < width; d += kLanes) store(out + d, load(sums.values + q * width + d) * scale + 0.0f);
    }
}

template <class T>
void attend_tile(const Call& call, const Tile& tile, int64_t head) {
    const int64_t queries = tile.rows * call.group(), width = call.cache.head_dim;
    Scratch& scratch = Scratch::of(call, queries);
    gather_queries(call, tile, head, (T*)scratch.queries.data());
    Partial sums = Partial::at(scratch.sums.data(), queries);
    Partial next = Partial::at(scratch.span.data(), queries);
    forget(sums, queries, width);
    for (int span = tile.first_span(); span <= tile.last_span(); span++) {
        attend_span<T>(call, tile, head, span, scratch, next);
        join(sums, next, queries, width);
    }
    write_out<T>(call, tile, head, sums);
}

// Partial results of split tiles until they are joined: [stored spans, KV heads].
struct Store {
    float* memory;
    int64_t queries;

    Partial at(const Call& call, const Tile& tile, int64_t head, int span) const {
        const int64_t entry = (tile.stored + span - tile.first_span()) * call.cache.num_kv_heads + head;
        return Partial::at(memory + entry * Partial::floats(queries, call.cache.head_dim), queries);
    }
};

template <class T>
void attend_stored_span(const Call& call, const Tile& tile, int64_t head, int span, const Store& store) {
    Scratch& scratch = Scratch::of(call, tile.rows * call.group());
    gather_queries(call, tile, head, (T*)scratch.queries.data());
    attend_span<T>(call, tile, head, span, scratch, store.at(call, tile, head, span));
}

template <class T>
void join_stored(const Call& call, const Tile& tile, int64_t head, const Store& store) {
    const int64_t queries = tile.rows * call.group(), width = call.cache.head_dim;
    Scratch& scratch = Scratch::of(call, queries);
    Partial sums = Partial::at(scratch.sums.data(), queries);
    forget(sums, queries, width);
    for (int span = tile.first_span(); span <= tile.last_span(); span++) {
        join(sums, store.at(call, tile, head, span), queries, width);
    }
    write_out<T>(call, tile, head, sums);
}

template <class T>
void attend(Pool& pool, const Call& call) {
    const WorkList& work = call.work;
    const int64_t heads = call.cache.num_kv_heads;
    thread_local std::vector<float> stored;
    const int64_t queries = work.tile_rows * call.group();
    Scratch::grow(stored, work.num_stored * heads * Partial::floats(queries, call.cache.head_dim));
    const Store store{stored.data(), queries};
    auto piece = [&](int64_t i) {
        const Piece& piece = work.pieces[i / heads];
        const Tile& tile = work.tiles[piece.tile];
        if (piece.span < 0) return attend_tile<T>(call, tile, i % heads);
        attend_stored_span<T>(call, tile, i % heads, piece.span, store);
    };
    pool.run(int64_t(work.pieces.size()) * heads, piece);
    pool.run(int64_t(work.split_tiles.size()) * heads, [&](int64_t i) {
        join_stored<T>(call, work.tiles[work.split_tiles[i / heads]], i % heads, store);
    });
}

}  // namespace

extern "C" {

// q: [rows, Hq * D], rows q_stride values apart; out likewise. The cache must hold the step's own keys and values.
void faser_attend(Pool* pool, const FaserCache* cache, FaserPlan* plan, const FaserHeads* heads, int64_t layer,
                  const void* q, int64_t q_stride, void* out, int64_t out_stride) {
    const int64_t group = heads->num_heads / cache->num_kv_heads;
    const int64_t tile_rows = std::max<int64_t>(1, kQueries / group);
    const WorkList& work = plan->work(tile_rows, heads->window, cache->num_kv_heads, pool->num_threads());
    Call call{*cache, *plan, *heads, work, layer, (const char*)q, q_stride, (char*)out, out_stride};
    if (cache->dtype == kFloat32) return attend<float>(*pool, call);
    attend<bf16>(*pool, call);
}
}
