// Sampling kernels: the largest logit of a row, the token drawn after temperature and truncation, and the draft token
// likeliest to equal the one that the target draws with the same random number (sample-and-match).
//
// One thread has a row to itself. Neither the order of sums nor the width of vectors changes a result: the weight of a
// token is a fixed series of single float32 operations, none of them fused; fixed-point probabilities are whole
// numbers, whose sums are exact in double; the order of tokens is total (larger first, then lower id).
// engine/execution/sampling/distribution.py defines the same numbers with tensors.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "calls.h"
#include "pool.h"
#include "simd.h"

using namespace faser;

namespace {

constexpr int64_t kBlock = 256;           // columns that are summed, or searched, at once
constexpr float kLowest = -60.0f;         // nats; a token that far below the most likely one has a probability of 0
constexpr float kLog2E = 1.44269504f;
constexpr float kLn2High = 0.693145751953125f;  // ln 2 in two parts of 16 bits: their products with an exponent
constexpr float kLn2Low = 49087 * 0x1p-35f;      // are exact
constexpr double kWeightOne = 4294967296.0;            // 2^32, units in which weights are summed
constexpr double kProbTimesWeightOne = 0x1p84;         // 2^52 (a probability of 1) times 2^32
constexpr int kCuts = 8;                  // tried at once
constexpr float kNothing = -std::numeric_limits<float>::infinity();

typedef float vf_half __attribute__((vector_size(kLanes * 2)));
typedef double vd __attribute__((vector_size(kLanes * 4)));  // as many bits as a vf has: half the lanes

// A sum of whole numbers below 2^53, whose order cannot matter.
struct Total {
    vd low = {}, high = {};

    void add(vf x) {
        vf_half halves[2];
        std::memcpy(halves, &x, sizeof x);
        low += __builtin_convertvector(halves[0], vd);
        high += __builtin_convertvector(halves[1], vd);
    }

    double value() const {
        const vd both = low + high;
        double sum = 0;
        for (int i = 0; i < kLanes / 2; i++) sum += both[i];
        return sum;
    }
};

inline vf at_least(vf x, float least) { return x > least ? x : splat(least); }
inline vf larger(vf a, vf b) { return a > b ? a : b; }

// Of x >= 0: the largest whole number not above it.
inline vf whole(vf x) {
    const float magic = 8388608.0f;  // 2^23: from there on every float is whole
    vf nearest = (x + magic) - magic;
    vf below = nearest > x ? nearest - 1.0f : nearest;
    return x < magic ? below : x;
}

// exp(x) for x <= 0, below kLowest as there: multiplications and additions, each rounded, in this order.
inline vf weight(vf x) {
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
    x = at_least(x, kLowest);
    vf shifted = x * kLog2E + magic;
    vf n = shifted - magic;
    vf f = (x - n * kLn2High) - n * kLn2Low;
    vf p = f * 8.312521e-3f + 4.189016e-2f;  // least relative error, 1.1e-7, with these last two terms
    p = p * f + 0.16667114f;
    p = p * f + 0.4999923f;
    p = p * f + 1.0f;
    p = p * f + 1.0f;
    return (vf)((vi)p + ((vi)shifted << 23));
}

// Which lanes of a are at least b: one bit each.
inline uint32_t reaching(vf a, float b) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask(a, splat(b), _CMP_GE_OQ);
#elif defined(__AVX__)
    return uint32_t(_mm256_movemask_ps((vf)(a >= splat(b))));
#else
    uint32_t bits = 0;
    for (int i = 0; i < kLanes; i++) bits |= uint32_t(a[i] >= b) << i;
    return bits;
#endif
}

inline vf load_some(const float* x, int64_t count, float rest) {
    vf v = splat(rest);
    for (int64_t i = 0; i < count; i++) v[i] = x[i];
    return v;
}

// Calls body(i, x[i : i + kLanes]) for all columns; what the last vector has beyond them is `rest`.
template <class Body>
inline __attribute__((always_inline)) void each_vector(const float* x, int64_t width, float rest, const Body& body) {
    int64_t i = 0;
    for (; i + kLanes <= width; i += kLanes) body(i, load(x + i));
    if (i < width) body(i, load_some(x + i, width - i, rest));
}

