// Low-bit products of a CPU that this machine only emulates. Reads cases from the standard input and writes their
// results to the standard output; test_foreign_isas.py says how both look.

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "low_bit/layout.h"
#include "pool.h"

using namespace faser;

extern "C" {
Pool* faser_pool_new(int32_t num_threads);
int64_t faser_low_bit_bytes(const FaserLowBitPart* part, int64_t depth);
void faser_low_bit_pack(Pool* pool, const FaserLowBitPart* part, int64_t depth, int32_t stored, const uint8_t* blocks);
void faser_low_bit_linear(Pool* pool, const FaserLowBit* linear, const void* x, int64_t x_stride, int32_t x_dtype,
                          int64_t rows, void* out, int64_t out_stride, int32_t out_dtype, const void* residual,
                          int64_t residual_stride, const FaserLowBit* following);
}

struct Case {
    int64_t stored, form, zero_point, factors, has_minimums, columns, depth, rows, num_bytes;
};

template <class T>
void take(T* to, size_t count) {
    if (count > 0 && std::fread(to, sizeof(T), count, stdin) != count) std::exit(1);
}

int main() {
    Pool* pool = faser_pool_new(2);
    Case given;
    while (std::fread(&given, sizeof(given), 1, stdin) == 1) {
        std::vector<uint8_t> blocks(given.num_bytes);
        std::vector<float> x(given.rows * given.depth), out(given.rows * given.columns);
        take(blocks.data(), blocks.size());
        take(x.data(), x.size());
        FaserLowBitPart part{nullptr,
                             0,
                             given.columns,
                             int32_t(given.form),
                             int32_t(given.zero_point),
                             int32_t(given.factors),
                             int32_t(given.has_minimums),
                             int32_t(group_of(int32_t(given.form)))};
        std::vector<char> panels(faser_low_bit_bytes(&part, given.depth) + 64);
        part.panels = panels.data() + (64 - (uintptr_t)panels.data() % 64) % 64;
        faser_low_bit_pack(pool, &part, given.depth, int32_t(given.stored), blocks.data());
        const FaserLowBit linear{&part, 1, nullptr, given.depth};
        faser_low_bit_linear(pool, &linear, x.data(), given.depth, kFloat32, given.rows, out.data(), given.columns,
                             kFloat32, nullptr, 0, nullptr);
        std::fwrite(out.data(), sizeof(float), out.size(), stdout);
    }
}
