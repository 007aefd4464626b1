#include "pool.h"

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <vector>

#include "simd.h"

namespace lf {
namespace {

// A range of items of one job: epoch 20 bits, begin 22, end 22. The epoch makes a worker that
// slept through a job unable to take items of the next one for the last one's function.
constexpr int INDEX_BITS = 22;
constexpr uint64_t INDEX_MASK = (1u << INDEX_BITS) - 1;
constexpr int64_t MAX_ITEMS = INDEX_MASK;

uint64_t make_span(uint32_t epoch, uint64_t begin, uint64_t end) {
  return ((uint64_t)(epoch & 0xfffff) << (2 * INDEX_BITS)) | (begin << INDEX_BITS) | end;
}

struct alignas(64) Span {
  std::atomic<uint64_t> value{0};
};

struct Scratch {
  float* memory = nullptr;
  size_t size = 0;
  ~Scratch() { std::free(memory); }
};
thread_local Scratch own_scratch[NUM_PURPOSES];

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

class Pool {
 public:
  Pool(int count, int spin_us) : spans_(count), owner_(getpid()), spin_us_(spin_us) {
    for (int i = 1; i < count; i++) workers_.emplace_back([this, i] { work(i); });
  }

  ~Pool() {
    stop_.store(true);
    post();
    for (auto& worker : workers_) worker.join();
  }

  int count() const { return (int)spans_.size(); }
  bool is_mine() const { return owner_ == getpid(); }
  // Only one caller at a time.
  void run(int64_t items, ItemFunction function, const void* context) {
    uint32_t epoch = epoch_.load(std::memory_order_relaxed) + 1;
    function_.store(function, std::memory_order_relaxed);
    context_.store(context, std::memory_order_relaxed);
    left_.store(items, std::memory_order_relaxed);
    int n = count();
    for (int i = 0; i < n; i++)
      spans_[i].value.store(make_span(epoch, items * i / n, items * (i + 1) / n),
                            std::memory_order_release);
    post();
    take_all(0, epoch, function, context);
    wait_for_rest();
  }

 private:
  void post() {
    epoch_.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst)) epoch_.notify_all();
  }

  bool take(Span& span, uint32_t epoch, bool from_front, int64_t* item) {
    uint64_t seen = span.value.load(std::memory_order_acquire);
    for (;;) {
      uint64_t begin = (seen >> INDEX_BITS) & INDEX_MASK, end = seen & INDEX_MASK;
      if ((seen >> (2 * INDEX_BITS)) != (epoch & 0xfffff) || begin >= end) return false;
      *item = (int64_t)(from_front ? begin : end - 1);
      uint64_t next = from_front ? make_span(epoch, begin + 1, end) : make_span(epoch, begin, end - 1);
      if (span.value.compare_exchange_weak(seen, next, std::memory_order_acq_rel)) return true;
    }
  }

  void take_all(int self, uint32_t epoch, ItemFunction function, const void* context) {
    int n = count();
    for (int offset = 0; offset < n; offset++) {
      int victim = (self + offset) % n;
      int64_t item, done = 0;
      while (take(spans_[victim], epoch, offset == 0, &item)) {
        function(context, item);
        done++;
      }
      if (done && left_.fetch_sub(done, std::memory_order_acq_rel) == done) left_.notify_one();
    }
  }

  void wait_for_rest() {
    for (int i = 0; i < 2000; i++) {
      if (left_.load(std::memory_order_acquire) == 0) return;
      pause();
    }
    for (int64_t left; (left = left_.load(std::memory_order_acquire)) != 0;) left_.wait(left);
  }

  uint32_t next_epoch(uint32_t seen) {
    using clock = std::chrono::steady_clock;
    auto until = clock::now() + std::chrono::microseconds(spin_us_);
    do {
      for (int i = 0; i < 64; i++) {
        uint32_t now = epoch_.load(std::memory_order_acquire);
        if (now != seen) return now;
        pause();
      }
    } while (clock::now() < until);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    epoch_.wait(seen, std::memory_order_seq_cst);
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
    return epoch_.load(std::memory_order_acquire);
  }

  void work(int self) {
    uint32_t epoch = 0;
    for (;;) {
      epoch = next_epoch(epoch);
      if (stop_.load()) return;
      ItemFunction function = function_.load(std::memory_order_relaxed);
      const void* context = context_.load(std::memory_order_relaxed);
      // a newer job may have replaced them; its spans carry another epoch
      if (epoch_.load(std::memory_order_acquire) == epoch) take_all(self, epoch, function, context);
    }
  }

  std::vector<Span> spans_;
  std::vector<std::thread> workers_;
  alignas(64) std::atomic<uint32_t> epoch_{0};
  std::atomic<int> sleepers_{0};
  std::atomic<bool> stop_{false};
  std::atomic<ItemFunction> function_{nullptr};
  std::atomic<const void*> context_{nullptr};
  alignas(64) std::atomic<int64_t> left_{0};
  pid_t owner_;
  int spin_us_;
};

// Never destroyed at exit: a step may still be running then, and threads die with the process.
Pool* pool = nullptr;
std::mutex pool_in_use;
std::atomic<int> thread_count{1};

}  // namespace

int threads() { return thread_count.load(std::memory_order_relaxed); }

void run_items(int64_t count, ItemFunction function, const void* context) {
  if (count > 1 && count < MAX_ITEMS && threads() > 1) {
    // another backend may be using the threads at this moment: then this one works alone
    std::unique_lock<std::mutex> lock(pool_in_use, std::try_to_lock);
    if (lock.owns_lock()) return pool->run(count, function, context);
  }
  for (int64_t i = 0; i < count; i++) function(context, i);
}

float* scratch(Purpose purpose, size_t num_floats) {
  Scratch& s = own_scratch[purpose];
  if (s.size < num_floats) {
    std::free(s.memory);
    s.size = (num_floats + 1023) / 1024 * 1024;
    s.memory = static_cast<float*>(std::aligned_alloc(4096, s.size * sizeof(float)));
  }
  return s.memory;
}

}  // namespace lf

extern "C" {

// Sets how many threads of this process run items, the caller included, and how long idle ones
// spin.
void lf_set_threads(int64_t count, int64_t spin_us) {
  using lf::pool;
  std::lock_guard<std::mutex> lock(lf::pool_in_use);
  if (pool && pool->is_mine() && pool->count() == count) return;
  // after a fork the other threads do not exist, and their memory is another process's business
  if (pool && pool->is_mine()) delete pool;
  pool = new lf::Pool((int)count, (int)spin_us);
  lf::thread_count.store((int)count, std::memory_order_relaxed);
}

// Runs a recorded step: pairs of a function and its arguments, in order.
struct Call {
  void (*function)(const void* args);
  const void* args;
};

void lf_run(const Call* calls, int64_t count) {
  for (int64_t i = 0; i < count; i++) calls[i].function(calls[i].args);
}

// Asks for huge pages for a long-lived buffer: fewer misses while weights stream through.
void lf_advise_huge(char* start, int64_t bytes) {
#if defined(MADV_HUGEPAGE)
  const uintptr_t page = 1 << 21;
  uintptr_t first = ((uintptr_t)start + page - 1) / page * page;
  uintptr_t last = ((uintptr_t)start + bytes) / page * page;
  if (first < last) madvise((void*)first, last - first, MADV_HUGEPAGE);
#endif
}
}
