// The drafts of a head, EAGLE-3 (arXiv 2503.01840) or an MTP layer (arXiv 2412.19437), all tokens of all sequences in one
// call: a pass of a head takes a quarter of a millisecond, and Python between its operations would take as long.
// Operations are those that have calls of their own, in the order of the loop in Python, so drafts are the same.

#include "drafting.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

using namespace faser;

extern "C" {

// The weights of a head of either kind. Products without weights are steps that the kind does not have: EAGLE-3 has no
// stream, MTP has neither fc nor qkv. Mirrored in library.py, as the others here.
struct FaserDraftHead {
    FaserAnyLinear embedding;
    const float* embedding_norm;
    const float* const* state_norms;  // of equal parts of the states, side by side
    int64_t num_state_norms;
    FaserAnyLinear fc;  // from the states to features, else the states are features
    const float* feature_norm;
    float eps;
    FaserAnyLinear stream;       // from an embedding and features side by side to the residual stream, else features
    int32_t residual_is_normed;  // begin it: as they are, or normalised
    FaserAnyLinear qkv;          // of the first layer: of an embedding and features side by side; else the layer has it
    const FaserLayer* layers;
    int64_t num_layers;
    FaserNormedLinear logits;
    int32_t norm_output;         // the next pass takes the output behind the norm of the logits
    const int64_t* draft_ids;    // the target's token of each row of the logits, or null: the same
};

// Room for the rows of the first pass, and for as many as there are sequences.
struct FaserDraftRoom {
    FaserBlockRows block;  // its number of rows is not read
    void* states;
    void* features;
    void* embedded;
    void* joined;
    void* hidden;
    void* qkv;
    void* mixed;
    float* logits;
};

// Committed tokens of S sequences, each with the target's states of the position before it, and where they and the
// drafts that follow them go in the cache.
struct FaserHeadRows {
    int64_t num_rows;
    const int64_t* token_ids;
    const void* states;
    int64_t states_stride;       // values from one row to the next
    const int32_t* query_start;  // [S + 1]
    const int32_t* places;       // one for each row
    const int32_t* block_table;  // [S, table_width]
    int64_t table_width, block_size;
};
}

namespace {

double acceptance(const FaserDraftRules& rules, double margin) {
    const double x = -(rules.intercept + rules.slope * margin);
    return 1 / (1 + std::exp(std::min(std::max(x, -500.0), 500.0)));
}

class Drafting {
  public:
    Drafting(Pool* pool, const FaserDraftHead& head, const FaserCache* cache, const FaserDraftRoom& room,
             const FaserDraftRules& rules, const FaserHeadRows& input, const FaserDrafts& drafts)
        : pool_(pool), head_(head), cache_(cache), room_(room), rules_(rules), input_(input), drafts_(drafts),
          rows_(room.block), survival_(rules.num_sequences, 1.0) {
        for (int64_t s = 0; s < rules.num_sequences; s++) {
            active_.push_back(s);
            drafts.counts[s] = drafts.num_fed[s] = 0;
        }
    }

    // Returns the number of passes.
    int64_t run() {
        read();
        for (int64_t passes = 1;; passes++) {
            choose();
            if (!take()) return passes;
            pass();
        }
    }

  private:
    int64_t width() const { return head_.embedding.depth; }
    int64_t bytes() const { return rows_.dtype == kFloat32 ? 4 : 2; }

    // A token and its margin for each active sequence.
    void choose() {
        const int64_t count = active_.size(), columns = head_.logits.product.columns;
        rows_.rows = count;
        if (head_.norm_output) {
            multiply(head_.logits.product, room_.hidden, width(), count, room_.logits, kFloat32, nullptr);
        } else {
            faser_normed_linear(pool_, &head_.logits, &rows_, room_.hidden, width(), room_.logits, kFloat32);
        }
        choose_columns(pool_, rules_, drafts_.counts, active_, room_.logits, columns, head_.draft_ids, 0,
                       found_, margins_);
    }

    // Keeps those tokens that the rules allow. Whether a sequence goes on; those that do are active, and their rows of
    // the hidden states lie one after the other.
    bool take() {
        std::vector<int64_t> staying, from;
        double excess = 0;
        for (size_t i = 0; i < active_.size(); i++) {
            const int64_t s = active_[i];
            if (rules_.pass_prices) {
                survival_[s] *= acceptance(rules_, margins_[i]);
                if (!(survival_[s] > rules_.row_price)) continue;
            }
            const int64_t at = s * rules_.width + drafts_.counts[s]++;
            drafts_.token_ids[at] = head_.draft_ids ? head_.draft_ids[found_[i]] : found_[i];
            drafts_.margins[at] = margins_[i];
            if (drafts_.counts[s] == rules_.max_tokens[s]) continue;
            staying.push_back(s);
            from.push_back(i);
            excess += survival_[s] - rules_.row_price;
        }
        if (staying.empty()) return false;
        if (rules_.pass_prices && !(excess > rules_.pass_prices[staying.size() - 1])) return false;
        const int64_t row = width() * bytes();
        for (size_t i = 0; i < from.size(); i++) {
            if (from[i] != int64_t(i)) memcpy((char*)room_.hidden + i * row, (char*)room_.hidden + from[i] * row, row);
        }
        active_ = staying;
        return true;
    }

