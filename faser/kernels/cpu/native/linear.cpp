// Products with packed weights, and embedding rows read from packed weights.
//
// A weight [N, K] is stored in panels of 16 output columns; a panel holds K / values steps of 64 bytes. Columns
// past N are zero. Reading the weights is the expensive part: each panel is read from memory once and multiplied
// with all rows while it is in the cache.

#include <algorithm>
#include <vector>

#include "calls.h"
#include "linear.h"
#include "pool.h"
#include "product.h"
#include "tile.h"
#include "tile_product.h"

using namespace faser;

namespace {

// Rows multiplied with a panel group before the next group is read; and with how many memory is the limit.
template <class T>
constexpr int64_t kRowBlock = kInTiles<T> ? 256 : 96;
template <class T>
constexpr int64_t kFewRows = kInTiles<T> ? 16 : kTileRows;
template <class T>
constexpr int kTogether = kInTiles<T> ? 4 : kTilePanels;  // panels
constexpr int64_t kPieceBytes = 96 * 1024;    // weights per piece of work while memory is the limit
constexpr int kFetchBytes = 1536;  // distance of the prefetch, in bytes of weights
constexpr int kShortFetchBytes = 6144;
constexpr int kTileFetchBytes = 4096;

template <class T>
int64_t panel_bytes(const FaserLinear& linear) {
    return linear.depth / Step<T>::kValues * kStepBytes;
}

int64_t num_panels(const FaserLinear& linear) { return (linear.columns + kPanel - 1) / kPanel; }

// One tile: `rows` rows from `row` on, `Panels` panels from `panel` on. Fetch, prefetched: see multiply.
template <class T, int Panels, bool Fetch>
void multiply_tile(const FaserLinear& linear, const FaserProduct& call, int64_t panel, int64_t row, int rows,
                   const char* const* prefetched) {
    const char* w[Panels];
    for (int p = 0; p < Panels; p++) w[p] = linear.panels + (panel + p) * panel_bytes<T>(linear);
    const int64_t x_stride = call.x_stride * sizeof(T);
    const char* x = (const char*)call.x + row * x_stride;
    alignas(64) float sums[kTileRows * Panels * kPanel];
    with_count<kTileRows>(rows, [&](auto count) {
        Sums<count.value, Panels> tile;
        clear(tile);
        multiply<T, count.value, Panels, Fetch>(x, x_stride, w, kStepBytes, linear.depth / Step<T>::kValues, tile,
                                                prefetched);
        spill(tile, sums, Panels * kPanel);
    });
    finish(call, linear.bias, linear.columns, row, rows, panel * kPanel, sums, Panels * kPanel);
}

// Rows [row, end) with `Panels` panels. The first tile prefetches these panels, a little further on. The following
// tiles find them in the cache, and some of them prefetch the panels that this thread will probably need next.
template <class T, int Panels>
void multiply_group(const FaserLinear& linear, const FaserProduct& call, int64_t panel, int64_t next, int64_t row,
                    int64_t end) {
    const int64_t bytes = panel_bytes<T>(linear);
    const int64_t fetchers = std::min<int64_t>(Panels, (end - row - 1) / kTileRows);
    // Short panels: those of a later group, so that every line is fetched.
    const int64_t group = Panels * bytes, ahead = bytes < kFetchBytes ? (kShortFetchBytes + group - 1) / group * group : kFetchBytes;
    for (int64_t tile = 0; row < end; tile++) {
        const int rows = tile_rows(end - row);
        const char* prefetched[Panels];
        for (int p = 0; p < Panels; p++) {
            const bool mine = tile > 0 && p * fetchers / Panels == tile - 1;
            prefetched[p] = linear.panels + (mine ? next + p : panel + p) * bytes + (tile == 0 ? ahead : 0);
        }
        if (tile <= fetchers) {
            multiply_tile<T, Panels, true>(linear, call, panel, row, rows, prefetched);
        } else {
            multiply_tile<T, Panels, false>(linear, call, panel, row, rows, prefetched);
        }
        row += rows;
    }
}

#if defined(FASER_TILES)

// Rows [row, end), at most a block, with up to kTogether panels from `panel` on.
template <class Tiles>
void multiply_in_tiles(const FaserLinear& linear, const FaserProduct& call, int64_t panel, int panels, int64_t row,
                       int64_t end) {
    constexpr int64_t kStretch = 1024 / kTileDepth;  // steps for all rows before the next ones: two panels are 64 kB
    constexpr int64_t kTileOfPanel = kTileHeight * kStepBytes;
    alignas(64) static thread_local float sums[kRowBlock<bf16> * kTogether<bf16> * kPanel];
    alignas(64) static thread_local char x_rest[kRowBlock<bf16> * kTileBytes], w_rest[kTogether<bf16> * kTileOfPanel];
    const int64_t bytes = panel_bytes<bf16>(linear), x_stride = call.x_stride * 2, width = panels * kPanel;
    const int64_t steps = linear.depth / kTileDepth, rest = linear.depth % kTileDepth;
    const char* x = (const char*)call.x + row * x_stride;
    const char* w = linear.panels + panel * bytes;
    if (rest) {
        pad_rows(x + steps * kTileBytes, x_stride, end - row, rest * 2, x_rest);
        for (int p = 0; p < panels; p++) {
            pad_lines(w + p * bytes + steps * kTileOfPanel, kStepBytes, rest / 2, w_rest + p * kTileOfPanel);
        }
    }
    // `rows` rows from `first` on with `count` panels from `from` on, over `length` steps from `step` on.
    const auto multiply = [&](int64_t first, int rows, int from, int count, int64_t step, int64_t length, int64_t ahead) {
        float* to = sums + first * width + from * kPanel;
        const auto at = [&](int p, int64_t s) { return w + (from + p) * bytes + (step + s) * kTileOfPanel; };
        const TileOperands of{x + first * x_stride + step * kTileBytes, x_stride, at, kStepBytes};
        if (length) multiply_tiles<Tiles>(of, rows, count, length, to, width, step > 0, ahead);
        if (!rest || step + length < steps) return;
        const auto last = [&](int p, int64_t) { return w_rest + (from + p) * kTileOfPanel; };
        const TileOperands padded{x_rest + first * kTileBytes, kTileBytes, last, kStepBytes};
        multiply_tiles<Tiles>(padded, rows, count, 1, to, width, steps > 0);
    };
    // Two tiles of rows while there are more than one tile's, then the rest.
    const int64_t count = end - row, left = count % kTilesRows;
    const int64_t many = left > kTileHeight ? count : count - left;
    if (many) {
        const TileScope<Tiles> scope(product_tiles(kTilesRows));
        for (int from = 0; from < panels; from += 2) {
            for (int64_t step = 0; step == 0 || step < steps; step += kStretch) {
                for (int64_t first = 0; first < many; first += kTilesRows) {
                    const int rows = int(std::min<int64_t>(kTilesRows, many - first));
                    if (rows < kTilesRows) Tiles::configure(product_tiles(rows));
                    multiply(first, rows, from, std::min(2, panels - from), step, std::min(kStretch, steps - step), 0);
                    if (rows < kTilesRows) Tiles::configure(product_tiles(kTilesRows));
                }
            }
        }
    }
    if (many < count) {
        const TileScope<Tiles> scope(product_tiles(int(count - many)));
        multiply(many, int(count - many), 0, panels, 0, steps, many ? 0 : kTileFetchBytes);
    }
    finish(call, linear.bias, linear.columns, row, int(count), panel * kPanel, sums, int(width));
}

#endif

// Panels [panel, last) of a product of rows [row, end). stride: panels to those that this thread needs next.
template <class T>
void multiply_piece(const FaserLinear& linear, const FaserProduct& call, int64_t panel, int64_t last, int64_t stride,
                    int64_t row, int64_t end) {
#if defined(FASER_TILES)
    if constexpr (kInTiles<T>) {
        for (; panel < last; panel += kTogether<T>) {
            const int width = int(std::min<int64_t>(kTogether<T>, last - panel));
            with_tiles([&](auto tiles) { multiply_in_tiles<decltype(tiles)>(linear, call, panel, width, row, end); });
        }
        return;
    }
#endif
    const int64_t panels = num_panels(linear);
    for (; panel + kTilePanels <= last; panel += kTilePanels) {
        const int64_t next = std::min(panel + stride, panels - kTilePanels);
        multiply_group<T, kTilePanels>(linear, call, panel, next, row, end);
    }
    if constexpr (kTilePanels > 1) {
        if (panel == last) return;
        with_count<kTilePanels - 1>(int(last - panel), [&](auto count) {
            multiply_group<T, count.value>(linear, call, panel, panel, row, end);
        });
    }
}

// How many panels a piece of work has, by its number of rows.
template <class T>
int64_t piece_panels(const FaserLinear& linear, int64_t rows) {
    if (rows > kFewRows<T>) return kTogether<T>;
    return std::max<int64_t>(1, kPieceBytes / (panel_bytes<T>(linear) * kTogether<T>)) * kTogether<T>;
}

template <class T>
void product(Pool& pool, const FaserLinear& linear, const FaserProduct& call) {
    if (call.rows == 0) return;
    const int64_t panels = num_panels(linear), group = piece_panels<T>(linear, call.rows);
    const int64_t groups = (panels + group - 1) / group;
    const int64_t row_blocks = (call.rows + kRowBlock<T> - 1) / kRowBlock<T>;
    const int64_t block = (call.rows + row_blocks - 1) / row_blocks;
    const int64_t stride = kTilePanels * pool.num_threads();
    pool.run(groups * row_blocks, [&](int64_t piece) {
        const int64_t panel = piece / row_blocks * group, last = std::min(panel + group, panels);
        const int64_t row = piece % row_blocks * block, end = std::min(row + block, call.rows);
        multiply_piece<T>(linear, call, panel, last, stride, row, end);
    });
}

// Appends the pieces of a product with rows [begin, end) of a call.
template <class T>
void append(const FaserLinear& linear, const FaserProduct& call, int64_t begin, int64_t end,
            std::vector<LinearPiece>& pieces) {
    const int64_t rows = end - begin, row_blocks = (rows + kRowBlock<T> - 1) / kRowBlock<T>;
    const int64_t block = (rows + row_blocks - 1) / row_blocks;
    const int64_t panels = num_panels(linear), width = piece_panels<T>(linear, rows);
    for (int64_t panel = 0; panel < panels; panel += width) {
        for (int64_t row = begin; row < end; row += block) {
            pieces.push_back({&linear, &call, panel, std::min(panel + width, panels), row, std::min(row + block, end)});
        }
    }
}

template <class T>
void pack(Pool& pool, const FaserLinear& linear, const T* weight) {
    constexpr int values = Step<T>::kValues;
    pool.run(num_panels(linear), [&](int64_t panel) {
        T* to = (T*)(linear.panels + panel * panel_bytes<T>(linear));
        for (int64_t k = 0; k < linear.depth; k += values) {
            for (int64_t n = panel * kPanel; n < (panel + 1) * kPanel; n++) {
                for (int i = 0; i < values; i++) *to++ = n < linear.columns ? weight[n * linear.depth + k + i] : T{};
            }
        }
    });
}

template <class Unit>
void embed(const FaserLinear& linear, const int64_t* ids, int64_t row, int64_t end, Unit* out, int64_t steps) {
    for (; row < end; row++) {
        const Unit* from = (const Unit*)linear.panels + ids[row] / kPanel * steps * kPanel + ids[row] % kPanel;
        Unit* to = out + row * steps;
        for (int64_t step = 0; step < steps; step++) to[step] = from[step * kPanel];
    }
}

}  // namespace

