// An n-gram model: for contexts of a few tokens, the token that follows most often and the chance that it does.

#pragma once

#include <cstdint>
#include <vector>

#include "text.h"

namespace faser {

struct Ngrams {
    Lengths lengths;             // 1 … width
    Table places;                // by the key of a context
    std::vector<int32_t> next;   // by place
    std::vector<double> chances;

    // contexts: [count, width], at the end of their rows, kEnd before shorter ones. No context occurs twice.
    Ngrams(const int32_t* contexts, int width, const int32_t* following, const double* chance, int64_t count);

    // A chain of the likeliest tokens, each of the length whose chance is highest, the longer in a tie. It ends before a
    // token that is unlikely to be reached and right. context_end: after the last token of a text of `available` tokens.
    // Returns the number of tokens written, at most limit.
    int draft(const int32_t* context_end, int64_t available, int64_t limit, int64_t* out, double* confidences) const;
};

}  // namespace faser

struct FaserNgrams {
    faser::Ngrams model;
};
