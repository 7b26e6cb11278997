#include "tessera/checkpoint/checkpoint.hpp"

#include <algorithm>
#include <filesystem>
#include <map>
#include <ranges>
#include <span>

#include "runtime/checkpoint/manifest.hpp"
#include "runtime/checkpoint/new_folder.hpp"
#include "runtime/checkpoint/together.hpp"
#include "tessera/base/error.hpp"
#include "tessera/checkpoint/model.hpp"
#include "tessera/detail/base/utf8.hpp"
#include "tessera/tensor/ops.hpp"

namespace tessera::checkpoint {
namespace {

constexpr std::string_view kStep = "step-";

// A part as a load sees it: tensors of files, whose names may have a prefix, and values as scalars.
class PartSource final : public StateSource {
 public:
  PartSource(WeightFiles files, std::string prefix, Scalars scalars)
      : files_(std::move(files)), prefix_(std::move(prefix)), scalars_(std::move(scalars)) {}

  const std::string& what() const noexcept override { return files_.what(); }
  std::vector<std::string> names() const override {
    std::vector<std::string> names;
    for (const auto& [name, value] : scalars_) names.push_back(name);
    // PyTorch counts steps beside each parameter; here they are one of the values.
    for (const std::string& name : files_.names())
      if (prefix_.empty() || !name.ends_with(".step"))
        names.push_back(name.starts_with(prefix_) ? name.substr(prefix_.size()) : name);
    return names;
  }
  bool has(std::string_view name) const override {
    return value(name) || files_.has(in_file(name));
  }
  Entry entry(std::string_view name) const override {
    const Scalar* const own = value(name);
    if (!own) return files_.entry(in_file(name));
    return {{}, std::holds_alternative<std::int64_t>(*own) ? i64 : f64, ""};
  }
  bool is_file() const noexcept override { return true; }
  bool is_same(std::string_view a, std::string_view b) const override {
    const Scalar *const x = value(a), *const y = value(b);
    return x || y ? x && y && *x == *y : files_.is_same(in_file(a), in_file(b));
  }
  std::string fault(std::string_view name, const ShardSpec& spec) const override {
    const Scalar* const own = value(name);
    if (own && (std::holds_alternative<std::string>(*own) || std::holds_alternative<bool>(*own)))
      return "no number";
    return own ? "" : files_.fault(in_file(name), spec);
  }
  void read(const Tensor& to, std::span<const std::string> names, const ShardSpec& spec,
            bool transposed) const override {
    if (const Scalar* const own = value(names[0])) {
      const auto* const integer = std::get_if<std::int64_t>(own);
      return raw::copy_into(
          to, integer ? Tensor::from(std::vector{*integer}, {}, to.device())
                      : Tensor::from(std::vector{std::get<double>(*own)}, {}, to.device()));
    }
    std::vector<std::string> all;
    for (const std::string& name : names) all.push_back(in_file(name));
    files_.read(to, all, spec, transposed);
  }
  [[noreturn]] void refuse(const std::string& message) const override { files_.refuse(message); }

 private:
  const Scalar* value(std::string_view name) const {
    const auto found = scalars_.find(name);
    return found == scalars_.end() ? nullptr : &found->second;
  }
  std::string in_file(std::string_view name) const { return concat(prefix_, name); }

