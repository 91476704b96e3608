// Gated delta nets, chunk by chunk: the outputs of a chunk's rows follow from the state before it and from its rows.
//
// With S the state before the chunk, G(j, t) the sum of the decays g of the rows after j up to t, G(t) that of all
// rows of the chunk up to t, and k, q of norm 1 (arXiv:2412.06464, section 3.3, row by row instead of all at once):
//
//     u_t = β_t (v_t - e^G(t) Sᵀ k_t - Σ_{j < t} e^G(j,t) (k_j · k_t) u_j)
//     o_t =           e^G(t) Sᵀ q_t + Σ_{j <= t} e^G(j,t) (k_j · q_t) u_j
//     state after the chunk's last row:  e^G(last) S + Σ_j e^G(j,last) k_j u_jᵀ
//
// So decoding reads the state and writes only k, u and g of its row; S is written once in kChunk rows. Every sum has
// its own fixed order, and chunks begin at fixed positions: a row has the same bits in every step.
//
// A piece of work is a key head of a sequence, with the value heads that read it.

#include "delta_net.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "pool.h"
#include "simd.h"

using namespace faser;

namespace {

constexpr int64_t kChunk = 16;          // rows; CHUNK of kernels/interface/delta_net.py
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kNormEps = 1e-6f;       // of the squares of a key or a query
constexpr int kMostVectors = kLanes == 16 ? 8 : 4;  // that are multiplied with a state at once

float dot(const float* x, const float* y, int64_t width) {
    vf total = {};
    for (int64_t i = 0; i < width; i += kLanes) total = fma(load(x + i), load(y + i), total);
    return sum(total);
}

// y += by x.
void add(float by, const float* x, int64_t width, float* y) {
    for (int64_t i = 0; i < width; i += kLanes) store(y + i, fma(splat(by), load(x + i), load(y + i)));
}

void scale(float by, int64_t width, float* y) {
    for (int64_t i = 0; i < width; i += kLanes) store(y + i, by * load(y + i));
}

// found[n] = Sᵀ x[n] of N vectors x, [depth], in P panels of S [depth, width].
template <int N, int P>
void panels_of_state(const float* state, int64_t depth, int64_t width, const float* const* x, float* const* found,
                     int64_t first) {
    constexpr int kVectors = P * kParts;
    vf sums[N][kVectors] = {};
    for (int64_t i = 0; i < depth; i++) {
        vf row[kVectors];
        for (int c = 0; c < kVectors; c++) row[c] = load(state + i * width + first + c * kLanes);
        for (int n = 0; n < N; n++) {
            const vf factor = splat(x[n][i]);
            for (int c = 0; c < kVectors; c++) sums[n][c] = fma(factor, row[c], sums[n][c]);
        }
    }
    for (int n = 0; n < N; n++) {
        for (int c = 0; c < kVectors; c++) store(found[n] + first + c * kLanes, sums[n][c]);
    }
}

template <int N>
void times_state(const float* state, int64_t depth, int64_t width, const float* const* x, float* const* found) {
    constexpr int kPanels = N * 2 * kParts <= kMostVectors * kParts ? 2 : 1;
    int64_t first = 0;
    for (; first + kPanels * kPanel <= width; first += kPanels * kPanel) {
        panels_of_state<N, kPanels>(state, depth, width, x, found, first);
    }
    for (; first < width; first += kPanel) panels_of_state<N, 1>(state, depth, width, x, found, first);
}

// The sums of decays after each row of a chunk, [0, last], up to the last one, as powers of e; of all of them the last.
struct Decays {
    alignas(64) float after[kChunk];
    float all;

    // g: of row j in room[j].
    Decays(const float* const* g, int64_t last) {
        alignas(64) float sums[kChunk] = {};
        float total = 0;
        for (int64_t j = last; j >= 0; total += *g[j], j--) sums[j] = total;
        for (int64_t j = 0; j < kChunk; j += kLanes) store(after + j, exp2(load(sums + j) * kLog2e));
        all = exp2(splat(total * kLog2e))[0];
    }
};

float sigmoid(float x) { return 1.0f / (1.0f + exp2(splat(x * -kLog2e))[0]); }
float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }
vf silu(vf x) { return x / (1.0f + exp2(x * -kLog2e)); }

