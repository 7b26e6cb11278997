// A fresh folder under the system's temporary one, gone at the end of the scope.
#pragma once

#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include <cstddef>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <span>
#include <string>
#include <string_view>

namespace tessera::testing {

class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "tessera-XXXXXX").string();
    if (!::mkdtemp(pattern.data())) throw std::filesystem::filesystem_error("mkdtemp", {});
    path_ = pattern;
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  ~TemporaryFolder() {
    std::error_code
        ignored;  // a test has already failed or passed; what is left is the system's to clean
    std::filesystem::remove_all(path_, ignored);
  }

  std::string operator/(std::string_view name) const { return (path_ / name).string(); }
  const std::filesystem::path& path() const { return path_; }

  // Writes a file and returns its path.
  std::string write(std::string_view name, std::string_view contents) const {
    const std::string path = *this / name;
    std::ofstream(path, std::ios::binary) << contents;
    return path;
  }
  std::string read(std::string_view name) const {
    std::ifstream file(path_ / name, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  std::size_t entries() const {
    const std::filesystem::directory_iterator begin(path_);
    return static_cast<std::size_t>(std::distance(begin, std::filesystem::directory_iterator()));
  }

  // How many a file has that is being written: 0 or, where the file system knows no files without a
  // name, 1.
  std::size_t entries_of_unfinished() const {
    const int descriptor = ::open(path_.c_str(), O_TMPFILE | O_WRONLY | O_CLOEXEC, 0600);
    if (descriptor >= 0) ::close(descriptor);
    return descriptor < 0 ? 1 : 0;
  }

 private:
  std::filesystem::path path_;
};

}  // namespace tessera::testing
