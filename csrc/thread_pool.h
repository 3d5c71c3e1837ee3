// A few persistent threads that sleep until there is work. The caller of Run always works too; the threads only help.
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

 private:
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
  int64_t num_tasks_ = 0;
  std::atomic<int64_t> next_{0};  // next task nobody has taken
};

}  // namespace pyscan
