// What layers and their parts are made of, as Python lays it out: mirrored in library.py.
#pragma once

#include "adapters.h"
#include "attention/span.h"
#include "calls.h"
#include "delta_net.h"
#include "pool.h"

extern "C" {

struct FaserNormedLinear {
    FaserAnyLinear product;
    const float* norm;  // [depth]
    float eps;
};

// E gated networks, of which each row passes top_k. gate_up, down: [E]. shared: gate_up and down of one that every row
// passes, weighed by the sigmoid of the router's last logit, number E; or null.
struct FaserExperts {
    FaserAnyLinear router;
    const FaserAnyLinear* gate_up;
    const FaserAnyLinear* down;
    int64_t num_experts, top_k;
    int32_t renormalise;  // weights of the chosen ones are divided by their sum
    int32_t activation;   // FaserActivation
    const float* scales;  // [E], what the weight of each is multiplied by in the end; or null
    const FaserAnyLinear* shared;
    int32_t sigmoid;           // weights are sigmoids of the logits, in place of a softmax
    const float* choice_bias;  // [E], added to sigmoids for the choice alone; or null
};

// A mixture beside the network of a layer, whose results are added up. Norms: [H], before and after it, before the
// router, and after the network.
struct FaserExpertsBeside {
    const FaserExperts* experts;
    const float *norm, *router_norm, *norm_after, *norm_after_network;
};

// hidden += norm(out(activation(gate(hidden)) * p)). room: [rows, 2 P], `stride` values apart; the second half is p.
struct FaserTokenInputs {
    FaserAnyLinear gate, out;
    const float* norm;
    void* room;
    int64_t stride;
};

struct FaserFeedForward {
    FaserAnyLinear attention_out;
    FaserNormedLinear gate_up;
    FaserAnyLinear down;
    int32_t activation;                 // FaserActivation
    const float* norm_after_attention;  // [columns], of what attention adds, and of what the network adds; or null
    const float* norm_after;
    float after_eps;              // of these two norms
    const FaserExperts* experts;  // in place of gate, up and down; or null. gate_up has the norm before it
    const FaserExpertsBeside* beside;      // or null
    const FaserTokenInputs* token_inputs;  // added in the end; or null
    float scale;                           // what the stream is multiplied by then
};

struct FaserLayer {
    FaserNormedLinear qkv;  // without a norm: the caller computes it
    FaserFeedForward feed_forward;
    FaserHeads heads;
    const float* angles;  // as faser_rope_append takes them
    const float* query_angles;
    const float* q_norm;
    const float* k_norm;
    const float* v_norm;
    const float* wide_q_norm;  // of all queries of a row together, and of all its keys; or null
    const float* wide_k_norm;
    float eps;
    void* states;  // room for the inputs of the layer, or null
    int64_t states_stride;
    int32_t gated;                   // attention is multiplied by gates, the last columns of qkv
    FaserNormedLinear rates;         // of the delta net
    const FaserDeltaNet* delta_net;  // in place of attention; or null
    const FaserShortConv* short_conv;  // likewise
    int64_t kv_layer;         // whose keys and values are read: its own number, or that of an earlier layer
    const FaserCache* lent;   // those of the layers of another model, of which one is read; or null
};

// Where delta nets and short convolutions go on. layers: of each layer. rates: room for those of the step's rows, or
// null where no layer has any.
struct FaserStatesOfStep {
    const FaserStates* layers;
    const FaserStateStep* step;
    float* rates;
};

// The rows of a step, without gaps in any tensor; normed, gate_up and inner are overwritten.
struct FaserBlockRows {
    int64_t rows;
    int32_t dtype;
    void* normed;
    void* gate_up;
    void* inner;
    const FaserAdapterRows* adapted;  // which adapters they have; or null
};

// Layers [first, last) over hidden [rows, H], in place; their keys and values enter the cache. layers, caches: of
// each layer, from number 0 on. following: the product after them, which is not computed here, or null. qkv, mixed:
// room for the rows. captures: layers that have room for their inputs copy them there. states: null where no layer has
// a state.
void faser_layers(faser::Pool* pool, const FaserLayer* layers, int64_t first, int64_t last,
                  const FaserNormedLinear* following, const FaserBlockRows* rows, const FaserCache* caches,
                  FaserPlan* plan, void* hidden, void* qkv, void* mixed, int32_t captures,
                  const FaserStatesOfStep* states);

// One layer of attention whose output is wanted of the rows `ends` alone, which ascend: keys and values of all rows enter
// the cache. Afterwards these rows of `hidden` are the first ones. plan_of_ends: one row of each sequence.
void faser_last_layer(faser::Pool* pool, const FaserLayer* layer, const FaserNormedLinear* following,
                      const FaserBlockRows* rows, const FaserCache* cache, FaserPlan* plan, const int64_t* ends,
                      int64_t num_ends, FaserPlan* plan_of_ends, void* hidden, void* qkv, void* mixed);

// hidden += attention_out(mixed); hidden += down(gate(gate_up(hidden))); unless following is null,
// out = following(hidden).
void faser_feed_forward(faser::Pool* pool, const FaserFeedForward* layer, const FaserNormedLinear* following,
                        const FaserBlockRows* rows, const void* mixed, void* hidden, void* out);

void faser_experts(faser::Pool* pool, const FaserExperts* experts, const void* x, const void* routed_by,
                   int64_t rows, void* hidden, int32_t dtype);

// out [rows, N] = product(norm(hidden [rows, K])). stride: values from one row of hidden to the next.
void faser_normed_linear(faser::Pool* pool, const FaserNormedLinear* by, const FaserBlockRows* rows,
                         const void* hidden, int64_t stride, void* out, int32_t out_dtype);
}
