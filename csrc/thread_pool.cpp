#include "thread_pool.h"

#include <algorithm>
#include <csignal>
#include <system_error>
#include <thread>

namespace pyscan {
namespace {

std::atomic<ThreadPool*> instance{nullptr};
std::atomic<ThreadPool::ParallelFn> borrowed{nullptr};
std::atomic<ThreadPool::NumberFn> borrowed_number{nullptr};  // set before `borrowed`
constexpr int kMostParts = 64;

// The threads of the parent do not exist in the child, and its locks may be held by them: leave that pool alone.
void ForgetInChild() {
  instance.store(nullptr);
  borrowed.store(nullptr);
}

// What the threads of one borrowed team share: tasks in as many parts as there are threads.
struct Job {
  ThreadPool::Task task;
  void* context;
  int64_t num_tasks;
  int num_parts;
  ThreadPool::NumberFn number;
  std::atomic<int64_t> num_taken[kMostParts] = {};  // of each part

  void Do(int part) {
    const int64_t begin = num_tasks * part / num_parts, end = num_tasks * (part + 1) / num_parts;
    for (int64_t i; (i = end - 1 - num_taken[part].fetch_add(1)) >= begin;) task(context, i);
  }
};

// Each thread begins with the part of its own number, which is the part of a tensor that the host's operators give to
// that thread: it is in the cache of its core. Everybody begins at the end, with what was written last.
void Work(void* data) {
  Job& job = *static_cast<Job*>(data);
  const int first = job.number() % job.num_parts;
  for (int part = 0; part < job.num_parts; ++part) job.Do((first + part) % job.num_parts);
}

}  // namespace

void ThreadPool::Borrow(ParallelFn parallel, NumberFn number) {
  borrowed_number.store(number);
  borrowed.store(parallel);
}

ThreadPool& ThreadPool::Instance() {
  static const int registered = pthread_atfork(nullptr, nullptr, ForgetInChild);
  (void)registered;
  ThreadPool* pool = instance.load();
  if (pool == nullptr) {
    auto* fresh = new ThreadPool;
    if (instance.compare_exchange_strong(pool, fresh)) return *fresh;
    delete fresh;
  }
  return *pool;
}

// Signals belong to the host's threads: ours are born with all of them blocked.
void ThreadPool::Grow(int num_helpers) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    for (; num_helpers_ < num_helpers; ++num_helpers_) std::thread([this] { Help(); }).detach();
  } catch (const std::system_error&) {  // the process may have no more threads: fewer helpers, the same answer
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void ThreadPool::Help() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    work_.wait(lock, [this] { return tickets_ > 0; });
    --tickets_;
    ++num_active_;
    const Task task = task_;
    void* const context = context_;
    lock.unlock();
    for (int64_t i; (i = next_.fetch_sub(1)) >= 0;) task(context, i);
    lock.lock();
    if (--num_active_ == 0) helpers_out_.notify_one();
  }
}

void ThreadPool::Run(int64_t num_tasks, int num_threads, Task task, void* context) {
  const int num_helpers = int(num_tasks < num_threads ? num_tasks : num_threads) - 1;
  if (num_helpers < 1) {
    for (int64_t i = num_tasks - 1; i >= 0; --i) task(context, i);
  } else if (const ParallelFn parallel = borrowed.load()) {
    Job job{task, context, num_tasks, std::min(num_helpers + 1, kMostParts), borrowed_number.load()};
    parallel(Work, &job, unsigned(num_helpers) + 1, 0);
  } else {
    RunOwn(num_tasks, num_helpers, task, context);
  }
}

void ThreadPool::RunOwn(int64_t num_tasks, int num_helpers, Task task, void* context) {
  std::unique_lock<std::mutex> busy(busy_, std::defer_lock);
  if (!busy.try_lock()) {
    for (int64_t i = num_tasks - 1; i >= 0; --i) task(context, i);
    return;
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    Grow(num_helpers);
    task_ = task;
    context_ = context;
    next_.store(num_tasks - 1);
    tickets_ = num_helpers;
  }
  for (int i = 0; i < num_helpers; ++i) work_.notify_one();
  for (int64_t i; (i = next_.fetch_sub(1)) >= 0;) task(context, i);
  // Helpers that are still asleep have nothing left to do; those inside must leave before the context goes.
  std::unique_lock<std::mutex> lock(mutex_);
  tickets_ = 0;
  helpers_out_.wait(lock, [this] { return num_active_ == 0; });
}

}  // namespace pyscan
