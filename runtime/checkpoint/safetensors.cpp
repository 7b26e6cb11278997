#include "tessera/checkpoint/safetensors.hpp"

#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <set>
#include <utility>

#include "runtime/checkpoint/safetensors_header.hpp"
#include "tessera/base/error.hpp"
#include "tessera/detail/base/checked.hpp"
#include "tessera/detail/base/utf8.hpp"

namespace tessera::checkpoint {
namespace {

constexpr std::size_t kLengthBytes = 8;
constexpr const char* kWhat = "safetensors file";

std::atomic<int> g_kept{0};  // descriptors are the process's

// When the file was written to for the last time. File numbers would not do: some file systems
// give a file another one later.
std::int64_t changed_ns(const OpenFile& file) {
  struct stat status{};
  ::fstat(file.descriptor(), &status);
  return status.st_mtim.tv_sec * 1'000'000'000 + status.st_mtim.tv_nsec;
}

std::uint64_t little_endian(std::span<const std::byte> bytes) {
  std::uint64_t value = 0;
  for (std::size_t i = kLengthBytes; i-- > 0;)
    value = value << 8 | std::to_integer<std::uint64_t>(bytes[i]);
  return value;
}

// Every byte of the data belongs to exactly one tensor.
void check_cover(const std::vector<SafetensorsEntry>& entries, std::int64_t data_bytes,
                 const std::string& file) {
  std::int64_t end = 0;
  const SafetensorsEntry* last = nullptr;
  for (const SafetensorsEntry& entry : entries) {
    if (entry.begin_bytes != end) {
      throw DataError(concat(file, ": tensor ", shown(entry.name), " begins at ", entry.begin_bytes,
                             entry.begin_bytes < end ? ", inside " : ", which leaves a hole after ",
                             last ? shown(last->name) : std::string("the header"), " that ends at ",
                             end, "; write the file again"));
    }
    end = entry.begin_bytes + entry.size_bytes;
    last = &entry;
  }
  if (end != data_bytes) {
    throw DataError(
        concat(file, " has ", data_bytes, " bytes of data, its header describes ", end,
               end > data_bytes ? "; the file is cut off" : "; something follows the last tensor"));
  }
}

}  // namespace

SafetensorsReader::Kept SafetensorsReader::kept(OpenFile file) {
  const auto close = [](const OpenFile* of) {
    delete of;
    --g_kept;
  };
  if (++g_kept <= kMostKept) return {new OpenFile(std::move(file)), close};
  --g_kept;
  return {nullptr, close};
}

SafetensorsReader::SafetensorsReader(std::string path, Links links)
    : path_(std::move(path)), links_(links), kept_(nullptr, nullptr) {
  OpenFile opened(path_, kWhat, links_);
  size_bytes_ = opened.size_bytes();
  changed_ns_ = changed_ns(opened);
  const std::string file = concat(kWhat, " '", path_, "'");
  const auto size = static_cast<std::uint64_t>(size_bytes_);
  if (size < kLengthBytes) {
    throw DataError(
        concat(file, " has ", size, " bytes, too few for a header; is it the right file?"));
  }
  std::byte length_bytes[kLengthBytes];
  opened.read(0, length_bytes);
  const std::uint64_t length = little_endian(length_bytes);
  if (length > kMaxHeaderBytes || length > size - kLengthBytes) {
    throw DataError(concat(file, " claims a header of ", length, " bytes, but has ",
                           size - kLengthBytes, " behind its length (limit ", kMaxHeaderBytes,
                           "); is it a safetensors file?"));
  }
  head_.resize(kLengthBytes + static_cast<std::size_t>(length));
  opened.read(0, std::as_writable_bytes(std::span(head_)));
  SafetensorsHeader header = parse_safetensors_header(head().substr(kLengthBytes), file);
  entries_ = std::move(header.entries);
  metadata_ = std::move(header.metadata);
  // Empty tensors sort before the one that begins where they lie.
  std::stable_sort(entries_.begin(), entries_.end(), [](const auto& a, const auto& b) {
    return std::pair(a.begin_bytes, a.size_bytes) < std::pair(b.begin_bytes, b.size_bytes);
  });
  check_cover(entries_, static_cast<std::int64_t>(size - head_.size()), file);
  for (std::size_t i = 0; i < entries_.size(); ++i) by_name_.emplace(entries_[i].name, i);
  kept_ = kept(std::move(opened));
}

const SafetensorsEntry* SafetensorsReader::find(std::string_view name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : &entries_[found->second];
}

void SafetensorsReader::read(const SafetensorsEntry& entry, std::int64_t offset,
                             std::span<std::byte> into) const {
  const SafetensorsEntry* own = find(entry.name);
  TESSERA_EXPECT(
      own && own->begin_bytes == entry.begin_bytes && own->size_bytes == entry.size_bytes,
      "SafetensorsReader::read: ", shown(entry.name), " is not an entry of '", path(), "'");
  TESSERA_EXPECT(offset >= 0 && offset <= own->size_bytes &&
                     into.size() <= static_cast<std::size_t>(own->size_bytes - offset),
                 "SafetensorsReader::read: ", into.size(), " bytes from ", offset,
                 " on are not in ", shown(entry.name), ", which has ", own->size_bytes);
  const std::int64_t at = static_cast<std::int64_t>(head_.size()) + own->begin_bytes + offset;
  if (kept_) return kept_->read(at, into);
  const OpenFile file(path_, kWhat, links_);
  if (file.size_bytes() != size_bytes_ || changed_ns(file) != changed_ns_)
    throw DataError(
        concat(kWhat, " '", path_, "' was changed while it was in use; leave it alone"));
  file.read(at, into);
}

std::vector<std::byte> SafetensorsReader::bytes(const SafetensorsEntry& entry) const {
  std::vector<std::byte> all(static_cast<std::size_t>(entry.size_bytes));
  read(entry, 0, all);
  return all;
}

SafetensorsWriter::SafetensorsWriter(const std::string& path, std::vector<SafetensorsEntry> entries,
                                     const std::map<std::string, std::string>& metadata)
    : entries_(std::move(entries)) {
  std::set<std::string_view> names;
  std::int64_t offset = 0;
  for (SafetensorsEntry& entry : entries_) {
    TESSERA_EXPECT(names.insert(entry.name).second && entry.name != "__metadata__",
                   "SafetensorsWriter: the name ", shown(entry.name),
                   " is given twice or reserved; give each tensor a name of its own");
    entry.begin_bytes = offset;
    entry.size_bytes = static_cast<std::int64_t>(tessera::size_bytes(entry.dtype));
    for (const std::int64_t extent : entry.shape)
      entry.size_bytes = checked_mul(entry.size_bytes, extent);
    offset = checked_add(offset, entry.size_bytes);
  }
  const std::string header = format_safetensors_header(entries_, metadata);
  check_writable(path);

  file_.emplace(path);
  std::byte length[kLengthBytes];
  for (std::size_t i = 0; i < kLengthBytes; ++i) {
    length[i] = static_cast<std::byte>(static_cast<std::uint64_t>(header.size()) >> (8 * i));
  }
  file_->write(length);
  file_->write(header);
  skip_empty();
}

void SafetensorsWriter::skip_empty() {
  while (current_ < entries_.size() && entries_[current_].size_bytes == 0) ++current_;
}

void SafetensorsWriter::write(std::string_view name, std::span<const std::byte> chunk) {
  TESSERA_EXPECT(!file_->is_committed(), "SafetensorsWriter::write: '", file_->path(),
                 "' is committed already");
  if (chunk.empty()) return;
  TESSERA_EXPECT(
      current_ < entries_.size() && entries_[current_].name == name,
      "SafetensorsWriter::write: got ", shown(name), ", expected ",
      current_ < entries_.size() ? shown(entries_[current_].name) : std::string("no more data"));
  const std::int64_t left = entries_[current_].size_bytes - written_bytes_;
  TESSERA_EXPECT(static_cast<std::int64_t>(chunk.size()) <= left,
                 "SafetensorsWriter::write: ", chunk.size(), " bytes are given for ", shown(name),
                 ", which lacks only ", left);
  file_->write(chunk);
  written_bytes_ += static_cast<std::int64_t>(chunk.size());
  if (written_bytes_ < entries_[current_].size_bytes) return;
  ++current_;
  written_bytes_ = 0;
  skip_empty();
}

void SafetensorsWriter::commit() {
  TESSERA_EXPECT(!file_->is_committed(), "SafetensorsWriter::commit: '", file_->path(),
                 "' is committed already");
  TESSERA_EXPECT(current_ == entries_.size(),
                 "SafetensorsWriter::commit: ", shown(entries_[current_].name), " has ",
                 written_bytes_, " of its ", entries_[current_].size_bytes,
                 " bytes; write the rest first");
  file_->commit();
}

}  // namespace tessera::checkpoint
