// Philox4x32-10, one counter after the other; kernels/interface/sampling.py names the source.

#include <cstdint>

namespace {

constexpr int kRounds = 10;
constexpr uint64_t kLow = 0xffffffff;

}  // namespace

// counters: [4, count], keys: [2, count], words: [4, count]; 32-bit words, each in 64 bits.
extern "C" void faser_philox(const uint64_t* counters, const uint64_t* keys, int64_t count, uint64_t* words) {
    for (int64_t i = 0; i < count; i++) {
        uint64_t x[4], first = keys[i], second = keys[count + i];
        for (int j = 0; j < 4; j++) x[j] = counters[j * count + i];
        for (int round = 0; round < kRounds; round++) {
            const uint64_t a = x[0] * 0xD2511F53, b = x[2] * 0xCD9E8D57;
            x[0] = (b >> 32) ^ x[1] ^ first;
            x[1] = b & kLow;
            x[2] = (a >> 32) ^ x[3] ^ second;
            x[3] = a & kLow;
            first = (first + 0x9E3779B9) & kLow;
            second = (second + 0xBB67AE85) & kLow;
        }
        for (int j = 0; j < 4; j++) words[j * count + i] = x[j];
    }
}
