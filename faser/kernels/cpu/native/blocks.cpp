// Layers, and the parts of a layer around its attention, in one call: what lies between two kernels is then
// nanoseconds, not Python. Every operation is the one that has a call of its own, so results are the same bits.
//
// A low-bit product knows which one follows: while a thread waits, it fetches the first weights of its share of it.

#include <cstring>
#include <vector>

#include "blocks.h"
#include "calls.h"
#include "simd.h"

using namespace faser;

namespace {

// Of the product as it is, or as it would be without adapters.
void multiply_base(Pool* pool, const FaserAnyLinear& by, const FaserBlockRows& rows, const void* x, int64_t x_stride,
                    void* out, int64_t out_stride, int32_t out_dtype, const void* residual,
                    const FaserAnyLinear* following) {
    if (by.linear) {
        return faser_linear(pool, by.linear, x, x_stride, rows.rows, out, out_stride, out_dtype, residual, by.columns);
    }
    faser_low_bit_linear(pool, by.low_bit, x, x_stride, rows.dtype, rows.rows, out, out_stride, out_dtype, residual,
                         by.columns, following ? following->low_bit : nullptr);
}

// Rows of x and out at any distance.
void multiply_apart(Pool* pool, const FaserAnyLinear& by, const FaserBlockRows& rows, const void* x, int64_t x_stride,
                    void* out, int64_t out_stride, int32_t out_dtype, const void* residual,
                    const FaserAnyLinear* following) {
    if (!by.adapters || !rows.adapted) {
        return multiply_base(pool, by, rows, x, x_stride, out, out_stride, out_dtype, residual, following);
    }
    AdapterSums sums(*pool, by.adapters, *rows.adapted, x, x_stride);
    multiply_base(pool, by, rows, x, x_stride, out, out_stride, out_dtype, residual, following);
    sums.add(out, out_stride, out_dtype);
}

void multiply(Pool* pool, const FaserAnyLinear& by, const FaserBlockRows& rows, const void* x, void* out,
              int32_t out_dtype, const void* residual, const FaserAnyLinear* following) {
    multiply_apart(pool, by, rows, x, by.depth, out, by.columns, out_dtype, residual, following);
}

void normed_linear(Pool* pool, const FaserNormedLinear& by, const FaserBlockRows& rows, const void* hidden,
                   int64_t stride, void* out, int32_t out_dtype, const FaserAnyLinear* following) {
    const int64_t width = by.product.depth;
    faser_rms_norm(pool, hidden, stride, rows.rows, width, by.norm, by.eps, rows.normed, width, rows.dtype, nullptr);
    multiply(pool, by.product, rows, rows.normed, out, out_dtype, nullptr, following);
}

// hidden += norm(product(x)), or product(x) where norm is null. following: as in multiply.
void add(Pool* pool, const FaserAnyLinear& product, const float* norm, float eps, const FaserBlockRows& rows,
         const void* x, void* hidden, const FaserAnyLinear* following) {
    if (!norm) return multiply(pool, product, rows, x, hidden, rows.dtype, hidden, following);
    const int64_t width = product.columns;
    multiply(pool, product, rows, x, rows.normed, rows.dtype, nullptr, following);
    faser_rms_norm(pool, rows.normed, width, rows.rows, width, norm, eps, hidden, width, rows.dtype, hidden);
}

// hidden += norm(norm(down(inner)) + norm(experts)).
void add_with_experts(Pool* pool, const FaserFeedForward& layer, const FaserExpertsBeside& beside,
                      const FaserBlockRows& rows, void* hidden) {
    static thread_local std::vector<char> memory;
    const int64_t width = layer.down.columns, size = rows.rows * width * (rows.dtype == kFloat32 ? 4 : 2);
    const int64_t apart = (size + 63) / 64 * 64;
    if (int64_t(memory.size()) < 3 * apart + 64) memory.resize(3 * apart + 64);
    char* both = memory.data() + (64 - (uintptr_t)memory.data() % 64) % 64;
    char *routed_by = both + apart, *given = routed_by + apart;
    const auto norm = [&](const void* x, const float* weight, void* out, const void* residual) {
        faser_rms_norm(pool, x, width, rows.rows, width, weight, layer.gate_up.eps, out, width, rows.dtype, residual);
    };
    multiply(pool, layer.down, rows, rows.inner, both, rows.dtype, nullptr, nullptr);
    norm(both, beside.norm_after_network, both, nullptr);
    norm(hidden, beside.router_norm, routed_by, nullptr);
    norm(hidden, beside.norm, rows.normed, nullptr);
    memset(given, 0, size);
    faser_experts(pool, beside.experts, rows.normed, routed_by, rows.rows, given, rows.dtype);
    norm(given, beside.norm_after, both, both);
    norm(both, layer.norm_after, hidden, hidden);
}

void add_token_inputs(Pool* pool, const FaserFeedForward& layer, const FaserTokenInputs& given,
                      const FaserBlockRows& rows, void* hidden, const FaserAnyLinear* following) {
    const int64_t size = given.gate.columns, width = given.out.columns;
    multiply_apart(pool, given.gate, rows, hidden, width, given.room, given.stride, rows.dtype, nullptr, &given.out);
    faser_gate(pool, given.room, given.stride, rows.rows, size, given.room, given.stride, rows.dtype,
               layer.activation);
    multiply_apart(pool, given.out, rows, given.room, given.stride, rows.normed, width, rows.dtype, nullptr, following);
    faser_rms_norm(pool, rows.normed, width, rows.rows, width, given.norm, layer.gate_up.eps, hidden, width, rows.dtype,
                   hidden);
}

template <class T>
void scale_rows(Pool* pool, float by, int64_t rows, int64_t width, T* x) {
    pool->run(rows, [&](int64_t row) {
        T* at = x + row * width;
        int64_t i = 0;
        for (; i + kLanes <= width; i += kLanes) store(at + i, load(at + i) * by);
        for (; i < width; i++) narrow(widen(at[i]) * by, at + i);
    });
}

// following: the product that is multiplied next, or null.
void feed_forward(Pool* pool, const FaserFeedForward& layer, const FaserBlockRows& rows, const void* mixed,
                  void* hidden, const FaserAnyLinear* following) {
    const float eps = layer.gate_up.eps;
    if (layer.experts) {
        const FaserAnyLinear& router = layer.experts->router;
        multiply(pool, layer.attention_out, rows, mixed, hidden, rows.dtype, hidden, nullptr);
        faser_rms_norm(pool, hidden, router.depth, rows.rows, router.depth, layer.gate_up.norm, eps, rows.normed,
                       router.depth, rows.dtype, nullptr);
        faser_experts(pool, layer.experts, rows.normed, rows.normed, rows.rows, hidden, rows.dtype);
        return;
    }
    const int64_t inner = layer.down.depth;
    add(pool, layer.attention_out, layer.norm_after_attention, layer.after_eps, rows, mixed, hidden, &layer.gate_up.product);
    normed_linear(pool, layer.gate_up, rows, hidden, layer.down.columns, rows.gate_up, rows.dtype, &layer.down);
    faser_gate(pool, rows.gate_up, 2 * inner, rows.rows, inner, rows.inner, inner, rows.dtype, layer.activation);
    if (layer.beside) {
        add_with_experts(pool, layer, *layer.beside, rows, hidden);
    } else {
        add(pool, layer.down, layer.norm_after, layer.after_eps, rows, rows.inner, hidden, following);
    }
    if (layer.token_inputs) add_token_inputs(pool, layer, *layer.token_inputs, rows, hidden, following);
    if (layer.scale == 1.0f) return;
    if (rows.dtype == kFloat32) return scale_rows(pool, layer.scale, rows.rows, layer.down.columns, (float*)hidden);
    scale_rows(pool, layer.scale, rows.rows, layer.down.columns, (bf16*)hidden);
}

void append(Pool* pool, const FaserLayer& layer, const FaserBlockRows& rows, const FaserCache* cache, FaserPlan* plan,
            void* qkv) {
    const int64_t stride = layer.qkv.product.columns, width = layer.feed_forward.attention_out.depth;
    if (layer.wide_q_norm) {
        char* keys = (char*)qkv + width * (rows.dtype == kFloat32 ? 4 : 2);
        faser_rms_norm(pool, qkv, stride, rows.rows, width, layer.wide_q_norm, layer.eps, qkv, stride, rows.dtype,
                       nullptr);
        faser_rms_norm(pool, keys, stride, rows.rows, cache->num_kv_heads * cache->head_dim, layer.wide_k_norm,
                       layer.eps, keys, stride, rows.dtype, nullptr);
    }
    faser_rope_append(pool, cache, plan, layer.heads.num_heads, qkv, stride, layer.angles,
                      layer.query_angles, layer.q_norm, layer.k_norm, layer.v_norm, layer.eps, rows.dtype);
}

void attend(Pool* pool, const FaserLayer& layer, const FaserBlockRows& rows, const FaserCache* cache, FaserPlan* plan,
            void* qkv, void* mixed) {
    const int64_t stride = layer.qkv.product.columns, width = layer.feed_forward.attention_out.depth;
    faser_attend(pool, cache, plan, &layer.heads, qkv, stride, mixed, width, rows.dtype);
    if (layer.gated) {
        const char* gates = (const char*)qkv + (stride - width) * (rows.dtype == kFloat32 ? 4 : 2);
        faser_sigmoid_gate(pool, mixed, rows.rows, width, gates, stride, rows.dtype);
    }
}

void mix_by_state(Pool* pool, const FaserLayer& layer, const FaserBlockRows& rows, const FaserStates* states,
                  const FaserStatesOfStep& of_step, const void* hidden, const void* qkv, void* mixed) {
    const int64_t stride = layer.rates.product.depth;
    normed_linear(pool, layer.rates, rows, hidden, stride, of_step.rates, kFloat32, nullptr);
    faser_delta_net(pool, layer.delta_net, states, of_step.step, qkv, of_step.rates, mixed, rows.dtype);
}

void capture(const FaserLayer& layer, const FaserBlockRows& rows, const void* hidden) {
    const int64_t value = rows.dtype == kFloat32 ? 4 : 2, width = layer.qkv.product.depth * value;
    for (int64_t row = 0; row < rows.rows; row++) {
        memcpy((char*)layer.states + row * layer.states_stride * value, (const char*)hidden + row * width, width);
    }
}

}  // namespace

