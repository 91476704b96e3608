// The drafts of an EAGLE-3 head (arXiv 2503.01840), all tokens of all sequences in one call: a pass of a head takes a
// quarter of a millisecond, and Python between its operations would take as long. Operations are those that have calls
// of their own, in the order of the loop in Python, so drafts are the same.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "blocks.h"
#include "simd.h"

using namespace faser;

extern "C" {

void faser_embed(Pool*, const FaserLinear*, const int64_t* ids, int64_t rows, void* out);
void faser_low_bit_embed(Pool*, const FaserLowBit*, const int64_t* ids, int64_t rows, void* out, int32_t out_dtype);
void faser_linear(Pool*, const FaserLinear*, const void* x, int64_t x_stride, int64_t rows, void* out,
                  int64_t out_stride, int32_t out_dtype, const void* residual, int64_t residual_stride);
void faser_low_bit_linear(Pool*, const FaserLowBit*, const void* x, int64_t x_stride, int32_t x_dtype, int64_t rows,
                          void* out, int64_t out_stride, int32_t out_dtype, const void* residual,
                          int64_t residual_stride, const FaserLowBit* following);
void faser_rms_norm(Pool*, const void* x, int64_t stride, int64_t rows, int64_t width, const void* weight, float eps,
                    void* out, int64_t out_stride, int32_t dtype);
FaserPlan* faser_plan_new(const int32_t* query_start, const int32_t* positions, const int32_t* block_table,
                          int64_t num_sequences, int64_t num_rows, int64_t table_width, int64_t block_size);
void faser_plan_free(FaserPlan*);
void faser_best(Pool*, const float* logits, int64_t stride, int64_t rows, int64_t width, int64_t* found,
                double* margins);
struct FaserChoice;
void faser_nearest(Pool*, const float* logits, int64_t stride, int64_t width, const FaserChoice* choice, int64_t count,
                   const double* uniforms, double window, int64_t* found, double* margins);

// A head's weights. Mirrored in library.py, as the others here.
struct FaserEagle3 {
    FaserAnyLinear embedding;
    const void* embedding_norm;
    const void* feature_norm;
    float eps;
    int32_t residual_is_normed;  // the residual stream begins with the normalised features
    FaserAnyLinear qkv;          // of the first layer: of an embedding and features side by side
    const FaserLayer* layers;
    int64_t num_layers;
    FaserNormedLinear logits;
    const int64_t* draft_ids;    // the target's token of each row of the logits, or null: the same
};

// Room for as many rows as there are sequences.
struct FaserDraftRoom {
    FaserBlockRows block;  // its number of rows is not read
    void* embedded;
    void* joined;
    void* hidden;  // where the drafts begin: the head's output for the last committed token of each sequence
    void* qkv;
    void* mixed;
    float* logits;
};

// How the tokens of S sequences are chosen, and where drafts end. uniforms: [S, width], or null: all are greedy.
struct FaserDraftRules {
    int64_t num_sequences, width;  // of the longest draft
    const int64_t* max_tokens;
    const float* temperature;  // as in FaserChoice, for each sequence
    const float* log_min_p;
    const int64_t* top_k;
    const double* top_p;
    const double* uniforms;
    double window;
    const double* pass_prices;  // by the number of sequences that go on, from 1 on; null: drafts have max_tokens
    double row_price, intercept, slope;
};

struct FaserDraftPlaces {
    const int32_t* block_table;  // [S, table_width]
    int64_t table_width, block_size;
    const int32_t* places;  // [S] of the first drafted token in the cache
};

// token_ids, margins: [S, width], of which the first counts[s] are written. num_fed: tokens that were rows of a pass.
struct FaserDrafts {
    int64_t* token_ids;
    double* margins;
    int64_t* counts;
    int64_t* num_fed;
};
}

namespace {

constexpr double kCertain = 100;  // nats: larger margins carry no more information

// Arrays that FaserChoice points to, in its order.
struct Choice {
    const int64_t* rows;
    const int64_t* best;
    const float* temperature;
    const float* log_min_p;
    const int64_t* top_k;
    const double* top_p;
};

double acceptance(const FaserDraftRules& rules, double margin) {
    const double x = -(rules.intercept + rules.slope * margin);
    return 1 / (1 + std::exp(std::min(std::max(x, -500.0), 500.0)));
}

class Drafting {
  public:
    Drafting(Pool* pool, const FaserEagle3& head, const FaserCache* cache, const FaserDraftRoom& room,
             const FaserDraftRules& rules, const FaserDraftPlaces& places, const FaserDrafts& drafts)
        : pool_(pool), head_(head), cache_(cache), room_(room), rules_(rules), places_(places), drafts_(drafts),
          rows_(room.block), survival_(rules.num_sequences, 1.0) {
        for (int64_t s = 0; s < rules.num_sequences; s++) {
            active_.push_back(s);
            drafts.counts[s] = drafts.num_fed[s] = 0;
        }
    }