// The two largest values that a lane has seen, and whether one was NaN.
struct Leaders {
    vf first = splat(kNothing), second = splat(kNothing);
    vi bad = {};

    void add(vf v) {
        second = larger(second, v < first ? v : first);
        first = larger(v, first);
        bad |= v != v;
    }

    void add(const Leaders& other) {
        second = larger(larger(second, other.second), first < other.first ? first : other.first);
        first = larger(first, other.first);
        bad |= other.bad;
    }
};

struct Best {
    int64_t column;  // -1: the largest value is infinite, or one is NaN
    float margin;      // by how much its value exceeds all others
};

// The first of the largest values.
Best best(const float* x, int64_t width) {
    Leaders parts[4];
    int64_t i = 0;
    for (; i + 4 * kLanes <= width; i += 4 * kLanes) {
        for (int part = 0; part < 4; part++) parts[part].add(load(x + i + part * kLanes));
    }
    each_vector(x + i, width - i, kNothing, [&](int64_t, vf v) { parts[0].add(v); });
    for (int part = 1; part < 4; part++) parts[0].add(parts[part]);
    float value = kNothing, next = kNothing;
    for (int lane = 0; lane < kLanes; lane++) {
        if (parts[0].bad[lane]) return {-1, 0};
        const float first = parts[0].first[lane];
        next = std::max({next, parts[0].second[lane], std::min(first, value)});
        value = std::max(value, first);
    }
    if (!std::isfinite(value)) return {-1, 0};
    for (i = 0; i + kLanes <= width; i += kLanes) {
        if (uint32_t found = reaching(load(x + i), value)) return {i + __builtin_ctz(found), value - next};
    }
    while (x[i] != value) i++;
    return {i, value - next};
}

struct Entry {
    uint64_t order;  // distinct
    double prob;     // whole
};

inline bool before(const Entry& a, const Entry& b) { return a.order < b.order; }

// Moves the shortest prefix of the order whose probability reaches `target` to the front, its last entry last, returns
// its length. All entries together reach it.
int64_t shortest_prefix(Entry* entries, int64_t count, double target) {
    int64_t low = 0, high = count;
    double below = 0;  // probability of the entries before low
    while (high - low > 24) {
        const uint64_t a = entries[low].order, b = entries[low + (high - low) / 2].order, c = entries[high - 1].order;
        const uint64_t pivot = std::max(std::min(a, b), std::min(std::max(a, b), c));
        int64_t middle = low;
        double left = 0;
        for (int64_t i = low; i < high; i++) {
            if (entries[i].order >= pivot) continue;
            left += entries[i].prob;
            std::swap(entries[i], entries[middle++]);
        }
        if (below + left >= target) {
            high = middle;
        } else {
            below += left;
            low = middle;
        }
    }
    std::sort(entries + low, entries + high, before);
    while (low < high && below < target) below += entries[low++].prob;
    return low;
}

double total_prob(const Entry* entries, int64_t count) {
    double total = 0;
    for (int64_t i = 0; i < count; i++) total += entries[i].prob;
    return total;
}

// The drawn token is the first whose cumulative probability exceeds this whole number, which is below the total.
double threshold(double uniform, double total) { return std::min(std::floor(uniform * total), total - 1); }

// The column that has most of the running sum's stretch between two numbers.
struct Nearest {
    double low, high;
    double most = 0;
    int64_t column = -1;

    Nearest(double uniform, double window, double total)
        : low(uniform * total - window * total), high(uniform * total + window * total) {}

    bool holds(double start, double end) const { return low <= start && end <= high; }

    // Columns come in order. start: probability before this one.
    void add(int64_t at, double start, double prob) {
        const double inside = std::min(start + prob, high) - std::max(start, low);
        if (inside <= most) return;
        most = inside;
        column = at;
    }
};

struct Shape {
    float temperature;
    float log_min_p;  // -inf is off
    int64_t top_k;    // 0 is off
    double top_p;     // 1 is off
};

