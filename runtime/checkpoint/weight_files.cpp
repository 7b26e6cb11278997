// The files of a model as one source of its state.
#include <algorithm>
#include <cstring>
#include <filesystem>
#include <memory>
#include <set>

#include "runtime/checkpoint/safetensors_header.hpp"
#include "tessera/base/error.hpp"
#include "tessera/checkpoint/model.hpp"

namespace tessera::checkpoint {
namespace {

// Rows [begin, end) of a matrix or of any other tensor, whose rows have `row` elements.
struct Rows {
  std::int64_t begin, end, row;
  std::int64_t of;  // rows in all: the distance of a transposed matrix's elements
  bool is_transposed;
  std::int64_t numel() const { return (end - begin) * row; }
  // Where element i lies in the file, in elements.
  std::int64_t at(std::int64_t i) const {
    return is_transposed ? i % row * of + begin + i / row : begin * row + i;
  }
};

template <class To, class From>
To converted(From value) {
  if constexpr (std::is_same_v<To, From>)
    return value;
  else if constexpr (std::is_class_v<From> || std::is_class_v<To>)  // floats of 16 or 8 bits
    return To(static_cast<float>(value));
  else
    return static_cast<To>(value);
}

// Adds their elements to `out`, as bytes of another type; neither side is aligned to anything.
template <class To, class From>
void read(std::vector<std::byte>& out, std::span<const std::byte> bytes, const Rows& rows) {
  const std::size_t begin = out.size();
  out.resize(begin + static_cast<std::size_t>(rows.numel()) * sizeof(To));
  for (std::int64_t i = 0; i < rows.numel(); ++i) {
    From value;
    std::memcpy(&value, bytes.data() + static_cast<std::size_t>(rows.at(i)) * sizeof value,
                sizeof value);
    const To own = converted<To>(value);
    std::memcpy(out.data() + begin + static_cast<std::size_t>(i) * sizeof own, &own, sizeof own);
  }
}

std::string folder_of(const std::string& path) {
  return std::filesystem::path(path).parent_path().string();
}

// The file or index that a folder of Hugging Face's has, else the path itself.
std::string file_of(const std::string& path) {
  std::error_code ignored;
  if (!std::filesystem::is_directory(path, ignored)) return path;
  for (const char* const name : {"model.safetensors.index.json", "model.safetensors"}) {
    const std::filesystem::path file = std::filesystem::path(path) / name;
    if (std::filesystem::exists(file, ignored)) return file.string();
  }
  return path;
}

}  // namespace

WeightFiles::WeightFiles(const std::string& path) : what_(concat('\'', file_of(path), '\'')) {
  const std::string file = file_of(path);
  file.ends_with(".json") ? open_index(file) : open(file);
}

WeightFiles::WeightFiles(const std::vector<std::string>& paths) {
  TESSERA_EXPECT(!paths.empty(), "load: no file is given; name one");
  what_ = concat('\'', paths[0], '\'');
  if (paths.size() > 1) what_ += concat(" and ", paths.size() - 1, " more files");
  for (const std::string& path : paths) open(path);
}

void WeightFiles::open(const std::string& path) {
  const SafetensorsReader& file = files_.emplace_back(path);
  for (const SafetensorsEntry& entry : file.entries()) {
    const auto [at, is_new] =
        locations_.try_emplace(entry.name, Location{files_.size() - 1, &entry});
    if (!is_new)
      throw DataError(concat("tensor ", shown(entry.name), " stands in '",
                             files_[at->second.file].path(), "' and in '", path,
                             "'; give the files of one model"));
  }
}

void WeightFiles::open_index(const std::string& path) {
  const MappedFile text(path, "index");
  const auto bytes = text.bytes();
  const auto holders = parse_safetensors_index(
      {reinterpret_cast<const char*>(bytes.data()), bytes.size()}, concat("index '", path, "'"));
  std::set<std::string> files;
  for (const auto& [name, file] : holders) {
    if (file.empty() || file == ".." || file.find_first_of(std::string_view("/\0", 2)) != file.npos)
      throw DataError(concat("index '", path, "' says that ", shown(name), " lies in ", shown(file),
                             "; expected the name of a file beside it"));
    files.insert(file);
  }
  for (const std::string& file : files)
    open((std::filesystem::path(folder_of(path)) / file).string());
  for (const auto& [name, file] : holders) {
    const auto location = locations_.find(name);
    if (location == locations_.end() ||
        std::filesystem::path(files_[location->second.file].path()).filename() != file)
      throw DataError(concat("index '", path, "' says that ", shown(name), " lies in ", shown(file),
                             ", which does not have it; fetch the files again"));
  }
}

std::vector<std::string> WeightFiles::paths() const {
  std::vector<std::string> paths;
  for (const SafetensorsReader& file : files_) paths.push_back(file.path());
  return paths;
}

std::vector<std::string> WeightFiles::names() const {
  std::vector<std::string> names;
  for (const SafetensorsReader& file : files_)
    for (const SafetensorsEntry& entry : file.entries()) names.push_back(entry.name);
  return names;
}

std::span<const std::byte> WeightFiles::bytes(std::string_view name) const {
  const Location& location = locations_.find(name)->second;
  return files_[location.file].bytes(*location.entry);
}

nn::StateSource::Entry WeightFiles::entry(std::string_view name) const {
  const SafetensorsEntry& entry = *locations_.find(name)->second.entry;
  return {entry.shape, entry.dtype, entry.foreign};
}

bool WeightFiles::is_same(std::string_view a, std::string_view b) const {
  const Entry x = entry(a), y = entry(b);
  return x.dtype == y.dtype && x.foreign == y.foreign && x.shape == y.shape &&
         std::ranges::equal(bytes(a), bytes(b));
}

std::string WeightFiles::fault(std::string_view, const ShardSpec&) const { return ""; }

Tensor WeightFiles::rows(std::span<const std::string> names, const ShardSpec& spec, bool transposed,
                         DType dtype, const Device& device) const {
  if (spec.dim > 0) return rows_of(rows(names, {spec.shape}, transposed, dtype, device), spec);
  const RowRange own = spec.shape.ndim() == 0 ? RowRange{0, 1} : spec.owned();  // whole everywhere
  std::vector<std::byte> values;
  RowRange part;
  for (const std::string& name : names) {
    const Entry held = entry(name);
    part = {part.end, part.end + (held.shape.empty() ? 1 : held.shape[transposed ? 1 : 0])};
    const RowRange here = within(part, own);
    const Rows rows{here.begin, here.end, spec.row_numel(), part.size(), transposed};
    visit(dtype, [&](auto to) {
      visit(held.dtype, [&](auto from) {
        read<typename decltype(to)::type, typename decltype(from)::type>(values, bytes(name), rows);
      });
    });
  }
  return Tensor::from_bytes(values, spec.local_shape(), dtype, device);
}

void WeightFiles::refuse(const std::string& message) const { throw DataError(message); }

nn::LoadReport load_weights(const std::string& path, nn::Module& model,
                            const nn::LoadOptions& options) {
  return nn::load(model, [&] { return std::make_shared<WeightFiles>(path); }, options);
}

}  // namespace tessera::checkpoint

namespace tessera::nn {

LoadReport Module::load(const std::string& path, const LoadOptions& options) {
  return checkpoint::load_weights(path, *this, options);
}
LoadReport Module::load(const std::vector<std::string>& paths, const LoadOptions& options) {
  return nn::load(*this, [&] { return std::make_shared<checkpoint::WeightFiles>(paths); }, options);
}

}  // namespace tessera::nn
