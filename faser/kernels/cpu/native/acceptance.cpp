// How likely draft tokens are to be accepted, and what a step says about its drafts: the loops of
// engine/control/speculation/acceptance.py over the same arrays, and the choice of how many tokens to verify.
//
// Oracle: those Python classes, which explain what is computed. Sums go in the order of the drafts.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "arrays.h"
#include "lookup.h"

using namespace faser;

namespace {

enum Confidence : int64_t { kMargin = 0, kProbability = 1, kMatchLength = 2 };

constexpr int64_t kNoToken = -1;  // beyond the end of a draft

}  // namespace

extern "C" {

// Arrays that Python owns. M methods, N slots, K the cap. kinds: [M] of confidence. Two kinds of drafters, by a model
// and from text; own: [2, N, 2, K], all: [2, 2, K], reached before passed. The numbers are those of acceptance.py.
struct FaserAcceptanceArrays {
    int64_t num_methods, num_slots, cap;
    const int64_t* kinds;
    const uint8_t* teaches;                    // [N]
    const double *samples, *prior_precision;   // [N]
    const double* prior_curvature;             // [M, 3, 3]
    double *weights, *curvature, *depths;      // [M, 3], [M, 3, 3], [M, 2]: sum and count
    double *offset, *precision;                // [M, N]
    double *shift, *shift_precision;           // [M]
    double *own, *all;
    double depth_scale, curve_kept, longest_step, largest_offset, precision_kept, shift_prior, shift_kept;
    double lowest, highest, least_survival, largest_margin, edge, own_kept, all_kept;
};

}

namespace {

// D drafts of up to K tokens, as columns: contract/drafts.py.
struct Drafts {
    int64_t count;
    const int64_t *slots, *methods, *lengths, *token_ids;
    const double* confidences;

    Drafts(int64_t num_drafts, const int64_t* slot, const int64_t* method, const int64_t* length, const int64_t* token,
           const double* confidence)
        : count(num_drafts), slots(slot), methods(method), lengths(length), token_ids(token), confidences(confidence) {}

    Drafts(int64_t num_drafts, Array slot, Array method, Array length, Array token, Array confidence)
        : count(num_drafts),
          slots(ints(slot)),
          methods(ints(method)),
          lengths(ints(length)),
          token_ids(ints(token)),
          confidences(reals(confidence)) {}
};

// A decided token.
struct Token {
    int64_t method, slot, depth;
    double confidence;
    bool good;
};

struct Feature {
    double of[3];
};

// What look-ups have found for a step, of S sequences by one method, then by the next. taken: [S] positions.
struct Looked {
    std::vector<int64_t> slots, methods, lengths, token_ids, taken;
    std::vector<double> confidences;

    Drafts drafts() const {
        return {int64_t(slots.size()), slots.data(), methods.data(), lengths.data(), token_ids.data(),
                confidences.data()};
    }
};

// What a step of R sequences sampled: [R] slots, -1 for those that teach nothing, and counts; tokens, one sequence after
// the other.
struct Sampled {
    int64_t num_sequences;
    const int64_t *slots, *counts, *tokens;
};

double inside(double value, double low, double high) { return std::min(std::max(value, low), high); }

double sigmoid(double logit) { return 1.0 / (1.0 + std::exp(-logit)); }

// x of matrix x = right, by the Cholesky factors.
void solve(const double* m, const double* right, double* x) {
    const double lower_b = m[1] / m[0], lower_c = m[2] / m[0];
    const double pivot = m[4] - lower_b * m[1], rest = m[5] - lower_b * m[2];
    const double lower_e = rest / pivot, last = m[8] - lower_c * m[2] - lower_e * rest;
    const double second = right[1] - lower_b * right[0];
    x[2] = (right[2] - lower_c * right[0] - lower_e * second) / last;
    x[1] = second / pivot - lower_e * x[2];
    x[0] = right[0] / m[0] - lower_b * x[1] - lower_c * x[2];
}

}  // namespace

