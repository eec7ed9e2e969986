// Runs a function on a team of torch's own OpenMP threads.
//
// The OpenMP entry points are handed in from the runtime that torch has loaded (see library.py): linking one here could load a
// second runtime, whose threads would fight torch's for the cores. Without a runtime everything runs on the calling thread.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <new>

struct OpenMp {
  void (*parallel)(void (*)(void*), void*, unsigned, unsigned) = nullptr;  // GOMP_parallel
  void (*barrier)() = nullptr;                                             // GOMP_barrier
};
inline OpenMp openmp;

// Calls body() once on each of num_threads threads; body takes its work from a Queue.
template <class Body>
void run_team(int num_threads, Body& body) {
  if (num_threads <= 1 || openmp.parallel == nullptr) {
    body();
    return;
  }
  openmp.parallel([](void* data) { (*(Body*)data)(); }, &body, (unsigned)num_threads, 0);
}

inline void team_barrier(int num_threads) {
  if (num_threads > 1 && openmp.barrier != nullptr) openmp.barrier();
}

// Hands out [0, size) in pieces, first come, first served: a thread that is held up takes less.
class Queue {
 public:
  explicit Queue(int64_t size, int64_t piece = 1) : size_(size), piece_(piece) {}
  bool take(int64_t* begin, int64_t* end) {
    *begin = next_.fetch_add(piece_, std::memory_order_relaxed);
    *end = std::min(*begin + piece_, size_);
    return *begin < size_;
  }

 private:
  std::atomic<int64_t> next_{0};
  const int64_t size_, piece_;
};

// Memory of one thread, kept for the next call; aligned for vector loads.
class Scratch {
 public:
  ~Scratch() { ::operator delete(data_, std::align_val_t(64)); }
  // Returns null when memory is out.
  void* reserve(size_t bytes) {
    if (bytes > size_) {
      ::operator delete(data_, std::align_val_t(64));
      data_ = ::operator new(bytes, std::align_val_t(64), std::nothrow);
      size_ = data_ == nullptr ? 0 : bytes;
    }
    return data_;
  }

 private:
  void* data_ = nullptr;
  size_t size_ = 0;
};
