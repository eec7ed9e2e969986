// Runs a function on a team of threads, and hands out its work.
//
// Calls that come one by one between torch's operations run on torch's own OpenMP threads: those are awake then, and others would
// fight them for the cores. Who does whole steps here says so (`chatpage_use_own_threads`) and gets the threads of team.cpp, for
// which nobody waits unless they have taken work: one that the operating system holds up (a browser on the other core) costs
// nothing, the others do its part.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <new>

// Calls function(data) on the calling thread, and on up to num_threads - 1 more; returns when all that began are done. Threads
// may join at any time, or not at all: the function takes its work from a Queue, and may find none left.
void run_on_team(int num_threads, void (*function)(void*), void* data);

template <class Body>
void run_team(int num_threads, Body& body) {
  if (num_threads <= 1) {
    body();
  } else {
    run_on_team(num_threads, [](void* data) { (*(Body*)data)(); }, &body);
  }
}

// Waits until is_done(): briefly awake, since the others are at work, then asleep, so that one held up gets this core.
void wait_awhile(int* num_waits);

template <class IsDone>
void wait_until(const IsDone& is_done) {
  for (int num_waits = 0; !is_done();) wait_awhile(&num_waits);
}

// Hands out [0, size) in pieces, first come, first served: a thread that is held up takes less.
class Queue {
 public:
  explicit Queue(int64_t size, int64_t piece = 1) : size_(size), left_(size), piece_(piece) {}
  bool take(int64_t* begin, int64_t* end) {
    *begin = next_.fetch_add(piece_, std::memory_order_relaxed);
    *end = std::min(*begin + piece_, size_);
    return *begin < size_;
  }
  // Says that a piece is done; true for the last one of all.
  bool finish(int64_t begin, int64_t end) {
    return left_.fetch_sub(end - begin, std::memory_order_acq_rel) == end - begin;
  }
  // Waits until everything is done, by whomever.
  void wait() const {
    wait_until([&] { return left_.load(std::memory_order_acquire) <= 0; });
  }

 private:
  const int64_t size_;
  std::atomic<int64_t> next_{0}, left_;
  const int64_t piece_;
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
