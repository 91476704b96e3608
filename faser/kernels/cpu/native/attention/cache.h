// The place of a key and a value in the paged cache.
//
// [block][KV head], each holding the keys of the block's B tokens, then their values:
//     keys    [D / n][B][n]    n = values of a step (4 int8, 2 bf16, 1 float): 16 tokens are the columns of a panel
//     values  [B / n][D][n]    16 channels are the columns of a panel
// so that scores (queries x keys) and sums (weights x values) are the same product as a linear layer. Keys and values
// are stored in the order in which they are read: two streams in one page would confuse the processor's prefetching.
//
// In int8 a key or value is D signed codes times one scale (kernels/interface/kv_cache.py). Keys are kept as
// code + 128, because the products of VNNI take one unsigned factor; values as they are, since weights are never
// negative. Between keys and values stand the scales, [B] bf16 of keys, then of values.
#pragma once

#include "../simd.h"

extern "C" {

// Of one layer. Mirrored field by field in library.py.
struct FaserCache {
    char* data;
    int64_t block_size;  // tokens, a multiple of 16
    int64_t num_kv_heads;
    int64_t head_dim;  // D, a multiple of 16
    int32_t dtype;     // of what is stored
};
}

namespace faser {

constexpr int kChunk = kPanel;  // tokens that kernels handle together

inline int64_t item_bytes(const FaserCache& cache) {
    return cache.dtype == kFloat32 ? 4 : cache.dtype == kBFloat16 ? 2 : 1;
}

// Bytes of the keys of one block and head, and of their scales; the values need as many.
inline int64_t keys_bytes(const FaserCache& cache) { return cache.block_size * cache.head_dim * item_bytes(cache); }
inline int64_t scales_bytes(const FaserCache& cache) { return cache.dtype == kInt8 ? cache.block_size * 2 : 0; }

inline int64_t head_bytes(const FaserCache& cache) { return 2 * (keys_bytes(cache) + scales_bytes(cache)); }

// The keys of one block and head.
inline char* block_at(const FaserCache& cache, int64_t block, int64_t head) {
    return cache.data + (block * cache.num_kv_heads + head) * head_bytes(cache);
}

inline int64_t values_from(const FaserCache& cache) { return keys_bytes(cache) + 2 * scales_bytes(cache); }

// Bytes from one step of a block's keys to the next, and bytes of the values of a chunk.
inline int64_t keys_step(const FaserCache& cache) { return cache.block_size * 4; }
inline int64_t values_bytes(const FaserCache& cache) { return kChunk * cache.head_dim * item_bytes(cache); }

}  // namespace faser
