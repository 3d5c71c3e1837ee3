// One file of the writer: opened, locked, written at given offsets, closed. Every call throws FileError with the path
// and a remedy when the system refuses. Children of a fork lose their copies of all open files at once, so that they
// can neither write nor keep a lock alive.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace pyscan {

class FileError : public std::runtime_error {
 public:
  // code: errno of the failure, which decides the type of the exception in Python.
  FileError(int code, const std::string& path, const std::string& text)
      : std::runtime_error(text), code_(code), path_(path) {}
  int code() const { return code_; }
  const std::string& path() const { return path_; }

 private:
  int code_;
  std::string path_;
};

// How often this process has been copied by fork, counted from its own start: an object that remembers the number it
// was made under knows whether it lives in a child.
int NumForks();

class Sink {
 public:
  enum class Mode {
    kCreate,   // the file must not exist
    kResume,   // opened if it exists, created otherwise
    kReplace,  // emptied if it exists, created otherwise
    kRead,     // must exist; only read
  };

  Sink() = default;
  ~Sink() { Close(); }
  Sink(const Sink&) = delete;
  Sink& operator=(const Sink&) = delete;

  void Open(const std::string& path, Mode mode);
  void Close();
  bool is_open() const { return fd_ >= 0; }
  const std::string& path() const { return path_; }

  // Takes the lock that two writers of one file contend for. Held until Close or the end of the process. File systems
  // that know no locks are written without one.
  void Lock();

  uint64_t Size() const;

  // Reads up to `size` bytes; returns how many there were before the end of the file.
  size_t ReadAt(uint64_t offset, void* data, size_t size) const;

  // Writes all of it or throws; after a throw, a part may be in the file.
  void WriteAt(uint64_t offset, const void* data, size_t size);

  void Truncate(uint64_t size);
  void Sync();

  // Throws if the file has been deleted from under the writer: bytes written from now on would reach no one.
  void CheckLinked() const;

 private:
  [[noreturn]] void Fail(const char* what) const;

  std::string path_;
  int fd_ = -1;
};

// Removes the file if it exists.
void RemoveFile(const std::string& path);

// Makes the name of a new file durable.
void SyncDirectoryOf(const std::string& path);

}  // namespace pyscan
