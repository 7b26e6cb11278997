#include "tools/checkpoint/parts.hpp"

#include <algorithm>
#include <span>
#include <utility>

#include "runtime/checkpoint/box.hpp"
#include "tessera/base/error.hpp"
#include "tessera/checkpoint/checkpoint.hpp"
#include "tessera/detail/base/checked.hpp"
#include "tessera/detail/base/text.hpp"
#include "tessera/detail/base/utf8.hpp"

namespace tessera::checkpoint_tool {

void expect_checkpoint(const std::string& path) {
  if (!checkpoint::Manifest::is_in(path)) (void)checkpoint::Checkpoint(path);  // says what is wrong
}

checkpoint::WeightFiles open_part(const std::string& path, const checkpoint::Manifest& manifest,
                                  std::string_view part) {
  return {concat("part ", shown(part), " of '", path, '\''), manifest.files(path, part),
          manifest.id};
}

RowReader::RowReader(const checkpoint::WeightFiles& files, std::string name, DType dtype)
    : files_(files), name_(std::move(name)), dtype_(dtype) {
  const StateSource::Entry entry = files.entry(name_);
  if (!entry.foreign.empty() || std::ssize(entry.shape) > kMaxDims)
    throw DataError(concat("tensor ", shown(name_), " of ", files.what(), " is ", dtype_text(entry),
                           ' ', shape_text(entry), ", and this program can't read such values"));
  spec_.shape = Shape(std::span<const std::int64_t>(entry.shape));
  spec_.rows_of_chunk =
      std::max<std::int64_t>(1, kElements / std::max<std::int64_t>(1, spec_.row_numel()));
  spec_.world =
      spec_.shape.numel() == 0 ? 0 : static_cast<int>(ceil_div(spec_.rows(), spec_.rows_of_chunk));
}

std::vector<std::byte> RowReader::next(const Device& device) {
  const Tensor rows = files_.rows(std::span(&name_, 1), spec_, false, dtype_, device);
  std::vector<std::byte> bytes(static_cast<std::size_t>(rows.numel()) * size_bytes(dtype_));
  rows.to_bytes(bytes);
  ++spec_.rank;
  return bytes;
}

std::string shape_text(const StateSource::Entry& entry) { return checkpoint::text_of(entry.shape); }

std::string dtype_text(const StateSource::Entry& entry) {
  return entry.foreign.empty() ? std::string(name(entry.dtype)) : entry.foreign;
}

std::string counted(std::int64_t count, const char* what) {
  return concat(with_commas(std::to_string(count)), ' ', what, count == 1 ? "" : "s");
}

}  // namespace tessera::checkpoint_tool
