// What delta nets, short convolutions and the states of their sequences are made of, as Python lays it out: mirrored in library.py.
#pragma once

#include <cstdint>

namespace faser {
class Pool;
}

extern "C" {

// Heads and weights of a layer. Value head h reads key head h / (num_v_heads / num_k_heads), or if they are tiled,
// h % num_k_heads.
struct FaserDeltaNet {
    int64_t num_k_heads, num_v_heads;
    int64_t k_dim, v_dim;  // Dk, Dv: multiples of 16
    int64_t kernel;        // taps of the convolution
    const float* conv;     // [kernel, channels], the row's own last
    const float* decay;    // [Hv], by which g = decay softplus(a + dt_bias)
    const float* dt_bias;  // [Hv]
    const float* norm;     // [Dv]
    float eps;
    int32_t tiled;
};

// A short convolution of H channels, a multiple of 16.
struct FaserShortConv {
    int64_t channels, kernel;
    const float* conv;  // [kernel, channels], the row's own last
};

// The states of a layer, of all slots; of a short convolution the inputs alone. Rows and inputs of position p are at p modulo their number.
struct FaserStates {
    float* state;    // [slots, Hv, Dk, Dv], after whole chunks
    float* keys;     // [slots, Hk, rows, Dk]
    float* changes;  // [slots, Hv, rows, Dv]: what a row adds to the state is its key times its change
    float* decays;   // [slots, Hv, rows]: g
    void* inputs;    // [slots, inputs, channels], of the convolution, in the type of the activations
    int64_t rows, inputs_kept;
};

// The rows of a step, [S] each; see StateStep of kernels/interface/delta_net.py.
struct FaserStateStep {
    int64_t num_sequences;
    const int64_t* slots;
    const int64_t* ends;
    const int64_t* starts;
    const int64_t* counts;
    const int64_t* num_drafts;
    const int64_t* first_rows;
};

// out [R, Hv Dv] = norm(o) silu(z) of the rows qkv [R, columns] and rates [R, 2 Hv], b then a. None has gaps.
void faser_delta_net(faser::Pool* pool, const FaserDeltaNet* net, const FaserStates* states,
                     const FaserStateStep* step, const void* qkv, const float* rates, void* out, int32_t dtype);

// out [R, H] = c conv(b x) of the rows bcx [R, 3 H]. None has gaps.
void faser_short_conv(faser::Pool* pool, const FaserShortConv* net, const FaserStates* states,
                      const FaserStateStep* step, const void* bcx, void* out, int32_t dtype);
}
