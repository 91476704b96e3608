// The drafts of a block drafter, DFlash or DSpark (arXiv 2607.05147), of all sequences in one call: a pass over the context
// rows and the blocks, then a walk from place to place over the best tokens of each. Operations are those that have calls
// of their own, in the order of the loop in Python, so drafts are the same.
//
//     rows       context rows of every sequence | blocks of every sequence
//     inputs     features                       | normalised residual stream
//     qkv        keys and values (and queries)  | queries, keys and values
//
// A context row's queries are computed and not used: a product reads its weights once, whatever the number of rows.

#include "drafting.h"

#include <cstring>
#include <numeric>

using namespace faser;

extern "C" {

// The weights of a block drafter. Products without weights are steps that it does not have. Mirrored in library.py, as
// the others here.
struct FaserBlockDrafter {
    FaserAnyLinear embedding;
    const void* mask;    // embedding of the rows behind an anchor, in the type of activations; or null:
    int64_t mask_token;  // that of this token
    FaserAnyLinear fc;
    const float* hidden_norm;
    float eps;
    const FaserLayer* layers;
    const int32_t* causal;  // of each layer, whether the rows of a block see only those before them
    int64_t num_layers;
    const float* norm;
    FaserAnyLinear head;
    int64_t num_candidates;    // of each row, at most as many as the head has columns
    const int64_t* draft_ids;  // the target's token of each column of the head, or null: the same
    int32_t predicts_from_anchor;
    FaserAnyLinear markov_before;  // rows of the token before, and of each column of the head
    FaserAnyLinear markov_candidates;
    const float* confidence_of_hidden;  // or null: margins are those of the scores
    const float* confidence_of_before;  // or null
    float confidence_bias;
};

// Room for all rows. inputs, hidden: [R, H]. logits: [logit_rows, columns of the head].
struct FaserBlockRoom {
    FaserBlockRows block;  // its number of rows is not read
    void* inputs;
    void* hidden;
    void* qkv;
    void* mixed;
    float* logits;
    int64_t logit_rows;
};

// S sequences: the place of the first context row, the number of context rows, the token before the draft. Rows of a
// block follow the context rows. states: of all context rows.
struct FaserBlockInput {
    const int32_t* starts;
    const int32_t* context;
    const int64_t* anchors;
    const void* states;
    int64_t states_stride;       // values from one row to the next
    const int32_t* block_table;  // [S, table_width]
    int64_t table_width, block_size;
};
}

namespace {

// In double, where products are exact: rounded to float, the order of the sum does not matter.
template <class A, class B>
double dot(const A* a, const B* b, int64_t count) {
    double sums[8] = {};
    int64_t i = 0;
    for (; i + 8 <= count; i += 8) {
        for (int j = 0; j < 8; j++) sums[j] += double(widen(a[i + j])) * double(widen(b[i + j]));
    }
    for (; i < count; i++) sums[0] += double(widen(a[i])) * double(widen(b[i]));
    return std::accumulate(sums, sums + 8, 0.0);
}

template <class T>
class BlockDrafting {
  public:
    BlockDrafting(Pool* pool, const FaserBlockDrafter& drafter, const FaserCache* caches, const FaserBlockRoom& room,
                  const FaserDraftRules& rules, const FaserBlockInput& input, const FaserDrafts& drafts)
        : pool_(pool), drafter_(drafter), caches_(caches), room_(room), rules_(rules), input_(input), drafts_(drafts),
          rows_(room.block), width_(drafter.embedding.depth), rank_(drafter.markov_before.depth) {}

    void run() {
        lay_out();
        pass();
        predict();
        walk();
    }

  private:
    int64_t block_rows(int64_t s) const { return rules_.max_tokens[s] + !drafter_.predicts_from_anchor; }
    T* hidden(int64_t row) const { return (T*)room_.hidden + row * width_; }
    void norm(const void* x, int64_t rows, const float* weight, void* out) const {
        faser_rms_norm(pool_, x, width_, rows, width_, weight, drafter_.eps, out, width_, rows_.dtype, nullptr);
    }

