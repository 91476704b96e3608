// Builds plans. The division of work never changes a result: spans are computed apart and joined in order anyway.

#include "../calls.h"
#include "plan.h"

#include <algorithm>

using namespace faser;

namespace {

constexpr int kPiecesPerThread = 4;  // a tile that costs more than a thread's share over this is cut into spans

void add_tiles(const FaserPlan& plan, WorkList& list) {
    for (int32_t s = 0; s < plan.num_sequences; s++) {
        for (int32_t row = plan.query_start[s]; row < plan.query_start[s + 1];) {
            const int32_t left = plan.query_start[s + 1] - row;
            const int32_t tiles = int32_t((left + list.tile_rows - 1) / list.tile_rows);
            const int32_t rows = (left + tiles - 1) / tiles;
            const int32_t first = plan.positions[row], end = plan.seen_to[row + rows - 1] + 1;
            const int32_t begin = list.window ? std::max<int32_t>(0, first - int32_t(list.window) + 1) : 0;
            list.tiles.push_back({s, row, rows, begin, end, -1});
            list.cost += int64_t(rows) * (end - begin);
            row += rows;
        }
    }
}

void cut(WorkList& list, int num_threads) {
    const int64_t share = list.cost * list.num_kv_heads / (int64_t(num_threads) * kPiecesPerThread);
    for (int32_t i = 0; i < int32_t(list.tiles.size()); i++) {
        Tile& tile = list.tiles[i];
        const int64_t cost = int64_t(tile.rows) * (tile.end - tile.begin);
        if (num_threads == 1 || tile.spans() == 1 || cost <= share) {
            list.pieces.push_back({i, -1, cost});
            continue;
        }
        tile.stored = list.num_stored;
        list.num_stored += tile.spans();
        list.split_tiles.push_back(i);
        for (int32_t span = tile.first_span(); span <= tile.last_span(); span++) {
            list.pieces.push_back({i, span, cost / tile.spans()});
        }
    }
    std::stable_sort(list.pieces.begin(), list.pieces.end(),
                     [](const Piece& a, const Piece& b) { return a.cost > b.cost; });
}

}  // namespace

const WorkList& FaserPlan::work(int64_t tile_rows, int64_t window, int64_t num_kv_heads, int num_threads) {
    for (const WorkList& list : lists) {
        if (list.tile_rows == tile_rows && list.window == window && list.num_kv_heads == num_kv_heads) return list;
    }
    WorkList& list = lists.emplace_back();
    list.tile_rows = tile_rows;
    list.window = window;
    list.num_kv_heads = num_kv_heads;
    add_tiles(*this, list);
    cut(list, num_threads);
    return list;
}

extern "C" {

FaserPlan* faser_plan_new(const int32_t* query_start, const int32_t* positions, const int32_t* seen_to,
                          const int32_t* block_table, int64_t num_sequences, int64_t num_rows, int64_t table_width,
                          int64_t block_size) {
    auto* plan = new FaserPlan;
    plan->num_rows = num_rows;
    plan->num_sequences = num_sequences;
    plan->table_width = table_width;
    plan->query_start.assign(query_start, query_start + num_sequences + 1);
    plan->positions.assign(positions, positions + num_rows);
    plan->seen_to.assign(seen_to ? seen_to : positions, (seen_to ? seen_to : positions) + num_rows);
    plan->block_table.assign(block_table, block_table + num_sequences * table_width);
    plan->row_block.resize(num_rows);
    plan->row_offset.resize(num_rows);
    for (int64_t s = 0; s < num_sequences; s++) {
        for (int32_t row = query_start[s]; row < query_start[s + 1]; row++) {
            plan->row_block[row] = block_table[s * table_width + positions[row] / block_size];
            plan->row_offset[row] = int32_t(positions[row] % block_size);
        }
    }
    return plan;
}

void faser_plan_free(FaserPlan* plan) { delete plan; }
}
