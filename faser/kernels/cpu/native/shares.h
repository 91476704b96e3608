// Units of work in order, a stretch of them for each thread.
//
// A thread goes through its own share from the front, so that what it reads is one stretch of memory, the same in every
// call; then it takes from the shares of others. So a descheduled thread delays no other.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

namespace faser {

class Shares {
  public:
    static int64_t begin(int64_t units, int share, int num_shares) { return units * share / num_shares; }

    void deal(int64_t units, int num_shares) {
        if (num_shares > capacity_) shares_.reset(new Share[capacity_ = num_shares]);
        for (int i = 0; i < num_shares; i++) {
            shares_[i].next.store(begin(units, i, num_shares), std::memory_order_relaxed);
            shares_[i].end = begin(units, i + 1, num_shares);
        }
    }

    int64_t end(int share) const { return shares_[share].end; }

    // Claims units [first, last) of a share: two that begin at an even one, or one, as the last two of a share are, so
    // that threads end together. False: there are none left.
    bool claim(int share, int64_t& first, int64_t& last) {
        Share& from = shares_[share];
        first = from.next.load(std::memory_order_relaxed);
        while (first < from.end) {
            last = first + (first % 2 == 0 && first + 4 <= from.end ? 2 : 1);
            if (from.next.compare_exchange_weak(first, last, std::memory_order_relaxed)) return true;
        }
        return false;
    }

  private:
    struct alignas(64) Share {
        std::atomic<int64_t> next;
        int64_t end;
    };

    std::unique_ptr<Share[]> shares_;
    int capacity_ = 0;
};

}  // namespace faser