    void lay_out() {
        const int64_t count = rules_.num_sequences;
        for (int64_t s = 0; s < count; s++) {
            for (int32_t i = 0; i < input_.context[s]; i++) places_.push_back(input_.starts[s] + i);
            starts_.push_back(int32_t(places_.size()));
        }
        num_context_ = places_.size();
        for (int64_t s = 0; s < count; s++) {
            const int32_t first = input_.starts[s] + input_.context[s], rows = int32_t(block_rows(s));
            for (int32_t i = 0; i < rows; i++) {
                places_.push_back(first + i);
                seen_to_.push_back(first + rows - 1);
                ids_.push_back(i ? drafter_.mask_token : input_.anchors[s]);
            }
            starts_.push_back(int32_t(places_.size()));
        }
        num_block_ = ids_.size();
        tables_.assign(input_.block_table, input_.block_table + count * input_.table_width);
        tables_.insert(tables_.end(), input_.block_table, input_.block_table + count * input_.table_width);
    }

    // Attention of the blocks. seen_to: as of a plan.
    FaserPlan* plan_of_blocks(const int32_t* seen_to) const {
        std::vector<int32_t> starts(starts_.begin() + rules_.num_sequences, starts_.end());
        for (int32_t& each : starts) each -= int32_t(num_context_);
        return faser_plan_new(starts.data(), places_.data() + num_context_, seen_to, tables_.data(),
                              rules_.num_sequences, num_block_, input_.table_width, input_.block_size);
    }

    void pass() {
        T* const own = (T*)room_.inputs + num_context_ * width_;  // inputs of the blocks' rows
        if (num_context_) {
            multiply(pool_, drafter_.fc, input_.states, input_.states_stride, num_context_, rows_.dtype, room_.hidden,
                     rows_.dtype, nullptr);
            norm(room_.hidden, num_context_, drafter_.hidden_norm, room_.inputs);
        }
        embed(pool_, drafter_.embedding, ids_.data(), num_block_, room_.hidden, rows_.dtype);
        for (int64_t row = 0, s = 0, left = 0; drafter_.mask && row < num_block_; row++, left--) {
            if (left == 0) {
                left = block_rows(s++);
            } else {
                std::memcpy(hidden(row), drafter_.mask, width_ * sizeof(T));
            }
        }
        FaserPlan* const stored = faser_plan_new(starts_.data(), places_.data(), nullptr, tables_.data(),
                                                 2 * rules_.num_sequences, places_.size(), input_.table_width,
                                                 input_.block_size);
        FaserPlan* const causal = plan_of_blocks(nullptr);
        FaserPlan* const whole = plan_of_blocks(seen_to_.data());
        rows_.rows = num_block_;
        for (int64_t number = 0; number < drafter_.num_layers; number++) {
            const FaserLayer& layer = drafter_.layers[number];
            const int64_t stride = layer.qkv.product.columns, mixed = layer.feed_forward.attention_out.depth;
            norm(room_.hidden, num_block_, layer.qkv.norm, own);
            multiply(pool_, layer.qkv.product, room_.inputs, width_, places_.size(), rows_.dtype, room_.qkv, rows_.dtype,
                     layer.feed_forward.attention_out.low_bit);
            faser_rope_append(pool_, &caches_[number], stored, layer.heads.num_heads, room_.qkv, stride, layer.angles,
                              layer.query_angles, layer.q_norm, layer.k_norm, nullptr, layer.eps, rows_.dtype);
            faser_attend(pool_, &caches_[number], drafter_.causal[number] ? causal : whole, &layer.heads,
                         (T*)room_.qkv + num_context_ * stride, stride, room_.mixed, mixed, rows_.dtype);
            faser_feed_forward(pool_, &layer.feed_forward, nullptr, &rows_, room_.mixed, room_.hidden, nullptr);
        }
        for (FaserPlan* each : {stored, causal, whole}) faser_plan_free(each);
    }