  WeightFiles files_;
  std::string prefix_;
  Scalars scalars_;
};

// What an optimizer has counted is a scalar here, and beside each parameter a number for PyTorch.
void check_steps(const std::string& path, const Scalars& scalars,
                 const std::vector<WeightFile>& files) {
  constexpr const char* kSteps = "steps";
  const auto found = scalars.find(kSteps);
  if (found == scalars.end()) return;
  const auto* const steps = std::get_if<std::int64_t>(&found->second);
  if (!steps) return;  // whoever loads it says so
  const auto refuse = [&](const auto&... parts) {
    throw DataError(concat("checkpoint '", path, "' says of its optimizer that it has made ",
                           *steps, " steps, ", parts..., "; take another checkpoint"));
  };
  constexpr std::int64_t kMost = 1ll << 53;
  if (*steps < 0 || *steps > kMost) refuse("expected 0 to ", kMost);
  if (files.empty()) return;
  const SafetensorsReader file(files[0].path, files[0].links);  // rank 0's, which has them all
  const auto entry = std::ranges::find_if(file.entries(), [](const SafetensorsEntry& of) {
    return of.name.ends_with(".step") && of.shape.empty() && of.dtype == f32;
  });
  if (entry == file.entries().end()) return;
  float beside = 0;
  file.read(*entry, 0, std::as_writable_bytes(std::span(&beside, 1)));
  if (beside != static_cast<float>(*steps))
    refuse("and tensor ", shown(entry->name), " in '", file.path(), "' says ", beside);
}

// The entries step-N of a folder, rising, each with why it is no checkpoint; empty for one.
std::map<std::int64_t, std::string> entries_of(const std::string& folder) {
  std::map<std::int64_t, std::string> entries;
  std::error_code error;
  for (std::filesystem::directory_iterator at(folder, error), end; !error && at != end;
       at.increment(error))
    if (const auto step = step_of(at->path().filename().string()))
      entries.emplace(*step, Manifest::why_not_in(at->path().string()));
  if (error == std::errc::not_a_directory)
    throw DataError(concat('\'', folder, "' is no folder; name a folder of checkpoints"));
  if (error == std::errc::permission_denied)
    throw DataError(concat('\'', folder, "' cannot be read: ", error.message()));
  if (error && error != std::errc::no_such_file_or_directory)
    throw DeviceError(concat('\'', folder, "' cannot be read: ", error.message()));
  return entries;
}

// What may be done about a path that is no checkpoint, and `why_not`.
std::string remedy(const std::string& path, std::string_view why_not) {
  if (why_not == "does not exist") return "check the path";
  try {
    if (const auto steps = steps_in(path); !steps.empty())
      return concat("name a checkpoint in it, as '", step_folder(path, steps.back()), '\'');
  } catch (const Error&) {
    return "is it a checkpoint's folder?";
  }
  return "is it a checkpoint's folder?";
}

}  // namespace

std::string step_folder(const std::string& folder, std::int64_t step) {
  return (std::filesystem::path(folder) / concat(kStep, step)).string();
}

std::vector<std::int64_t> steps_in(const std::string& folder) {
  std::vector<std::int64_t> steps;
  for (const auto& [step, why_not] : entries_of(folder))
    if (why_not.empty()) steps.push_back(step);
  return steps;
}

std::optional<std::int64_t> newest(const std::string& folder, const World& world, Broken broken) {
  std::optional<std::int64_t> found;
  on_all(world, [&] {
    if (world.rank() != 0) return;
    for (const auto& [step, why_not] : entries_of(folder) | std::views::reverse) {
      if (why_not.empty()) {
        found = step;
        return;
      }
      if (broken == Broken::refused)
        throw DataError(concat("'", step_folder(folder, step),
                               "' is newer than all checkpoints and ", why_not,
                               "; move it away, or load another step by its number and "
                               "save nothing here"));
    }
  });
  constexpr std::int64_t kHalf = 1ll << 32;  // a double does not hold all of 64 bits
  double said[] = {found ? 1. : 0., static_cast<double>(found.value_or(0) / kHalf),
                   static_cast<double>(found.value_or(0) % kHalf)};
  world.sum(said);
  if (said[0] == 0) return {};
  return static_cast<std::int64_t>(said[1]) * kHalf + static_cast<std::int64_t>(said[2]);
}

void keep_newest(const std::string& folder, std::int64_t count,
                 std::optional<std::int64_t> loaded) {
  TESSERA_EXPECT(count > 0, "keep_newest: ", count, " checkpoints are to stay; give at least 1");
  const std::vector<std::int64_t> steps = steps_in(folder);
  for (std::size_t i = 0; i + static_cast<std::size_t>(count) < steps.size(); ++i) {
    if (steps[i] == loaded) continue;
    try {
      const Manifest manifest = Manifest::read(step_folder(folder, steps[i]));
      NewFolder::remove(folder, concat(kStep, steps[i]), manifest.id);
    } catch (const DataError&) {
      continue;  // not one of ours: it stays
    }
  }
}

struct Checkpoint::State {
  Manifest manifest;
};

Checkpoint::Checkpoint(const std::string& path) : path_(path) {
  if (const std::string why_not = Manifest::why_not_in(path); !why_not.empty())
    throw DataError(concat("checkpoint '", path, "' ", why_not, "; ", remedy(path, why_not)));
  state_ = std::make_unique<State>(Manifest::read(path));
}
Checkpoint::Checkpoint(const std::string& folder, std::int64_t step)
    : Checkpoint(step_folder(folder, step)) {
  if (const std::string fault = state_->manifest.fault_of_name(path_); !fault.empty())
    throw DataError(fault);
}
Checkpoint::~Checkpoint() = default;
Checkpoint::Checkpoint(Checkpoint&&) noexcept = default;
Checkpoint& Checkpoint::operator=(Checkpoint&&) noexcept = default;

const std::string& Checkpoint::id() const noexcept { return state_->manifest.id; }
std::int64_t Checkpoint::step() const noexcept { return state_->manifest.step; }
int Checkpoint::ranks() const noexcept { return static_cast<int>(state_->manifest.ranks); }
std::vector<std::string> Checkpoint::parts() const {
  std::vector<std::string> names;
  for (const auto& [name, part] : state_->manifest.parts) names.push_back(name);
  return names;
}
const Scalars& Checkpoint::scalars() const noexcept { return state_->manifest.scalars; }
const Scalars& Checkpoint::scalars(std::string_view part) const {
  return state_->manifest.part(path_, part).scalars;
}

namespace {

template <class T>
const T& scalar_of(const Checkpoint& of, std::string_view name, const char* kind) {
  const auto found = of.scalars().find(name);
  if (found == of.scalars().end())
    throw DataError(concat("checkpoint '", of.path(), "' has no scalar ", shown(name)));
  const T* const value = std::get_if<T>(&found->second);
  if (!value)
    throw DataError(concat("checkpoint '", of.path(), "': scalar ", shown(name), " is no ", kind));
  return *value;
}

}  // namespace

std::int64_t Checkpoint::integer(std::string_view name) const {
  return scalar_of<std::int64_t>(*this, name, "integer");
}
double Checkpoint::number(std::string_view name) const {
  const auto found = scalars().find(name);
  if (found != scalars().end())
    if (const auto* const integer = std::get_if<std::int64_t>(&found->second))
      return static_cast<double>(*integer);
  return scalar_of<double>(*this, name, "number");
}
const std::string& Checkpoint::text(std::string_view name) const {
  return scalar_of<std::string>(*this, name, "text");
}

std::shared_ptr<const StateSource> Checkpoint::part(std::string_view name) const {
  const Manifest::Part& part = state_->manifest.part(path_, name);
  // PyTorch's reader takes every such file of the folder, so one that was put there counts.
  std::error_code ignored;
  for (std::filesystem::directory_iterator at(std::filesystem::path(path_) / name, ignored), end;
       at != end; at.increment(ignored)) {
    const std::string file = at->path().filename().string();
    if (file.ends_with(".safetensors") &&
        std::ranges::find(part.files, file, &Manifest::File::name) == part.files.end())
      throw DataError(concat("checkpoint '", path_, "' has file ", shown(file), " in part ",
                             shown(name), ", which its manifest does not name; remove the file"));
  }
  const std::vector<WeightFile> files = state_->manifest.files(path_, name);
  auto source = std::make_shared<PartSource>(
      WeightFiles(concat("part ", shown(name), " of '", path_, '\''), files, state_->manifest.id),
      part.prefix, part.scalars);
  if (!part.prefix.empty()) check_steps(path_, part.scalars, files);
  return source;
}

}  // namespace tessera::checkpoint
