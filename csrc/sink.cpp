#include "sink.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <vector>

namespace pyscan {
namespace {

// The descriptors of all open sinks, for the handlers that run around a fork.
struct OpenFiles {
  std::mutex mutex;       // guards fds; held across every fork
  std::vector<int*> fds;  // each points into its Sink, which removes it on Close
  std::atomic<int> num_forks{0};
};

// Never destroyed: a fork may come after static destructors have begun.
OpenFiles& Registry() {
  static OpenFiles* files = [] {
    auto* made = new OpenFiles;
    pthread_atfork([] { Registry().mutex.lock(); }, [] { Registry().mutex.unlock(); },
                   [] {
                     // Closing a copy releases no lock of the parent; LOCK_UN would.
                     OpenFiles& files = Registry();
                     for (int* fd : files.fds) {
                       close(*fd);
                       *fd = -1;
                     }
                     files.fds.clear();
                     files.num_forks.fetch_add(1);
                     files.mutex.unlock();
                   });
    return made;
  }();
  return *files;
}

int OpenFlags(Sink::Mode mode) {
  switch (mode) {
    case Sink::Mode::kCreate:
      return O_RDWR | O_CREAT | O_EXCL;
    case Sink::Mode::kResume:
      return O_RDWR | O_CREAT;
    case Sink::Mode::kReplace:
      return O_RDWR | O_CREAT | O_TRUNC;
    case Sink::Mode::kRead:
      break;
  }
  return O_RDONLY;
}

}  // namespace

int NumForks() { return Registry().num_forks.load(std::memory_order_relaxed); }

void Sink::Fail(const char* what) const {
  const int code = errno;
  throw FileError(code, path_, std::string(what) + " failed: " + std::strerror(code));
}

void Sink::Open(const std::string& path, Mode mode) {
  path_ = path;
  OpenFiles& files = Registry();
  const std::lock_guard<std::mutex> lock(files.mutex);
  // O_NONBLOCK: opening a pipe must not wait for its other end. It means nothing to a regular file.
  fd_ = open(path.c_str(), OpenFlags(mode) | O_CLOEXEC | O_NONBLOCK, 0666);
  if (fd_ < 0 && errno == EEXIST) {
    throw FileError(EEXIST, path_, "file exists; pass resume=True to continue it, or choose another path");
  }
  if (fd_ < 0) Fail("open");
  struct stat status;
  if (fstat(fd_, &status) != 0 || !S_ISREG(status.st_mode)) {
    close(fd_);
    fd_ = -1;
    throw FileError(EINVAL, path_, "a scan must be a regular file; choose another path");
  }
  files.fds.push_back(&fd_);
}

void Sink::Close() {
  OpenFiles& files = Registry();
  const std::lock_guard<std::mutex> lock(files.mutex);
  if (fd_ < 0) return;
  files.fds.erase(std::remove(files.fds.begin(), files.fds.end(), &fd_), files.fds.end());
  close(fd_);
  fd_ = -1;
}

void Sink::Lock() {
  if (flock(fd_, LOCK_EX | LOCK_NB) == 0) return;
  if (errno == EWOULDBLOCK) {
    throw FileError(EWOULDBLOCK, path_,
                    "another process or scanner is writing this file; close it or choose another path");
  }
  if (errno != ENOSYS && errno != EOPNOTSUPP && errno != ENOLCK) Fail("lock");
}

uint64_t Sink::Size() const {
  struct stat status;
  if (fstat(fd_, &status) != 0) Fail("stat");
  return static_cast<uint64_t>(status.st_size);
}

size_t Sink::ReadAt(uint64_t offset, void* data, size_t size) const {
  size_t done = 0;
  while (done < size) {
    const ssize_t got = pread(fd_, static_cast<char*>(data) + done, size - done, static_cast<off_t>(offset + done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) Fail("read");
    if (got == 0) break;
    done += static_cast<size_t>(got);
  }
  return done;
}

void Sink::WriteAt(uint64_t offset, const void* data, size_t size) {
  size_t done = 0;
  while (done < size) {
    const ssize_t put =
        pwrite(fd_, static_cast<const char*>(data) + done, size - done, static_cast<off_t>(offset + done));
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) Fail("write");
    done += static_cast<size_t>(put);
  }
}

void Sink::Truncate(uint64_t size) {
  if (ftruncate(fd_, static_cast<off_t>(size)) != 0) Fail("truncate");
}

void Sink::Sync() {
  if (fdatasync(fd_) != 0) Fail("sync");
}

void Sink::CheckLinked() const {
  struct stat status;
  if (fstat(fd_, &status) != 0) Fail("stat");
  if (status.st_nlink == 0) throw FileError(ENOENT, path_, "the file was deleted while it was being written");
}

void RemoveFile(const std::string& path) {
  if (unlink(path.c_str()) == 0 || errno == ENOENT) return;
  const int code = errno;
  throw FileError(code, path, std::string("remove failed: ") + std::strerror(code));
}

void SyncDirectoryOf(const std::string& path) {
  const size_t slash = path.rfind('/');
  const std::string directory = slash == std::string::npos ? "." : path.substr(0, slash + 1);
  const int fd = open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  // Some file systems cannot sync a directory; the file itself is safe then all the same.
  if (fd < 0) return;
  fsync(fd);
  close(fd);
}

}  // namespace pyscan
