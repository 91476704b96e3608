// Vectors of the CPU's width, and the arithmetic that every kernel shares.
//
// Owns the only code that differs between instruction sets. A "step" is the unit of every product: 64 bytes with 16
// adjacent columns, holding one value per column (float) or two consecutive ones (bf16).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace faser {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

constexpr int kPanel = 16;               // columns of a panel
constexpr int kParts = kPanel / kLanes;  // vectors that hold one value of every column
constexpr int kStepBytes = 64;

// The rows x panels of accumulators that fit into the registers together with the operands.
constexpr int kTileRows = kLanes == 16 ? 6 : 4;
constexpr int kTilePanels = kLanes == 16 ? 4 : 1;

typedef float vf __attribute__((vector_size(kLanes * 4)));
typedef int32_t vi __attribute__((vector_size(kLanes * 4)));
typedef uint32_t vu __attribute__((vector_size(kLanes * 4)));
typedef uint16_t vh __attribute__((vector_size(kLanes * 2)));
typedef vf vf_any __attribute__((aligned(2), may_alias));
typedef vu vu_any __attribute__((aligned(2), may_alias));
typedef vh vh_any __attribute__((aligned(2), may_alias));

struct bf16 {
    uint16_t bits;
};

enum DType : int32_t { kFloat32 = 0, kBFloat16 = 1, kInt8 = 2 };  // kInt8: only of a KV cache

inline vf splat(float x) { return vf{} + x; }

// a * b + c, rounded once if the CPU can. Written out so that every kernel that inlines it rounds alike.
inline vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
    return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
    return vfmaq_f32(c, a, b);
#else
    return a * b + c;
#endif
}

inline float widen(float x) { return x; }
inline float widen(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float y;
    std::memcpy(&y, &bits, 4);
    return y;
}

inline void narrow(float x, float* y) { *y = x; }
inline void narrow(float x, bf16* y) {  // to nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    y->bits = x != x ? 0x7fc0 : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline vf load(const float* x) { return *(const vf_any*)x; }
inline vf load(const bf16* x) { return (vf)(__builtin_convertvector(*(const vh_any*)x, vu) << 16); }

inline void store(float* y, vf x) { *(vf_any*)y = x; }
inline void store(bf16* y, vf x) {
    vu bits = (vu)x;
    vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    vu quiet = vu{} + 0x7fc0;
    *(vh_any*)y = __builtin_convertvector((x != x) ? quiet : rounded, vh);
}

// As store, of numbers among which none but 0 is below 2^-126; those that are NaN stay so.
inline void store_normal(float* y, vf x) { store(y, x); }
inline void store_normal(bf16* y, vf x) {
#if defined(__AVX512BF16__)
    _mm256_storeu_si256((__m256i_u*)y, (__m256i)_mm512_cvtneps_pbh(x));
#else
    store(y, x);
#endif
}

typedef int8_t vc __attribute__((vector_size(kLanes)));
typedef vc vc_any __attribute__((aligned(1), may_alias));

// The lowest byte of each.
inline void store_bytes(int8_t* to, vi x) {
#if defined(__AVX512F__)
    _mm_storeu_si128((__m128i*)to, _mm512_maskz_cvtepi32_epi8(0xffff, (__m512i)x));
#else
    *(vc_any*)to = __builtin_convertvector(x, vc);
#endif
}

inline float sum(vf x) {
    float total = 0;
    for (int i = 0; i < kLanes; i++) total += x[i];
    return total;
}

inline float largest(vf x) {
    float most = x[0];
    for (int i = 1; i < kLanes; i++) most = x[i] > most ? x[i] : most;
    return most;
}

// 2^x for x up to 127, relative error below 3e-7; exactly 0 below -126, so that a masked score (-inf) weighs nothing.
inline vf exp2_bounded(vf x) {
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
    vf shifted = x + magic;
    vf f = x - (shifted - magic);  // in [-0.5, 0.5]
    vf p = splat(1.5403530e-4f);   // Taylor series of 2^f, degree 6
    p = fma(p, f, splat(1.3333558e-3f));
    p = fma(p, f, splat(9.6181291e-3f));
    p = fma(p, f, splat(5.5504109e-2f));
    p = fma(p, f, splat(2.4022651e-1f));
    p = fma(p, f, splat(6.9314718e-1f));
    p = fma(p, f, splat(1.0f));
    vf y = (vf)((vi)p + ((vi)shifted << 23));
    return (x < -126.0f) ? vf{} : y;
}

// 2^x: as exp2_bounded, and infinite above 127.
inline vf exp2(vf x) { return (x > 127.0f) ? splat(__builtin_inff()) : exp2_bounded(x); }

// Step<T>: load one vector of a step, spread one row's factor over the lanes, multiply and add.
template <class T>
struct Step;

template <>
struct Step<float> {
    static constexpr int kValues = 1;  // values of a row that one step consumes
    typedef vf Weight;
    typedef vf Factor;
    static Weight weight(const char* w) { return *(const vf_any*)w; }
    static Factor factor(const char* x) {
        float value;
        std::memcpy(&value, x, 4);
        return splat(value);
    }
    static vf madd(vf acc, Weight w, Factor x) { return fma(w, x, acc); }
};

template <>
struct Step<bf16> {
    static constexpr int kValues = 2;
#if defined(__AVX512BF16__)
    typedef __m512bh Weight;
    typedef __m512bh Factor;
    static Weight weight(const char* w) { return (__m512bh)_mm512_loadu_si512(w); }
    static Factor factor(const char* x) {
        int32_t pair;
        std::memcpy(&pair, x, 4);
        return (__m512bh)_mm512_set1_epi32(pair);
    }
    static vf madd(vf acc, Weight w, Factor x) { return _mm512_dpbf16_ps(acc, w, x); }
#else
    struct Weight {
        vf first, second;
    };
    typedef Weight Factor;
    static Weight split(vu pairs) { return {(vf)(pairs << 16), (vf)(pairs & 0xffff0000u)}; }
    static Weight weight(const char* w) { return split(*(const vu_any*)w); }
    static Factor factor(const char* x) {
        uint32_t pair;
        std::memcpy(&pair, x, 4);
        return split(vu{} + pair);
    }
    static vf madd(vf acc, Weight w, Factor x) { return fma(w.second, x.second, fma(w.first, x.first, acc)); }
#endif
};

}  // namespace faser