    // The candidates of each row that predicts, draft after draft, in the order of their tokens' ids.
    void predict() {
        int64_t count = 0;
        for (int64_t s = 0, row = 0; s < rules_.num_sequences; s++) {
            firsts_.push_back(count);
            row += !drafter_.predicts_from_anchor;
            for (int64_t i = 0; i < rules_.max_tokens[s]; i++, row++, count++) {
                if (row != count) std::memcpy(hidden(count), hidden(row), width_ * sizeof(T));
            }
        }
        norm(room_.hidden, count, drafter_.norm, room_.hidden);
        const int64_t columns = drafter_.head.columns, each = drafter_.num_candidates;
        std::vector<float> scores(count * each);
        std::vector<int64_t> found(count * each);
        for (int64_t row = 0; row < count; row += room_.logit_rows) {
            const int64_t rows = std::min(room_.logit_rows, count - row);
            multiply(pool_, drafter_.head, hidden(row), width_, rows, rows_.dtype, room_.logits, kFloat32, nullptr);
            faser_top(pool_, room_.logits, columns, rows, columns, each, found.data() + row * each,
                      scores.data() + row * each);
        }
        std::vector<int64_t> order(each);
        for (int64_t row = 0; row < count; row++) {
            const int64_t* own = found.data() + row * each;
            const auto id = [&](int64_t i) { return drafter_.draft_ids ? drafter_.draft_ids[own[i]] : own[i]; };
            std::iota(order.begin(), order.end(), 0);
            std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return id(a) < id(b); });
            for (const int64_t i : order) {
                scores_.push_back(scores[row * each + i]);
                columns_.push_back(own[i]);
                tokens_.push_back(id(i));
            }
        }
    }

    void walk() {
        const int64_t each = drafter_.num_candidates;
        const bool corrects = has_weights(drafter_.markov_before);
        std::vector<T> candidates(corrects ? columns_.size() * rank_ : 0), given;
        if (corrects) {
            embed(pool_, drafter_.markov_candidates, columns_.data(), columns_.size(), candidates.data(), rows_.dtype);
        }
        std::vector<int64_t> active(rules_.num_sequences), before(input_.anchors, input_.anchors + active.size());
        std::vector<int64_t> ids, found, last;
        std::vector<float> logits;
        std::vector<double> margins;
        std::iota(active.begin(), active.end(), 0);
        std::fill(drafts_.counts, drafts_.counts + active.size(), 0);
        while (!active.empty()) {
            logits.clear();
            ids.clear();
            last.clear();
            for (const int64_t s : active) last.push_back(before[s]);
            given.resize(active.size() * rank_);
            if (corrects) {
                embed(pool_, drafter_.markov_before, last.data(), active.size(), given.data(), rows_.dtype);
            }
            for (size_t i = 0; i < active.size(); i++) {
                const int64_t first = (firsts_[active[i]] + drafts_.counts[active[i]]) * each;
                for (int64_t c = first; c < first + each; c++) {
                    const T* own = candidates.data() + c * rank_;
                    logits.push_back(scores_[c] + (corrects ? float(dot(own, given.data() + i * rank_, rank_)) : 0.0f));
                    ids.push_back(tokens_[c]);
                }
            }
            choose_columns(pool_, rules_, drafts_.counts, active, logits.data(), each, ids.data(), each, found, margins);
            std::vector<int64_t> staying;
            for (size_t i = 0; i < active.size(); i++) {
                const int64_t s = active[i], depth = drafts_.counts[s]++, at = s * rules_.width + depth;
                before[s] = drafts_.token_ids[at] = ids[i * each + found[i]];
                drafts_.margins[at] = drafter_.confidence_of_hidden
                                          ? confidence(hidden(firsts_[s] + depth), given.data() + i * rank_)
                                          : margins[i];
                drafts_.num_fed[s] = depth;
                if (depth + 1 < rules_.max_tokens[s]) staying.push_back(s);
            }
            active = staying;
        }
    }

    // Log-odds that the token of a row is accepted. before: the row of the token before.
    double confidence(const T* row, const T* before) const {
        double odds = dot(row, drafter_.confidence_of_hidden, width_) + drafter_.confidence_bias;
        if (drafter_.confidence_of_before) odds += dot(before, drafter_.confidence_of_before, rank_);
        return std::min(std::max(double(float(odds)), -kCertain), kCertain);
    }

    Pool* pool_;
    const FaserBlockDrafter& drafter_;
    const FaserCache* caches_;
    const FaserBlockRoom& room_;
    const FaserDraftRules& rules_;
    const FaserBlockInput& input_;
    const FaserDrafts& drafts_;
    FaserBlockRows rows_;
    int64_t width_, rank_, num_context_ = 0, num_block_ = 0;
    std::vector<int32_t> starts_{0}, places_, seen_to_, tables_;
    std::vector<int64_t> ids_, firsts_;  // of the blocks' rows; of each draft, the first row that predicts
    std::vector<float> scores_;          // of the candidates, as the next two
    std::vector<int64_t> columns_, tokens_;
};

}  // namespace

extern "C" {

void faser_block_draft(Pool* pool, const FaserBlockDrafter* drafter, const FaserCache* caches,
                       const FaserBlockRoom* room, const FaserDraftRules* rules, const FaserBlockInput* input,
                       const FaserDrafts* drafts) {
    if (room->block.dtype == kFloat32) {
        return BlockDrafting<float>(pool, *drafter, caches, *room, *rules, *input, *drafts).run();
    }
    BlockDrafting<bf16>(pool, *drafter, caches, *room, *rules, *input, *drafts).run();
}
}
