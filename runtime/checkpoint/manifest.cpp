#include "runtime/checkpoint/manifest.hpp"

#include <sys/stat.h>

#include <cerrno>
#include <charconv>
#include <climits>
#include <cmath>
#include <cstring>
#include <filesystem>

#include "runtime/checkpoint/json_tree.hpp"
#include "runtime/checkpoint/safetensors_header.hpp"
#include "runtime/checkpoint/shard_info.hpp"
#include "tessera/base/error.hpp"
#include "tessera/detail/base/json.hpp"
#include "tessera/detail/base/utf8.hpp"

namespace tessera::checkpoint {
namespace {

constexpr std::int64_t kMostBytes = 64 << 20;
// Its own checksum stands last: of all that comes before this.
constexpr std::string_view kChecksum = "\n\"checksum\": \"", kEnd = "\"}\n";

Scalars scalars_of(const JsonTree& tree, const std::string& what) {
  Scalars scalars;
  for (const auto& [name, member] : tree.members(what)) {
    if (const auto* const flag = std::get_if<bool>(&member.value))
      scalars.emplace(name, *flag);
    else if (const auto* const integer = std::get_if<std::int64_t>(&member.value))
      scalars.emplace(name, *integer);
    else if (const auto* const number = std::get_if<double>(&member.value))
      scalars.emplace(name, *number);
    else if (const auto* const text = std::get_if<std::string>(&member.value))
      scalars.emplace(name, *text);
    else
      throw DataError(
          concat(what, " has a scalar ", shown(name), " that is neither a number nor a text"));
  }
  return scalars;
}

}  // namespace

std::string json_of(const std::string& name, const Scalar& value) {
  if (const auto* const text = std::get_if<std::string>(&value)) {
    TESSERA_EXPECT(is_utf8(*text), "checkpoint: scalar ", shown(name), " is ", shown(*text),
                   ", which is not UTF-8; give a text");
    return json::quote(*text);
  }
  if (const auto* const flag = std::get_if<bool>(&value)) return *flag ? "true" : "false";
  if (const auto* const integer = std::get_if<std::int64_t>(&value)) return concat(*integer);
  const double number = std::get<double>(value);
  TESSERA_EXPECT(std::isfinite(number), "checkpoint: scalar ", shown(name), " is ", number,
                 "; give a finite number");
  const std::string text = json::number(number);
  return text.find_first_of(".e") == text.npos ? text + ".0" : text;
}

std::string json_of(const Scalars& scalars) {
  std::string out = "{";
  for (const auto& [name, value] : scalars) {
    TESSERA_EXPECT(is_utf8(name), "checkpoint: the name of scalar ", shown(name),
                   " is not UTF-8; give another name");
    out += concat(out.size() > 1 ? ", " : "", json::quote(name), ": ", json_of(name, value));
  }
  return out + '}';
}

std::optional<std::int64_t> step_of(std::string_view name) {
  constexpr std::string_view kStep = "step-";
  std::int64_t step = 0;
  if (!name.starts_with(kStep)) return {};
  const char* const end = name.data() + name.size();
  const auto [at, error] = std::from_chars(name.data() + kStep.size(), end, step);
  if (error != std::errc() || at != end || step < 0 || name != concat(kStep, step)) return {};
  return step;
}

bool is_plain_name(std::string_view name) {
  constexpr std::size_t kMost = 255;  // bytes that Linux takes
  return !name.empty() && name.size() <= kMost && name[0] != '.' && name.find('/') == name.npos &&
         printable(name) == name;
}

std::string Manifest::why_not_in(const std::string& folder) {
  struct stat status{};
  if (::lstat((std::filesystem::path(folder) / kName).c_str(), &status) == 0)
    return S_ISREG(status.st_mode) ? "" : concat("has a ", kName, " that is no file");
  if (errno == ENOTDIR) return "is no folder";
  if (errno != ENOENT) return concat("cannot be looked into: ", std::strerror(errno));
  if (::stat(folder.c_str(), &status) == 0) return concat("has no ", kName);
  return ::lstat(folder.c_str(), &status) == 0 ? "is a link to nothing" : "does not exist";
}

Manifest Manifest::read(const std::string& folder) {
  const OpenFile file((std::filesystem::path(folder) / kName).string(), "manifest", Links::refused);
  const std::string what = concat("manifest '", file.path(), '\'');
  if (file.size_bytes() > kMostBytes)
    throw DataError(concat(what, " has ", file.size_bytes(), " bytes, the most is ", kMostBytes,
                           "; is it the manifest of a checkpoint?"));
  std::string text(static_cast<std::size_t>(file.size_bytes()), '\0');
  file.read(0, std::as_writable_bytes(std::span(text)));
  return parse(text, what);
}

Manifest Manifest::parse(std::string_view text, const std::string& what) {
  const auto changed = [&] {
    throw DataError(concat(what, " has changed since it was written; take another checkpoint"));
  };
  const std::size_t tail = kChecksum.size() + 16 + kEnd.size();
  std::uint64_t said = 0;
  if (text.size() < tail) changed();
  const std::string_view before = text.substr(0, text.size() - tail),
                         end = text.substr(before.size());
  if (!end.starts_with(kChecksum) || !end.ends_with(kEnd) ||
      !read_hex(end.substr(kChecksum.size(), 16), said) ||
      said != checksum_of(before.data(), before.size()))
    changed();
  const JsonTree tree = JsonTree::parse(text, what);
  const std::int64_t version = tree.member("tessera_checkpoint", what).integer(what);
  if (version != kVersion)
    throw DataError(concat(what, " has version ", version, ", this program reads version ",
                           kVersion, "; take the program that wrote it, or a newer one"));
  Manifest manifest;
  manifest.step = tree.member("step", what).integer(what);
  manifest.ranks = tree.member("ranks", what).integer(what);
  if (manifest.step < 0 || manifest.ranks < 1 || manifest.ranks > INT_MAX)
    throw DataError(concat(what, " is of step ", manifest.step, ", saved by ", manifest.ranks,
                           " ranks; take another checkpoint"));
  manifest.scalars = scalars_of(tree.member("scalars", what), what);
  const auto plain = [&](const std::string& name) {
    if (!is_plain_name(name))
      throw DataError(concat(what, " names ", shown(name), ", which is no plain file name"));
    return name;
  };
  manifest.id = plain(tree.member("id", what).text(what));  // of folders' names
  for (const auto& [name, member] : tree.member("parts", what).members(what)) {
    Part& part = manifest.parts[plain(name)];
    part.prefix = member.member("prefix", what).text(what);
    part.scalars = scalars_of(member.member("scalars", what), what);
    for (const JsonTree& entry : member.member("files", what).elements(what)) {
      File& of = part.files.emplace_back();
      of.name = plain(entry.member("name", what).text(what));
      of.size_bytes = entry.member("bytes", what).integer(what);
      if (!read_hex(entry.member("head", what).text(what), of.head_checksum) || of.size_bytes < 0)
        changed();
    }
  }
  return manifest;
}

std::string Manifest::fault_of_name(const std::string& folder) const {
  std::error_code ignored;
  std::filesystem::path path = std::filesystem::absolute(folder, ignored).lexically_normal();
  if (!path.has_filename()) path = path.parent_path();  // "runs/step-7/"
  const auto named = step_of(path.filename().string());
  if (!named || *named == step) return "";
  return concat("checkpoint '", folder, "' is of step ", step,
                " by its manifest; name its folder step-", step);
}

std::string Manifest::to_string() const {
  std::string out = concat("{\"tessera_checkpoint\": ", kVersion, ", \"id\": ", json::quote(id),
                           ", \"step\": ", step, ", \"ranks\": ", ranks,
                           ",\n\"scalars\": ", json_of(scalars), ",\n\"parts\": {");
  const char* comma = "";
  for (const auto& [name, part] : parts) {
    out += concat(comma, '\n', json::quote(name), ": {\"prefix\": ", json::quote(part.prefix),
                  ", \"scalars\": ", json_of(part.scalars), ", \"files\": [");
    comma = ",";
    const char* separator = "";
    for (const File& file : part.files) {
      out += concat(separator, "\n{\"name\": ", json::quote(file.name),
                    ", \"bytes\": ", file.size_bytes, ", \"head\": \"", hex(file.head_checksum),
                    "\"}");
      separator = ",";
    }
    out += "]}";
  }
  out += "},";
  out += concat(kChecksum, hex(checksum_of(out.data(), out.size())), kEnd);
  TESSERA_EXPECT(std::ssize(out) <= kMostBytes, "checkpoint: a manifest of ", out.size(),
                 " bytes is more than the ", kMostBytes,
                 " that are read; give shorter scalars, and ", "put what is long into a tensor");
  return out;
}

const Manifest::Part& Manifest::part(const std::string& folder, std::string_view name) const {
  const auto found = parts.find(name);
  if (found == parts.end())
    throw DataError(concat("checkpoint '", folder, "' has no part ", shown(name)));
  return found->second;
}

std::vector<WeightFile> Manifest::files(const std::string& folder, std::string_view name) const {
  std::vector<WeightFile> files;
  for (const File& file : part(folder, name).files)
    files.push_back(
        {.path = (std::filesystem::path(folder) / std::string(name) / file.name).string(),
         .links = Links::refused_with_folder,
         .size_bytes = file.size_bytes,
         .head_checksum = file.head_checksum});
  return files;
}

}  // namespace tessera::checkpoint
