// The threads of the kernels: they are started once, sleep between steps, and join whatever work is open when they come.
//
//     gate    [ number of the work, 20 bits | is open, 1 bit | threads that have joined, 11 bits ]
//
// Who has work writes it down, opens the gate and works too. A thread joins by counting itself in while the gate is open, so
// after closing it the caller knows for whom to wait: for those that joined, and nobody else.
//
// Linux likes to wake a thread on the core of who wakes it, where it does not run before that one rests, though the next core is
// idle: decoding was a third slower. So a thread that was last seen on the caller's core is sent away from it; and so is one
// that was sent away and has not been seen since, if the caller is where it went: it could be waiting there for the caller
// to rest.
#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <chrono>
#include <mutex>
#include <system_error>
#include <thread>

#include "abi.h"
#include "parallel.h"
#include "simd.h"

namespace {

constexpr int kSpins = 1000;  // about 30 microseconds: longer than the pause between two pieces of team work of a step
constexpr uint32_t kOpen = 1u << 11, kJoined = kOpen - 1, kNext = kOpen << 1;
constexpr int kMaxThreads = 256;

#if defined(__linux__)
int this_core() { return sched_getcpu(); }
int this_thread() { return gettid(); }

// Lets a thread run wherever the process may, but not on one core.
void keep_off(int thread, int core) {
  cpu_set_t allowed;
  if (sched_getaffinity(getpid(), sizeof allowed, &allowed) != 0 || CPU_COUNT(&allowed) < 2) return;
  CPU_CLR(core, &allowed);
  sched_setaffinity(thread, sizeof allowed, &allowed);
}
#else
int this_core() { return -1; }
int this_thread() { return 0; }
void keep_off(int, int) {}
#endif

class Team {
 public:
  // False if another thread uses the team: two at a time would only take the cores from each other.
  bool run(int num_threads, void (*function)(void*), void* data) {
    std::unique_lock<std::mutex> only(in_use_, std::try_to_lock);
    if (!only.owns_lock()) return false;
    start(std::min(num_threads, kMaxThreads) - 1);
    function_ = function;
    data_ = data;
    places_ = std::min(num_threads - 1, num_started_);
    num_done_.store(0, std::memory_order_relaxed);
    send_away_from_here();
    gate_.store(((gate_.load(std::memory_order_relaxed) | kOpen | kJoined) + 1) | kOpen);
    gate_.notify_all();
    function(data);
    const int num_joined = (int)(gate_.fetch_and(~kOpen) & kJoined);
    wait_until([&] { return num_done_.load(std::memory_order_acquire) == num_joined; });
    return true;
  }

  // A child process after fork() has the memory of the team, but none of its threads.
  void forget_threads() { new (this) Team(); }

 private:
  struct Place {
    std::atomic<int> thread{0}, core{-1};  // of when it last joined; -1: not since it was sent away
    int kept_off = -1;
  };

  void start(int num_wanted) {
    for (; num_started_ < num_wanted; ++num_started_) {
      try {
        std::thread([this, place = &places_of_[num_started_]] { serve(place); }).detach();
      } catch (const std::system_error&) {  // no more threads: those there are do the work
        return;
      }
    }
  }

  void serve(Place* place) {
    place->thread.store(this_thread());
    for (uint32_t seen = 0;;) {
      seen = next_work(seen);
      if (!join(&seen)) continue;
      place->core.store(this_core(), std::memory_order_relaxed);
      function_(data_);
      num_done_.fetch_add(1, std::memory_order_release);
    }
  }

  void send_away_from_here() {
    const int here = this_core();
    for (int i = 0; i < places_ && here >= 0; ++i) {
      Place& place = places_of_[i];
      const int core = place.core.load(std::memory_order_relaxed);
      if (core != here && (core >= 0 || place.kept_off == here)) continue;
      const int thread = place.thread.load();
      if (thread == 0) continue;  // it has not begun yet
      keep_off(thread, here);
      place.kept_off = here;
      place.core.store(-1, std::memory_order_relaxed);
    }
  }

  // Returns the gate once it is open for another work than that of `seen`.
  uint32_t next_work(uint32_t seen) {
    for (int i = 0;; ++i) {
      const uint32_t gate = gate_.load();
      if ((gate & kOpen) != 0 && gate / kNext != seen / kNext) return gate;
      if (i < kSpins) {
        _mm_pause();
      } else {
        gate_.wait(gate);
      }
    }
  }

  bool join(uint32_t* gate) {
    while ((*gate & kOpen) != 0 && (int)(*gate & kJoined) < places_) {
      if (gate_.compare_exchange_weak(*gate, *gate + 1)) return true;
    }
    return false;
  }

  std::mutex in_use_;
  int num_started_ = 0;
  void (*function_)(void*) = nullptr;
  void* data_ = nullptr;
  std::atomic<int> places_{0};
  Place places_of_[kMaxThreads];
  alignas(64) std::atomic<uint32_t> gate_{0};
  alignas(64) std::atomic<int> num_done_{0};
};

Team& team() {
  // Never destroyed: its threads may outlive whatever else the process takes down at its end.
  static Team* const shared = [] {
    Team* made = new Team();
    pthread_atfork(nullptr, nullptr, [] { team().forget_threads(); });
    return made;
  }();
  return *shared;
}

// The entry point of the OpenMP runtime that torch has loaded (see library.py): linking one here could load a second runtime.
using OpenMpParallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
OpenMpParallel openmp_parallel = nullptr;
thread_local bool uses_own_threads = false;

}  // namespace

void run_on_team(int num_threads, void (*function)(void*), void* data) {
  if (!uses_own_threads && openmp_parallel != nullptr) {
    openmp_parallel(function, data, (unsigned)num_threads, 0);
  } else if (!team().run(num_threads, function, data)) {
    function(data);
  }
}

API void chatpage_use_openmp(OpenMpParallel parallel) { openmp_parallel = parallel; }

// For the calling thread, from now on.
API void chatpage_use_own_threads() { uses_own_threads = true; }

void wait_awhile(int* num_waits) {
  if (++*num_waits < kSpins) {
    _mm_pause();
  } else {
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}
