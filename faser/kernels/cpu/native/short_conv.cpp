// Gated short convolutions: kernels/interface/short_conv.py. A row's sum is in the order of the taps, from products
// rounded to the type of the activations, so its bits do not depend on where a step begins.
//
// A piece of work is some channels of a sequence, in all of its rows: the rows of a long step overwrite those kept.

#include <algorithm>
#include <vector>

#include "delta_net.h"
#include "pool.h"
#include "simd.h"

using namespace faser;

namespace {

constexpr int64_t kChannels = 128;  // of a piece

// What a piece convolves: the products b x of kernel - 1 rows before the step, then of the step's rows.
template <class T>
std::vector<T>& room() {
    thread_local std::vector<T> mine;
    return mine;
}

template <class T>
void convolve(const FaserShortConv& net, const FaserStates& states, const FaserStateStep& step, int64_t sequence,
              int64_t first, int64_t width, const T* bcx, T* out) {
    const int64_t channels = net.channels, past = net.kernel - 1, columns = 3 * channels;
    const int64_t start = step.starts[sequence], count = step.counts[sequence], row = step.first_rows[sequence];
    T* kept = (T*)states.inputs + step.slots[sequence] * states.inputs_kept * channels + first;
    const auto place = [&](int64_t position) { return kept + position % states.inputs_kept * channels; };
    std::vector<T>& products = room<T>();
    if (int64_t(products.size()) < (past + count) * width) products.resize((past + count) * width);
    for (int64_t i = 0; i < past; i++) {
        const int64_t position = start - past + i;
        if (position < 0) {
            std::fill_n(&products[i * width], width, T{});
        } else {
            std::copy_n(place(position), width, &products[i * width]);
        }
    }
    for (int64_t i = 0; i < count; i++) {
        const T *b = bcx + (row + i) * columns + first, *c = b + channels, *x = c + channels;
        T* product = &products[(past + i) * width];
        T* to = out + (row + i) * channels + first;
        for (int64_t at = 0; at < width; at += kLanes) {
            store(product + at, load(b + at) * load(x + at));
            vf total = {};
            for (int64_t tap = 0; tap < net.kernel; tap++) {
                total = fma(load(net.conv + tap * channels + first + at), load(&products[(i + tap) * width] + at), total);
            }
            store(to + at, load(c + at) * total);
        }
    }
    for (int64_t i = std::max<int64_t>(0, count - states.inputs_kept); i < count; i++) {
        std::copy_n(&products[(past + i) * width], width, place(start + i));
    }
}

template <class T>
void short_conv(Pool& pool, const FaserShortConv& net, const FaserStates& states, const FaserStateStep& step,
                const T* bcx, T* out) {
    const int64_t pieces = (net.channels + kChannels - 1) / kChannels;
    pool.run(step.num_sequences * pieces, [&](int64_t piece) {
        const int64_t first = piece % pieces * kChannels, width = std::min(kChannels, net.channels - first);
        convolve(net, states, step, piece / pieces, first, width, bcx, out);
    });
}

}  // namespace

extern "C" {

void faser_short_conv(Pool* pool, const FaserShortConv* net, const FaserStates* states, const FaserStateStep* step,
                      const void* bcx, void* out, int32_t dtype) {
    if (dtype == kFloat32) return short_conv(*pool, *net, *states, *step, (const float*)bcx, (float*)out);
    short_conv(*pool, *net, *states, *step, (const bf16*)bcx, (bf16*)out);
}
}