struct FaserAcceptance {
    FaserAcceptanceArrays a;
    std::vector<Token> held;  // of steps that are not learned yet
    // Scratch.
    std::vector<Feature> features;
    std::vector<double> missed, spread, slot_missed, slot_spread, survival;
    std::vector<int64_t> slot_count, begin, length, order;
    Looked looked;  // by the last look

    explicit FaserAcceptance(const FaserAcceptanceArrays& arrays)
        : a(arrays),
          slot_missed(arrays.num_slots),
          slot_spread(arrays.num_slots),
          slot_count(arrays.num_slots),
          begin(arrays.num_slots),
          length(arrays.num_slots) {}

    double feature(int64_t method, double confidence) const {
        switch (a.kinds[method]) {
            case kProbability: {
                const double chance = inside(confidence, a.edge, 1.0 - a.edge);
                return std::log(chance / (1.0 - chance));
            }
            case kMatchLength:
                return std::log(std::max(confidence, 1.0));
            default:
                return inside(confidence, -a.largest_margin, a.largest_margin);
        }
    }

    double offset(int64_t method, int64_t slot) const {
        return a.samples[slot] * a.shift[method] + a.offset[method * a.num_slots + slot];
    }

    // [K + 1] of one draft; 0 beyond its length, and where it is negligible.
    void survive(const Drafts& drafts, int64_t at, double* out) const {
        const int64_t method = drafts.methods[at], length = drafts.lengths[at];
        const double* weights = a.weights + 3 * method;
        const double moved = offset(method, drafts.slots[at]);
        const double* confidences = drafts.confidences + at * a.cap;
        double product = out[0] = 1.0;
        int64_t depth = 0;
        for (; depth < length; depth++) {
            const double by_depth = double(depth) * a.depth_scale * weights[2] + weights[0];
            const double logit = feature(method, confidences[depth]) * weights[1] + by_depth + moved;
            product *= inside(sigmoid(logit), a.lowest, a.highest);
            if (product < a.least_survival) break;
            out[depth + 1] = product;
        }
        std::fill(out + depth + 1, out + a.cap + 1, 0.0);
    }

    // Drafts of one kind have come; of the first reached[i] depths it is known how likely they are.
    void note(bool from_text, const int64_t* slots, int64_t count, const int64_t* reached, const double* survival) {
        const int64_t cap = a.cap;
        double* all = a.all + from_text * 2 * cap;
        int64_t num_teaching = 0;
        for (int64_t i = 0; i < count; i++) num_teaching += a.teaches[slots[i]];
        const double kept = std::pow(a.all_kept, double(num_teaching));
        for (int64_t k = 0; k < 2 * cap; k++) all[k] *= kept;
        for (int64_t i = 0; i < count; i++) {
            double* own = a.own + (from_text * a.num_slots + slots[i]) * 2 * cap;
            const double* line = survival + i * (cap + 1);
            for (int64_t k = 0; k < cap; k++) {
                const bool is_reached = k < reached[i];
                own[k] = own[k] * a.own_kept + (is_reached ? line[k] : 0.0);
                own[cap + k] = own[cap + k] * a.own_kept + (is_reached ? line[k + 1] : 0.0);
                if (!is_reached || !a.teaches[slots[i]]) continue;
                all[k] += line[k];
                all[cap + k] += line[k + 1];
            }
        }
    }

    // The first `decided` tokens of a draft are decided, of which the first `accepted` were right.
    void hold(const Drafts& drafts, int64_t at, int64_t decided, int64_t accepted) {
        for (int64_t depth = 0; depth < decided; depth++) {
            held.push_back({drafts.methods[at], drafts.slots[at], depth, drafts.confidences[at * a.cap + depth],
                            depth < accepted});
        }
    }

