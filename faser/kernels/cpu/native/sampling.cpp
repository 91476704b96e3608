// Sampling kernels: the largest logit of a row, and the token drawn after temperature and truncation, by a race of
// blocks of columns and then of the columns of one block (race.h).
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
#include "race.h"
#include "simd.h"

using namespace faser;

namespace {

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

// The `count` largest values and their columns, falling, the lower column first among equal ones. A column may be 0 and
// its value -inf where there are too few above that; the first value is NaN where one is.
void top(const float* x, int64_t width, int64_t count, int64_t* columns, float* values) {
    std::fill(columns, columns + count, 0);
    std::fill(values, values + count, kNothing);
    vi bad = {};
    each_vector(x, width, kNothing, [&](int64_t first, vf v) {
        bad |= v != v;
        uint32_t found = reaching(v, values[count - 1]);
        for (; found; found &= found - 1) {
            const int lane = __builtin_ctz(found);
            int64_t at = count - 1;
            if (!(v[lane] > values[at])) continue;
            for (; at > 0 && v[lane] > values[at - 1]; at--) {
                values[at] = values[at - 1];
                columns[at] = columns[at - 1];
            }
            values[at] = v[lane];
            columns[at] = first + lane;
        }
    });
    for (int lane = 0; lane < kLanes; lane++) {
        if (bad[lane]) values[0] = std::numeric_limits<float>::quiet_NaN();
    }
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

struct Shape {
    float temperature;
    float log_min_p;  // -inf is off
    int64_t top_k;    // 0 is off
    double top_p;     // 1 is off
};

// A row's weights and fixed-point probabilities. One for each thread, used again for row after row.
class Row {
  public:
    // best: column of the largest logit. ids: of the columns, ascending, or null: columns are ids.
    void take(const float* logits, int64_t width, int64_t best, const Shape& shape, const int64_t* ids) {
        width_ = width;
        ids_ = ids;
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

    int64_t draw(uint64_t noise) {
        Arrivals arrivals(noise);
        return shortened() ? draw_kept(arrivals) : draw_any(arrivals);
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

    int64_t id(int64_t column) const { return ids_ ? ids_[column] : column; }

    double sum_blocks() {
        blocks_.clear();
        double total = 0;
        for (int64_t begin = 0, end; begin < width_; begin = end) {
            const int64_t number = id(begin) / kRaceBlock, next = (number + 1) * kRaceBlock;
            end = ids_ ? std::lower_bound(ids_ + begin, ids_ + width_, next) - ids_ : std::min(next, width_);
            blocks_.push_back({number, begin, end, prob_between(begin, end)});
            total += blocks_.back().prob;
        }
        return total;
    }

    int64_t draw_any(Arrivals& arrivals) {
        sum_blocks();
        const int64_t count = blocks_.back().number + 1;
        numbers_.resize(std::max(count, kRaceBlock) + Arrivals::kGroup);
        arrivals.fill(kRaceBlock, count, numbers_.data());
        Winner block;
        for (size_t i = 0; i < blocks_.size(); i++) block.add(int64_t(i), numbers_[blocks_[i].number], blocks_[i].prob);
        arrivals.fill(0, kRaceBlock, numbers_.data());
        Winner column;
        for (int64_t i = blocks_[block.at].begin; i < blocks_[block.at].end; i++) {
            column.add(i, numbers_[id(i) % kRaceBlock], whole(splat(weights_[i]) * unit_)[0]);
        }
        return column.at;
    }

    int64_t draw_kept(Arrivals& arrivals) {
        const Kept kept = truncate();
        blocks_.clear();
        for (size_t i = 0; i < entries_.size(); i++) {
            if (entries_[i].order > kept.last) continue;
            const int64_t number = id(uint32_t(entries_[i].order)) / kRaceBlock;
            if (blocks_.empty() || blocks_.back().number != number) blocks_.push_back({number, int64_t(i), 0, 0});
            blocks_.back().end = int64_t(i) + 1;
            blocks_.back().prob += entries_[i].prob;
        }
        Winner block;
        for (size_t i = 0; i < blocks_.size(); i++) {
            block.add(int64_t(i), arrivals[kRaceBlock + blocks_[i].number], blocks_[i].prob);
        }
        Winner column;
        for (int64_t i = blocks_[block.at].begin; i < blocks_[block.at].end; i++) {
            const int64_t at = uint32_t(entries_[i].order);
            if (entries_[i].order <= kept.last) column.add(at, arrivals[id(at) % kRaceBlock], entries_[i].prob);
        }
        return column.at;
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

    // Columns, or entries, [begin, end) of one block of ids, and their probability.
    struct Block {
        int64_t number, begin, end;
        double prob;
    };

    int64_t width_;
    const int64_t* ids_;
    Shape shape_;
    float unit_;  // probability of a weight of 1
    std::vector<float> weights_;  // 0 where min_p cuts off; whole vectors, as the next
    std::vector<float> scaled_;   // of rows that are shortened
    std::vector<Block> blocks_;
    std::vector<double> numbers_;
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

void faser_top(Pool* pool, const float* logits, int64_t stride, int64_t rows, int64_t width, int64_t count,
               int64_t* found, float* values) {
    pool->run(rows, [&](int64_t row) {
        top(logits + row * stride, width, count, found + row * count, values + row * count);
    });
}

// noise, found, margins: [N]. margins: by how much a scaled logit exceeds those of all other columns; may be null.
void faser_draw(Pool* pool, const float* logits, int64_t stride, int64_t width, const FaserChoice* choice, int64_t count,
                const uint64_t* noise, int64_t* found, double* margins) {
    pool->run(count, [&](int64_t i) {
        const float* at = logits + choice->rows[i] * stride;
        const int64_t likeliest = choice->best[i];
        Row& row = scratch();
        const int64_t* ids = choice->ids ? choice->ids + choice->rows[i] * choice->ids_stride : nullptr;
        row.take(at, width, likeliest, shape(*choice, i), ids);
        const int64_t column = found[i] = row.draw(noise[i]);
        if (!margins) return;
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
        row.take(at, width, choice->best[i], shape(*choice, i), nullptr);
        row.write(at);
    });
}
}
