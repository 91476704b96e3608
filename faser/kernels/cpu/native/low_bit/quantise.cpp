// Quantises weights in 16 or 32 bits as they are packed: the bits of kernels/interface/low_bit/rows.py.
//
// A vector holds one value of several rows, so that sums run over a group in the order of its values.

#include "pack.h"

using namespace faser;

namespace {

constexpr int kMostValues = 64;       // of a group
constexpr int kSteps = 13;            // pairs of scale and minimum that are tried
constexpr float kFirstSteps = 11.0f;  // codes that a group's values span in the first of them
constexpr float kSmallestSpan = 0x1p-100f;

// Rounds to half floats, ties to even. bits: of the half floats.
inline vf to_halves(vf x, uint16_t* bits) {
#if defined(__AVX512F__)
    const __m256i halves = _mm512_maskz_cvtps_ph(0xffff, x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm256_storeu_si256((__m256i*)bits, halves);
#elif defined(__F16C__)
    _mm_storeu_si128((__m128i*)bits, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
    for (int i = 0; i < kLanes; i++) {
        uint32_t wide;
        const float each = x[i];
        std::memcpy(&wide, &each, 4);
        const uint32_t sign = wide >> 16 & 0x8000, size = wide & 0x7fffffff;
        uint32_t half;
        if (size < 0x38800000) {  // below the smallest normal half float: a multiple of 2^-24
            const float scaled = (each < 0 ? -each : each) * 0x1p24f + 12582912.0f;
            std::memcpy(&half, &scaled, 4);
            half -= 0x4b400000;
        } else if (size >= 0x477ff000) {
            half = 0x7c00;
        } else {
            half = (size + 0xfff + (size >> 13 & 1) - 0x38000000) >> 13;
        }
        bits[i] = uint16_t(sign | half);
    }
#endif
    return load_halves((const char*)bits);
}

inline vf where(vi mask, vf yes, vf no) { return (vf)(((vi)yes & mask) | ((vi)no & ~mask)); }
inline vf least(vf a, vf b) { return where(a < b, a, b); }
inline vf most(vf a, vf b) { return where(a > b, a, b); }
inline vf nearest(vf x) { return x + 12582912.0f - 12582912.0f; }  // ties to even

// 1 / scale; 0 where that is 0.
inline vf inverse_of(vf scale) {
    const vi none = scale == vf{};
    return where(none, vf{}, 1.0f / where(none, splat(1.0f), scale));
}

inline vf code_of(vf x, vf minimum, vf inverse) {
    return least(most(nearest((x - minimum) * inverse), vf{}), splat(15.0f));
}

// One group of kLanes rows. x, codes: [values][kPanel].
struct Group {
    const float* x;
    float* codes;
    int values;

    void int8(uint16_t* scales) const {
        vf largest{};
        for (int k = 0; k < values; k++) {
            const vf each = load(x + k * kPanel);
            largest = most(largest, most(each, -each));
        }
        const vf inverse = inverse_of(to_halves(largest / 127.0f, scales));
        for (int k = 0; k < values; k++) {
            const vf code = nearest(load(x + k * kPanel) * inverse);
            store(codes + k * kPanel, least(most(code, splat(-127.0f)), splat(127.0f)) + 128.0f);
        }
    }

    void int4(uint16_t* scales, uint16_t* minimums) const {
        const float count = float(values);
        vf low = load(x), high = low, total{};
        for (int k = 0; k < values; k++) {
            const vf each = load(x + k * kPanel);
            low = least(low, each), high = most(high, each), total += each;
        }
        const vf span = high - low;
        const vi flat = span < kSmallestSpan;
        const vf divisor = where(flat, splat(1.0f), span);
        vf best = splat(__builtin_inff()), scale{}, minimum{};
        for (int step = 0; step < kSteps; step++) {
            const vf inverse = where(flat, vf{}, splat(kFirstSteps + 0.5f * float(step)) / divisor);
            vf sum{}, squares{}, products{};
            for (int k = 0; k < values; k++) {
                const vf each = load(x + k * kPanel), code = code_of(each, low, inverse);
                sum += code, squares += code * code, products += each * code;
            }
            const vf spread = count * squares - sum * sum;
            const vf slope = to_halves((count * products - sum * total) / most(spread, splat(1.0f)), scales);
            const vf height = to_halves((total - slope * sum) / count, minimums);
            const vf inverse_slope = inverse_of(slope);
            vf error{};
            for (int k = 0; k < values; k++) {
                const vf each = load(x + k * kPanel);
                const vf miss = slope * code_of(each, height, inverse_slope) + height - each;
                error += miss * miss;
            }
            const vi better = error < best;
            best = where(better, error, best), scale = where(better, slope, scale);
            minimum = where(better, height, minimum);
        }
        to_halves(scale, scales);  // exactly
        to_halves(minimum, minimums);
        const vf inverse = inverse_of(scale);
        for (int k = 0; k < values; k++) store(codes + k * kPanel, code_of(load(x + k * kPanel), minimum, inverse));
    }
};

template <class T>
void quantise_part(Pool& pool, const FaserLowBitPart& part, int64_t depth, const T* weight) {
    const auto read = [&](int64_t row, int64_t columns, int64_t first, int64_t values, SpanOfRow* spans) {
        for (int64_t at = 0; at < values; at += part.factor_values) {
            const int count = int(std::min<int64_t>(part.factor_values, values - at));
            alignas(64) float x[kMostValues * kPanel], codes[kMostValues * kPanel];
            alignas(64) uint16_t scales[kPanel], minimums[kPanel];
            std::memset(x, 0, sizeof(x));
            for (int64_t n = 0; n < columns; n++) {
                const T* from = weight + (row + n) * depth + first + at;
                for (int k = 0; k < count; k++) x[k * kPanel + n] = widen(from[k]);
            }
            for (int i = 0; i < kPanel; i += kLanes) {
                const Group group{x + i, codes + i, count};
                if (part.form == kBytes) {
                    group.int8(scales + i);
                } else {
                    group.int4(scales + i, minimums + i);
                }
            }
            for (int64_t n = 0; n < columns; n++) {
                const int64_t factor = at / part.factor_values;
                spans[n].scales[factor] = scales[n];
                if (part.has_minimums) spans[n].minimums[factor] = minimums[n];
                for (int k = 0; k < count; k++) spans[n].codes[at + k] = uint8_t(codes[k * kPanel + n]);
            }
        }
    };
    pack_part(pool, part, depth, read);
}

}  // namespace

extern "C" {

// weight: [columns of the part, depth] of dtype. The form decides: nibbles with minimums, or bytes without. At most 64
// values have one scale.
void faser_low_bit_quantise(Pool* pool, const FaserLowBitPart* part, int64_t depth, const void* weight,
                            int32_t dtype) {
    if (dtype == kFloat32) return quantise_part(*pool, *part, depth, (const float*)weight);
    quantise_part(*pool, *part, depth, (const bf16*)weight);
}
}