    // Of each of count sequences the draft that is worth most: see faser_acceptance_choose.
    void choose(const Drafts& drafts, int64_t count, double row_price, int64_t* taken, int64_t* methods,
                int64_t* lengths, int64_t* tokens, double* confidences, double* survivals) {
        const int64_t cap = a.cap;
        survival.resize(cap + 1);
        for (int64_t s = 0; s < count; s++) {
            double most = 0.0, most_expected = 0.0;
            for (int64_t at = s; at < drafts.count; at += count) {
                survive(drafts, at, survival.data());
                const double expected = std::accumulate(survival.begin(), survival.end(), 0.0);
                double worth = 0.0;
                for (int64_t k = 1; k <= cap; k++) worth += std::max(survival[k] - row_price, 0.0);
                if (worth < most || (worth == most && (worth > 0.0 || expected <= most_expected))) continue;
                most = worth;
                most_expected = expected;
                taken[s] = at;
                std::copy(survival.begin(), survival.end(), survivals + s * (cap + 1));
            }
            const int64_t at = taken[s];
            methods[s] = drafts.methods[at];
            lengths[s] = drafts.lengths[at];
            const int64_t num_tokens = lengths[s];
            std::copy_n(drafts.token_ids + at * cap, num_tokens, tokens + s * cap);
            std::fill_n(tokens + s * cap + num_tokens, cap - num_tokens, kNoToken);
            std::copy_n(drafts.confidences + at * cap, num_tokens, confidences + s * cap);
            std::fill_n(confidences + s * cap + num_tokens, cap - num_tokens, 0.0);
        }
    }

    // A step is done: see faser_acceptance_judge.
    void judge(const Sampled& came, const Drafts& made, const int64_t* kept, int64_t* accepted, const Drafts& others,
               const int64_t* taken, const int64_t* by_model, int64_t num_by_model, int64_t num_decided,
               bool is_drawn) {
        const int64_t cap = a.cap;
        const int64_t* model_end = by_model + num_by_model;
        for (int64_t i = 0; i < made.count; i++) length[made.slots[i]] = 0;
        int64_t first = 0;
        for (int64_t i = 0; i < came.num_sequences; first += came.counts[i++]) {
            if (came.slots[i] < 0) continue;
            begin[came.slots[i]] = first;
            length[came.slots[i]] = came.counts[i];
        }
        for (int64_t i = 0; i < made.count; i++) {
            const int64_t slot = made.slots[i], right = accepted[i] = length[slot] - 1;
            if (length[slot] == 0) continue;
            if (is_drawn) {
                hold(made, i, std::min(right + 1, kept[i]), right);
                continue;
            }
            const int64_t good = right + num_decided, verified = kept[i] + num_decided;
            const int64_t last = came.tokens[begin[slot] + length[slot] - 1];
            const bool cut_is_right =
                good == verified && verified < made.lengths[i] && made.token_ids[i * cap + verified] == last;
            hold(made, i, std::min(good + 1, made.lengths[i]), good + cut_is_right);
        }
        for (int64_t at = 0; at < others.count; at++) {
            const int64_t s = at % made.count, slot = others.slots[at];
            if (others.lengths[at] == 0 || length[slot] == 0) continue;
            if (taken[s] == at && std::find(by_model, model_end, s) == model_end) continue;
            const int64_t most = std::min(length[slot], others.lengths[at]);
            int64_t right = 0;
            while (right < most && others.token_ids[at * cap + right] == came.tokens[begin[slot] + right]) right++;
            hold(others, at, std::min(right + 1, most), right);
        }
    }

    // See faser_acceptance_look.
    int64_t look(FaserTexts* texts, const int64_t* method_ids, int64_t count, const int64_t* slots,
                 const int64_t* limits, double row_price, int64_t* numbers, int64_t* tokens, double* real) {
        const int64_t cap = a.cap, total = num_methods(texts) * count;
        looked.slots.resize(total);
        looked.methods.resize(total);
        looked.lengths.resize(total);
        looked.token_ids.resize(total * cap);
        looked.confidences.resize(total * cap);
        looked.taken.assign(count, 0);
        for (int64_t at = 0; at < total; at++) {
            looked.slots[at] = slots[at % count];
            looked.methods[at] = method_ids[at / count];
        }
        const int32_t fault = look_up(texts, slots, limits, nullptr, count, nullptr, cap, looked.lengths.data(),
                                      looked.token_ids.data(), looked.confidences.data());
        if (fault != 0) return -1 - int64_t(fault);
        double* survivals = real + count * cap;
        choose(looked.drafts(), count, row_price, looked.taken.data(), numbers, numbers + count, tokens, real,
               survivals);
        int64_t promising = 0;
        for (int64_t s = 0; s < count; s++) {
            promising += numbers[count + s] > 0 && survivals[s * (cap + 1) + 1] > row_price;
        }
        return promising;
    }

