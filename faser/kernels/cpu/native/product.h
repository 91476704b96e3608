// One product's call, and how its sums become its output: bias, residual, one rounding.
#pragma once

#include <algorithm>

#include "simd.h"

namespace faser {

struct FaserProduct {
    const void* x;  // [rows, K]; rows x_stride values apart
    int64_t x_stride;
    int64_t rows;
    void* out;  // [rows, N]
    int64_t out_stride;
    const void* residual;  // [rows, N] in out's dtype, or null; may be out
    int64_t residual_stride;
    int32_t out_dtype;
};

// The place of the first id that is below 0 or not below `columns`, or -1.
inline int64_t first_outside(const int64_t* ids, int64_t count, int64_t columns) {
    for (int64_t i = 0; i < count; i++) {
        if (uint64_t(ids[i]) >= uint64_t(columns)) return i;
    }
    return -1;
}

// out[r][column : column + columns] = sums + bias + residual, rounded once. bias: of the first column, or null.
template <class Out, bool Bias, bool Residual>
void finish_rows(const FaserProduct& call, const float* bias, int64_t row, int rows, int64_t column, int columns,
                 const float* sums, int sums_stride) {
    for (int r = 0; r < rows; r++) {
        const float* sum = sums + r * sums_stride;
        Out* out = (Out*)call.out + (row + r) * call.out_stride + column;
        const Out* residual = Residual ? (const Out*)call.residual + (row + r) * call.residual_stride + column : nullptr;
        int c = 0;
        for (; c + kLanes <= columns; c += kLanes) {
            vf value = load(sum + c);
            if (Bias) value += load(bias + column + c);
            if (Residual) value += load(residual + c);
            store(out + c, value);
        }
        for (; c < columns; c++) {
            float value = sum[c];
            if (Bias) value += bias[column + c];
            if (Residual) value += widen(residual[c]);
            narrow(value, out + c);
        }
    }
}

template <class Out>
void finish_as(const FaserProduct& call, const float* bias, int64_t row, int rows, int64_t column, int columns,
               const float* sums, int sums_stride) {
    if (bias && call.residual) {
        return finish_rows<Out, true, true>(call, bias, row, rows, column, columns, sums, sums_stride);
    }
    if (bias) return finish_rows<Out, true, false>(call, bias, row, rows, column, columns, sums, sums_stride);
    if (call.residual) return finish_rows<Out, false, true>(call, bias, row, rows, column, columns, sums, sums_stride);
    finish_rows<Out, false, false>(call, bias, row, rows, column, columns, sums, sums_stride);
}

// The columns from `column` on for which there are sums, but only those before `end`.
inline void finish(const FaserProduct& call, const float* bias, int64_t end, int64_t row, int rows, int64_t column,
                   float* sums, int sums_stride) {
    const int columns = int(std::min<int64_t>(sums_stride, end - column));
    if (call.out_dtype == kFloat32) {
        return finish_as<float>(call, bias, row, rows, column, columns, sums, sums_stride);
    }
    finish_as<bf16>(call, bias, row, rows, column, columns, sums, sums_stride);
}

}  // namespace faser
