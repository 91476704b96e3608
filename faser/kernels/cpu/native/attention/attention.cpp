// Attention of ragged rows over the paged cache.
//
// Keys are taken in spans of 256 positions that start at multiples of 256. Within a span a row has an ordinary softmax:
// all scores, their maximum, weights, sums. Spans are then joined in order by the usual rescaling (Milakov and
// Gimelshein, arXiv:1805.02867; Dao et al., arXiv:2205.14135, section 3.1). A row's result therefore depends on
// its own query and the keys it sees, and on nothing else: not on other rows, nor on which thread computed what.
// Positions that a row does not see weigh exactly 0, whatever is stored there, and slots that no row of the tile sees
// are never used.

#include "../calls.h"
#include "float_span.h"
#include "int8_span.h"

using namespace faser;

namespace {

// Most queries (rows times heads of a group) of a tile of several rows.
int64_t most_queries(const FaserCache& cache) {
#if defined(FASER_TILES)
    if (cache.dtype == kBFloat16 || (cache.dtype == kInt8 && tile_kind != kEmulatedTiles)) return kTilesRows;
#endif
    return 24;
}

void forget(Partial& sums, int64_t queries, int64_t width) {
    std::fill(sums.most, sums.most + queries, kNothing);
    std::fill(sums.total, sums.total + queries, 0.0f);
    std::fill(sums.values, sums.values + queries * width, 0.0f);
}

// sums = sums and next, for every query that saw something in next.
void join(Partial& sums, const Partial& next, int64_t queries, int64_t width) {
    alignas(64) float most_of_both[kLanes], old_parts[kLanes], new_parts[kLanes];
    for (int64_t q = 0; q < queries; q++) {
        const int64_t i = q % kLanes;
        if (i == 0) {  // of as many queries as lanes; more follow the maxima of a partial result than are read here
            const vf old_most = load(sums.most + q), new_most = load(next.most + q);
            const vf most = old_most < new_most ? new_most : old_most;
            store(most_of_both, most);
            store(old_parts, exp2(old_most - most));
            store(new_parts, exp2(new_most - most));
        }
        if (next.most[q] == kNothing) continue;
        const vf old_part = splat(old_parts[i]), new_part = splat(new_parts[i]);
        float* values = sums.values + q * width;
        for (int64_t d = 0; d < width; d += kLanes) {
            store(values + d, fma(load(values + d), old_part, load(next.values + q * width + d) * new_part));
        }
        sums.total[q] = sums.total[q] * old_parts[i] + next.total[q] * new_parts[i];
        sums.most[q] = most_of_both[i];
    }
}

template <class T>
void write_out(const Call& call, const Tile& tile, int64_t head, const Partial& sums) {
    const int64_t width = call.cache.head_dim;
    for (int64_t q = 0; q < tile.rows * call.group(); q++) {
        const int64_t query_head = head * call.group() + q % call.group();
        T* out = (T*)call.out + (tile.row + q / call.group()) * call.out_stride + query_head * width;
        float total = sums.total[q];
        if (call.heads.sinks) total += exp2(splat(call.heads.sinks[query_head] * kLog2e - sums.most[q]))[0];
        const float scale = 1.0f / total;
        // Adding 0 makes -0 to 0: weights of 0 may have done so or not, depending on other rows.
        for (int64_t d = 0; d < width; d += kLanes) store(out + d, load(sums.values + q * width + d) * scale + 0.0f);
    }
}

template <class T, class Span>
void attend_tile(const Call& call, const Tile& tile, int64_t head) {
    const int64_t queries = tile.rows * call.group(), width = call.cache.head_dim;
    Scratch& scratch = Scratch::of(call, queries);
    Span::gather(call, tile, head, scratch);
    Partial sums = Partial::at(scratch.sums.data(), queries);
    Partial next = Partial::at(scratch.span.data(), queries);
    forget(sums, queries, width);
    for (int span = tile.first_span(); span <= tile.last_span(); span++) {
        Span::attend(call, tile, head, span, scratch, next);
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

template <class Span>
void attend_stored_span(const Call& call, const Tile& tile, int64_t head, int span, const Store& store) {
    Scratch& scratch = Scratch::of(call, tile.rows * call.group());
    Span::gather(call, tile, head, scratch);
    Span::attend(call, tile, head, span, scratch, store.at(call, tile, head, span));
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

template <class T, class Span>
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
        if (piece.span < 0) return attend_tile<T, Span>(call, tile, i % heads);
        attend_stored_span<Span>(call, tile, i % heads, piece.span, store);
    };
    pool.run(int64_t(work.pieces.size()) * heads, piece);
    pool.run(int64_t(work.split_tiles.size()) * heads, [&](int64_t i) {
        join_stored<T>(call, work.tiles[work.split_tiles[i / heads]], i % heads, store);
    });
}

}  // namespace

extern "C" {

// q: [rows, Hq * D] in dtype, rows q_stride values apart; out likewise. The cache must hold the step's own keys and
// values.
void faser_attend(Pool* pool, const FaserCache* cache, FaserPlan* plan, const FaserHeads* heads, const void* q,
                  int64_t q_stride, void* out, int64_t out_stride, int32_t dtype) {
    const int64_t group = heads->num_heads / cache->num_kv_heads;
    const int64_t tile_rows = std::max<int64_t>(1, most_queries(*cache) / group);
    const WorkList& work = plan->work(tile_rows, heads->window, cache->num_kv_heads, pool->num_threads());
    Call call{*cache, *plan, *heads, work, (const char*)q, q_stride, (char*)out, out_stride};
    if (cache->dtype == kInt8) {
        if (dtype == kFloat32) return attend<float, Int8Span<float>>(*pool, call);
        return attend<bf16, Int8Span<bf16>>(*pool, call);
    }
    if (dtype == kFloat32) return attend<float, FloatSpan<float>>(*pool, call);
    attend<bf16, FloatSpan<bf16>>(*pool, call);
}
}
