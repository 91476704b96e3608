// The eight tiles of AMX, on the hardware and emulated. Kernels take the kind as a template's argument: their own source
// gives the same bits on any machine.
//
// The arithmetic of tdpbf16ps: for each number of C a chain of multiply-adds of the even places and one of the odd
// places, each from 0 and in order; their sum is added to C. Denormal numbers are zeros, before and after. Sums of bytes
// are exact.
//
// These are not the intrinsics of immintrin.h: those of GCC before 11.5, 12.4 and 13.3 tell the compiler that ldtilecfg
// reads 8 bytes of 64 (PR 114098), so that it drops stores of the rest, and their tileloadd names no memory.
#pragma once

#include <type_traits>

#include "simd.h"

namespace faser {

#if defined(FASER_TILES)
constexpr bool kHasTiles = true;
#else
constexpr bool kHasTiles = false;
#endif

// Whether products of these values are those of tiles.
template <class T>
constexpr bool kInTiles = kHasTiles && std::is_same_v<T, bf16>;

}  // namespace faser

#if defined(FASER_TILES)

namespace faser {

constexpr int kTileHeight = 16;    // most rows of a tile
constexpr int kTileBytes = 64;     // most bytes of a row
constexpr int kTileSums = kTileHeight * kPanel;
constexpr int kTilesRows = 32;     // most rows of a product that two tiles of A hold
constexpr int kTileDepth = 32;     // values in bf16 of a row of A

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {};  // of a row of each tile
    uint8_t rows[16] = {};

    void set(int tile, int tile_rows, int row_bytes) {
        rows[tile] = uint8_t(tile_rows);
        bytes[tile] = uint16_t(row_bytes);
    }
};

// A configuration holds from configure to release, in one thread. Results are computed between begin and end.
struct HardwareTiles {
    static void configure(const TileConfig& config) { asm volatile("ldtilecfg %0" ::"m"(config) : "memory"); }
    static void release() { asm volatile("tilerelease"); }
    static void begin() {}
    static void end() {}

    template <int C>
    static inline __attribute__((always_inline)) void zero() {
        asm volatile("tilezero %%tmm%c0" ::"i"(C));
    }
    // An operand A or B; then sums C. What a tile holds may be read until the next load into it.
    template <int T>
    static inline __attribute__((always_inline)) void load(const void* from, int64_t stride) {
        asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(T), "r"(from), "r"(stride) : "memory");
    }
    template <int C>
    static inline __attribute__((always_inline)) void load_sums(const void* from, int64_t stride) {
        load<C>(from, stride);
    }
    template <int C>
    static inline __attribute__((always_inline)) void store(void* to, int64_t stride) {
        asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(C), "r"(to), "r"(stride) : "memory");
    }
    // C += A B. A: rows of the product; B: 16 columns. AT&T names B first.
    template <int C, int A, int B>
    static inline __attribute__((always_inline)) void dot() {
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
    }
    // Bytes: signed by signed, signed A by unsigned B, unsigned A by signed B.
    template <int C, int A, int B>
    static inline __attribute__((always_inline)) void dot_ss() {
        asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
    }
    template <int C, int A, int B>
    static inline __attribute__((always_inline)) void dot_su() {
        asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
    }
    template <int C, int A, int B>
    static inline __attribute__((always_inline)) void dot_us() {
        asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
    }
};

// Operands stay where they lie: a tile is an address and a stride. Sums are copies. What the hardware refuses (SIGILL) is
// a trap: tiles without a configuration, shapes that do not fit together.
struct EmulatedTiles {
    struct State {
        TileConfig config;
        const char* at[8];
        int64_t stride[8];
        alignas(64) int32_t sums[8][kTileHeight][16];
        alignas(64) uint32_t even[kTileHeight][16], odd[kTileHeight][16];  // floats: the values of A's rows
        int widened = -1;                                                  // the tile whose values these are
        unsigned rounding;
    };
    static State& state() {
        static thread_local State mine;
        return mine;
    }

    static void configure(const TileConfig& config) {
        state().config = config;
        state().widened = -1;
    }
    static void release() { configure(TileConfig{}); }
    static void begin() {
        state().rounding = _mm_getcsr();
        _mm_setcsr(state().rounding | 0x8040);  // denormal numbers are zeros
    }
    static void end() { _mm_setcsr(state().rounding); }

    template <int C>
    static void zero() {
        check(state().config.rows[C] > 0);
        std::memset(state().sums[C], 0, sizeof(State::sums[C]));
    }
    template <int T>
    static void load(const void* from, int64_t stride) {
        check(state().config.rows[T] > 0);
        state().at[T] = (const char*)from;
        state().stride[T] = stride;
        if (state().widened == T) state().widened = -1;
    }
    template <int C>
    static void load_sums(const void* from, int64_t stride) {
        check(state().config.rows[C] > 0);
        for (int r = 0; r < state().config.rows[C]; r++) {
            std::memcpy(state().sums[C][r], (const char*)from + r * stride, state().config.bytes[C]);
        }
    }
    template <int C>
    static void store(void* to, int64_t stride) {
        check(state().config.rows[C] > 0);
        for (int r = 0; r < state().config.rows[C]; r++) {
            std::memcpy((char*)to + r * stride, state().sums[C][r], state().config.bytes[C]);
        }
    }

