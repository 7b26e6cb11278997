// The safetensors format, on raw bytes: other programs read and write weights in it.
// checkpoint/model.hpp stands on this header, which knows nothing of tensors, ranks or models.
//
//   N: u64, little-endian │ N bytes of JSON │ data
//
//   JSON: {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}
//
// Source: the format's description in github.com/huggingface/safetensors (README, "Format"). The
// file is data from outside: the reader believes nothing that it has not checked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/dtype.hpp"
#include "tessera/base/file.hpp"

namespace tessera::checkpoint {

struct SafetensorsEntry {
  std::string name;
  DType dtype = f32;
  std::vector<std::int64_t> shape = {};
  std::int64_t begin_bytes = 0;  // offset into the data; set by the reader, ignored by the writer
  std::int64_t size_bytes = 0;   // likewise
  // Set by the reader: the name of a dtype that we lack, as "U8". `dtype` then says nothing. Such a
  // tensor may stand in a file as long as nobody wants its values.
  std::string foreign = {};
};

// A file whose header has been checked. Data is read when it is asked for, not mapped, so a file
// that shrinks is an error and no signal. Owns: the descriptor, while the readers of this process
// have few of them; beyond that each read opens the file anew. Threads: all calls are const and
// free for all.
class SafetensorsReader {
 public:
  // Files that the readers of a process keep open together. A checkpoint has one a rank and part.
  static constexpr int kMostKept = 32;

  // Throws: DataError naming the file, the tensor and the values, if the header's length, JSON,
  // dtypes, shapes or offsets are wrong, tensors overlap, leave holes or miss the end of the file,
  // or a key stands twice; TooManyFiles.
  explicit SafetensorsReader(std::string path, Links links = Links::followed);

  const std::string& path() const noexcept { return path_; }
  // The entries, in the order of their data.
  const std::vector<SafetensorsEntry>& entries() const noexcept { return entries_; }
  const std::map<std::string, std::string>& metadata() const noexcept { return metadata_; }
  // The entry of that name, null if there is none.
  const SafetensorsEntry* find(std::string_view name) const;
  // The file's head: its length and its text, which say all that the data is.
  std::string_view head() const noexcept { return head_; }
  std::int64_t size_bytes() const noexcept { return size_bytes_; }
  // Reads part of an entry's data, from `offset` bytes on: row-major, little-endian. The entry is
  // this reader's. Throws: ContractError for bytes that are not the entry's; DeviceError as
  // OpenFile::read; where the file is opened anew, as OpenFile, and DataError if it has changed.
  void read(const SafetensorsEntry& entry, std::int64_t offset, std::span<std::byte> into) const;
  // All data of an entry. Throws: as read.
  std::vector<std::byte> bytes(const SafetensorsEntry& entry) const;

 private:
  using Kept = std::unique_ptr<const OpenFile, void (*)(const OpenFile*)>;
  static Kept kept(OpenFile file);

  std::string path_;
  Links links_;
  std::int64_t size_bytes_ = 0, changed_ns_ = 0;  // of the file when it was opened first
  Kept kept_;                                     // null where enough others are open
  std::string head_;
  std::vector<SafetensorsEntry> entries_;
  std::map<std::string, std::string> metadata_;
  std::map<std::string, std::size_t, std::less<>> by_name_;
};

// Writes a file tensor by tensor, in any number of chunks. The file appears whole or not at all,
// when `commit` is called; see WholeFile.
//
//   SafetensorsWriter writer("model.safetensors", entries);
//   for (...) writer.write(entry.name, chunk);
//   writer.commit();
class SafetensorsWriter {
 public:
  // Writes the header.
  // Throws: ContractError if names repeat or shapes are negative; DataError if `path` cannot be
  // written (see check_writable); DeviceError if the system refuses.
  SafetensorsWriter(const std::string& path, std::vector<SafetensorsEntry> entries,
                    const std::map<std::string, std::string>& metadata = {});

  // Writes the next bytes of tensor `name`. Tensors come in the order of the entries. Throws:
  // ContractError if it is another tensor's turn or the chunk is too long; DeviceError if the write
  // fails.
  void write(std::string_view name, std::span<const std::byte> chunk);

  // Gives the file its name.
  // Throws: ContractError if bytes are missing; DeviceError if the file system refuses.
  void commit();

 private:
  void skip_empty();

  std::optional<WholeFile> file_;  // not before the entries are checked
  std::vector<SafetensorsEntry> entries_;
  std::size_t current_ = 0;         // the entry that is being written
  std::int64_t written_bytes_ = 0;  // of it
};

}  // namespace tessera::checkpoint
