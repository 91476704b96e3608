// Mixtures of experts: each row passes the networks that its router chooses, and their results are weighed and added.
//
// Pairs of a row and an expert are sorted by expert, so that each weight is read once for all rows that need it; the
// products of all experts are one list of work. A row's sum is in the order of its own weights: its bits depend on no
// other row.

#include <algorithm>
#include <cmath>
#include <vector>

#include "blocks.h"
#include "calls.h"
#include "simd.h"

using namespace faser;

namespace {

constexpr int64_t kRows = 16;  // of a piece of work that is not a product
constexpr float kSigmoidEps = 1e-6f;  // SIGMOID_EPS of kernels/interface/experts.py

// Where each pair is. P: rows times top_k.
struct Routing {
    std::vector<int32_t> expert;   // [R, top_k], by descending weight
    std::vector<float> weight;     // [R, top_k]
    std::vector<int64_t> sorted;   // [R, top_k], the pair's place in the order of the experts
    std::vector<int64_t> row;      // [P], of the pair at that place
    std::vector<FaserGroup> groups;
};

// The experts of a row by what the router likes, descending, of equal ones the lower first.
void choose(const float* liking, const FaserExperts& experts, int32_t* chosen) {
    const int64_t count = experts.num_experts, top = experts.top_k;
    for (int64_t e = 0, found = 0; e < count; e++) {
        if (found == top && !(liking[e] > liking[chosen[top - 1]])) continue;
        int64_t place = found < top ? found++ : top - 1;
        for (; place > 0 && liking[e] > liking[chosen[place - 1]]; place--) chosen[place] = chosen[place - 1];
        chosen[place] = int32_t(e);
    }
}

float sigmoid(float x) { return 1 / (1 + std::exp(-x)); }

// By sigmoids of the logits, and a bias of each expert that counts for the choice alone.
void choose_by_sigmoid(const float* logits, const FaserExperts& experts, int32_t* chosen, float* weights) {
    static thread_local std::vector<float> liking;
    const int64_t top = experts.top_k;
    liking.resize(experts.num_experts);
    for (int64_t e = 0; e < experts.num_experts; e++) {
        liking[e] = sigmoid(logits[e]) + (experts.choice_bias ? experts.choice_bias[e] : 0);
    }
    choose(liking.data(), experts, chosen);
    float total = kSigmoidEps;
    for (int64_t k = 0; k < top; k++) total += weights[k] = sigmoid(logits[chosen[k]]);
    for (int64_t k = 0; k < top; k++) {
        if (experts.renormalise) weights[k] /= total;
        if (experts.scales) weights[k] *= experts.scales[chosen[k]];
    }
}

// The experts of a row by descending logits, then their weights.
void choose(const float* logits, const FaserExperts& experts, int32_t* chosen, float* weights) {
    if (experts.sigmoid) return choose_by_sigmoid(logits, experts, chosen, weights);
    const int64_t count = experts.num_experts, top = experts.top_k;
    choose(logits, experts, chosen);
    const float most = logits[chosen[0]];
    float total = 0;
    if (!experts.renormalise) {
        for (int64_t e = 0; e < count; e++) total += std::exp(logits[e] - most);
    }
    for (int64_t k = 0; k < top; k++) {
        weights[k] = std::exp(logits[chosen[k]] - most);
        if (experts.renormalise) total += weights[k];
    }
    for (int64_t k = 0; k < top; k++) weights[k] /= total;
    if (!experts.scales) return;
    for (int64_t k = 0; k < top; k++) weights[k] *= experts.scales[chosen[k]];
}

void route(Pool& pool, const FaserExperts& experts, const float* logits, int64_t rows, Routing& to) {
    const int64_t top = experts.top_k, pairs = rows * top;
    to.expert.resize(pairs);
    to.weight.resize(pairs);
    to.sorted.resize(pairs);
    to.row.resize(pairs);
    pool.run((rows + kRows - 1) / kRows, [&](int64_t piece) {
        for (int64_t row = piece * kRows; row < std::min(rows, (piece + 1) * kRows); row++) {
            choose(logits + row * experts.router.columns, experts, &to.expert[row * top], &to.weight[row * top]);
        }
    });
    std::vector<int64_t> next(experts.num_experts + 1);
    for (int64_t i = 0; i < pairs; i++) next[to.expert[i] + 1]++;
    to.groups.clear();
    for (int64_t e = 0; e < experts.num_experts; e++) {
        next[e + 1] += next[e];
        if (next[e + 1] > next[e]) to.groups.push_back({e, next[e], next[e + 1]});
    }
    for (int64_t i = 0; i < pairs; i++) {
        to.sorted[i] = next[to.expert[i]]++;
        to.row[to.sorted[i]] = i / top;
    }
}

// What the shared expert gives, [R, H] or null, and the logit of its weight for row 0; those of rows are `stride`
// apart.
struct Shared {
    const float* given;
    const float* gate;
    int64_t stride;
};

// hidden[r] += the weighed results of its experts, given [P, H], then of the shared one; rounded once.
template <class T>
void combine(Pool& pool, const Routing& routing, int64_t top, const float* given, const Shared& shared, int64_t width,
             int64_t rows, T* hidden) {
    pool.run(rows, [&](int64_t row) {
        T* to = hidden + row * width;
        const int64_t* at = &routing.sorted[row * top];
        const float* weights = &routing.weight[row * top];
        const float* more = shared.given ? shared.given + row * width : nullptr;
        const float share = more ? sigmoid(shared.gate[row * shared.stride]) : 0;
        int64_t i = 0;
        for (; i + kLanes <= width; i += kLanes) {
            vf total = {};
            for (int64_t k = 0; k < top; k++) total = fma(splat(weights[k]), load(given + at[k] * width + i), total);
            if (more) total = fma(splat(share), load(more + i), total);
            store(to + i, load(to + i) + total);
        }
        for (; i < width; i++) {
            float total = 0;
            for (int64_t k = 0; k < top; k++) total = std::fma(weights[k], given[at[k] * width + i], total);
            if (more) total = std::fma(share, more[i], total);
            narrow(widen(to[i]) + total, to + i);
        }
    });
}

char* grown(std::vector<char>& memory, int64_t bytes) {
    if (int64_t(memory.size()) < bytes + 64) memory = std::vector<char>(bytes + 64);  // resize may take twice as much
    return memory.data() + (64 - (uintptr_t)memory.data() % 64) % 64;
}

}  // namespace

