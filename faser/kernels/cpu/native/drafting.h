// What drafts of all kinds of models share: the rules of a draft, where it goes, and how a column becomes a token of it.
#pragma once

#include <algorithm>
#include <vector>

#include "blocks.h"
#include "calls.h"
#include "simd.h"

extern "C" {

// How the tokens of S sequences are chosen, and where drafts end. noise: [S, width], or null: all are greedy.
struct FaserDraftRules {
    int64_t num_sequences, width;  // of the longest draft
    const int64_t* max_tokens;
    const float* temperature;  // as in FaserChoice, for each sequence
    const float* log_min_p;
    const int64_t* top_k;
    const double* top_p;
    const uint64_t* noise;
    const double* pass_prices;  // by the number of sequences that go on, from 1 on; null: drafts have max_tokens
    double row_price, intercept, slope;
};

// token_ids, margins: [S, width], of which the first counts[s] are written. num_fed: tokens that were rows of a pass.
struct FaserDrafts {
    int64_t* token_ids;
    double* margins;
    int64_t* counts;
    int64_t* num_fed;
};
}

namespace faser {

constexpr double kCertain = 100;  // nats: larger margins carry no more information

inline bool has_weights(const FaserAnyLinear& product) { return product.linear || product.low_bit; }

// following: the weights that are multiplied next, or null.
inline void multiply(Pool* pool, const FaserAnyLinear& by, const void* x, int64_t stride, int64_t rows, int32_t dtype,
                     void* out, int32_t out_dtype, const FaserLowBit* following) {
    if (by.linear) {
        faser_linear(pool, by.linear, x, stride, rows, out, by.columns, out_dtype, nullptr, 0);
    } else {
        faser_low_bit_linear(pool, by.low_bit, x, stride, dtype, rows, out, by.columns, out_dtype, nullptr, 0,
                             following);
    }
}

inline void embed(Pool* pool, const FaserAnyLinear& by, const int64_t* ids, int64_t rows, void* out, int32_t dtype) {
    if (by.linear) {
        faser_embed(pool, by.linear, ids, rows, out);
    } else {
        faser_low_bit_embed(pool, by.low_bit, ids, rows, out, dtype);
    }
}

// A column and its margin for each active sequence, whose row of the logits has the sequence's number among them.
// counts: [S] tokens that each draft has. ids: of the columns, ascending, or null; ids_stride: as in FaserChoice.
inline void choose_columns(Pool* pool, const FaserDraftRules& rules, const int64_t* counts,
                           const std::vector<int64_t>& active, const float* logits, int64_t columns,
                           const int64_t* ids, int64_t ids_stride, std::vector<int64_t>& found,
                           std::vector<double>& margins) {
    const int64_t count = active.size();
    found.resize(count);
    margins.resize(count);
    faser_best(pool, logits, columns, count, columns, found.data(), margins.data());
    std::vector<int64_t> rows, best, top_k, drawn;
    std::vector<float> temperature, log_min_p;
    std::vector<uint64_t> noise;
    std::vector<double> top_p, drawn_margins;
    for (int64_t i = 0; rules.noise && i < count; i++) {
        const int64_t s = active[i];
        if (!(rules.temperature[s] > 0) || found[i] < 0) continue;
        rows.push_back(i);
        best.push_back(found[i]);
        temperature.push_back(rules.temperature[s]);
        log_min_p.push_back(rules.log_min_p[s]);
        top_k.push_back(rules.top_k[s]);
        top_p.push_back(rules.top_p[s]);
        noise.push_back(rules.noise[s * rules.width + counts[s]]);
    }
    if (!rows.empty()) {
        drawn.resize(rows.size());
        drawn_margins.resize(rows.size());
        const FaserChoice choice{rows.data(),  best.data(),  temperature.data(), log_min_p.data(),
                                 top_k.data(), top_p.data(), ids,                ids_stride};
        faser_draw(pool, logits, columns, columns, &choice, rows.size(), noise.data(), drawn.data(),
                   drawn_margins.data());
        for (size_t i = 0; i < rows.size(); i++) {
            found[rows[i]] = drawn[i];
            margins[rows[i]] = drawn_margins[i];
        }
    }
    for (int64_t i = 0; i < count; i++) {
        found[i] = std::max<int64_t>(found[i], 0);  // where logits are no numbers
        margins[i] = std::min(std::max(margins[i], -kCertain), kCertain);
    }
}

}  // namespace faser
