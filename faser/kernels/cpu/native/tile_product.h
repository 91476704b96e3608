// The inner loop of products by tiles: up to 32 rows times a few panels of 16 columns, 32 values of depth at a time.
//
// A row's bits are those of its own values alone: neither the other rows of a tile nor where sums are stored between two
// calls changes them.
#pragma once

#include "tiles.h"

#if defined(FASER_TILES)

namespace faser {

// Panels that are multiplied together: four where one tile holds the rows, else two.
inline int tile_panels(int rows) { return rows <= kTileHeight ? 4 : 2; }

// Of a product with this many rows, at most 32, and values of depth in a step, at most 32. Sums are tiles 0 ... 3. Up to
// 16 rows: A 4, B 5 ... 7. More: A 4 and 5, B 6 and 7.
inline TileConfig product_tiles(int rows, int depth = kTileDepth) {
    TileConfig config;
    const int first = rows < kTileHeight ? rows : kTileHeight;
    const int second = rows > kTileHeight ? rows - kTileHeight : kTileHeight;
    for (int t = 0; t < 4; t++) config.set(t, rows > kTileHeight && t >= 2 ? second : first, kTileBytes);
    config.set(4, first, depth * 2);
    if (rows > kTileHeight) {
        config.set(5, second, depth * 2);
    } else {
        config.set(5, depth / 2, kTileBytes);
    }
    config.set(6, depth / 2, kTileBytes);
    config.set(7, depth / 2, kTileBytes);
    return config;
}

// Rows of x, whose steps lie x_step bytes apart, and where B's tiles are: at(p, s) is that of panel p and step s, its rows
// (pairs of depth) `stride` apart.
template <class At>
struct TileOperands {
    const char* x;
    int64_t x_stride;
    At at;
    int64_t stride;
    int64_t x_step = kTileBytes;
};

template <class At>
TileOperands(const char*, int64_t, At, int64_t) -> TileOperands<At>;
template <class At>
TileOperands(const char*, int64_t, At, int64_t, int64_t) -> TileOperands<At>;

// Up to 16 rows. ahead: bytes from a line of B to the one that is fetched meanwhile; 0: none.
template <class Tiles, int Panels, class At>
inline void multiply_few(const TileOperands<At>& of, int64_t steps, float* sums, int64_t sums_stride, bool goes_on,
                         int64_t ahead) {
    const int64_t bytes = sums_stride * 4;
    if (goes_on) {
        Tiles::template load_sums<0>(sums, bytes);
        if constexpr (Panels > 1) Tiles::template load_sums<1>(sums + 16, bytes);
        if constexpr (Panels > 2) Tiles::template load_sums<2>(sums + 32, bytes);
        if constexpr (Panels > 3) Tiles::template load_sums<3>(sums + 48, bytes);
    } else {
        Tiles::template zero<0>();
        if constexpr (Panels > 1) Tiles::template zero<1>();
        if constexpr (Panels > 2) Tiles::template zero<2>();
        if constexpr (Panels > 3) Tiles::template zero<3>();
    }
    const char* x = of.x;
    for (int64_t s = 0; s < steps; s++, x += of.x_step) {
        if (ahead) {
            for (int p = 0; p < Panels; p++) {
                const char* from = of.at(p, s) + ahead;
                for (int line = 0; line < kTileHeight; line++) __builtin_prefetch(from + line * of.stride, 0, 2);
            }
        }
        Tiles::template load<4>(x, of.x_stride);
        Tiles::template load<5>(of.at(0, s), of.stride);
        Tiles::template dot<0, 4, 5>();
        if constexpr (Panels > 1) {
            Tiles::template load<6>(of.at(1, s), of.stride);
            Tiles::template dot<1, 4, 6>();
        }
        if constexpr (Panels > 2) {
            Tiles::template load<7>(of.at(2, s), of.stride);
            Tiles::template dot<2, 4, 7>();
        }
        if constexpr (Panels > 3) {
            Tiles::template load<5>(of.at(3, s), of.stride);
            Tiles::template dot<3, 4, 5>();
        }
    }
    Tiles::template store<0>(sums, bytes);
    if constexpr (Panels > 1) Tiles::template store<1>(sums + 16, bytes);
    if constexpr (Panels > 2) Tiles::template store<2>(sums + 32, bytes);
    if constexpr (Panels > 3) Tiles::template store<3>(sums + 48, bytes);
}

// 17 to 32 rows.
template <class Tiles, int Panels, class At>
inline void multiply_many(const TileOperands<At>& of, int64_t steps, float* sums, int64_t sums_stride, bool goes_on) {
    const int64_t bytes = sums_stride * 4;
    float* lower = sums + kTileHeight * sums_stride;
    if (goes_on) {
        Tiles::template load_sums<0>(sums, bytes);
        Tiles::template load_sums<2>(lower, bytes);
        if constexpr (Panels > 1) {
            Tiles::template load_sums<1>(sums + 16, bytes);
            Tiles::template load_sums<3>(lower + 16, bytes);
        }
    } else {
        Tiles::template zero<0>();
        Tiles::template zero<2>();
        if constexpr (Panels > 1) {
            Tiles::template zero<1>();
            Tiles::template zero<3>();
        }
    }
    const char* x = of.x;
    for (int64_t s = 0; s < steps; s++, x += of.x_step) {
        Tiles::template load<6>(of.at(0, s), of.stride);
        Tiles::template load<4>(x, of.x_stride);
        Tiles::template dot<0, 4, 6>();
        if constexpr (Panels > 1) {
            Tiles::template load<7>(of.at(1, s), of.stride);
            Tiles::template dot<1, 4, 7>();
        }
        Tiles::template load<5>(x + kTileHeight * of.x_stride, of.x_stride);
        Tiles::template dot<2, 5, 6>();
        if constexpr (Panels > 1) Tiles::template dot<3, 5, 7>();
    }
    Tiles::template store<0>(sums, bytes);
    Tiles::template store<2>(lower, bytes);
    if constexpr (Panels > 1) {
        Tiles::template store<1>(sums + 16, bytes);
        Tiles::template store<3>(lower + 16, bytes);
    }
}

// sums [rows, 16 * panels] = rows of x times panels, at most tile_panels(rows) of them, over `steps`; goes_on:
// added to what is there. The configuration is product_tiles(rows).
template <class Tiles, class At>
inline void multiply_tiles(const TileOperands<At>& of, int rows, int panels, int64_t steps, float* sums,
                           int64_t sums_stride, bool goes_on, int64_t ahead = 0) {
    Tiles::begin();
    if (rows > kTileHeight) {
        if (panels > 1) {
            multiply_many<Tiles, 2>(of, steps, sums, sums_stride, goes_on);
        } else {
            multiply_many<Tiles, 1>(of, steps, sums, sums_stride, goes_on);
        }
    } else if (panels == 4) {
        multiply_few<Tiles, 4>(of, steps, sums, sums_stride, goes_on, ahead);
    } else if (panels == 3) {
        multiply_few<Tiles, 3>(of, steps, sums, sums_stride, goes_on, ahead);
    } else if (panels == 2) {
        multiply_few<Tiles, 2>(of, steps, sums, sums_stride, goes_on, ahead);
    } else {
        multiply_few<Tiles, 1>(of, steps, sums, sums_stride, goes_on, ahead);
    }
    Tiles::end();
}

// Copies of the last values of a depth that is no multiple of 32, with zeros after them: steps of their own.
// to [count, 16 lines]: from rows `stride` bytes apart of `bytes` each, to rows of 64 bytes.
inline void pad_rows(const char* from, int64_t stride, int64_t count, int64_t bytes, char* to) {
    for (int64_t r = 0; r < count; r++, from += stride, to += kTileBytes) {
        std::memcpy(to, from, bytes);
        std::memset(to + bytes, 0, kTileBytes - bytes);
    }
}

// A tile of B of `lines` lines, `stride` apart, and zeros after them.
inline void pad_lines(const char* from, int64_t stride, int64_t lines, char* to) {
    for (int64_t line = 0; line < lines; line++) std::memcpy(to + line * kTileBytes, from + line * stride, kTileBytes);
    std::memset(to + lines * kTileBytes, 0, (kTileHeight - lines) * kTileBytes);
}

}  // namespace faser

#endif
