// Low-rank additions to products by row (LoRA, arXiv:2106.09685): out[r] += up(down(x[r])), with the adapter of row r.
#pragma once

#include <vector>

#include "linear.h"
#include "pool.h"

extern "C" {

// What an adapter adds to columns from `column` on. up: [N, r]; its inputs are those of `down` from `first` on.
struct FaserAdapterPart {
    FaserLinear up;
    int64_t column, first;
};

// An adapter of a product, in one of the slots of its room. down: [sum of r, K], of all parts. Without parts: the slot is
// empty, or the adapter leaves the product as it is. Mirrored in library.py, as all of these.
struct FaserAdapter {
    FaserLinear down;
    const FaserAdapterPart* parts;
    int64_t num_parts;
};

// Rows [begin, end) have the adapter in a slot.
struct FaserAdapterRun {
    int64_t slot, begin, end;
};

// Runs of one slot are neighbours.
struct FaserAdapterRows {
    const FaserAdapterRun* runs;
    int64_t num_runs;
};

// out += up(down(x)). room: [slots]. x: [rows, K], in the type of the adapters.
void faser_add_adapters(faser::Pool* pool, const FaserAdapter* room, const FaserAdapterRows* rows, const void* x,
                        int64_t x_stride, void* out, int64_t out_stride, int32_t out_dtype);
}

namespace faser {

// What adapters add to one product, in two jobs. The first one's pieces need only x, so the job that the pool runs next,
// that of the product itself, does them too; `add` needs both to have ended. One at a time on a thread.
class AdapterSums {
  public:
    AdapterSums(Pool& pool, const FaserAdapter* room, const FaserAdapterRows& rows, const void* x, int64_t x_stride);
    void add(void* out, int64_t out_stride, int32_t out_dtype);

  private:
    struct Job {
        const LinearPiece* pieces;
        const int64_t* begins;  // of each unit, and behind the last one

        void operator()(int64_t i) const;
    };

    Pool& pool_;
    FaserProduct down_{};
    Job first_{};
};

}  // namespace faser
