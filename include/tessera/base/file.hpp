// Files: read part by part or mapped, and written whole or not at all. Nothing here looks at
// contents. Token files, safetensors, traces and flight records lie in these.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "tessera/base/error.hpp"

namespace tessera {

// The process, or the machine, has as many files open as it may. It says nothing about the file.
class TooManyFiles : public DeviceError {
  using DeviceError::DeviceError;
};

// Whether a path may be a symbolic link. followed: it may. refused: its last name may not.
// refused_with_folder: neither its last name nor the folder around it may.
enum class Links : std::uint8_t { followed, refused, refused_with_folder };

// A regular file that is read part by part. A read of a mapping ends the process if the file has
// shrunk; here that is an exception. Owns: the descriptor. Threads: reading is free for all.
class OpenFile {
 public:
  // `what` opens every error message, e.g. "token file".
  // Throws: DataError if the path is missing, a folder or otherwise no regular file, or cannot be
  // read; TooManyFiles.
  OpenFile(std::string path, const char* what, Links links = Links::followed);
  OpenFile(OpenFile&& other) noexcept;
  OpenFile& operator=(OpenFile&& other) noexcept;
  ~OpenFile();

  const std::string& path() const noexcept { return path_; }
  int descriptor() const noexcept { return descriptor_; }
  std::int64_t size_bytes() const noexcept { return size_bytes_; }  // when it was opened
  // Reads as many bytes as there are from `offset` on, at most `into.size()`; returns how many.
  // Throws: DeviceError if the system refuses.
  std::size_t read_some(std::int64_t offset, std::span<std::byte> into) const;
  // Fills `into` from `offset` on. Throws: DeviceError likewise, and if the file has become too
  // short.
  void read(std::int64_t offset, std::span<std::byte> into) const;

 private:
  OpenFile(std::string path, const char* what, int descriptor);

  std::string path_;
  const char* what_;
  int descriptor_ = -1;
  std::int64_t size_bytes_ = 0;
};

// A regular file mapped read-only into memory.
// Owns: the mapping.  Threads: reading is free for all.  The file must not shrink while it is
// mapped: reading past its new end is a SIGBUS, which no library can turn into an exception.
class MappedFile {
 public:
  // Throws: DataError as OpenFile, and if the system has no room for the mapping.
  MappedFile(std::string path, const char* what);
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  ~MappedFile();

  const std::string& path() const noexcept { return path_; }
  std::span<const std::byte> bytes() const noexcept { return bytes_; }

 private:
  std::string path_;
  std::span<const std::byte> bytes_;
};

struct WholeFileOptions {
  unsigned mode = 0666;  // who may read and write it, without the process's mask; see WholeFile
  bool flush = true;     // whole after a loss of power, too; this waits for the disk
};

// A file that appears whole or not at all. It is filled without a name, and `commit` gives it one
// in one step. Until then a file of that name stays as it was, and nothing is left even of a
// process that is killed. Some file systems (NFS) have no files without a name. There it has a
// temporary one in the same folder, NAME.tmp-PID-N, which only a killed process leaves behind. The
// new file has the mode of the one that it replaces, as far as `options.mode` goes. A symbolic link
// stays, and the file that it names is replaced. Two writers, of one process or several, never
// share a temporary file; the last one to commit wins.
class WholeFile {
 public:
  // Throws: DeviceError if the file cannot be created; see check_writable.
  explicit WholeFile(std::string path, WholeFileOptions options = {});
  WholeFile(const WholeFile&) = delete;
  WholeFile& operator=(const WholeFile&) = delete;
  ~WholeFile();

  const std::string& path() const noexcept { return path_; }
  bool is_committed() const noexcept { return is_committed_; }
  // Throws: ContractError after `commit`; DeviceError if the system refuses.
  void write(std::span<const std::byte> bytes);
  void write(std::string_view text) { write(std::as_bytes(std::span(text))); }
  // Throws: likewise.
  void commit();

 private:
  friend void check_writable(const std::string& path);
  [[noreturn]] void fail(int error) const;
  // A temporary name, unless it has one.
  void give_name();

  std::string path_, target_;
  std::string temporary_;  // empty for a file without a name
  WholeFileOptions options_;
  int descriptor_ = -1;
  bool is_committed_ = false;
};

// Writes `text` as the whole of `path`.  Throws: DeviceError if the system refuses.
void write_whole(const std::string& path, std::string_view text, WholeFileOptions options = {});

// Tries whether `path` can be written, and throws DataError if not: a WholeFile begins and is given
// up. It is a check before hours of training, and leaves nothing.
void check_writable(const std::string& path);

// Throws DataError unless that many bytes are free where `path` lies, for a new file beside the old
// one. It is a rough check before hours of training, since others may take the bytes later.
void check_space(const std::string& path, std::int64_t bytes);

// The identity of a file: equal for two names that lead to one file, or will once it exists.
std::string file_identity(const std::string& path);

}  // namespace tessera
