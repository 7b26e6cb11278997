#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "runtime/checkpoint/box.hpp"
#include "tessera/base/error.hpp"
#include "tessera/detail/base/json.hpp"
#include "tessera/detail/base/text.hpp"
#include "tessera/detail/base/utf8.hpp"
#include "tessera/device/device.hpp"
#include "tools/checkpoint/all_cores.hpp"
#include "tools/checkpoint/command.hpp"
#include "tools/checkpoint/parts.hpp"
#include "tools/checkpoint/progress.hpp"

namespace tessera::checkpoint_tool {
namespace {

using namespace checkpoint;

struct Side {
  explicit Side(const std::string& given) : path(given) {
    if (!Manifest::is_in(path)) {
      parts.emplace("model", WeightFiles(path));
      return;
    }
    manifest = Manifest::read(path);
    for (const auto& [name, part] : manifest->parts)
      parts.emplace(name, open_part(path, *manifest, name));
  }

  std::string path;
  std::optional<Manifest> manifest{};  // none of weights
  std::map<std::string, WeightFiles, std::less<>> parts{};
};

// A tensor that is not the same on both sides.
struct Difference {
  std::string part, name;
  std::optional<StateSource::Entry> a{}, b{};  // none where it is missing
  std::int64_t unlike = 0;                     // elements; of equal shapes
  double largest = 0;  // of |a - b| where they are unlike; NaN where one of these is
};
// A scalar likewise, as JSON.
struct ScalarDifference {
  std::string part, name, a, b;  // part is empty for those of the save
};

template <class T>
void compare(const std::vector<std::byte>& x, const std::vector<std::byte>& y, Difference& found) {
  for (std::size_t at = 0; at < x.size(); at += sizeof(T)) {
    if (std::memcmp(x.data() + at, y.data() + at, sizeof(T)) == 0) continue;
    ++found.unlike;
    T a, b;
    std::memcpy(&a, x.data() + at, sizeof a);
    std::memcpy(&b, y.data() + at, sizeof b);
    const double distance = std::abs(static_cast<double>(a) - static_cast<double>(b));
    if (std::isnan(distance) || distance > found.largest) found.largest = distance;
  }
}

class Comparison {
 public:
  Comparison(const Side& a, const Side& b) : a_(a), b_(b) {
    const bool both = a.manifest && b.manifest;
    if (both) compare("", a.manifest->scalars, b.manifest->scalars);
    std::set<std::string> parts;
    for (const Side* const side : {&a, &b})
      for (const auto& [name, files] : side->parts)
        if (both || name == "model") parts.insert(name);
    for (const std::string& part : parts) {
      if (both) compare(part, scalars_of(a, part), scalars_of(b, part));
      list(part);
    }
    Progress progress("diff", total_bytes_);
    std::vector<std::optional<Difference>> found(tensors_.size());
    on_all_cores(tensors_.size(), [&] {
      return [&, device = Device::cpu({.executor = ExecutorKind::inlined})](std::size_t i) {
        found[i] = compare(tensors_[i].first, tensors_[i].second, device, progress);
      };
    });
    for (std::optional<Difference>& each : found)
      if (each) differences.push_back(*std::move(each));
  }

  std::vector<Difference> differences;
  std::vector<ScalarDifference> scalars;
  std::int64_t scalar_count = 0;
  std::int64_t tensor_count() const { return std::ssize(tensors_); }

 private:
  static Scalars scalars_of(const Side& side, const std::string& part) {
    const auto found = side.manifest->parts.find(part);
    return found == side.manifest->parts.end() ? Scalars() : found->second.scalars;
  }
  static const WeightFiles* files_of(const Side& side, const std::string& part) {
    const auto found = side.parts.find(part);
    return found == side.parts.end() ? nullptr : &found->second;
  }
  static std::optional<StateSource::Entry> entry_of(const WeightFiles* files,
                                                    const std::string& name) {
    if (!files || !files->has(name)) return {};
    return files->entry(name);
  }

  void compare(const std::string& part, const Scalars& a, const Scalars& b) {
    std::set<std::string> names;
    for (const Scalars* const side : {&a, &b})
      for (const auto& [name, value] : *side) names.insert(name);
    scalar_count += std::ssize(names);
    for (const std::string& name : names) {
      const auto text = [&](const Scalars& of) {
        const auto found = of.find(name);
        return found == of.end() ? "null" : json_of(name, found->second);
      };
      if (text(a) != text(b)) scalars.push_back({part, name, text(a), text(b)});
    }
  }

  // Notes the tensors of a part, in the order of A's files, then what B alone has.
  void list(const std::string& part) {
    const WeightFiles *const a = files_of(a_, part), *const b = files_of(b_, part);
    for (const WeightFiles* const side : {a, b}) {
      if (!side) continue;
      for (const std::string& name : side->names()) {
        if (side == b && a && a->has(name)) continue;
        tensors_.emplace_back(part, name);
        const StateSource::Entry entry = side->entry(name);
        total_bytes_ += numel_of(entry.shape) * static_cast<std::int64_t>(size_bytes(entry.dtype));
      }
    }
  }

