// Masks of logits: one bit for each token of the vocabulary.

#include <cstdint>
#include <limits>

#include "pool.h"

namespace {

using faser::Pool;

constexpr int64_t kBits = 64;
constexpr float kNothing = -std::numeric_limits<float>::infinity();

// Columns whose bit is 0 become -inf. Most words are all ones (text is allowed) or all zeros (one token is).
void mask(float* logits, int64_t width, const uint64_t* words) {
    for (int64_t first = 0; first < width; first += kBits, words++) {
        const uint64_t word = *words;
        if (word == ~uint64_t{0}) continue;
        const int64_t count = width - first < kBits ? width - first : kBits;
        float* at = logits + first;
        if (word == 0) {
            for (int64_t i = 0; i < count; i++) at[i] = kNothing;
        } else {
            for (int64_t i = 0; i < count; i++) at[i] = (word >> i) & 1 ? at[i] : kNothing;
        }
    }
}

}  // namespace

extern "C" {

// rows: [count], distinct; words: [count] lines, words_stride apart, of at least width bits.
void faser_mask(Pool* pool, float* logits, int64_t stride, int64_t width, const int64_t* rows, int64_t count,
                const uint64_t* words, int64_t words_stride) {
    pool->run(count, [&](int64_t i) { mask(logits + rows[i] * stride, width, words + i * words_stride); });
}
}
