// Packed weights of floats, and pieces of products with them, for jobs of several products.
#pragma once

#include <cstdint>

#include "product.h"

extern "C" {

// Mirrored field by field in library.py.
struct FaserLinear {
    char* panels;
    const float* bias;  // [N rounded up to 16], or null
    int64_t columns;    // N
    int64_t depth;      // K
    int32_t dtype;
};
}

namespace faser {

// Rows [row, end) of a call with panels [panel, last) of a weight.
struct LinearPiece {
    const FaserLinear* linear;
    const FaserProduct* call;
    int64_t panel, last, row, end;
};

void multiply(const LinearPiece& piece);

}  // namespace faser
