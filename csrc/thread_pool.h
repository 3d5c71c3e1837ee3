// Threads to reduce with. The caller of Run always works too; the threads only help. They are those of the host's
// OpenMP runtime where it has one: they spin for a while after every operator of the host, so that threads of our own
// would have to wait for them, and theirs are there at once. Else a few persistent threads of our own sleep until there
// is work.
#pragma once

#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace pyscan {

class ThreadPool {
 public:
  using Task = void (*)(void* context, int64_t index);

  // The pool of this process. It is never destroyed, so that a thread may still sleep in it while the process exits;
  // after a fork the child starts with a new, empty one.
  static ThreadPool& Instance();

  // Calls task(context, i) for every i in [0, num_tasks) on at most num_threads threads and returns when all are done.
  // Tasks must not throw. While one caller uses the pool, others work alone.
  void Run(int64_t num_tasks, int num_threads, Task task, void* context);

  // GOMP_parallel, which GNU's, Intel's and LLVM's runtimes all have: calls `work(data)` on num_threads threads.
  using ParallelFn = void (*)(void (*work)(void*), void* data, unsigned num_threads, unsigned flags);
  // omp_get_thread_num: which thread of its team the calling one is.
  using NumberFn = int (*)();
  // From now on use the threads of this OpenMP runtime; null: our own.
  static void Borrow(ParallelFn parallel, NumberFn number);

 private:
  void RunOwn(int64_t num_tasks, int num_helpers, Task task, void* context);
  void Grow(int num_helpers);
  void Help();

  std::mutex busy_;                      // held by the caller that uses the pool
  std::mutex mutex_;                     // guards all below but next_
  std::condition_variable work_;         // a ticket is there
  std::condition_variable helpers_out_;  // num_active_ is zero
  int num_helpers_ = 0;
  int tickets_ = 0;     // helpers that may still join the current job
  int num_active_ = 0;  // helpers inside the current job
  Task task_ = nullptr;
  void* context_ = nullptr;
  std::atomic<int64_t> next_{-1};  // next task nobody has taken; they are taken from the last to the first
};

}  // namespace pyscan
