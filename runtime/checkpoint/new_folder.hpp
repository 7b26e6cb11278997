// A folder that appears whole or not at all, beside WholeFile: filled under a hidden name, and
// `commit` gives it its own in one step. What a killed process leaves is a hidden folder without an
// owner, which `sweep` takes away.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace tessera::checkpoint {

// A descriptor; -1 for none.
class Descriptor {
 public:
  explicit Descriptor(int number = -1) noexcept : number_(number) {}
  Descriptor(Descriptor&& other) noexcept;
  Descriptor& operator=(Descriptor&& other) noexcept;
  ~Descriptor();
  int number() const noexcept { return number_; }

 private:
  int number_;
};

// All below throw DeviceError where the system refuses. No fsync is tried twice: what a failed one
// has lost, a later one may call written.

// A new file, in any order of its bytes.
class NewFile {
 public:
  // Throws: also where a file or link of that name is there.
  explicit NewFile(std::string path);
  void write(std::int64_t offset, std::span<const std::byte> bytes);
  void write(std::int64_t offset, std::string_view text) {
    write(offset, std::as_bytes(std::span(text)));
  }
  // The disk begins to take these bytes, and on return has those 64 MiB before, so that `finish` is
  // short, and whoever writes is as fast as the disk.
  void flush(std::int64_t offset, std::int64_t size_bytes);
  // Its bytes are on the disk, and the file is closed.
  void finish();

 private:
  std::string path_;
  Descriptor descriptor_;
};

// A message with `shown`, the path that a user gave, in the place of `path`, which never appears.
std::string with_path(std::string message, const std::string& path, const std::string& shown);

// The names in a folder are on the disk.
void sync_folder(const std::string& path);

class NewFolder {
 public:
  // `folder`/`name`, which is not there yet, and which `id` tells from all others that have been.
  // Throws: DataError where it cannot be made.
  NewFolder(const std::string& folder, const std::string& name, const std::string& id);
  NewFolder(const NewFolder&) = delete;
  NewFolder& operator=(const NewFolder&) = delete;
  ~NewFolder();  // with all that is in it, unless it was committed

  // Where it is filled.
  static std::string hidden(const std::string& folder, const std::string& name,
                            const std::string& id);
  // Throws: DataError where the name was taken meanwhile.
  void commit();

  // The number of this host's name, with which the ids of its folders begin.
  static std::uint64_t own_host();
  // Removes what programs that are no more have left in `folder`. A lock of another host may be
  // invisible here, as on NFS without its lock service, so its folders must be a day old, too.
  static void sweep(const std::string& folder);
  // Removes `folder`/`name` in one step, as seen from outside.
  static void remove(const std::string& folder, const std::string& name, const std::string& id);

 private:
  std::string folder_, path_, hidden_;
  Descriptor lock_;  // held as long as somebody fills it
  bool is_committed_ = false;
};

}  // namespace tessera::checkpoint