    // Returns the number of passes.
    int64_t run() {
        for (int64_t passes = 0;; passes++) {
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
        faser_normed_linear(pool_, &head_.logits, &rows_, room_.hidden, width(), room_.logits, kFloat32);
        found_.resize(count);
        margins_.resize(count);
        faser_best(pool_, room_.logits, columns, count, columns, found_.data(), margins_.data());
        if (rules_.uniforms) draw(columns);
        for (int64_t i = 0; i < count; i++) {
            found_[i] = std::max<int64_t>(found_[i], 0);  // where logits are no numbers
            margins_[i] = std::min(std::max(margins_[i], -kCertain), kCertain);
        }
    }

    void draw(int64_t columns) {
        std::vector<int64_t> rows, best, top_k, nearest;
        std::vector<float> temperature, log_min_p;
        std::vector<double> top_p, uniforms, margins;
        for (size_t i = 0; i < active_.size(); i++) {
            const int64_t s = active_[i];
            if (!(rules_.temperature[s] > 0) || found_[i] < 0) continue;
            rows.push_back(i);
            best.push_back(found_[i]);
            temperature.push_back(rules_.temperature[s]);
            log_min_p.push_back(rules_.log_min_p[s]);
            top_k.push_back(rules_.top_k[s]);
            top_p.push_back(rules_.top_p[s]);
            uniforms.push_back(rules_.uniforms[s * rules_.width + drafts_.counts[s]]);
        }
        if (rows.empty()) return;
        nearest.resize(rows.size());
        margins.resize(rows.size());
        const Choice choice{rows.data(),      best.data(),  temperature.data(),
                            log_min_p.data(), top_k.data(), top_p.data()};
        faser_nearest(pool_, room_.logits, columns, columns, (const FaserChoice*)&choice, rows.size(), uniforms.data(),
                      rules_.window, nearest.data(), margins.data());
        for (size_t i = 0; i < rows.size(); i++) {
            found_[rows[i]] = nearest[i];
            margins_[rows[i]] = margins[i];
        }
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

    // One row for each active sequence: its last drafted token, and the head's output that drafted it.
    void pass() {
        const int64_t count = active_.size(), row = width() * bytes();
        std::vector<int64_t> ids;
        std::vector<int32_t> starts{0}, positions, table;
        for (const int64_t s : active_) {
            ids.push_back(drafts_.token_ids[s * rules_.width + drafts_.counts[s] - 1]);
            positions.push_back(places_.places[s] + int32_t(drafts_.num_fed[s]++));
            starts.push_back(int32_t(starts.size()));
            const int32_t* blocks = places_.block_table + s * places_.table_width;
            table.insert(table.end(), blocks, blocks + places_.table_width);
        }
        FaserPlan* plan = faser_plan_new(starts.data(), positions.data(), table.data(), count, count,
                                         places_.table_width, places_.block_size);
        rows_.rows = count;
        if (head_.embedding.linear) {
            faser_embed(pool_, head_.embedding.linear, ids.data(), count, room_.embedded);
        } else {
            faser_low_bit_embed(pool_, head_.embedding.low_bit, ids.data(), count, room_.embedded, rows_.dtype);
        }
        faser_rms_norm(pool_, room_.embedded, width(), count, width(), head_.embedding_norm, head_.eps, room_.joined,
                       2 * width(), rows_.dtype);
        char* features = (char*)room_.joined + row;
        faser_rms_norm(pool_, room_.hidden, width(), count, width(), head_.feature_norm, head_.eps, features,
                       2 * width(), rows_.dtype);
        for (int64_t i = 0; head_.residual_is_normed && i < count; i++) {
            memcpy((char*)room_.hidden + i * row, features + 2 * i * row, row);
        }
        const FaserAnyLinear& qkv = head_.qkv;
        if (qkv.linear) {
            faser_linear(pool_, qkv.linear, room_.joined, qkv.depth, count, room_.qkv, qkv.columns, rows_.dtype, nullptr,
                         0);
        } else {
            faser_low_bit_linear(pool_, qkv.low_bit, room_.joined, qkv.depth, rows_.dtype, count, room_.qkv, qkv.columns,
                                 rows_.dtype, nullptr, 0, head_.layers->feed_forward.attention_out.low_bit);
        }
        faser_layers(pool_, head_.layers, 0, head_.num_layers, &head_.logits, &rows_, cache_, plan, room_.hidden,
                     room_.qkv, room_.mixed, 0);
        faser_plan_free(plan);
    }

    Pool* pool_;
    const FaserEagle3& head_;
    const FaserCache* cache_;
    const FaserDraftRoom& room_;
    const FaserDraftRules& rules_;
    const FaserDraftPlaces& places_;
    const FaserDrafts& drafts_;
    FaserBlockRows rows_;
    std::vector<double> survival_, margins_;
    std::vector<int64_t> active_, found_;
};

}  // namespace

extern "C" {

int64_t faser_eagle3_draft(Pool* pool, const FaserEagle3* head, const FaserCache* cache, const FaserDraftRoom* room,
                           const FaserDraftRules* rules, const FaserDraftPlaces* places, const FaserDrafts* drafts) {
    return Drafting(pool, *head, cache, *room, *rules, *places, *drafts).run();
}
}
