// The C functions of these kernels that other files call too, and how Python lays out what they take. The files that
// define them include this header, so that the compiler compares both.
#pragma once

#include <cstdint>

namespace faser {
class Pool;
}

extern "C" {

struct FaserAdapter;
struct FaserCache;
struct FaserHeads;
struct FaserLinear;
struct FaserLowBit;
struct FaserPlan;

// A product of either kind. Mirrored in library.py, as the others here.
struct FaserAnyLinear {
    const FaserLinear* linear;    // or null
    const FaserLowBit* low_bit;
    int64_t columns, depth;
    const FaserAdapter* adapters;  // [slots], those that its rows may have, see adapters.h; or null
};

// Rows [begin, end) of an input, which are multiplied with weight number `weight`.
struct FaserGroup {
    int64_t weight, begin, end;
};

// [N] each: rows of the logits, columns of their largest values, and how each row is to be shaped. Mirrored in
// library.py.
struct FaserChoice {
    const int64_t* rows;
    const int64_t* best;
    const float* temperature;
    const float* log_min_p;
    const int64_t* top_k;
    const double* top_p;
    const int64_t* ids;  // of the columns, ascending, or null
    int64_t ids_stride;  // from one row's ids to the next; 0: all have the same
};

// linear.cpp
void faser_linear(faser::Pool*, const FaserLinear*, const void* x, int64_t x_stride, int64_t rows, void* out,
                  int64_t out_stride, int32_t out_dtype, const void* residual, int64_t residual_stride);
int64_t faser_embed(faser::Pool*, const FaserLinear*, const int64_t* ids, int64_t rows, void* out);

// out[r] = linears[g.weight](x[r]) for each group g and its rows r. x: [rows, K], out: [rows, N]. All linears of one kind
// and size.
void faser_grouped_linear(faser::Pool* pool, const FaserAnyLinear* linears, const FaserGroup* groups,
                          int64_t num_groups, const void* x, int64_t x_stride, int32_t x_dtype, int64_t rows,
                          void* out, int64_t out_stride, int32_t out_dtype);

// The same of linears that are all FaserLowBit; and of those that are all FaserLinear.
void faser_grouped_low_bit(faser::Pool* pool, const FaserAnyLinear* linears, const FaserGroup* groups,
                           int64_t num_groups, const void* x, int64_t x_stride, int32_t x_dtype, int64_t rows,
                           void* out, int64_t out_stride, int32_t out_dtype);

// low_bit/. following: the weights that are multiplied next, or null.
void faser_low_bit_linear(faser::Pool*, const FaserLowBit*, const void* x, int64_t x_stride, int32_t x_dtype,
                          int64_t rows, void* out, int64_t out_stride, int32_t out_dtype, const void* residual,
                          int64_t residual_stride, const FaserLowBit* following);
int64_t faser_low_bit_embed(faser::Pool*, const FaserLowBit*, const int64_t* ids, int64_t rows, void* out,
                            int32_t out_dtype);

// rows.cpp
enum FaserActivation : int32_t { kSilu = 0, kGeluTanh = 1, kSwigluOai = 2, kGelu = 3 };

// residual: [rows, width] as far apart as those of out, or null; may be out.
void faser_rms_norm(faser::Pool*, const void* x, int64_t stride, int64_t rows, int64_t width, const float* weight,
                    float eps, void* out, int64_t out_stride, int32_t dtype, const void* residual);
void faser_gate(faser::Pool*, const void* gate_up, int64_t stride, int64_t rows, int64_t width, void* out,
                int64_t out_stride, int32_t dtype, int32_t activation);
// x = activation(x), of those with one input. x: [rows, width], without gaps.
void faser_activate(faser::Pool*, void* x, int64_t rows, int64_t width, int32_t dtype, int32_t activation);
// x, wide, out: [rows, width], without gaps; wide or out may be null, wide may be x. dtype: of out. bias: or null.
void faser_layer_norm(faser::Pool*, const float* x, int64_t rows, int64_t width, const float* weight,
                      const float* bias, float eps, float* wide, void* out, int32_t dtype);
// x *= sigmoid(gate). x: [rows, width], without gaps.
void faser_sigmoid_gate(faser::Pool*, void* x, int64_t rows, int64_t width, const void* gate, int64_t gate_stride,
                        int32_t dtype);
// cache: of the layer; without heads where the layer reads another one's keys and values.
void faser_rope_append(faser::Pool*, const FaserCache* cache, const FaserPlan*, int64_t num_heads, void* qkv,
                       int64_t stride, const float* angles, const float* query_angles, const float* q_norm,
                       const float* k_norm, const float* v_norm, float eps, int32_t dtype);

// attention/. seen_to: the last position that each row sees, or null: its own.
FaserPlan* faser_plan_new(const int32_t* query_start, const int32_t* positions, const int32_t* seen_to,
                          const int32_t* block_table, int64_t num_sequences, int64_t num_rows, int64_t table_width,
                          int64_t block_size);
void faser_plan_free(FaserPlan*);
void faser_attend(faser::Pool*, const FaserCache* cache, FaserPlan*, const FaserHeads*, const void* q,
                  int64_t q_stride, void* out, int64_t out_stride, int32_t dtype);

// sampling.cpp. found, values: [rows, count] columns and values of the largest logits of each row, falling, the lower
// column first among equal ones; a row with a NaN has one for its first value.
void faser_top(faser::Pool*, const float* logits, int64_t stride, int64_t rows, int64_t width, int64_t count,
               int64_t* found, float* values);
void faser_best(faser::Pool*, const float* logits, int64_t stride, int64_t rows, int64_t width, int64_t* found,
                double* margins);
void faser_draw(faser::Pool*, const float* logits, int64_t stride, int64_t width, const FaserChoice* choice,
                int64_t count, const uint64_t* noise, int64_t* found, double* margins);
}