struct Call {
    const FaserDeltaNet& net;
    const FaserStates& states;
    const FaserStateStep& step;

    int64_t k_size() const { return net.num_k_heads * net.k_dim; }
    int64_t v_size() const { return net.num_v_heads * net.v_dim; }
    int64_t channels() const { return 2 * k_size() + v_size(); }
    int64_t columns() const { return channels() + v_size(); }
    int64_t group() const { return net.num_v_heads / net.num_k_heads; }
};

// Memory of one thread: queries and values of a chunk's rows, products with the state, weights of keys, and the
// state of one value head behind rows that may be refused.
struct Room {
    std::vector<float> queries, values, mixed, weights, states;

    static Room& of(const Call& call) {
        thread_local Room mine;
        const int64_t k = call.net.k_dim, v = call.net.v_dim;
        grow(mine.queries, kChunk * k);
        grow(mine.values, kChunk * v * call.group());
        grow(mine.mixed, 2 * kChunk * v);
        grow(mine.weights, kChunk * k);
        grow(mine.states, call.group() * k * v);
        return mine;
    }

  private:
    static void grow(std::vector<float>& room, int64_t size) {
        if (int64_t(room.size()) < size) room.resize(size);
    }
};

// The rows of a sequence, in a key head and its value heads.
template <class T>
class Piece {
  public:
    Piece(const Call& call, int64_t sequence, int64_t k_head, const T* qkv, const float* rates, T* out)
        : call_(call), net_(call.net), states_(call.states), room_(Room::of(call)), k_head_(k_head),
          slot_(call.step.slots[sequence]), start_(call.step.starts[sequence]),
          end_(start_ + call.step.counts[sequence]), known_(end_ - call.step.num_drafts[sequence]),
          first_row_(call.step.first_rows[sequence]), qkv_(qkv), rates_(rates), out_(out),
          keys_(states_.keys + (slot_ * net_.num_k_heads + k_head) * states_.rows * net_.k_dim) {}

    void run(int64_t kept) {
        const int64_t group = call_.group();
        for (int64_t h = 0; h < group; h++) {
            if (start_ == 0) std::fill_n(state_of(h), net_.k_dim * net_.v_dim, 0.0f);
            for (int64_t chunk = kept; chunk + kChunk <= start_; chunk += kChunk) {
                close_chunk(chunk, h, state_of(h), state_of(h));
            }
        }
        for (int64_t from = start_, to; from < end_; from = to) {
            const int64_t chunk = from / kChunk * kChunk;
            to = std::min(chunk + kChunk, end_);
            convolve(from, to);
            multiply_keys(chunk, from, to);
            for (int64_t h = 0; h < group; h++) {
                // behind the end of a chunk that may be refused, the state is the one in the room
                float* state = chunk > known_ / kChunk * kChunk ? room_state(h) : state_of(h);
                mix(chunk, from, to, h, state);
                if (to == chunk + kChunk) close_chunk(chunk, h, state, to > known_ ? room_state(h) : state);
            }
        }
        keep_inputs();
    }

  private:
    int64_t v_head(int64_t h) const {
        return net_.tiled ? k_head_ + h * net_.num_k_heads : k_head_ * call_.group() + h;
    }
    int64_t at(int64_t position) const { return position % states_.rows; }
    int64_t head(int64_t h) const { return slot_ * net_.num_v_heads + v_head(h); }
    float* state_of(int64_t h) const { return states_.state + head(h) * net_.k_dim * net_.v_dim; }
    float* room_state(int64_t h) const { return room_.states.data() + h * net_.k_dim * net_.v_dim; }
    float* key(int64_t position) const { return keys_ + at(position) * net_.k_dim; }
    float* query(int64_t row) const { return room_.queries.data() + row * net_.k_dim; }
    float* value(int64_t row, int64_t h) const { return room_.values.data() + (h * kChunk + row) * net_.v_dim; }
    float* change(int64_t position, int64_t h) const {
        return states_.changes + (head(h) * states_.rows + at(position)) * net_.v_dim;
    }
    float* decay(int64_t position, int64_t h) const { return states_.decays + head(h) * states_.rows + at(position); }
    const T* row(int64_t position) const { return qkv_ + (first_row_ + position - start_) * call_.columns(); }
    T* input(int64_t position) const {
        return (T*)states_.inputs + (slot_ * states_.inputs_kept + position % states_.inputs_kept) * call_.channels();
    }