    void learn() {
        for (int64_t method = 0; method < a.num_methods; method++) {
            order.clear();
            for (int64_t i = 0; i < int64_t(held.size()); i++) {
                if (held[i].method == method) order.push_back(i);
            }
            if (!order.empty()) learn_method(method);
        }
        held.clear();
    }

    // The tokens of one method, as `order` says: the curve makes a step, then the shift, then the slots' offsets.
    void learn_method(int64_t method) {
        const int64_t count = int64_t(order.size());
        double* weights = a.weights + 3 * method;
        features.resize(count);
        missed.resize(count);
        spread.resize(count);
        int64_t num_teaching = 0;
        double drawn = 0.0, drawn_spread = 0.0, drawn_missed = 0.0;
        for (int64_t i = 0; i < count; i++) {
            const Token& token = held[order[i]];
            features[i] = {{1.0, feature(method, token.confidence), double(token.depth) * a.depth_scale}};
            const double* f = features[i].of;
            const double chance =
                sigmoid(f[0] * weights[0] + f[1] * weights[1] + f[2] * weights[2] + offset(method, token.slot));
            missed[i] = double(token.good) - chance;
            spread[i] = chance * (1.0 - chance);
            num_teaching += a.teaches[token.slot];
            const double is_drawn = a.samples[token.slot] * double(a.teaches[token.slot]);
            drawn += is_drawn;
            drawn_spread += is_drawn * spread[i];
            drawn_missed += is_drawn * missed[i];
        }
        if (num_teaching > 0) fit(method, num_teaching);
        if (drawn > 0.0) {
            double& precision = a.shift_precision[method];
            precision = precision * std::pow(a.shift_kept, drawn) + drawn_spread;
            a.shift[method] += drawn_missed / (precision + a.shift_prior);
        }
        move_offsets(method);
    }

    // One Newton step on the tokens that teach.
    void fit(int64_t method, int64_t num_teaching) {
        double *weights = a.weights + 3 * method, *curvature = a.curvature + 9 * method;
        const double* prior = a.prior_curvature + 9 * method;
        const double kept = std::pow(a.curve_kept, double(num_teaching));
        double added[9] = {}, gradient[3] = {}, whole[9], move[3], depth_sum = 0.0, longest = 0.0;
        for (int64_t i = 0; i < int64_t(order.size()); i++) {
            if (!a.teaches[held[order[i]].slot]) continue;
            const double* f = features[i].of;
            for (int row = 0; row < 3; row++) {
                for (int column = 0; column < 3; column++) added[3 * row + column] += f[row] * spread[i] * f[column];
                gradient[row] += missed[i] * f[row];
            }
            depth_sum += f[2];
        }
        for (int k = 0; k < 9; k++) {
            curvature[k] = curvature[k] * kept + added[k];
            whole[k] = curvature[k] + prior[k];
        }
        solve(whole, gradient, move);
        for (int64_t i = 0; i < int64_t(order.size()); i++) {
            if (!a.teaches[held[order[i]].slot]) continue;
            const double* f = features[i].of;
            longest = std::max(longest, std::fabs(f[0] * move[0] + f[1] * move[1] + f[2] * move[2]));
        }
        const double scale = longest > a.longest_step ? a.longest_step / longest : 1.0;
        for (int k = 0; k < 3; k++) weights[k] += move[k] * scale;
        weights[1] = std::max(weights[1], 0.0);
        double* depths = a.depths + 2 * method;
        depths[0] = depths[0] * kept + depth_sum / a.depth_scale;
        depths[1] = depths[1] * kept + double(num_teaching);
    }

