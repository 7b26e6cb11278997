#include <algorithm>
#include <cstdint>
#include <string>

#include "tessera/base/error.hpp"
#include "tessera/detail/base/checked.hpp"
#include "tessera/detail/base/json.hpp"
#include "tessera/detail/base/text.hpp"
#include "tessera/detail/base/utf8.hpp"
#include "tools/checkpoint/command.hpp"
#include "tools/checkpoint/parts.hpp"

namespace tessera::checkpoint_tool {
namespace {

using checkpoint::Manifest;

std::int64_t bytes_of(const Manifest::Part& part) {
  std::int64_t bytes = 0;
  for (const Manifest::File& file : part.files) bytes = checked_add(bytes, file.size_bytes);
  return bytes;
}

std::string lines_of(const checkpoint::Scalars& scalars) {
  std::string out;
  for (const auto& [name, value] : scalars)
    out += concat("  ", printable(name), " = ", shortened(checkpoint::json_of(name, value)), '\n');
  return out;
}

std::string text_of_part(const std::string& name, const Manifest::Part& part,
                         const checkpoint::WeightFiles& files) {
  const auto names = files.names();
  std::string out = concat("part ", shown(name), ": ", counted(std::ssize(names), "tensor"), " in ",
                           counted(std::ssize(part.files), "file"), ", ",
                           counted(bytes_of(part), "byte"), '\n', lines_of(part.scalars));
  std::size_t width = 0;
  for (const std::string& tensor : names) width = std::max(width, tensor.size());
  for (const std::string& tensor : names) {
    const auto entry = files.entry(tensor);
    out += concat("  ", printable(tensor), std::string(width - tensor.size() + 2, ' '),
                  dtype_text(entry), ' ', shape_text(entry), '\n');
  }
  return out;
}

std::string json_of_part(const Manifest::Part& part, const checkpoint::WeightFiles& files) {
  std::string out = concat("{\"bytes\": ", bytes_of(part),
                           ", \"scalars\": ", checkpoint::json_of(part.scalars), ", \"files\": [");
  const char* comma = "";
  for (const Manifest::File& file : part.files) {
    out +=
        concat(comma, "{\"name\": ", json::quote(file.name), ", \"bytes\": ", file.size_bytes, '}');
    comma = ", ";
  }
  out += "], \"tensors\": {";
  comma = "";
  for (const std::string& tensor : files.names()) {
    const auto entry = files.entry(tensor);
    out += concat(comma, json::quote(tensor), ": {\"dtype\": ", json::quote(dtype_text(entry)),
                  ", \"shape\": ", shape_text(entry), '}');
    comma = ", ";
  }
  return out + "}}";
}

}  // namespace

Answer inspect(const Command& command) {
  const std::string& path = command.paths[0];
  expect_checkpoint(path);
  const Manifest manifest = Manifest::read(path);
  std::int64_t bytes = 0;
  std::string text, parts;
  for (const auto& [name, part] : manifest.parts) {
    const checkpoint::WeightFiles files = open_part(path, manifest, name);
    bytes = checked_add(bytes, bytes_of(part));
    text += text_of_part(name, part, files);
    parts += concat(parts.empty() ? "" : ", ", json::quote(name), ": ", json_of_part(part, files));
  }
  const std::string fault = manifest.fault_of_name(path);
  if (command.json)
    return {concat("{\"path\": ", json::quote(path),
                   fault.empty() ? "" : concat(", \"fault\": ", json::quote(fault)),
                   ", \"id\": ", json::quote(manifest.id), ", \"step\": ", manifest.step,
                   ", \"ranks\": ", manifest.ranks, ", \"bytes\": ", bytes, ", \"scalars\": ",
                   checkpoint::json_of(manifest.scalars), ", \"parts\": {", parts, "}}\n")};
  return {concat("'", printable(path), "': step ", manifest.step, ", saved by ",
                 counted(manifest.ranks, "rank"), " as ", printable(manifest.id), ", ",
                 counted(bytes, "byte"), '\n', fault.empty() ? "" : printable(fault) + '\n',
                 lines_of(manifest.scalars), text)};
}

}  // namespace tessera::checkpoint_tool
