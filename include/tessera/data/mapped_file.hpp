// A file that is read through the page cache, without a copy: what token files and safetensors
// files lie in. Nothing here looks at the contents.
#pragma once

#include <cstddef>
#include <span>
#include <string>

namespace tessera::data {

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

}  // namespace tessera::data