    template <int C, int A, int B>
    static void dot() {
        constexpr int kMany = kLanes == 16 ? 8 : 2, kSome = kLanes == 16 ? 4 : 2;
        const int rows = rows_of<C, A, B>();
        widen(A, rows);
        int r = 0;
        for (; r + kMany <= rows; r += kMany) add_rows<C, A, B, kMany>(r);
        for (; r + kSome <= rows; r += kSome) add_rows<C, A, B, kSome>(r);
        for (; r < rows; r++) add_rows<C, A, B, 1>(r);
    }
    template <int C, int A, int B>
    static void dot_ss() {
        add_bytes<C, A, B, int8_t, int8_t>();
    }
    template <int C, int A, int B>
    static void dot_su() {
        add_bytes<C, A, B, int8_t, uint8_t>();
    }
    template <int C, int A, int B>
    static void dot_us() {
        add_bytes<C, A, B, uint8_t, int8_t>();
    }

  private:
    static void check(bool holds) {
        if (!holds) __builtin_trap();
    }
    template <int C, int A, int B>
    static int rows_of() {
        const TileConfig& config = state().config;
        check(config.rows[C] > 0 && config.rows[C] == config.rows[A] && config.bytes[C] == config.bytes[B] &&
              config.bytes[A] == 4 * config.rows[B]);
        return config.rows[C];
    }
    static void widen(int tile, int rows) {
        State& all = state();
        if (all.widened == tile) return;
        const char* x = all.at[tile];
        const int pairs = all.config.bytes[tile] / 4;
        for (int r = 0; r < rows; r++, x += all.stride[tile]) {
            for (int k = 0; k < pairs; k++) {
                uint32_t pair;
                std::memcpy(&pair, x + 4 * k, 4);
                all.even[r][k] = pair << 16;
                all.odd[r][k] = pair & 0xffff0000u;
            }
        }
        all.widened = tile;
    }
    template <int C, int A, int B, int Rows>
    static void add_rows(int first) {
        State& all = state();
        const int64_t stride = all.stride[B];
        const char* w = all.at[B];
        const int pairs = all.config.bytes[A] / 4;
        vf even[Rows][kParts] = {}, odd[Rows][kParts] = {};
        for (int k = 0; k < pairs; k++, w += stride) {
#pragma GCC unroll 2
            for (int i = 0; i < kParts; i++) {
                const vu pair = *(const vu_any*)(w + i * sizeof(vu));
                const vf low = (vf)(pair << 16), high = (vf)(pair & 0xffff0000u);
#pragma GCC unroll 8
                for (int r = 0; r < Rows; r++) {
                    even[r][i] = fma(low, (vf)(vu{} + all.even[first + r][k]), even[r][i]);
                    odd[r][i] = fma(high, (vf)(vu{} + all.odd[first + r][k]), odd[r][i]);
                }
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < Rows; r++) {
#pragma GCC unroll 2
            for (int i = 0; i < kParts; i++) {
                float* sum = (float*)all.sums[C][first + r] + i * kLanes;
                faser::store(sum, faser::load(sum) + (even[r][i] + odd[r][i]));
            }
        }
    }

    template <int C, int A, int B, class OfA, class OfB>
    static __attribute__((noinline)) void add_bytes() {
        State& all = state();
        const int rows = rows_of<C, A, B>();
        for (int r = 0; r < rows; r++) {
            const OfA* x = (const OfA*)(all.at[A] + r * all.stride[A]);
            for (int k = 0; k < all.config.bytes[A]; k += 4) {
                const OfB* w = (const OfB*)(all.at[B] + k / 4 * all.stride[B]);
                for (int n = 0; n < all.config.bytes[C] / 4; n++) {
                    for (int i = 0; i < 4; i++) all.sums[C][r][n] += int32_t(x[k + i]) * w[4 * n + i];
                }
            }
        }
    }
};

// A configuration for as long as an object lives.
template <class Tiles>
class TileScope {
  public:
    explicit TileScope(const TileConfig& config) { Tiles::configure(config); }
    ~TileScope() { Tiles::release(); }
    TileScope(const TileScope&) = delete;
};

// Which tiles this process computes with; tiles.cpp. Sums of bytes are the same without tiles, which are faster than
// emulated ones: only kAllEmulatedTiles, for tests, emulates those too.
enum TileKind : int32_t { kEmulatedTiles = 0, kHardwareTiles = 1, kAllEmulatedTiles = 2 };
extern TileKind tile_kind;

// Calls f(HardwareTiles{}) or f(EmulatedTiles{}).
template <class F>
inline void with_tiles(const F& f) {
    if (tile_kind == kHardwareTiles) return f(HardwareTiles{});
    f(EmulatedTiles{});
}

}  // namespace faser

#endif