  // None of equal bits.
  std::optional<Difference> compare(const std::string& part, const std::string& name,
                                    const Device& device, Progress& progress) const {
    const WeightFiles *const a = files_of(a_, part), *const b = files_of(b_, part);
    Difference found{part, name, entry_of(a, name), entry_of(b, name)};
    if (!found.a || !found.b || found.a->shape != found.b->shape) return found;
    const bool same = found.a->dtype == found.b->dtype;
    const DType dtype = same ? found.a->dtype : f64;
    RowReader x(*a, name, dtype), y(*b, name, dtype);
    while (!x.is_done()) {
      const auto left = x.next(device), right = y.next(device);
      if (left != right)
        visit(dtype, [&](auto type) {
          checkpoint_tool::compare<typename decltype(type)::type>(left, right, found);
        });
      progress.add(std::ssize(left) / static_cast<std::int64_t>(size_bytes(dtype)) *
                   static_cast<std::int64_t>(size_bytes(found.a->dtype)));
    }
    if (same && found.unlike == 0) return {};
    return found;
  }

  const Side &a_, &b_;
  std::vector<std::pair<std::string, std::string>> tensors_;  // part and name
  std::int64_t total_bytes_ = 0;
};

std::string text_of(const std::optional<StateSource::Entry>& entry) {
  return entry ? concat(dtype_text(*entry), ' ', shape_text(*entry)) : "missing";
}
std::string json_of(const std::optional<StateSource::Entry>& entry) {
  if (!entry) return "null";
  return concat("{\"dtype\": ", json::quote(dtype_text(*entry)),
                ", \"shape\": ", shape_text(*entry), '}');
}
std::string label(const std::string& part, const std::string& name) {
  return concat(printable(part), part.empty() ? "" : ": ", printable(name));
}

std::string line_of(const Difference& of) {
  std::string line = label(of.part, of.name) + "  ";
  const std::string a = text_of(of.a), b = text_of(of.b);
  line += a == b ? a : concat(a, " -> ", b);
  if (of.a && of.b && of.a->shape == of.b->shape)
    line += concat("  ", with_commas(std::to_string(of.unlike)), " of ",
                   counted(numel_of(of.a->shape), "element"), " unlike, largest difference ",
                   std::isnan(of.largest)   ? "nan"
                   : std::isinf(of.largest) ? "inf"
                                            : json::number(of.largest));
  return line + '\n';
}

std::string json_of(const Comparison& found) {
  std::string out = concat("\"tensors\": ", found.tensor_count(),
                           ", \"scalars\": ", found.scalar_count, ", \"unlike_tensors\": [");
  const char* comma = "";
  for (const Difference& of : found.differences) {
    out += concat(comma, "{\"part\": ", json::quote(of.part), ", \"name\": ", json::quote(of.name),
                  ", \"a\": ", json_of(of.a), ", \"b\": ", json_of(of.b));
    if (of.a && of.b && of.a->shape == of.b->shape)
      out += concat(", \"unlike\": ", of.unlike, ", \"largest\": ", json::number(of.largest));
    out += '}';
    comma = ", ";
  }
  out += "], \"unlike_scalars\": [";
  comma = "";
  for (const ScalarDifference& of : found.scalars) {
    out += concat(comma, "{\"part\": ", json::quote(of.part), ", \"name\": ", json::quote(of.name),
                  ", \"a\": ", of.a, ", \"b\": ", of.b, '}');
    comma = ", ";
  }
  return out + ']';
}

}  // namespace

Answer diff(const Command& command) {
  const Side a(command.paths[0]), b(command.paths[1]);
  const Comparison found(a, b);
  const bool is_equal = found.differences.empty() && found.scalars.empty();
  const int exit_code = is_equal ? 0 : 1;
  if (command.json)
    return {concat("{\"a\": ", json::quote(a.path), ", \"b\": ", json::quote(b.path),
                   ", \"equal\": ", is_equal ? "true" : "false", ", ", json_of(found), "}\n"),
            exit_code};
  std::string text;
  for (const ScalarDifference& of : found.scalars)
    text += concat(label(of.part, of.name), " = ", printable(of.a), " -> ", printable(of.b), '\n');
  for (const Difference& of : found.differences) text += line_of(of);
  text += concat(std::ssize(found.differences), " of ", counted(found.tensor_count(), "tensor"),
                 " and ", std::ssize(found.scalars), " of ", counted(found.scalar_count, "scalar"),
                 is_equal ? " differ: equal bits\n" : " differ\n");
  return {text, exit_code};
}

}  // namespace tessera::checkpoint_tool
