// Files: read through the page cache without a copy, and written whole or not at all. Nothing here
// looks at contents. Token files, safetensors, traces and flight records lie in these.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

namespace tessera {

// A regular file mapped read-only into memory.
// Owns: the mapping.  Threads: reading is free for all.  The file must not shrink while it is
// mapped: reading past its new end is a SIGBUS, which no library can turn into an exception.
class MappedFile {
 public:
  // `what` opens every error message, e.g. "token file".
  // Throws: DataError if the path is missing, a folder or otherwise no regular file, or cannot be
  // read.
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
  unsigned mode = 0666;  // who may read and write it, less the process's mask
  bool flush = true;     // whole after a loss of power too, which costs a wait for the disk
};

// A file that appears whole or not at all: filled under a temporary name in the same folder, which
// `commit` turns into its own in one step. Without `commit` the temporary file is removed, and a
// file of that name stays as it was. Two writers, of one process or several, never share a
// temporary file; the last one to commit wins.
class WholeFile {
 public:
  // Throws: DeviceError if the file cannot be created; see check_writable.
  explicit WholeFile(std::string path, WholeFileOptions options = {});
  WholeFile(const WholeFile&) = delete;
  WholeFile& operator=(const WholeFile&) = delete;
  ~WholeFile();

  const std::string& path() const noexcept { return path_; }
  bool is_committed() const noexcept { return temporary_.empty(); }
  // Throws: ContractError after `commit`; DeviceError if the system refuses.
  void write(std::span<const std::byte> bytes);
  void write(std::string_view text) { write(std::as_bytes(std::span(text))); }
  // Throws: likewise.
  void commit();

 private:
  [[noreturn]] void fail(int error) const;

  std::string path_, temporary_;
  WholeFileOptions options_;
  int descriptor_ = -1;
};

// Writes `text` as the whole of `path`.  Throws: DeviceError if the system refuses.
void write_whole(const std::string& path, std::string_view text, WholeFileOptions options = {});

// Throws DataError unless `path` can be written: its folder exists and lets files be made, and it
// is no folder itself. For a check before hours of training; writes nothing.
void check_writable(const std::string& path);

}  // namespace tessera