    // The first pass, over the committed tokens. Leaves the head's output for the last one of each sequence.
    void read() {
        const int64_t rows = input_.num_rows;
        const void* states = input_.states;
        int64_t stride = input_.states_stride;
        if (head_.num_state_norms) {
            const int64_t depth = head_.fc.depth, part = depth / head_.num_state_norms;
            for (int64_t i = 0; i < head_.num_state_norms; i++) {
                faser_rms_norm(pool_, (const char*)states + i * part * bytes(), stride, rows, part,
                               head_.state_norms[i], head_.eps, (char*)room_.states + i * part * bytes(),
                               depth, rows_.dtype, nullptr);
            }
            states = room_.states;
            stride = depth;
        }
        if (has_weights(head_.fc)) {
            multiply(head_.fc, states, stride, rows, room_.features, rows_.dtype, nullptr);
            states = room_.features;
        }
        std::vector<int64_t> ends;
        for (int64_t s = 0; s < rules_.num_sequences; s++) ends.push_back(input_.query_start[s + 1] - 1);
        compute(rows, input_.token_ids, states, input_.query_start, input_.places, input_.block_table, ends);
    }

    // One row for each active sequence: its last drafted token, and the head's output that drafted it.
    void pass() {
        std::vector<int64_t> ids;
        std::vector<int32_t> starts{0}, places, table;
        for (const int64_t s : active_) {
            ids.push_back(drafts_.token_ids[s * rules_.width + drafts_.counts[s] - 1]);
            places.push_back(input_.places[input_.query_start[s + 1] - 1] + 1 + int32_t(drafts_.num_fed[s]++));
            starts.push_back(int32_t(starts.size()));
            const int32_t* blocks = input_.block_table + s * input_.table_width;
            table.insert(table.end(), blocks, blocks + input_.table_width);
        }
        std::vector<int64_t> all(active_.size());
        std::iota(all.begin(), all.end(), 0);
        compute(active_.size(), ids.data(), room_.hidden, starts.data(), places.data(), table.data(), all);
    }

    // The layers over rows of these tokens and features, which may be the hidden states themselves. ends: the last row of
    // each sequence; of the other rows the last layer computes keys and values alone.
    void compute(int64_t rows, const int64_t* ids, const void* features, const int32_t* query_start,
                 const int32_t* places, const int32_t* table, const std::vector<int64_t>& ends) {
        const int64_t row = width() * bytes(), num_sequences = ends.size(), last = head_.num_layers - 1;
        FaserPlan* plan = faser_plan_new(query_start, places, nullptr, table, num_sequences, rows, input_.table_width,
                                         input_.block_size);
        rows_.rows = rows;
        embed(pool_, head_.embedding, ids, rows, room_.embedded, rows_.dtype);
        faser_rms_norm(pool_, room_.embedded, width(), rows, width(), head_.embedding_norm, head_.eps, room_.joined,
                       2 * width(), rows_.dtype, nullptr);
        char* normed = (char*)room_.joined + row;
        faser_rms_norm(pool_, features, width(), rows, width(), head_.feature_norm, head_.eps, normed, 2 * width(),
                       rows_.dtype, nullptr);
        if (has_weights(head_.stream)) {
            multiply(head_.stream, room_.joined, 2 * width(), rows, room_.hidden, rows_.dtype,
                     head_.layers->qkv.product.low_bit);
        } else if (head_.residual_is_normed) {
            for (int64_t i = 0; i < rows; i++) memcpy((char*)room_.hidden + i * row, normed + 2 * i * row, row);
        } else if (features != room_.hidden) {
            memcpy(room_.hidden, features, rows * row);
        }
        if (has_weights(head_.qkv)) {
            multiply(head_.qkv, room_.joined, 2 * width(), rows, room_.qkv, rows_.dtype,
                     head_.layers->feed_forward.attention_out.low_bit);
        }
        std::vector<int32_t> one_each(num_sequences + 1), places_of_ends;
        std::iota(one_each.begin(), one_each.end(), 0);
        for (const int64_t end : ends) places_of_ends.push_back(places[end]);
        FaserPlan* const plan_of_ends = faser_plan_new(one_each.data(), places_of_ends.data(), nullptr, table,
                                                       num_sequences, num_sequences, input_.table_width,
                                                       input_.block_size);
        faser_layers(pool_, head_.layers, 0, last, &head_.layers[last].qkv, &rows_, cache_, plan, room_.hidden, room_.qkv,
                     room_.mixed, 0, nullptr);
        faser_last_layer(pool_, &head_.layers[last], &head_.logits, &rows_, &cache_[last], plan, ends.data(), num_sequences,
                         plan_of_ends, room_.hidden, room_.qkv, room_.mixed);
        faser_plan_free(plan);
        faser_plan_free(plan_of_ends);
        if (head_.norm_output) {
            faser_rms_norm(pool_, room_.hidden, width(), num_sequences, width(), head_.logits.norm, head_.eps, room_.hidden, width(),
                           rows_.dtype, nullptr);
        }
    }

    void multiply(const FaserAnyLinear& by, const void* x, int64_t stride, int64_t rows, void* out, int32_t out_dtype,
                  const FaserLowBit* following) {
        faser::multiply(pool_, by, x, stride, rows, rows_.dtype, out, out_dtype, following);
    }

    Pool* pool_;
    const FaserDraftHead& head_;
    const FaserCache* cache_;
    const FaserDraftRoom& room_;
    const FaserDraftRules& rules_;
    const FaserHeadRows& input_;
    const FaserDrafts& drafts_;
    FaserBlockRows rows_;
    std::vector<double> survival_, margins_;
    std::vector<int64_t> active_, found_;
};

}  // namespace

extern "C" {

int64_t faser_head_draft(Pool* pool, const FaserDraftHead* head, const FaserCache* cache, const FaserDraftRoom* room,
                         const FaserDraftRules* rules, const FaserHeadRows* input, const FaserDrafts* drafts) {
    return Drafting(pool, *head, cache, *room, *rules, *input, *drafts).run();
}
}
