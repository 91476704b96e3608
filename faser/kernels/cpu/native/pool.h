// A thread pool that runs the pieces of one job at a time.
//
// Threads claim pieces one by one, so a descheduled thread delays no other: the others take its share, and the
// caller waits only for pieces already begun. (An OpenMP region waits for every thread at its end; with a web server
// on the same cores that costs whole time slices.) Idle threads spin through the Python between two steps, since the
// first kernels after a sleep are slow, then sleep; after rest() they sleep at once.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

namespace faser {

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

class Pool {
  public:
    // cores: one for each thread, the caller's first; the pool does not move the caller. null: threads are unpinned.
    explicit Pool(int num_threads, const int32_t* cores = nullptr) : num_threads_(num_threads), waits_(num_threads) {
        for (int i = 1; i < num_threads; i++) {
            threads_.emplace_back([this, i] { serve(i); });
            if (cores != nullptr && !place(threads_.back(), cores[i])) placed_ = false;
        }
    }

    ~Pool() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            stopping_ = true;
        }
        wake_.notify_all();
        for (auto& thread : threads_) thread.join();
    }

    int num_threads() const { return num_threads_; }

    // The experts whose weights its jobs have read, those of each layer and step by themselves; for the caller alone.
    int64_t experts_read = 0;

    // Whether every thread is pinned to its core.
    bool placed() const { return placed_; }

    // No job follows soon: idle threads sleep now and free their cores. The next job wakes them.
    void rest() { resting_.store(true, std::memory_order_relaxed); }

    // Pieces of a job.
    struct Beside {
        int64_t pieces = 0;
        void (*call)(const void*, int64_t) = nullptr;
        const void* context = nullptr;
    };

    // Calls body(i) once for every i below pieces (at most 2^31), from several threads; returns when all are done. A
    // body may take a second argument: the number of the thread that calls it, 0 for the caller.
    template <class Body>
    void run(int64_t pieces, const Body& body) {
        const int64_t own = pieces;
        Beside more;
        if (beside_.pieces > 0) std::swap(more, beside_);
        pieces += more.pieces;
        if (num_threads_ == 1 || pieces <= 1) {
            for (int64_t i = 0; i < own; i++) invoke(body, i, 0);
            for (int64_t i = 0; i < more.pieces; i++) more.call(more.context, i);
            return;
        }
        own_ = own;
        more_ = more;
        call_ = [](const void* context, int64_t i, int thread) {
            invoke(*static_cast<const Body*>(context), i, thread);
        };
        context_ = &body;
        done_.store(0, std::memory_order_relaxed);
        if (resting_.load(std::memory_order_relaxed)) resting_.store(false, std::memory_order_relaxed);
        ticket_.store(uint64_t(pieces) << 32);
        if (sleepers_.load() > 0) {
            { std::lock_guard<std::mutex> lock(mutex_); }
            wake_.notify_all();
        }
        work(0);
        for (int spins = 0; done_.load(std::memory_order_acquire) != pieces; spins++) {
            spins < kPatience ? wait(0) : std::this_thread::yield();
        }
    }

    // The next job does these pieces too, which need nothing of its own: it calls body(i) for every i below pieces. body
    // lives until that job has ended.
    template <class Body>
    void beside(int64_t pieces, const Body& body) {
        beside_ = {pieces, [](const void* context, int64_t i) { (*static_cast<const Body*>(context))(i); }, &body};
    }

    // The calling thread, of this number, brings [from, to) into its cache while it waits for its next job.
    void fetch_while_waiting(int thread, const char* from, const char* to) { waits_[thread] = {from, to}; }

  private:
    // The ticket holds how many pieces the job has (high half) and how many are claimed (low half): a thread that
    // claims a piece thereby knows that the job cannot end before it has read it. Claims beyond the last piece
    // only happen once a thread and job, so the low half does not overflow.
    static bool open(uint64_t ticket) { return uint32_t(ticket) < uint32_t(ticket >> 32); }

    template <class Body>
    static void invoke(const Body& body, int64_t i, int thread) {
        if constexpr (std::is_invocable_v<const Body&, int64_t, int>) {
            body(i, thread);
        } else {
            body(i);
        }
    }

    // A moment of waiting. Memory is idle then: the thread fetches a few lines of what it was asked to.
    void wait(int thread) {
        Wait& at = waits_[thread];
        if (at.next >= at.end) return relax();
        for (int i = 0; i < kFetched && at.next < at.end; i++, at.next += 64) __builtin_prefetch(at.next, 0, 2);
    }

    void work(int thread) {
        while (open(ticket_.load(std::memory_order_acquire))) {
            uint64_t claimed = ticket_.fetch_add(1, std::memory_order_acq_rel);
            if (!open(claimed)) return;
            const int64_t i = uint32_t(claimed);
            i < own_ ? call_(context_, i, thread) : more_.call(more_.context, i - own_);
            done_.fetch_add(1, std::memory_order_release);
        }
    }

    void serve(int thread) {
        using Clock = std::chrono::steady_clock;
        while (true) {
            auto deadline = Clock::now() + kSpin;
            for (int spins = 1; !open(ticket_.load(std::memory_order_relaxed)); spins++) {
                wait(thread);
                if (spins % 64 != 0) continue;
                if ((resting_.load(std::memory_order_relaxed) || Clock::now() > deadline) && !sleep()) return;
            }
            work(thread);
        }
    }

    // False when the pool is to stop.
    bool sleep() {
        std::unique_lock<std::mutex> lock(mutex_);
        sleepers_.fetch_add(1);
        wake_.wait(lock, [this] { return stopping_ || open(ticket_.load()); });
        sleepers_.fetch_sub(1);
        return !stopping_;
    }

    static bool place(std::thread& thread, int core) {
#if defined(__linux__)
        if (core < 0 || core >= CPU_SETSIZE) return false;
        cpu_set_t set;
        CPU_ZERO(&set);
        CPU_SET(core, &set);
        return pthread_setaffinity_np(thread.native_handle(), sizeof(set), &set) == 0;
#else
        return false;
#endif
    }

    static constexpr std::chrono::microseconds kSpin{2000};  // longer than the Python between two steps
    // What a thread is to fetch while it waits. Only that thread uses it.
    struct alignas(64) Wait {
        const char* next = nullptr;
        const char* end = nullptr;
    };

    static constexpr int kFetched = 4;                      // lines of 64 bytes
    static constexpr int kPatience = 20000;                 // spins, about 0.2 ms, before the caller yields

    const int num_threads_;
    alignas(64) std::atomic<uint64_t> ticket_{0};
    alignas(64) std::atomic<int64_t> done_{0};
    alignas(64) std::atomic<int> sleepers_{0};
    std::atomic<bool> resting_{false};
    void (*call_)(const void*, int64_t, int) = nullptr;
    const void* context_ = nullptr;
    int64_t own_ = 0;  // pieces of the job; behind them those of more_
    Beside more_, beside_;
    bool stopping_ = false;
    bool placed_ = true;
    std::vector<Wait> waits_;
    std::mutex mutex_;
    std::condition_variable wake_;
    std::vector<std::thread> threads_;
};

}  // namespace faser