    // Channels of the key head's queries and keys, and of its value heads.
    int64_t q_from() const { return k_head_ * net_.k_dim; }
    int64_t k_from() const { return call_.k_size() + q_from(); }
    int64_t v_from(int64_t h) const { return 2 * call_.k_size() + v_head(h) * net_.v_dim; }

    // Queries and values of these rows go to the room, keys to the kept rows.
    void convolve(int64_t from, int64_t to) {
        for (int64_t position = from; position < to; position++) {
            const int64_t row = position - from;
            convolve_head(position, q_from(), net_.k_dim, query(row));
            convolve_head(position, k_from(), net_.k_dim, key(position));
            normalise(query(row), 1.0f / std::sqrt(float(net_.k_dim)));
            normalise(key(position), 1.0f);
            for (int64_t h = 0; h < call_.group(); h++) convolve_head(position, v_from(h), net_.v_dim, value(row, h));
        }
    }

    void convolve_head(int64_t position, int64_t first, int64_t width, float* to) const {
        const int64_t channels = call_.channels();
        for (int64_t c = 0; c < width; c += kLanes) {
            vf total = {};
            for (int64_t tap = 0; tap < net_.kernel; tap++) {
                const int64_t before = position - net_.kernel + 1 + tap;
                if (before < 0) continue;
                const T* x = before < start_ ? input(before) : row(before);
                total = fma(load(net_.conv + tap * channels + first + c), load(x + first + c), total);
            }
            store(to + c, silu(total));
        }
    }

    void normalise(float* head, float by) const {
        scale(by / std::sqrt(dot(head, head, net_.k_dim) + kNormEps), net_.k_dim, head);
    }

    // Products of the keys and queries of these rows with the keys of the chunk up to them.
    void multiply_keys(int64_t chunk, int64_t from, int64_t to) {
        for (int64_t position = from; position < to; position++) {
            for (int64_t j = chunk; j <= position; j++) {
                by_key_[position - from][j - chunk] = dot(key(position), key(j), net_.k_dim);
                by_query_[position - from][j - chunk] = dot(query(position - from), key(j), net_.k_dim);
            }
        }
    }

    // Outputs of these rows of value head h, from the state before the chunk.
    void mix(int64_t chunk, int64_t from, int64_t to, int64_t h, const float* state) {
        read_state(from, to, state);
        for (int64_t position = from; position < to; position++) {
            const int64_t row = position - from, own = position - chunk;
            const float* rates = rates_ + (first_row_ + position - start_) * 2 * net_.num_v_heads + v_head(h);
            const float beta = sigmoid(rates[0]);
            *decay(position, h) = net_.decay[v_head(h)] * softplus(rates[net_.num_v_heads] + net_.dt_bias[v_head(h)]);
            const Decays decays = decays_to(chunk, own, h);
            float *of_key = room_.mixed.data() + 2 * row * net_.v_dim, *of_query = of_key + net_.v_dim;
            float* own_change = change(position, h);
            scale(decays.all, net_.v_dim, of_key);
            scale(decays.all, net_.v_dim, of_query);
            for (int64_t j = 0; j < own; j++) add(decays.after[j] * by_key_[row][j], change(chunk + j, h), net_.v_dim, of_key);
            for (int64_t c = 0; c < net_.v_dim; c += kLanes) {
                store(own_change + c, beta * (load(value(row, h) + c) - load(of_key + c)));
            }
            for (int64_t j = 0; j <= own; j++) {
                add(decays.after[j] * by_query_[row][j], change(chunk + j, h), net_.v_dim, of_query);
            }
            write(position, h, of_query);
        }
    }

    // Sᵀ k and Sᵀ q of these rows, side by side.
    void read_state(int64_t from, int64_t to, const float* state) {
        const float* vectors[2 * kChunk];
        float* found[2 * kChunk];
        for (int64_t row = 0; row < to - from; row++) {
            vectors[2 * row] = key(from + row);
            vectors[2 * row + 1] = query(row);
            found[2 * row] = room_.mixed.data() + 2 * row * net_.v_dim;
            found[2 * row + 1] = found[2 * row] + net_.v_dim;
        }
        int64_t n = 0;
        for (const int64_t count = 2 * (to - from); n + kMostVectors <= count; n += kMostVectors) {
            times_state<kMostVectors>(state, net_.k_dim, net_.v_dim, vectors + n, found + n);
        }
        for (; n < 2 * (to - from); n += 2) times_state<2>(state, net_.k_dim, net_.v_dim, vectors + n, found + n);
    }

