// Kernels that treat each row by itself: normalise, activate, rotate and store into the cache.

#include <algorithm>
#include <cmath>

#include "attention/cache.h"
#include "attention/int8.h"
#include "attention/plan.h"
#include "calls.h"
#include "pool.h"

using namespace faser;

namespace {

constexpr int64_t kPieceValues = 16 * 1024;  // values per piece of work: a few microseconds
constexpr int64_t kRowsTogether = 8;  // whose sums of squares are computed at once, each a chain of additions

// Calls body(first row, end row) for all rows, shared out when there is enough to do.
template <class Body>
void by_rows(Pool& pool, int64_t rows, int64_t width, const Body& body) {
    const int64_t block = std::max<int64_t>(1, kPieceValues / width);
    pool.run((rows + block - 1) / block, [&](int64_t i) { body(i * block, std::min(rows, (i + 1) * block)); });
}

template <class T>
float inverse_rms(const T* x, int64_t width, float eps) {
    vf squares = {};
    float rest = 0;
    int64_t i = 0;
    for (; i + kLanes <= width; i += kLanes) {
        vf v = load(x + i);
        squares = fma(v, v, squares);
    }
    for (; i < width; i++) rest += widen(x[i]) * widen(x[i]);
    return 1.0f / std::sqrt((sum(squares) + rest) / float(width) + eps);
}

// y = x * scale * weight; y may be x.
template <class T>
void scale_row(const T* x, const float* weight, float scale, int64_t width, T* y) {
    int64_t i = 0;
    for (; i + kLanes <= width; i += kLanes) store(y + i, load(x + i) * scale * load(weight + i));
    for (; i < width; i++) narrow(widen(x[i]) * scale * weight[i], y + i);
}

// y = x * scale * weight + residual, rounded once; y may be residual.
template <class T>
void add_scaled_row(const T* x, const float* weight, float scale, int64_t width, const T* residual, T* y) {
    int64_t i = 0;
    for (; i + kLanes <= width; i += kLanes) {
        store(y + i, fma(load(x + i) * scale, load(weight + i), load(residual + i)));
    }
    for (; i < width; i++) {
        narrow(fma(splat(widen(x[i]) * scale), splat(weight[i]), splat(widen(residual[i])))[0], y + i);
    }
}

template <class T>
void rms_norm(Pool& pool, const T* x, int64_t stride, int64_t rows, int64_t width, const float* weight, float eps,
              T* out, int64_t out_stride, const T* residual) {
    by_rows(pool, rows, width, [&](int64_t row, int64_t end) {
        for (float scales[kRowsTogether]; row < end; row += kRowsTogether) {
            const int64_t count = std::min(kRowsTogether, end - row);
            for (int64_t i = 0; i < count; i++) scales[i] = inverse_rms(x + (row + i) * stride, width, eps);
            for (int64_t i = 0; i < count; i++) {
                const T* from = x + (row + i) * stride;
                T* to = out + (row + i) * out_stride;
                if (residual) {
                    add_scaled_row(from, weight, scales[i], width, residual + (row + i) * out_stride, to);
                } else {
                    scale_row(from, weight, scales[i], width, to);
                }
            }
        }
    });
}

constexpr float kLog2e = 1.4426950408889634f;

struct Silu {
    static vf of(vf gate, vf up) { return gate / (1.0f + exp2(gate * -kLog2e)) * up; }
};

struct GeluTanh {  // x (1 + tanh(y)) / 2 = x / (1 + e^(-2 y))
    static vf of(vf gate, vf up) {
        const vf y = 0.7978845608028654f * (gate + 0.044715f * gate * gate * gate);
        return gate / (1.0f + exp2(y * (-2 * kLog2e))) * up;
    }
};

// x Φ(x). Φ(-|x|) by the polynomial of Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26: off by 1e-7.
struct Gelu {
    static vf of(vf gate, vf up) {
        const vf size = gate < 0.0f ? -gate : gate;
        const vf t = 1.0f / fma(size, splat(0.3275911f * 0.70710678f), splat(1.0f));
        vf tail = splat(0.5f * 1.061405429f);
        tail = fma(tail, t, splat(0.5f * -1.453152027f));
        tail = fma(tail, t, splat(0.5f * 1.421413741f));
        tail = fma(tail, t, splat(0.5f * -0.284496736f));
        tail = fma(tail, t, splat(0.5f * 0.254829592f));
        tail = tail * t * exp2(gate * gate * (-0.5f * kLog2e));
        return gate * (gate < 0.0f ? tail : 1.0f - tail) * up;
    }
};

struct SwigluOai {  // comparisons leave what is no number as it is
    static vf of(vf gate, vf up) {
        const vf most = splat(7.0f);
        gate = gate > most ? most : gate;
        up = up > most ? most : up < -most ? -most : up;
        return gate / (1.0f + exp2(gate * (-1.702f * kLog2e))) * (up + 1.0f);
    }
};

template <class Activation, class T>
void gate(Pool& pool, const T* gate_up, int64_t stride, int64_t rows, int64_t width, T* out, int64_t out_stride) {
    by_rows(pool, rows, width, [&](int64_t row, int64_t end) {
        for (; row < end; row++) {
            const T* gate = gate_up + row * stride;
            const T* up = gate + width;
            T* to = out + row * out_stride;
            int64_t i = 0;
            for (; i + kLanes <= width; i += kLanes) store(to + i, Activation::of(load(gate + i), load(up + i)));
            for (; i < width; i++) {
                narrow(Activation::of(splat(widen(gate[i])), splat(widen(up[i])))[0], to + i);
            }
        }
    });
}

template <class Activation, class T>
void activate(Pool& pool, T* x, int64_t rows, int64_t width) {
    const vf one = splat(1.0f);
    by_rows(pool, rows, width, [&](int64_t row, int64_t end) {
        T* const to = x + row * width;
        const int64_t count = (end - row) * width;
        int64_t i = 0;
        for (; i + kLanes <= count; i += kLanes) store(to + i, Activation::of(load(to + i), one));
        for (; i < count; i++) narrow(Activation::of(splat(widen(to[i])), one)[0], to + i);
    });
}

// wide and out, of which one may be null, get the row with mean 0 and variance 1, times weight, plus bias or nothing.
template <class T>
void layer_norm(Pool& pool, const float* x, int64_t rows, int64_t width, const float* weight, const float* bias,
                float eps, float* wide, T* out) {
    by_rows(pool, rows, width, [&](int64_t row, int64_t end) {
        for (; row < end; row++) {
            const float* from = x + row * width;
            vf sums = {}, squares = {};
            float rest = 0;
            int64_t i = 0;
            for (; i + kLanes <= width; i += kLanes) sums += load(from + i);
            for (; i < width; i++) rest += from[i];
            const float mean = (sum(sums) + rest) / float(width);
            rest = 0;
            for (i = 0; i + kLanes <= width; i += kLanes) {
                const vf off = load(from + i) - mean;
                squares = fma(off, off, squares);
            }
            for (; i < width; i++) rest += (from[i] - mean) * (from[i] - mean);
            const float scale = 1.0f / std::sqrt((sum(squares) + rest) / float(width) + eps);
            for (i = 0; i + kLanes <= width; i += kLanes) {
                const vf plus = bias ? load(bias + i) : vf{};
                const vf normed = fma((load(from + i) - mean) * scale, load(weight + i), plus);
                if (wide) store(wide + row * width + i, normed);
                if (out) store(out + row * width + i, normed);
            }
            for (; i < width; i++) {
                const float normed = (from[i] - mean) * scale * weight[i] + (bias ? bias[i] : 0.0f);
                if (wide) wide[row * width + i] = normed;
                if (out) narrow(normed, out + row * width + i);
            }
        }
    });
}

// x *= sigmoid(gate).
template <class T>
void sigmoid_gate(Pool& pool, T* x, int64_t rows, int64_t width, const T* gate, int64_t gate_stride) {
    by_rows(pool, rows, width, [&](int64_t row, int64_t end) {
        for (; row < end; row++) {
            T* to = x + row * width;
            const T* by = gate + row * gate_stride;
            int64_t i = 0;
            for (; i + kLanes <= width; i += kLanes) store(to + i, load(to + i) / (1.0f + exp2(load(by + i) * -kLog2e)));
            for (; i < width; i++) narrow(widen(to[i]) / (1.0f + exp2(splat(widen(by[i]) * -kLog2e))[0]), to + i);
        }
    });
}

template <class T>
void add_key(const FaserCache& cache, char* block, int64_t offset, const T* key) {
    constexpr int values = Step<T>::kValues;
    T* to = (T*)block + offset * values;
    for (int64_t d = 0; d < cache.head_dim; d += values, to += cache.block_size * values) {
        for (int i = 0; i < values; i++) to[i] = key[d + i];
    }
}

template <class T>
void add_value(const FaserCache& cache, char* block, int64_t offset, const T* value) {
    constexpr int values = Step<T>::kValues;
    T* to = (T*)(block + keys_bytes(cache)) + offset / values * values * cache.head_dim + offset % values;
    for (int64_t d = 0; d < cache.head_dim; d++) to[d * values] = value[d];
}

// A head as signed bytes with one scale, of which this returns the bits: the largest magnitude over 127, rounded up to
// bf16, or NaN where a number is not finite.
template <class T>
bf16 round_to_bytes(const T* head, int64_t width, int8_t* codes) {
    const uint32_t most = largest_bits(head, width);
    if (most >= 0x7f800000u) {
        std::memset(codes, 0, width);
        return {0x7fc0};
    }
    const float even = as_float(most) / 127.0f;
    uint32_t bits;
    std::memcpy(&bits, &even, 4);
    bits = std::max((bits + 0xffff) >> 16, 0x0080u);  // at least 2^-126
    const float scale = as_float(bits << 16);
    for (int64_t d = 0; d < width; d += kLanes) store_bytes(codes + d, round_to_int(load(head + d) / scale));
    return {uint16_t(bits)};
}

template <class T>
void add_int8_key(const FaserCache& cache, char* block, int64_t offset, const T* key) {
    alignas(64) int8_t codes[kMostHeadDim];
    ((bf16*)(block + keys_bytes(cache)))[offset] = round_to_bytes(key, cache.head_dim, codes);
    uint32_t* to = (uint32_t*)block + offset;
    for (int64_t d = 0; d < cache.head_dim; d += 4, to += cache.block_size) {
        uint32_t four;
        std::memcpy(&four, codes + d, 4);
        *to = four ^ 0x80808080u;
    }
}

template <class T>
void add_int8_value(const FaserCache& cache, char* block, int64_t offset, const T* value) {
    alignas(64) int8_t codes[kMostHeadDim];
    ((bf16*)(block + keys_bytes(cache) + scales_bytes(cache)))[offset] = round_to_bytes(value, cache.head_dim, codes);
    char* to = block + values_from(cache) + offset / 4 * 4 * cache.head_dim + offset % 4;
    for (int64_t d = 0; d < cache.head_dim; d++) to[d * 4] = codes[d];
}

// Normalise (weight not null) and rotate (angles not null) one head in place. Channel i turns with i + half.
template <class T>
void turn_head(T* head, int64_t width, const float* weight, float eps, const float* angles) {
    if (weight) scale_row(head, weight, inverse_rms(head, width, eps), width, head);
    if (!angles) return;
    const int64_t half = width / 2;
    int64_t i = 0;
    for (; i + kLanes <= half; i += kLanes) {
        vf first = load(head + i), second = load(head + half + i);
        vf cos = load(angles + i), sin = load(angles + half + i);
        store(head + i, first * cos - second * sin);
        store(head + half + i, second * cos + first * sin);
    }
    for (; i < half; i++) {
        float first = widen(head[i]), second = widen(head[half + i]);
        float cos = angles[i], sin = angles[half + i];
        narrow(first * cos - second * sin, head + i);
        narrow(second * cos + first * sin, head + half + i);
    }
}

struct Append {
    int64_t num_heads;
    int64_t stride;  // values from one row of qkv to the next
    const float* angles;
    const float* query_angles;
    const float* q_norm;
    const float* k_norm;
    const float* v_norm;
    float eps;
};

template <class T>
void append_row(const FaserCache& cache, const FaserPlan& plan, const Append& call, T* heads, int64_t row) {
    const int64_t width = cache.head_dim;
    const int64_t place = plan.positions[row] * width;
    const float* angles = call.angles ? call.angles + place : nullptr;
    const float* query_angles = call.query_angles ? call.query_angles + place : angles;
    for (int64_t h = 0; h < call.num_heads; h++) turn_head(heads + h * width, width, call.q_norm, call.eps, query_angles);
    T* keys = heads + call.num_heads * width;
    T* values = keys + cache.num_kv_heads * width;
    for (int64_t h = 0; h < cache.num_kv_heads; h++) {
        char* block = block_at(cache, plan.row_block[row], h);
        turn_head(keys + h * width, width, call.k_norm, call.eps, angles);
        turn_head(values + h * width, width, call.v_norm, call.eps, nullptr);
        if (cache.dtype == kInt8) {
            add_int8_key(cache, block, plan.row_offset[row], keys + h * width);
            add_int8_value(cache, block, plan.row_offset[row], values + h * width);
        } else {
            add_key(cache, block, plan.row_offset[row], keys + h * width);
            add_value(cache, block, plan.row_offset[row], values + h * width);
        }
    }
}

template <class T>
void append(Pool& pool, const FaserCache& cache, const FaserPlan& plan, const Append& call, T* qkv) {
    by_rows(pool, plan.num_rows, call.stride, [&](int64_t row, int64_t end) {
        for (; row < end; row++) append_row(cache, plan, call, qkv + row * call.stride, row);
    });
}

}  // namespace

