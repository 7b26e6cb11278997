// The files of a model as one source of its state.
#include <algorithm>
#include <filesystem>
#include <memory>
#include <set>
#include <utility>

#include "runtime/checkpoint/box.hpp"
#include "runtime/checkpoint/held_box.hpp"
#include "runtime/checkpoint/manifest.hpp"
#include "runtime/checkpoint/safetensors_header.hpp"
#include "runtime/checkpoint/shard_info.hpp"
#include "tessera/base/error.hpp"
#include "tessera/checkpoint/checkpoint.hpp"
#include "tessera/checkpoint/model.hpp"
#include "tessera/detail/base/utf8.hpp"

namespace tessera::checkpoint {
namespace {

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

// The files of PyTorch's sharded form in a folder, by name; none where it has none.
std::vector<WeightFile> shards_in(const std::string& path) {
  std::vector<WeightFile> files;
  std::error_code ignored;
  for (std::filesystem::directory_iterator at(path, ignored), end; at != end; at.increment(ignored))
    if (at->path().extension() == ".safetensors") files.push_back({.path = at->path().string()});
  std::ranges::sort(files, {}, &WeightFile::path);
  return files;
}

// Whoever names the folder of a run's checkpoints has to say which.
void expect_no_steps(const std::string& path) {
  std::error_code ignored;
  if (!std::filesystem::is_directory(path, ignored)) return;
  if (const auto steps = steps_in(path); !steps.empty())
    throw DataError(concat('\'', path, "' is a folder of checkpoints; name one in it, as '",
                           step_folder(path, steps.back()), '\''));
}

std::vector<WeightFile> unchecked(const std::vector<std::string>& paths) {
  std::vector<WeightFile> files;
  for (const std::string& path : paths) files.push_back({.path = path});
  return files;
}

}  // namespace

// A tensor of the files, in boxes.
struct WeightFiles::State {
  struct Held {
    Sizes shape;  // of all boxes together
    DType dtype;
    std::string foreign;
    std::vector<HeldBox> boxes;
  };
  void add(const SafetensorsReader& file, const SafetensorsEntry& entry, const ShardInfo& info);
  void check_cover() const;
  const Held& at(std::string_view name) const {
    const auto found = tensors.find(name);
    if (found == tensors.end())
      throw DataError(concat("there is no tensor ", shown(name),
                             files.empty() ? "" : concat(" in '", files[0]->path(), '\'')));
    return found->second;
  }

