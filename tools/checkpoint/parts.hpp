// A checkpoint as the tool looks at it: by its manifest, and part after part as its files have it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/checkpoint/manifest.hpp"
#include "tessera/checkpoint/model.hpp"
#include "tessera/device/device.hpp"
#include "tessera/param/shard_spec.hpp"

namespace tessera::checkpoint_tool {

// Throws: DataError for a folder that is no checkpoint.
void expect_checkpoint(const std::string& path);

// The files of a part, under the names of tensors that they have. Reads headers.
// Throws: DataError as checkpoint::Checkpoint::part.
checkpoint::WeightFiles open_part(const std::string& path, const checkpoint::Manifest& manifest,
                                  std::string_view part);

// A tensor's elements, row-major, as `dtype`: some rows at a time, of 4 Mi elements at most unless
// one row has more.
class RowReader {
 public:
  // Throws: DataError for a dtype that is none of ours, and for more than kMaxDims dimensions.
  RowReader(const checkpoint::WeightFiles& files, std::string name, DType dtype);
  bool is_done() const { return spec_.rank == spec_.world; }
  // The next ones.  Throws: DataError for bytes that are not as they were saved.
  std::vector<std::byte> next(const Device& device);

 private:
  static constexpr std::int64_t kElements = 4 << 20;

  const checkpoint::WeightFiles& files_;
  std::string name_;
  DType dtype_;
  ShardSpec spec_;  // of the rows that come next
};

// "[2, 3]", and "f32" or the name of a dtype that is none of ours.
std::string shape_text(const StateSource::Entry& entry);
std::string dtype_text(const StateSource::Entry& entry);

// "3 files", "1 file".
std::string counted(std::int64_t count, const char* what);

}  // namespace tessera::checkpoint_tool