// A row's weights and fixed-point probabilities. One for each thread, used again for row after row.
class Row {
  public:
    // best: column of the largest logit.
    void take(const float* logits, int64_t width, int64_t best, const Shape& shape) {
        width_ = width;
        shape_ = shape;
        weights_.resize(width + kLanes);
        if (shortened()) scaled_.resize(width + kLanes);
        const bool remember = shortened();
        const float most = logits[best], temperature = shape.temperature, log_min_p = shape.log_min_p;
        float *weights = weights_.data(), *kept = scaled_.data();
        Total total;
        each_vector(logits, width, kNothing, [&](int64_t i, vf x) {
            const vf s = (x - most) / temperature, w = weight(s);
            total.add(whole(w * float(kWeightOne)));
            store(weights + i, s >= log_min_p ? w : vf{});
            if (remember) store(kept + i, s);
        });
        unit_ = float(kProbTimesWeightOne / total.value());
    }

    bool shortened() const { return (shape_.top_k > 0 && shape_.top_k < width_) || shape_.top_p < 1; }

    int64_t draw(double uniform) { return shortened() ? draw_kept(uniform) : draw_any(uniform); }

    // The column with most probability within `window` (a share of the total) of the number; if none has any, the one
    // that the number falls in.
    int64_t nearest(double uniform, double window) {
        if (window == 0) return draw(uniform);
        return shortened() ? nearest_kept(uniform, window) : nearest_any(uniform, window);
    }

    // out: may be the logits.
    void write(float* out) {
        if (!shortened()) {
            for (int64_t i = 0; i < width_; i += kLanes) {
                vf probs = whole(load(weights_.data() + i) * unit_);
                if (i + kLanes <= width_) {
                    store(out + i, probs);
                } else {
                    for (int64_t j = i; j < width_; j++) out[j] = probs[j - i];
                }
            }
            return;
        }
        const Kept kept = truncate();
        std::fill(out, out + width_, 0.0f);
        for (const Entry& entry : entries_) {
            if (entry.order <= kept.last) out[uint32_t(entry.order)] = float(entry.prob);
        }
    }

  private:
    // Fixed-point probabilities of columns [begin, end); weights after the last column are not counted.
    double prob_between(int64_t begin, int64_t end) const {
        const float unit = unit_;
        Total total;
        each_vector(weights_.data() + begin, end - begin, 0.0f, [&](int64_t, vf w) {
            total.add(whole(w * unit));
        });
        return total.value();
    }

    double sum_blocks() {
        blocks_.clear();
        double total = 0;
        for (int64_t at = 0; at < width_; at += kBlock) {
            blocks_.push_back(prob_between(at, std::min(at + kBlock, width_)));
            total += blocks_.back();
        }
        return total;
    }

    int64_t draw_any(double uniform) {
        double left = threshold(uniform, sum_blocks());
        size_t block = 0;
        while (blocks_[block] <= left) left -= blocks_[block++];
        for (int64_t i = int64_t(block) * kBlock;; i++) {
            const double prob = whole(splat(weights_[i]) * unit_)[0];
            if (prob > left) return i;
            left -= prob;
        }
    }

    int64_t draw_kept(double uniform) {
        const Kept kept = truncate();
        double left = threshold(uniform, kept.prob);
        for (const Entry& entry : entries_) {
            if (entry.order > kept.last) continue;
            if (entry.prob > left) return uint32_t(entry.order);
            left -= entry.prob;
        }
        __builtin_unreachable();
    }

    int64_t nearest_any(double uniform, double window) {
        Nearest found(uniform, window, sum_blocks());
        double start = 0, end;
        for (size_t block = 0; block < blocks_.size() && start < found.high; block++, start = end) {
            end = start + blocks_[block];
            if (end <= found.low || blocks_[block] <= found.most) continue;
            if (found.holds(start, end)) {
                largest_of(int64_t(block), found);
            } else {
                largest_part_of(int64_t(block), start, found);
            }
        }
        return found.column;
    }