    void move_offsets(int64_t method) {
        for (const int64_t i : order) slot_missed[held[i].slot] = slot_spread[held[i].slot] = 0.0;
        for (const int64_t i : order) slot_count[held[i].slot] = 0;
        for (size_t i = 0; i < order.size(); i++) {
            const int64_t slot = held[order[i]].slot;
            slot_missed[slot] += missed[i];
            slot_spread[slot] += spread[i];
            slot_count[slot]++;
        }
        for (const int64_t i : order) {
            const int64_t slot = held[i].slot;
            if (slot_count[slot] == 0) continue;  // done
            const int64_t at = method * a.num_slots + slot;
            double &offset = a.offset[at], &precision = a.precision[at];
            precision = precision * std::pow(a.precision_kept, double(slot_count[slot])) + slot_spread[slot];
            offset += slot_missed[slot] / (precision + a.prior_precision[slot]);
            offset = inside(offset, -a.largest_offset, a.largest_offset);
            slot_count[slot] = 0;
        }
    }
};

extern "C" {

// The address of what an array holds.
const void* faser_array_data(Array array) { return held_by<void>(array); }

FaserAcceptance* faser_acceptance_new(const FaserAcceptanceArrays* arrays) { return new FaserAcceptance(*arrays); }

void faser_acceptance_free(FaserAcceptance* acceptance) { delete acceptance; }

// out: [D, K + 1] survival of drafts that are there.
void faser_acceptance_survival(const FaserAcceptance* acceptance, int64_t count, Array slots, Array methods,
                               Array lengths, Array token_ids, Array confidences, Array out) {
    const Drafts drafts(count, slots, methods, lengths, token_ids, confidences);
    for (int64_t i = 0; i < count; i++) acceptance->survive(drafts, i, reals(out) + i * (acceptance->a.cap + 1));
}

// Of drafts of S sequences by one method, then by the next, for each sequence the one whose tokens are worth most beyond
// row_price; where no token exceeds it, the one with the most expected tokens.
// numbers: [3, S] its position, method and length. tokens: [S, K]. real: [S, K] confidences, then [S, K + 1] survival.
// requested: [S] tokens that the look-ups were asked for; null: they are not noted.
void faser_acceptance_choose(FaserAcceptance* acceptance, int64_t num_drafts, Array slots, Array methods, Array lengths,
                             Array token_ids, Array confidences, int64_t count, Array requested, double row_price,
                             Array numbers, Array tokens, Array real) {
    const Drafts drafts(num_drafts, slots, methods, lengths, token_ids, confidences);
    const int64_t cap = acceptance->a.cap;
    double *sure = reals(real), *survival = sure + count * cap;
    int64_t* taken = ints(numbers);
    acceptance->choose(drafts, count, row_price, taken, taken + count, taken + 2 * count, ints(tokens), sure, survival);
    if (requested != nullptr) acceptance->note(true, drafts.slots, count, ints(requested), survival);
}

void faser_acceptance_note(FaserAcceptance* acceptance, int32_t from_text, int64_t count, Array slots, Array reached,
                           Array survival) {
    acceptance->note(from_text != 0, ints(slots), count, ints(reached), reals(survival));
}

void faser_acceptance_hold(FaserAcceptance* acceptance, int64_t count, Array slots, Array methods, Array lengths,
                           Array token_ids, Array confidences, Array decided, Array accepted) {
    const Drafts drafts(count, slots, methods, lengths, token_ids, confidences);
    for (int64_t i = 0; i < count; i++) acceptance->hold(drafts, i, ints(decided)[i], ints(accepted)[i]);
}

// A step is done, of R sequences: came: [R] slots, -1 for those that teach nothing; counts, [R]; sampled: tokens,
// sequence after sequence. S drafts were made, of which it verified kept[i] tokens, after num_decided that were accepted
// before; accepted: [S] of these, -1 where the step teaches nothing. looked: D drafts from text, of which those at taken,
// [S], are among the made ones but for the sequences by_model. is_drawn: the made tokens are no point masses.
void faser_acceptance_judge(FaserAcceptance* acceptance, int64_t num_sequences, const int64_t* came,
                            const int64_t* counts, const int64_t* sampled, int64_t num_made, Array slots, Array methods,
                            Array lengths, Array token_ids, Array confidences, Array kept, Array accepted,
                            int64_t num_looked, Array looked_slots, Array looked_methods, Array looked_lengths,
                            Array looked_token_ids, Array looked_confidences, Array taken, Array by_model,
                            int64_t num_by_model, int64_t num_decided, int32_t is_drawn) {
    const Drafts made(num_made, slots, methods, lengths, token_ids, confidences);
    const Drafts looked(num_looked, looked_slots, looked_methods, looked_lengths, looked_token_ids, looked_confidences);
    acceptance->judge({num_sequences, came, counts, sampled}, made, ints(kept), ints(accepted), looked, ints(taken),
                      ints(by_model), num_by_model, num_decided, is_drawn != 0);
}

// Look up a draft for each of S sequences, of at most limits[i] tokens, and take the one that is worth most, as of
// faser_acceptance_choose; the others are kept for faser_acceptance_judge_look. method_ids: of what texts ask, in order.
// numbers: [2, S] method and length; tokens and real as there. Returns how many drafts have a first token whose survival
// exceeds row_price; below 0: -1 less the fault.
int64_t faser_acceptance_look(FaserAcceptance* acceptance, FaserTexts* texts, Array method_ids, int64_t count,
                              Array slots, Array limits, double row_price, Array numbers, Array tokens, Array real) {
    return acceptance->look(texts, ints(method_ids), count, ints(slots), ints(limits), row_price, ints(numbers),
                            ints(tokens), reals(real));
}

// faser_acceptance_judge of the drafts that faser_acceptance_look has found last.
void faser_acceptance_judge_look(FaserAcceptance* acceptance, int64_t num_sequences, const int64_t* came,
                                 const int64_t* counts, const int64_t* sampled, int64_t num_made, Array slots,
                                 Array methods, Array lengths, Array token_ids, Array confidences, Array kept,
                                 Array accepted) {
    const Drafts made(num_made, slots, methods, lengths, token_ids, confidences);
    const Looked& looked = acceptance->looked;
    acceptance->judge({num_sequences, came, counts, sampled}, made, ints(kept), ints(accepted), looked.drafts(),
                      looked.taken.data(), nullptr, 0, 0, false);
}

// What is held of a sequence that leaves its slot is lost.
void faser_acceptance_drop(FaserAcceptance* acceptance, int64_t slot) {
    auto& held = acceptance->held;
    held.erase(std::remove_if(held.begin(), held.end(), [slot](const Token& token) { return token.slot == slot; }),
               held.end());
}

void faser_acceptance_learn(FaserAcceptance* acceptance) { acceptance->learn(); }

// How many of each draft's tokens to verify so that tokens over seconds are largest. survival: [S, K + 1]; least: [S]
// that are verified in any case, null: none; lengths: [S]; seconds: of the step with 0, 1, … draft rows; worth: tokens of
// the step without. kept: [S]. Returns tokens over seconds.
double faser_best_prefixes(FaserAcceptance* acceptance, int64_t count, Array survival, Array least, Array lengths,
                           Array seconds, double worth, Array kept) {
    const int64_t cap = acceptance->a.cap;
    int64_t* found = ints(kept);
    auto& values = acceptance->survival;
    auto& order = acceptance->order;
    values.resize(count * cap);
    order.clear();
    double sum = worth;
    int64_t rows = 0;
    for (int64_t s = 0; s < count; s++) {
        const double* chances = reals(survival) + s * (cap + 1) + 1;
        found[s] = least == nullptr ? 0 : ints(least)[s];
        rows += found[s];
        for (int64_t k = 0; k < found[s]; k++) sum += chances[k];
        for (int64_t k = found[s]; k < ints(lengths)[s]; k++) {
            values[s * cap + k] = chances[k];
            order.push_back(s * cap + k);
        }
    }
    if (count > 1) {
        std::stable_sort(order.begin(), order.end(),
                         [&values](int64_t one, int64_t other) { return values[one] > values[other]; });
    }
    double best = sum / reals(seconds)[rows];
    size_t num_best = 0;
    for (size_t i = 0; i < order.size(); i++) {
        sum += values[order[i]];
        const double rate = sum / reals(seconds)[rows + i + 1];
        if (rate > best) {
            best = rate;
            num_best = i + 1;
        }
    }
    for (size_t i = 0; i < num_best; i++) found[order[i] / cap]++;
    return best;
}
}
