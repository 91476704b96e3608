// Low-rank additions to products: the products by `down` of all runs of rows in one job, those by `up` in a second one.

#include "adapters.h"

#include <algorithm>

using namespace faser;

namespace {

constexpr int64_t kUpBytes = 16 * 1024;  // weights per unit of work, for few rows
constexpr int64_t kFewRows = 8;
constexpr int64_t kBlockRows = 96;
constexpr int64_t kTogether = 4;  // panels that are multiplied together

// Runs [first, last) have one adapter.
struct Group {
    const FaserAdapterRun *first, *last;
    const FaserAdapter* adapter;

    int64_t rows() const {
        int64_t rows = 0;
        for (const FaserAdapterRun* run = first; run < last; run++) rows += run->end - run->begin;
        return rows;
    }
};

// The units of a job; each has pieces [begins[i], begins[i + 1]). Runs of one adapter share units, which read its
// weights once.
struct Units {
    std::vector<LinearPiece> pieces;
    std::vector<int64_t> begins;

    void clear() {
        pieces.clear();
        begins.clear();
    }

    void append(const FaserLinear& linear, const FaserProduct& call, const Group& group, int64_t width) {
        const int64_t panels = (linear.columns + kPanel - 1) / kPanel;
        for (int64_t panel = 0; panel < panels; panel += width) {
            int64_t rows = kBlockRows;
            for (const FaserAdapterRun* run = group.first; run < group.last; run++) {
                for (int64_t row = run->begin; row < run->end; row += kBlockRows) {
                    const int64_t end = std::min(row + kBlockRows, run->end);
                    if (rows + end - row > kBlockRows) {
                        begins.push_back(int64_t(pieces.size()));
                        rows = 0;
                    }
                    rows += end - row;
                    pieces.push_back({&linear, &call, panel, std::min(panel + width, panels), row, end});
                }
            }
        }
    }

    int64_t close() {
        begins.push_back(int64_t(pieces.size()));
        return int64_t(begins.size()) - 1;
    }
};

// Panels of a unit by `up`, whose rows are short.
int64_t up_width(const FaserLinear& up, int64_t rows) {
    const int64_t bytes = up.depth * kPanel * (up.dtype == kFloat32 ? 4 : 2) * ((rows + kFewRows - 1) / kFewRows);
    return std::max<int64_t>(1, kUpBytes / (bytes * kTogether)) * kTogether;
}

thread_local std::vector<Group> groups;
thread_local Units down_units, up_units;
thread_local std::vector<FaserProduct> up_calls;
thread_local std::vector<char> inner;

// Returns how many values a row has between the two products: the largest sum of ranks.
int64_t find_groups(const FaserAdapter* room, const FaserAdapterRows& rows, int64_t& num_rows) {
    int64_t most = num_rows = 0;
    groups.clear();
    const FaserAdapterRun* end = rows.runs + rows.num_runs;
    for (const FaserAdapterRun *first = rows.runs, *last; first < end; first = last) {
        const FaserAdapter& adapter = room[first->slot];
        for (last = first; last < end && last->slot == first->slot; last++) num_rows = std::max(num_rows, last->end);
        if (adapter.num_parts == 0) continue;
        groups.push_back({first, last, &adapter});
        most = std::max(most, adapter.down.columns);
    }
    return most;
}

}  // namespace

namespace faser {

void AdapterSums::Job::operator()(int64_t i) const {
    for (int64_t piece = begins[i]; piece < begins[i + 1]; piece++) multiply(pieces[piece]);
}

AdapterSums::AdapterSums(Pool& pool, const FaserAdapter* room, const FaserAdapterRows& rows, const void* x,
                         int64_t x_stride)
    : pool_(pool) {
    int64_t num_rows;
    const int64_t width = find_groups(room, rows, num_rows);
    if (groups.empty()) return;
    const int32_t dtype = room[0].down.dtype;
    const int64_t bytes = num_rows * width * (dtype == kFloat32 ? 4 : 2);
    if (int64_t(inner.size()) < bytes) inner.resize(bytes);
    down_ = {x, x_stride, num_rows, inner.data(), width, nullptr, 0, dtype};
    down_units.clear();
    const bool is_one = groups.size() == 1 && groups[0].rows() <= kFewRows;  // then all threads share it
    for (const Group& group : groups) down_units.append(group.adapter->down, down_, group, is_one ? 1 : kTogether);
    const int64_t count = down_units.close();
    first_ = {down_units.pieces.data(), down_units.begins.data()};
    pool.beside(count, first_);
}

void AdapterSums::add(void* out, int64_t out_stride, int32_t out_dtype) {
    if (groups.empty()) return;
    up_units.clear();
    up_calls.clear();
    size_t count = 0;
    for (const Group& group : groups) count += group.adapter->num_parts;
    up_calls.reserve(count);  // pieces point to them
    const int64_t value = down_.out_dtype == kFloat32 ? 4 : 2, out_value = out_dtype == kFloat32 ? 4 : 2;
    for (const Group& group : groups) {
        const FaserAdapterPart* parts = group.adapter->parts;
        for (const FaserAdapterPart* part = parts; part < parts + group.adapter->num_parts; part++) {
            char* to = (char*)out + part->column * out_value;
            const char* from = (const char*)down_.out + part->first * value;
            up_calls.push_back({from, down_.out_stride, down_.rows, to, out_stride, to, out_stride, out_dtype});
            up_units.append(part->up, up_calls.back(), group, up_width(part->up, group.rows()));
        }
    }
    const int64_t num_units = up_units.close();
    pool_.run(num_units, Job{up_units.pieces.data(), up_units.begins.data()});
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
