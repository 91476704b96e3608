// Drafts by an n-gram model. Oracle: tests/engine/execution/drafting/oracle/ngram_model.py, with a dict.

#include "ngrams.h"

#include <algorithm>

using namespace faser;

namespace {

constexpr double kLeastSurvival = 0.02;  // of a drafted token, by the model's own chances
constexpr uint64_t kSalt = 0;            // contexts are no client's: their keys need no secret

}  // namespace

namespace faser {

Ngrams::Ngrams(const int32_t* contexts, int width, const int32_t* following, const double* chance, int64_t count)
    : lengths(false, 1, width), next(following, following + count), chances(chance, chance + count) {
    std::vector<uint64_t> keys(width);
    for (int64_t place = 0; place < count; place++) {
        const int32_t* end = contexts + (place + 1) * width;
        int length = 0;
        while (length < width && end[-length - 1] != kEnd) length++;
        context_keys(lengths, end, length, kSalt, keys.data());
        places.put(keys[length - 1], place);
    }
}

int Ngrams::draft(const int32_t* context_end, int64_t available, int64_t limit, int64_t* out,
                  double* confidences) const {
    const int64_t width = int64_t(lengths.of.size());
    static thread_local std::vector<int32_t> text;
    static thread_local std::vector<uint64_t> keys;
    text.assign(context_end - std::min(available, width), context_end);
    keys.resize(width);
    double survival = 1.0;
    int count = 0;
    while (count < limit) {
        const int found = context_keys(lengths, text.data() + text.size(), int64_t(text.size()), kSalt, keys.data());
        int64_t best = kNowhere;
        for (int i = 0; i < found; i++) {
            const int64_t place = places.find(keys[i]);
            if (place == kNowhere) break;  // nor is a longer context known
            if (best == kNowhere || chances[place] >= chances[best]) best = place;
        }
        if (best == kNowhere) break;
        survival *= chances[best];
        if (survival < kLeastSurvival) break;
        out[count] = next[best];
        confidences[count++] = chances[best];
        text.push_back(next[best]);
    }
    return count;
}

}  // namespace faser

extern "C" {

FaserNgrams* faser_ngrams_new(const int32_t* contexts, int64_t width, const int32_t* following, const double* chances,
                              int64_t count) {
    return new FaserNgrams{Ngrams(contexts, int(width), following, chances, count)};
}

void faser_ngrams_free(FaserNgrams* ngrams) { delete ngrams; }
}