extern "C" {

void faser_normed_linear(Pool* pool, const FaserNormedLinear* by, const FaserBlockRows* rows, const void* hidden,
                         int64_t stride, void* out, int32_t out_dtype) {
    normed_linear(pool, *by, *rows, hidden, stride, out, out_dtype, nullptr);
}

void faser_feed_forward(Pool* pool, const FaserFeedForward* layer, const FaserNormedLinear* following,
                        const FaserBlockRows* rows, const void* mixed, void* hidden, void* out) {
    feed_forward(pool, *layer, *rows, mixed, hidden, following ? &following->product : nullptr);
    if (following) faser_normed_linear(pool, following, rows, hidden, layer->down.columns, out, rows->dtype);
}

void faser_layers(Pool* pool, const FaserLayer* layers, int64_t first, int64_t last, const FaserNormedLinear* following,
                  const FaserBlockRows* rows, const FaserCache* caches, FaserPlan* plan, void* hidden, void* qkv,
                  void* mixed, int32_t captures, const FaserStatesOfStep* states) {
    for (int64_t number = first; number < last; number++) {
        const FaserLayer& layer = layers[number];
        if (captures && layer.states) capture(layer, *rows, hidden);
        const FaserNormedLinear* next = number + 1 < last ? &layers[number + 1].qkv : following;
        if (layer.qkv.norm) {
            normed_linear(pool, layer.qkv, *rows, hidden, layer.qkv.product.depth, qkv, rows->dtype,
                          &layer.feed_forward.attention_out);
        }
        if (layer.short_conv) {
            faser_short_conv(pool, layer.short_conv, &states->layers[number], states->step, qkv, mixed, rows->dtype);
        } else if (layer.delta_net) {
            mix_by_state(pool, layer, *rows, &states->layers[number], *states, hidden, qkv, mixed);
        } else {
            append(pool, layer, *rows, &caches[number], plan, qkv);
            attend(pool, layer, *rows, &(layer.lent ? layer.lent : caches)[layer.kv_layer], plan, qkv, mixed);
        }
        feed_forward(pool, layer.feed_forward, *rows, mixed, hidden, next ? &next->product : nullptr);
    }
}

void faser_last_layer(Pool* pool, const FaserLayer* layer, const FaserNormedLinear* following,
                      const FaserBlockRows* rows, const FaserCache* cache, FaserPlan* plan, const int64_t* ends,
                      int64_t num_ends, FaserPlan* plan_of_ends, void* hidden, void* qkv, void* mixed) {
    const int64_t value = rows->dtype == kFloat32 ? 4 : 2;
    if (layer->qkv.norm) {
        normed_linear(pool, layer->qkv, *rows, hidden, layer->qkv.product.depth, qkv, rows->dtype,
                      &layer->feed_forward.attention_out);
    }
    append(pool, *layer, *rows, cache, plan, qkv);
    const int64_t columns = layer->qkv.product.columns * value, width = layer->qkv.product.depth * value;
    for (int64_t i = 0; i < num_ends; i++) {
        if (ends[i] == i) continue;
        memcpy((char*)qkv + i * columns, (char*)qkv + ends[i] * columns, columns);
        memcpy((char*)hidden + i * width, (char*)hidden + ends[i] * width, width);
    }
    FaserBlockRows some = *rows;
    some.rows = num_ends;
    attend(pool, *layer, some, cache, plan_of_ends, qkv, mixed);
    feed_forward(pool, layer->feed_forward, some, mixed, hidden, following ? &following->product : nullptr);
}
}