  std::vector<std::unique_ptr<SafetensorsReader>> files;
  std::vector<std::string> names;  // in the order in which the files have them
  std::map<std::string, Held, std::less<>> tensors;
};

void WeightFiles::State::add(const SafetensorsReader& file, const SafetensorsEntry& entry,
                             const ShardInfo& info) {
  const auto refuse = [&](const auto&... parts) {
    throw DataError(concat("tensor ", shown(entry.name), " in '", file.path(), "' ", parts...));
  };
  HeldBox box{.box = {Sizes(entry.shape.size(), 0), entry.shape}, .file = &file, .entry = &entry};
  Sizes shape = entry.shape;
  const auto own = info.boxes.find(entry.name);
  if (!info.boxes.empty()) {
    if (own == info.boxes.end()) refuse("has no offsets in the file's DCP_SHARDING_INFO");
    const BoxInfo& said = own->second;
    if (said.begin.size() != shape.size() || (said.has_shape && said.shape.size() != shape.size()))
      refuse("has the shape ", text_of(entry.shape),
             ", but its box has another number of dimensions");
    box.box.begin = said.begin;
    for (std::size_t d = 0; d < shape.size(); ++d) {
      if (said.begin[d] > INT64_MAX - entry.shape[d]) refuse("begins beyond 64 bits");
      shape[d] = said.has_shape ? said.shape[d] : box.box.end(d);
    }
    box.checksums = said.checksums;
  }
  const auto [at, is_new] = tensors.try_emplace(entry.name);
  Held& held = at->second;
  if (is_new) {
    names.push_back(entry.name);
    held = {shape, entry.dtype, entry.foreign, {}};
  } else {
    const SafetensorsReader& other = *held.boxes[0].file;
    if (info.boxes.empty())
      throw DataError(concat("tensor ", shown(entry.name), " is in both '", other.path(), "' and '",
                             file.path(), "'; give the files of one model"));
    if (held.dtype != entry.dtype || held.foreign != entry.foreign ||
        held.shape.size() != shape.size())
      refuse("is of another dtype or number of dimensions than in '", other.path(), '\'');
    if (own->second.has_shape && held.shape != shape)
      refuse("is part of a tensor ", text_of(shape), ", in '", other.path(), "' of a tensor ",
             text_of(held.shape));
    for (std::size_t d = 0; d < shape.size(); ++d)
      held.shape[d] = std::max(held.shape[d], shape[d]);
  }
  held.boxes.push_back(std::move(box));
}

void WeightFiles::State::check_cover() const {
  for (const auto& [name, held] : tensors) {
    const Box whole{Sizes(held.shape.size(), 0), held.shape};
    if (held.boxes.size() == 1 && held.boxes[0].box == whole) continue;
    std::vector<Box> boxes;
    for (const HeldBox& box : held.boxes) boxes.push_back(box.box);
    const std::string fault = fault_of_cover(held.shape, std::move(boxes));
    if (!fault.empty())
      throw DataError(concat("tensor ", shown(name), ' ', text_of(held.shape), " of '",
                             held.boxes[0].file->path(), "' and the files beside it ", fault));
  }
}

WeightFiles::WeightFiles(WeightFiles&&) noexcept = default;
WeightFiles& WeightFiles::operator=(WeightFiles&&) noexcept = default;
WeightFiles::~WeightFiles() = default;

WeightFiles::WeightFiles(const std::string& path) : what_(concat('\'', file_of(path), '\'')) {
  const std::string file = file_of(path);
  if (Manifest::is_in(file)) {
    const Manifest manifest = Manifest::read(file);
    open(manifest.files(file, "model"), manifest.id);
  } else if (file.ends_with(".json")) {
    open_index(file);
  } else {
    const std::vector<WeightFile> shards = shards_in(file);
    if (shards.empty()) expect_no_steps(file);
    open(shards.empty() ? unchecked({file}) : shards);
  }
}

WeightFiles::WeightFiles(const std::vector<std::string>& paths) {
  TESSERA_EXPECT(!paths.empty(), "load: no file is given; name one");
  what_ = concat('\'', paths[0], '\'');
  if (paths.size() > 1) what_ += concat(" and ", paths.size() - 1, " more files");
  open(unchecked(paths));
}

WeightFiles::WeightFiles(const std::string& what, const std::vector<WeightFile>& files,
                         std::string_view id)
    : what_(what) {
  open(files, id);
}

void WeightFiles::open(const std::vector<WeightFile>& files, std::string_view id) {
  state_ = std::make_unique<State>();
  for (const WeightFile& of : files) {
    const auto& file =
        *state_->files.emplace_back(std::make_unique<SafetensorsReader>(of.path, of.links));
    const ShardInfo info = shard_info_of(file, of, id);
    for (const SafetensorsEntry& entry : file.entries()) state_->add(file, entry, info);
  }
  state_->check_cover();
}

void WeightFiles::open_index(const std::string& path) {
  index_ = path;
  constexpr std::int64_t kMostBytes = 100'000'000;  // as of a file's header
  const OpenFile text(path, "index");
  if (text.size_bytes() > kMostBytes)
    throw DataError(concat("index '", path, "' has ", text.size_bytes(), " bytes, the most is ",
                           kMostBytes, "; is it the index of a model?"));
  std::string bytes(static_cast<std::size_t>(text.size_bytes()), '\0');
  text.read(0, std::as_writable_bytes(std::span(bytes)));
  const auto holders = parse_safetensors_index(bytes, concat("index '", path, "'"));
  std::set<std::string> files;
  for (const auto& [name, file] : holders) {
    if (file.empty() || file == ".." || file.find_first_of(std::string_view("/\0", 2)) != file.npos)
      throw DataError(concat("index '", path, "' says that ", shown(name), " lies in ", shown(file),
                             "; expected the name of a file beside it"));
    files.insert(file);
  }
  std::vector<std::string> paths;
  for (const std::string& file : files)
    paths.push_back((std::filesystem::path(folder_of(path)) / file).string());
  open(unchecked(paths));
  for (const auto& [name, file] : holders) {
    const auto held = state_->tensors.find(name);
    if (held == state_->tensors.end() ||
        std::filesystem::path(held->second.boxes[0].file->path()).filename() != file)
      throw DataError(concat("index '", path, "' says that ", shown(name), " lies in ", shown(file),
                             ", which does not have it; fetch the files again"));
  }
}

std::vector<std::string> WeightFiles::paths() const {
  std::vector<std::string> paths;
  for (const auto& file : state_->files) paths.push_back(file->path());
  return paths;
}

std::vector<std::string> WeightFiles::names() const { return state_->names; }

bool WeightFiles::has(std::string_view name) const {
  return state_->tensors.find(name) != state_->tensors.end();
}

nn::StateSource::Entry WeightFiles::entry(std::string_view name) const {
  const State::Held& held = state_->at(name);
  return {held.shape, held.dtype, held.foreign};
}

bool WeightFiles::is_same(std::string_view a, std::string_view b) const {
  const State::Held &x = state_->at(a), &y = state_->at(b);
  if (x.dtype != y.dtype || x.foreign != y.foreign || x.shape != y.shape ||
      x.boxes.size() != y.boxes.size())
    return false;
  std::vector<std::byte> left(kPieceBytes), right(kPieceBytes);
  for (std::size_t i = 0; i < x.boxes.size(); ++i) {
    if (x.boxes[i].box != y.boxes[i].box) return false;
    for (std::int64_t at = 0; at < pieces_of(x.boxes[i].entry->size_bytes); ++at)
      if (!std::ranges::equal(x.boxes[i].read(at, left), y.boxes[i].read(at, right))) return false;
  }
  return true;
}

std::string WeightFiles::fault(std::string_view, const ShardSpec&) const { return ""; }

void WeightFiles::read(const Tensor& to, std::span<const std::string> names, const ShardSpec& spec,
                       bool transposed) const {
  const auto ndim = static_cast<std::size_t>(spec.shape.ndim());
  if (to.numel() == 0) return;
  BoxReader reader(to);
  RowRange part;  // of the rows of dimension 0, those that the name at hand has
  for (const std::string& name : names) {
    const State::Held& held = state_->at(name);
    // Dimension d of the parameter in the file.
    const auto in_file = [&](std::size_t d) { return transposed && d < 2 ? 1 - d : d; };
    part = {part.end, part.end + (ndim == 0 ? 1 : held.shape[in_file(0)])};
    Box wanted{Sizes(ndim, 0), held.shape};
    Sizes to_strides(ndim);
    std::int64_t first = 0;  // element of `to`
    for (std::size_t d = 0; d < ndim; ++d) {
      const int dim = static_cast<int>(d);
      to_strides[in_file(d)] = to.strides()[dim];
      RowRange range{0, spec.shape[dim]};
      if (dim == spec.dim) range = spec.owned();
      if (d == 0) {
        const RowRange here = within(part, range);
        first += to.strides()[0] * std::max<std::int64_t>(part.begin - range.begin, 0);
        range = here;
      }
      wanted.begin[in_file(d)] = range.begin;
      wanted.sizes[in_file(d)] = range.size();
    }
    for (const HeldBox& box : held.boxes) {
      const Box region = common(wanted, box.box);
      if (std::ranges::find(region.sizes, 0) != region.sizes.end()) continue;
      std::int64_t at = first;
      for (std::size_t d = 0; d < ndim; ++d)
        at += (region.begin[d] - wanted.begin[d]) * to_strides[d];
      reader.read(box, region, at, to_strides);
    }
  }
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
