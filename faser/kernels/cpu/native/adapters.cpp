// Low-rank additions to products: the products by `down` of all runs of rows in one job, those by `up` in a second one.

#include "adapters.h"

#include <algorithm>

using namespace faser;

namespace {

constexpr int64_t kUpBytes = 16 * 1024;  // weights per piece of work, for few rows
constexpr int64_t kFewRows = 8;
constexpr int64_t kTogether = 4;  // panels that are multiplied together

// Rows of the room between the two products are as far apart as the largest sum of ranks.
int64_t most_inputs(const FaserAdapter* room, const FaserAdapterRows& rows) {
    int64_t most = 0;
    for (int64_t i = 0; i < rows.num_runs; i++) {
        const FaserAdapter& adapter = room[rows.runs[i].slot];
        if (adapter.num_parts) most = std::max(most, adapter.down.columns);
    }
    return most;
}

// Panels of a piece by `up`, whose rows are short.
int64_t up_width(const FaserLinear& up, int64_t rows) {
    const int64_t bytes = up.depth * kPanel * (up.dtype == kFloat32 ? 4 : 2) * ((rows + kFewRows - 1) / kFewRows);
    return std::max<int64_t>(1, kUpBytes / (bytes * kTogether)) * kTogether;
}

thread_local std::vector<LinearPiece> down_pieces, up_pieces;
thread_local std::vector<FaserProduct> up_calls;
thread_local std::vector<char> inner;

}  // namespace

namespace faser {

AdapterSums::AdapterSums(Pool& pool, const FaserAdapter* room, const FaserAdapterRows& rows, const void* x,
                         int64_t x_stride)
    : pool_(pool), room_(room), rows_(rows) {
    const int64_t width = most_inputs(room, rows);
    down_pieces.clear();
    if (width == 0) return;
    const int32_t dtype = room[0].down.dtype;
    const int64_t end = rows.runs[rows.num_runs - 1].end, bytes = end * width * (dtype == kFloat32 ? 4 : 2);
    if (int64_t(inner.size()) < bytes) inner.resize(bytes);
    down_ = {x, x_stride, end, inner.data(), width, nullptr, 0, dtype};
    for (int64_t i = 0; i < rows.num_runs; i++) {
        const FaserAdapterRun& run = rows.runs[i];
        const FaserAdapter& adapter = room[run.slot];
        const int64_t panels = rows.num_runs < pool.num_threads() && run.end - run.begin <= kFewRows ? 1 : kTogether;
        if (adapter.num_parts) append_pieces(adapter.down, down_, run.begin, run.end, panels, down_pieces);
    }
    first_ = {down_pieces.data()};
    pool.beside(int64_t(down_pieces.size()), first_);
}

void AdapterSums::add(void* out, int64_t out_stride, int32_t out_dtype) {
    if (down_pieces.empty()) return;
    up_calls.clear();
    up_pieces.clear();
    int64_t count = 0;
    for (int64_t i = 0; i < rows_.num_runs; i++) count += room_[rows_.runs[i].slot].num_parts;
    up_calls.reserve(count);  // pieces point to them
    const int64_t value = down_.out_dtype == kFloat32 ? 4 : 2, out_value = out_dtype == kFloat32 ? 4 : 2;
    for (int64_t i = 0; i < rows_.num_runs; i++) {
        const FaserAdapterRun& run = rows_.runs[i];
        const FaserAdapter& adapter = room_[run.slot];
        for (const FaserAdapterPart* part = adapter.parts; part < adapter.parts + adapter.num_parts; part++) {
            char* to = (char*)out + part->column * out_value;
            const char* from = (const char*)down_.out + part->first * value;
            up_calls.push_back({from, down_.out_stride, down_.rows, to, out_stride, to, out_stride, out_dtype});
            append_pieces(part->up, up_calls.back(), run.begin, run.end, up_width(part->up, run.end - run.begin),
                          up_pieces);
        }
    }
    const LinearPiece* pieces = up_pieces.data();  // of this thread
    pool_.run(int64_t(up_pieces.size()), [=](int64_t i) { multiply(pieces[i]); });
}

}  // namespace faser

extern "C" {

void faser_add_adapters(Pool* pool, const FaserAdapter* room, const FaserAdapterRows* rows, const void* x,
                        int64_t x_stride, void* out, int64_t out_stride, int32_t out_dtype) {
    AdapterSums sums(*pool, room, *rows, x, x_stride);
    pool->run(0, [](int64_t) {});  // the first job alone
    sums.add(out, out_stride, out_dtype);
}
}