    // Of a block that lies in the stretch: what its columns have of it is their probability.
    void largest_of(int64_t block, Nearest& found) const {
        const int64_t begin = block * kBlock;
        each_vector(weights_.data() + begin, std::min(kBlock, width_ - begin), 0.0f, [&](int64_t i, vf w) {
            const vf probs = whole(w * unit_);
            for (uint32_t more = reaching(probs, float(found.most)); more; more &= more - 1) {
                const int lane = __builtin_ctz(more);
                if (probs[lane] <= found.most) continue;
                found.most = probs[lane];
                found.column = begin + i + lane;
            }
        });
    }

    // Of a block at an end of the stretch.
    void largest_part_of(int64_t block, double start, Nearest& found) const {
        const int64_t begin = block * kBlock;
        each_vector(weights_.data() + begin, std::min(kBlock, width_ - begin), 0.0f, [&](int64_t i, vf w) {
            const vf probs = whole(w * unit_);
            for (int lane = 0; lane < kLanes; lane++) {
                found.add(begin + i + lane, start, probs[lane]);
                start += probs[lane];
            }
        });
    }

    int64_t nearest_kept(double uniform, double window) {
        const Kept kept = truncate();
        Nearest found(uniform, window, kept.prob);
        double start = 0;
        for (const Entry& entry : entries_) {
            if (entry.order > kept.last) continue;
            found.add(uint32_t(entry.order), start, entry.prob);
            start += entry.prob;
        }
        return found.column;
    }

    // What the truncation keeps: of the entries, in which it leaves them, those up to `last` in their order.
    struct Kept {
        uint64_t last;
        double prob;
    };

    Kept truncate() {
        if (shape_.top_k > 0 && shape_.top_k < width_) {
            collect(std::max(shape_.log_min_p, at_least_top_k()));
            ordered_ = entries_;
            const int64_t found = int64_t(ordered_.size()), kept = std::min(found, shape_.top_k);
            std::nth_element(ordered_.begin(), ordered_.begin() + (kept - 1), ordered_.end(), before);
            const double prob = total_prob(ordered_.data(), kept);
            return shape_.top_p < 1 ? shortest(kept, shape_.top_p * prob) : Kept{ordered_[kept - 1].order, prob};
        }
        const double target = shape_.top_p * sum_blocks();
        collect(std::max(shape_.log_min_p, about_top_p(float(target / unit_))));
        if (total_prob(entries_.data(), int64_t(entries_.size())) < target) collect(shape_.log_min_p);
        ordered_ = entries_;
        return shortest(int64_t(ordered_.size()), target);
    }

    Kept shortest(int64_t count, double target) {
        const int64_t length = shortest_prefix(ordered_.data(), count, target);
        return {ordered_[length - 1].order, total_prob(ordered_.data(), length)};
    }

    // A scaled logit such that the columns that reach it have about the target of the weights, and rather more.
    float about_top_p(float target) const {
        float low = -24, high = 0;  // beyond, hardly anything counts
        for (int round = 0; round < 2; round++) {
            const float step = (high - low) / kCuts;
            vf sums[kCuts] = {};
            for (int64_t i = 0; i < width_; i += kLanes) {
                const vf s = load(scaled_.data() + i), w = load(weights_.data() + i);
                for (int cut = 0; cut < kCuts; cut++) sums[cut] += s >= low + float(cut) * step ? w : vf{};
            }
            int cut = kCuts - 1;
            while (cut > 0 && sum(sums[cut]) < target * 1.0001f) cut--;
            high = low + float(cut + 1) * step;
            low += float(cut) * step;
        }
        return low;
    }

