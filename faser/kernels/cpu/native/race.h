// The exponential random numbers by which tokens race for a row. kernels/interface/sampling.py (`arrivals`) defines
// them: the same bits here, whatever the width of vectors.
#pragma once

#include <cstdint>
#include <cstring>

#include "simd.h"

namespace faser {

constexpr int64_t kRaceBlock = 256;  // columns that race against each other once their block has won

class Arrivals {
  public:
    static constexpr int64_t kGroup = kLanes;  // numbers that are made at once

    explicit Arrivals(uint64_t word) : first_(word & kLow), second_(word >> 32) {}

    // Number `at` and the following ones, at least `count` of them. at: a multiple of kGroup; out has room for whole
    // groups.
    void fill(int64_t at, int64_t count, double* out) const {
        for (int64_t i = 0; i < count; i += kGroup) group(at + i, out + i);
    }

    // One number; cheap where the next one that is asked for is near.
    double operator[](int64_t at) {
        if (at / kGroup != held_) {
            held_ = at / kGroup;
            group(held_ * kGroup, numbers_);
        }
        return numbers_[at % kGroup];
    }

  private:
    typedef uint64_t vq __attribute__((vector_size(kLanes * 4)));
    typedef double vd __attribute__((vector_size(kLanes * 4)));

    static constexpr uint64_t kLow = 0xffffffff;
    static constexpr int kRounds = 10;
    static constexpr uint64_t kPurpose = 4;
    static constexpr uint64_t kOneBits = 0x3ff0000000000000;       // of 1.0
    static constexpr uint64_t kHalfRootBits = 0x3fe6a09e667f3bcd;  // of the square root of 1/2
    static constexpr uint64_t kMagicBits = 0x4330000000000000;     // of 2^52: there the last bit of a double is worth 1

    // Products of two 32-bit numbers, each in 64 bits.
    static vq product(vq a, uint64_t b) {
        const vq factor = vq{} + b;
#if defined(__AVX512F__)
        return (vq)_mm512_mul_epu32((__m512i)a, (__m512i)factor);
#elif defined(__AVX2__)
        return (vq)_mm256_mul_epu32((__m256i)a, (__m256i)factor);
#else
        return a * factor;
#endif
    }

    void group(int64_t at, double* out) const {
        vq a, b = {}, c = vq{} + kPurpose, d = {};
        for (int lane = 0; lane < kLanes / 2; lane++) a[lane] = uint64_t(at) / 2 + lane;
        uint64_t first = first_, second = second_;
        for (int round = 0; round < kRounds; round++) {
            const vq one = product(a, 0xD2511F53), other = product(c, 0xCD9E8D57);
            a = (other >> 32) ^ b ^ first;
            b = other & kLow;
            c = (one >> 32) ^ d ^ second;
            d = one & kLow;
            first = (first + 0x9E3779B9) & kLow;
            second = (second + 0xBB67AE85) & kLow;
        }
        const vd even = minus_log((a << 32) | b), odd = minus_log((c << 32) | d);
        for (int lane = 0; lane < kLanes / 2; lane++) {
            out[2 * lane] = even[lane];
            out[2 * lane + 1] = odd[lane];
        }
    }

    static vd minus_log(vq words) {
        const vq bits = (vq)(((vd)((words >> 12) | kOneBits) - 1.0) + 0x1p-53);
        const vq exponent = (bits + (kOneBits - kHalfRootBits)) >> 52;  // by 1023 too large, so that it is no sign
        const vd mantissa = (vd)(bits + (uint64_t(1023) << 52) - (exponent << 52));
        const vd part = (mantissa - 1.0) / (mantissa + 1.0);
        const vd square = part * part;
        vd series = square * (1.0 / 17.0) + 1.0 / 15.0;
        series = series * square + 1.0 / 13.0;
        series = series * square + 1.0 / 11.0;
        series = series * square + 1.0 / 9.0;
        series = series * square + 1.0 / 7.0;
        series = series * square + 1.0 / 5.0;
        series = series * square + 1.0 / 3.0;
        series = series * square + 1.0;
        const vd whole = (vd)(exponent | kMagicBits) - (0x1p52 + 1023.0);
        return whole * -0.6931471805599453 - (part + part) * series;
    }

    uint64_t first_, second_;
    int64_t held_ = -1;
    double numbers_[kGroup];
};

// The first of those that arrive first.
struct Winner {
    double time = __builtin_inf();
    int64_t at = -1;

    void add(int64_t one, double arrival, double prob) {
        const double when = arrival / prob;
        if (when < time) {
            time = when;
            at = one;
        }
    }
};

}  // namespace faser