namespace faser {

void multiply(const LinearPiece& piece) {
    const auto multiply = piece.linear->dtype == kFloat32 ? multiply_piece<float> : multiply_piece<bf16>;
    multiply(*piece.linear, *piece.call, piece.panel, piece.last, kTilePanels, piece.row, piece.end);
}

}  // namespace faser

extern "C" {

int64_t faser_packed_bytes(int64_t columns, int64_t depth, int32_t dtype) {
    return (columns + kPanel - 1) / kPanel * kPanel * depth * (dtype == kFloat32 ? 4 : 2);
}

// Tiles of rows that a product of such weights makes of this many rows.
int64_t faser_linear_tiles(int32_t dtype, int64_t rows) {
    const int64_t height = dtype == kFloat32 ? kFewRows<float> : kFewRows<bf16>;
    return (rows + height - 1) / height;
}

void faser_pack(Pool* pool, const FaserLinear* linear, const void* weight) {
    if (linear->dtype == kFloat32) return pack(*pool, *linear, (const float*)weight);
    pack(*pool, *linear, (const bf16*)weight);
}

void faser_linear(Pool* pool, const FaserLinear* linear, const void* x, int64_t x_stride, int64_t rows, void* out,
                  int64_t out_stride, int32_t out_dtype, const void* residual, int64_t residual_stride) {
    FaserProduct call{x, x_stride, rows, out, out_stride, residual, residual_stride, out_dtype};
    if (linear->dtype == kFloat32) return product<float>(*pool, *linear, call);
    product<bf16>(*pool, *linear, call);
}

void faser_grouped_linear(Pool* pool, const FaserAnyLinear* linears, const FaserGroup* groups, int64_t num_groups,
                          const void* x, int64_t x_stride, int32_t x_dtype, int64_t rows, void* out,
                          int64_t out_stride, int32_t out_dtype) {
    if (linears[groups[0].weight].low_bit) {
        return faser_grouped_low_bit(pool, linears, groups, num_groups, x, x_stride, x_dtype, rows, out, out_stride,
                                     out_dtype);
    }
    const FaserProduct call{x, x_stride, rows, out, out_stride, nullptr, 0, out_dtype};
    static thread_local std::vector<LinearPiece> pieces;
    pieces.clear();
    for (const FaserGroup* group = groups; group < groups + num_groups; group++) {
        const FaserLinear& linear = *linears[group->weight].linear;
        const auto append_all = linear.dtype == kFloat32 ? append<float> : append<bf16>;
        append_all(linear, call, group->begin, group->end, pieces);
    }
    const LinearPiece* all = pieces.data();  // of this thread
    pool->run(int64_t(pieces.size()), [=](int64_t i) { multiply(all[i]); });
}

// out: [rows, K], contiguous. A unit of 4 bytes is one float or two bf16: the same gather serves both. Returns -1; or
// the place of the first id that the weight has no row for, and then reads nothing.
int64_t faser_embed(Pool* pool, const FaserLinear* linear, const int64_t* ids, int64_t rows, void* out) {
    const int64_t outside = first_outside(ids, rows, linear->columns);
    if (outside >= 0) return outside;
    const int64_t steps = linear->depth * (linear->dtype == kFloat32 ? 4 : 2) / 4;
    const int64_t block = 8;
    pool->run((rows + block - 1) / block, [&](int64_t i) {
        embed(*linear, ids, i * block, std::min(rows, (i + 1) * block), (uint32_t*)out, steps);
    });
    return -1;
}

Pool* faser_pool_new(int32_t num_threads) { return new Pool(num_threads); }

// cores: one for each thread, the caller's first. Null when a thread cannot be put on its core.
Pool* faser_pool_on(const int32_t* cores, int32_t num_cores) {
    Pool* pool = new Pool(num_cores, cores);
    if (pool->placed()) return pool;
    delete pool;
    return nullptr;
}

void faser_pool_rest(Pool* pool) { pool->rest(); }

void faser_pool_free(Pool* pool) { delete pool; }
}