    // A scaled logit that at least top_k columns reach: as many maxima of disjoint sets of columns do.
    float at_least_top_k() {
        const int64_t vectors = (width_ + kLanes - 1) / kLanes;
        const int64_t group = std::max<int64_t>(1, vectors * kLanes / (8 * shape_.top_k + 256));  // vectors of a set
        maxima_.clear();
        for (int64_t at = 0; at < width_; at += group * kLanes) {
            vf most = splat(kNothing);
            each_vector(scaled_.data() + at, std::min(group * kLanes, width_ - at), kNothing,
                        [&](int64_t, vf s) { most = larger(s, most); });
            for (int lane = 0; lane < kLanes; lane++) maxima_.push_back(most[lane]);
        }
        if (int64_t(maxima_.size()) < shape_.top_k) return kNothing;
        const auto edge = maxima_.begin() + (shape_.top_k - 1);
        std::nth_element(maxima_.begin(), edge, maxima_.end(), [](float a, float b) { return a > b; });
        return *edge;
    }

    // Makes entries of all columns whose scaled logit is at least `cut`, in the order of distribution.py.
    void collect(float cut) {
        entries_.clear();
        each_vector(scaled_.data(), width_, kNothing, [&](int64_t i, vf s) {
            uint32_t found = reaching(s, cut);
            if (i + kLanes > width_) found &= (1u << (width_ - i)) - 1;
            if (!found) return;
            const vf probs = whole(load(weights_.data() + i) * unit_);
            const vu keys = (vu)s & 0x7fffffffu;  // of numbers not above 0: the larger one has the smaller key
            for (; found; found &= found - 1) {
                const int lane = __builtin_ctz(found);
                entries_.push_back({uint64_t(keys[lane]) << 32 | uint64_t(i + lane), probs[lane]});
            }
        });
    }

    int64_t width_;
    Shape shape_;
    float unit_;  // probability of a weight of 1
    std::vector<float> weights_;  // 0 where min_p cuts off; whole vectors, as the next
    std::vector<float> scaled_;   // of rows that are shortened
    std::vector<double> blocks_;
    std::vector<float> maxima_;
    std::vector<Entry> entries_;  // ascending columns
    std::vector<Entry> ordered_;  // the same, in the course of being ordered
};

Row& scratch() {
    thread_local Row row;
    return row;
}

Shape shape(const FaserChoice& choice, int64_t i) {
    return {choice.temperature[i], choice.log_min_p[i], choice.top_k[i], choice.top_p[i]};
}

}  // namespace

extern "C" {

// found, margins: [rows].
void faser_best(Pool* pool, const float* logits, int64_t stride, int64_t rows, int64_t width, int64_t* found,
                double* margins) {
    pool->run(rows, [&](int64_t row) {
        const Best first = best(logits + row * stride, width);
        found[row] = first.column;
        margins[row] = first.margin;
    });
}

// uniforms, found: [N].
void faser_draw(Pool* pool, const float* logits, int64_t stride, int64_t width, const FaserChoice* choice, int64_t count,
                const double* uniforms, int64_t* found) {
    pool->run(count, [&](int64_t i) {
        Row& row = scratch();
        row.take(logits + choice->rows[i] * stride, width, choice->best[i], shape(*choice, i));
        found[i] = row.draw(uniforms[i]);
    });
}

// uniforms, found, margins: [N]. margins: by how much a scaled logit exceeds those of all other columns.
void faser_nearest(Pool* pool, const float* logits, int64_t stride, int64_t width, const FaserChoice* choice,
                   int64_t count, const double* uniforms, double window, int64_t* found, double* margins) {
    pool->run(count, [&](int64_t i) {
        const float* at = logits + choice->rows[i] * stride;
        const int64_t likeliest = choice->best[i];
        Row& row = scratch();
        row.take(at, width, likeliest, shape(*choice, i));
        const int64_t column = found[i] = row.nearest(uniforms[i], window);
        const float margin = column == likeliest ? best(at, width).margin : at[column] - at[likeliest];
        margins[i] = margin / choice->temperature[i];
    });
}

// In place of the logits.
void faser_fixed_point_probs(Pool* pool, float* logits, int64_t stride, int64_t width, const FaserChoice* choice,
                             int64_t count) {
    pool->run(count, [&](int64_t i) {
        float* at = logits + choice->rows[i] * stride;
        Row& row = scratch();
        row.take(at, width, choice->best[i], shape(*choice, i));
        row.write(at);
    });
}
}