    Decays decays_to(int64_t chunk, int64_t last, int64_t h) const {
        const float* g[kChunk];
        for (int64_t j = 0; j <= last; j++) g[j] = decay(chunk + j, h);
        return Decays(g, last);
    }

    void write(int64_t position, int64_t h, const float* mixed) const {
        const T* z = row(position) + call_.channels() + v_head(h) * net_.v_dim;
        T* to = out_ + (first_row_ + position - start_) * call_.v_size() + v_head(h) * net_.v_dim;
        const float by = 1.0f / std::sqrt(dot(mixed, mixed, net_.v_dim) / float(net_.v_dim) + net_.eps);
        for (int64_t c = 0; c < net_.v_dim; c += kLanes) {
            store(to + c, by * load(mixed + c) * load(net_.norm + c) * silu(load(z + c)));
        }
    }

    // The state after a whole chunk. to: may be from.
    void close_chunk(int64_t chunk, int64_t h, const float* from, float* to) {
        const int64_t width = net_.v_dim;
        const Decays decays = decays_to(chunk, kChunk - 1, h);
        const float* changes[kChunk];
        float* weights = room_.weights.data();
        for (int64_t j = 0; j < kChunk; j++) {
            changes[j] = change(chunk + j, h);
            const float* k = key(chunk + j);
            for (int64_t i = 0; i < net_.k_dim; i++) weights[i * kChunk + j] = decays.after[j] * k[i];
        }
        for (int64_t c = 0; c < width; c += kLanes) {
            vf added[kChunk];
            for (int64_t j = 0; j < kChunk; j++) added[j] = load(changes[j] + c);
            for (int64_t i = 0; i < net_.k_dim; i++) {
                vf total = decays.all * load(from + i * width + c);
                for (int64_t j = 0; j < kChunk; j++) total = fma(splat(weights[i * kChunk + j]), added[j], total);
                store(to + i * width + c, total);
            }
        }
    }

    // The last rows' inputs, of these heads' channels.
    void keep_inputs() const {
        for (int64_t position = std::max(start_, end_ - states_.inputs_kept); position < end_; position++) {
            const T* from = row(position);
            T* to = input(position);
            std::copy_n(from + q_from(), net_.k_dim, to + q_from());
            std::copy_n(from + k_from(), net_.k_dim, to + k_from());
            for (int64_t h = 0; h < call_.group(); h++) std::copy_n(from + v_from(h), net_.v_dim, to + v_from(h));
        }
    }

    const Call& call_;
    const FaserDeltaNet& net_;
    const FaserStates& states_;
    Room& room_;
    const int64_t k_head_, slot_;
    const int64_t start_, end_, known_;  // positions: of the first row, behind the last one, behind those that stay
    const int64_t first_row_;
    const T* qkv_;
    const float* rates_;
    T* out_;
    float* keys_;
    float by_key_[kChunk][kChunk];
    float by_query_[kChunk][kChunk];
};

template <class T>
void delta_net(Pool& pool, const Call& call, const T* qkv, const float* rates, T* out) {
    const int64_t heads = call.net.num_k_heads;
    pool.run(call.step.num_sequences * heads, [&](int64_t piece) {
        const int64_t sequence = piece / heads;
        Piece<T>(call, sequence, piece % heads, qkv, rates, out).run(call.step.ends[sequence]);
    });
}

}  // namespace

extern "C" {

void faser_delta_net(Pool* pool, const FaserDeltaNet* net, const FaserStates* states, const FaserStateStep* step,
                     const void* qkv, const float* rates, void* out, int32_t dtype) {
    const Call call{*net, *states, *step};
    if (dtype == kFloat32) return delta_net(*pool, call, (const float*)qkv, rates, (float*)out);
    delta_net(*pool, call, (const bf16*)qkv, rates, (bf16*)out);
}
}