extern "C" {

// hidden += experts(x). x, hidden, and routed_by, which the router sees: [rows, H] in dtype, without gaps. The pool
// counts the experts that any row chose.
void faser_experts(Pool* pool, const FaserExperts* experts, const void* x, const void* routed_by, int64_t rows,
                   void* hidden, int32_t dtype) {
    if (rows == 0) return;
    static thread_local Routing own_routing;
    Routing& routing = own_routing;  // other threads read that of this one
    static thread_local std::vector<char> logit_memory, gathered_memory, gate_memory, inner_memory, given_memory;
    static thread_local std::vector<char> shared_memory;
    const int64_t value = dtype == kFloat32 ? 4 : 2, width = experts->router.depth, pairs = rows * experts->top_k;
    const int64_t num_logits = experts->router.columns;
    float* logits = (float*)grown(logit_memory, rows * num_logits * 4);
    const FaserGroup all{0, 0, rows};
    faser_grouped_linear(pool, &experts->router, &all, 1, routed_by, width, dtype, rows, logits, num_logits, kFloat32);
    // to [count, H] = what the networks of these groups give for from [count, H].
    auto networks = [&](const FaserAnyLinear* gate_up_of, const FaserAnyLinear* down_of, const FaserGroup* groups,
                        int64_t num_groups, const void* from, int64_t count, float* to) {
        const int64_t inner = down_of->depth;
        char* gate_up = grown(gate_memory, count * 2 * inner * value);
        faser_grouped_linear(pool, gate_up_of, groups, num_groups, from, width, dtype, count, gate_up, 2 * inner,
                             dtype);
        char* gated = grown(inner_memory, count * inner * value);
        faser_gate(pool, gate_up, 2 * inner, count, inner, gated, inner, dtype, experts->activation);
        faser_grouped_linear(pool, down_of, groups, num_groups, gated, inner, dtype, count, to, width, kFloat32);
    };
    Shared shared{nullptr, logits + num_logits - 1, num_logits};
    if (experts->shared) {
        float* given = (float*)grown(shared_memory, rows * width * 4);
        networks(&experts->shared[0], &experts->shared[1], &all, 1, x, rows, given);
        shared.given = given;
    }
    route(*pool, *experts, logits, rows, routing);
    char* gathered = grown(gathered_memory, pairs * width * value);
    pool->run((pairs + kRows - 1) / kRows, [&](int64_t piece) {
        for (int64_t i = piece * kRows; i < std::min(pairs, (piece + 1) * kRows); i++) {
            std::memcpy(gathered + i * width * value, (const char*)x + routing.row[i] * width * value, width * value);
        }
    });
    const int64_t count = int64_t(routing.groups.size());
    float* given = (float*)grown(given_memory, pairs * width * 4);
    networks(experts->gate_up, experts->down, routing.groups.data(), count, gathered, pairs, given);
    if (dtype == kFloat32) {
        combine(*pool, routing, experts->top_k, given, shared, width, rows, (float*)hidden);
    } else {
        combine(*pool, routing, experts->top_k, given, shared, width, rows, (bf16*)hidden);
    }
    pool->experts_read += count;
}

int64_t faser_experts_read(const Pool* pool) { return pool->experts_read; }
}
