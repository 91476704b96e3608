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

using namespace faser;

namespace {

enum Confidence : int64_t { kMargin = 0, kProbability = 1, kMatchLength = 2 };

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
    double lowest, highest, largest_margin, edge, own_kept, all_kept;
};

}

namespace {

// D drafts of up to K tokens, as columns: contract/drafts.py.
struct Drafts {
    int64_t count;
    const int64_t *slots, *methods, *lengths, *token_ids;
    const double* confidences;

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

    // [K + 1] of one draft; 0 beyond its length.
    void survive(const Drafts& drafts, int64_t at, double* out) const {
        const int64_t method = drafts.methods[at];
        const double* weights = a.weights + 3 * method;
        const double moved = offset(method, drafts.slots[at]);
        const double* confidences = drafts.confidences + at * a.cap;
        double product = out[0] = 1.0;
        for (int64_t depth = 0; depth < a.cap; depth++) {
            if (depth >= drafts.lengths[at]) {
                out[depth + 1] = 0.0;
                continue;
            }
            const double by_depth = double(depth) * a.depth_scale * weights[2] + weights[0];
            const double logit = feature(method, confidences[depth]) * weights[1] + by_depth + moved;
            out[depth + 1] = product *= inside(sigmoid(logit), a.lowest, a.highest);
        }
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
    int64_t *taken = ints(numbers), *method = taken + count, *length = method + count, *token = ints(tokens);
    auto& line = acceptance->survival;
    line.resize(cap + 1);
    for (int64_t s = 0; s < count; s++) {
        double most = 0.0, most_expected = 0.0;
        for (int64_t at = s; at < num_drafts; at += count) {
            acceptance->survive(drafts, at, line.data());
            const double expected = std::accumulate(line.begin(), line.end(), 0.0);
            double worth = 0.0;
            for (int64_t k = 1; k <= cap; k++) worth += std::max(line[k] - row_price, 0.0);
            if (worth < most || (worth == most && (worth > 0.0 || expected <= most_expected))) continue;
            most = worth;
            most_expected = expected;
            taken[s] = at;
            std::copy(line.begin(), line.end(), survival + s * (cap + 1));
        }
        const int64_t at = taken[s];
        method[s] = drafts.methods[at];
        length[s] = drafts.lengths[at];
        std::copy_n(drafts.token_ids + at * cap, cap, token + s * cap);
        std::copy_n(drafts.confidences + at * cap, cap, sure + s * cap);
    }
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
    const int64_t cap = acceptance->a.cap;
    const int64_t *model_begin = ints(by_model), *model_end = model_begin + num_by_model;
    auto &begin = acceptance->begin, &length = acceptance->length;
    for (int64_t i = 0; i < num_made; i++) length[made.slots[i]] = 0;
    int64_t first = 0;
    for (int64_t i = 0; i < num_sequences; first += counts[i++]) {
        if (came[i] < 0) continue;
        begin[came[i]] = first;
        length[came[i]] = counts[i];
    }
    for (int64_t i = 0; i < num_made; i++) {
        const int64_t slot = made.slots[i], right = ints(accepted)[i] = length[slot] - 1;
        if (length[slot] == 0) continue;
        if (is_drawn) {
            acceptance->hold(made, i, std::min(right + 1, ints(kept)[i]), right);
            continue;
        }
        const int64_t good = right + num_decided, verified = ints(kept)[i] + num_decided;
        const int64_t last = sampled[begin[slot] + length[slot] - 1];
        const bool cut_is_right =
            good == verified && verified < made.lengths[i] && made.token_ids[i * cap + verified] == last;
        acceptance->hold(made, i, std::min(good + 1, made.lengths[i]), good + cut_is_right);
    }
    for (int64_t at = 0; at < num_looked; at++) {
        const int64_t s = at % num_made, slot = looked.slots[at];
        if (looked.lengths[at] == 0 || length[slot] == 0) continue;
        if (ints(taken)[s] == at && std::find(model_begin, model_end, s) == model_end) continue;
        const int64_t most = std::min(length[slot], looked.lengths[at]);
        int64_t right = 0;
        while (right < most && looked.token_ids[at * cap + right] == sampled[begin[slot] + right]) right++;
        acceptance->hold(looked, at, std::min(right + 1, most), right);
    }
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
