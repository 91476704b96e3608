// A step's layout, digested once and used by every layer: where each row is stored, and the pieces of attention work.
#pragma once

#include <cstdint>
#include <vector>

namespace faser {

constexpr int kSpan = 256;  // keys that share one softmax; spans start at multiples of it, in every batch

// Query rows of one sequence that are attended together.
struct Tile {
    int32_t sequence;
    int32_t row;    // the first
    int32_t rows;
    int32_t begin;  // first position that any of its rows sees
    int32_t end;    // one past the last position that any of them sees
    int32_t stored;  // its first entry among the stored partial results, or -1: one piece does all its spans

    int first_span() const { return begin / kSpan; }
    int last_span() const { return (end - 1) / kSpan; }
    int spans() const { return last_span() - first_span() + 1; }
};

// The unit of work of one thread, for each KV head.
struct Piece {
    int32_t tile;
    int32_t span;  // -1: all of them
    int64_t cost;
};

struct WorkList {
    int64_t tile_rows, window, num_kv_heads;
    std::vector<Tile> tiles;
    std::vector<Piece> pieces;
    std::vector<int32_t> split_tiles;
    int32_t num_stored = 0;
    int64_t cost = 0;  // query rows times keys
};

}  // namespace faser

struct FaserPlan {
    int64_t num_rows, num_sequences, table_width;
    std::vector<int32_t> query_start;  // [S + 1]
    std::vector<int32_t> positions;    // [R]
    std::vector<int32_t> seen_to;      // [R], the last position that each row sees, rising within a sequence
    std::vector<int32_t> block_table;  // [S, table_width]
    std::vector<int32_t> row_block;    // [R]
    std::vector<int32_t> row_offset;   // [R], within the block
    std::vector<faser::WorkList> lists;  // one for each shape of attention met so far

    // window: 0 when rows see everything. The list stays valid until the next call.
    const faser::WorkList& work(int64_t tile_rows, int64_t window, int64_t num_kv_heads, int num_threads);
};