extern "C" {

void faser_rms_norm(Pool* pool, const void* x, int64_t stride, int64_t rows, int64_t width, const float* weight,
                    float eps, void* out, int64_t out_stride, int32_t dtype, const void* residual) {
    if (dtype == kFloat32) {
        return rms_norm(*pool, (const float*)x, stride, rows, width, weight, eps, (float*)out, out_stride,
                        (const float*)residual);
    }
    rms_norm(*pool, (const bf16*)x, stride, rows, width, weight, eps, (bf16*)out, out_stride, (const bf16*)residual);
}

// width: F, of the output.
void faser_gate(Pool* pool, const void* gate_up, int64_t stride, int64_t rows, int64_t width, void* out,
                int64_t out_stride, int32_t dtype, int32_t activation) {
    auto run = [&](auto activate) {
        using A = decltype(activate);
        if (dtype == kFloat32) {
            return gate<A>(*pool, (const float*)gate_up, stride, rows, width, (float*)out, out_stride);
        }
        gate<A>(*pool, (const bf16*)gate_up, stride, rows, width, (bf16*)out, out_stride);
    };
    switch (activation) {
        case kGeluTanh: return run(GeluTanh{});
        case kSwigluOai: return run(SwigluOai{});
        case kGelu: return run(Gelu{});
        default: return run(Silu{});
    }
}

void faser_activate(Pool* pool, void* x, int64_t rows, int64_t width, int32_t dtype, int32_t activation) {
    auto run = [&](auto function) {
        using A = decltype(function);
        if (dtype == kFloat32) return activate<A>(*pool, (float*)x, rows, width);
        activate<A>(*pool, (bf16*)x, rows, width);
    };
    activation == kGeluTanh ? run(GeluTanh{}) : activation == kGelu ? run(Gelu{}) : run(Silu{});
}

void faser_layer_norm(Pool* pool, const float* x, int64_t rows, int64_t width, const float* weight, const float* bias,
                      float eps, float* wide, void* out, int32_t dtype) {
    if (dtype == kFloat32) return layer_norm(*pool, x, rows, width, weight, bias, eps, wide, (float*)out);
    layer_norm(*pool, x, rows, width, weight, bias, eps, wide, (bf16*)out);
}

void faser_sigmoid_gate(Pool* pool, void* x, int64_t rows, int64_t width, const void* gate, int64_t gate_stride,
                        int32_t dtype) {
    if (dtype == kFloat32) return sigmoid_gate(*pool, (float*)x, rows, width, (const float*)gate, gate_stride);
    sigmoid_gate(*pool, (bf16*)x, rows, width, (const bf16*)gate, gate_stride);
}

// dtype: of qkv. query_angles: of queries; null: those of keys.
void faser_rope_append(Pool* pool, const FaserCache* cache, const FaserPlan* plan, int64_t num_heads, void* qkv,
                       int64_t stride, const float* angles, const float* query_angles, const float* q_norm,
                       const float* k_norm, const float* v_norm, float eps, int32_t dtype) {
    Append call{num_heads, stride, angles, query_angles, q_norm, k_norm, v_norm, eps};
    if (dtype == kFloat32) return append(*pool, *cache, *plan, call, (float*)qkv);
    append(*pool, *cache, *plan, call, (bf16*)qkv);
}
}
