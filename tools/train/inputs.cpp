#include "tools/train/inputs.hpp"

#include <filesystem>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/base/error.hpp"
#include "tessera/base/file.hpp"

namespace tessera::train {
namespace {

// Writing over what is read would destroy it.
void check_distinct(const Config& config, int records) {
  std::vector<std::pair<std::string_view, std::string>> outputs = {
      {"--save", config.flags.save},
      {"--trace", config.flags.trace},
      {"metrics.jsonl", config.metrics.jsonl}};
  for (int r = 0; r < records; ++r)
    outputs.emplace_back("comm.flight_record", flight_record_path(config.comm.flight_record, r));
  const std::pair<std::string_view, const std::string&> inputs[] = {
      {"data.path", config.data.path},
      {"--load", config.flags.load},
      {"the configuration file", config.file}};
  for (const auto& [output, written] : outputs) {
    for (const auto& [input, read] : inputs) {
      const bool resaved =
          output == "--save" && input == "--load";  // replaced by a whole file, as the user said
      if (written.empty() || read.empty() || resaved || !is_same_file(written, read)) continue;
      throw DataError(
          concat(output, ": '", written, "' would overwrite ", input, "; name another file"));
    }
  }
  for (const auto& a : std::span(outputs).first(3))
    for (const auto& b : outputs)
      if (&a < &b && !a.second.empty() && !b.second.empty() && is_same_file(a.second, b.second))
        throw DataError(
            concat(a.first, ": '", a.second, "' is ", b.first, " too; name another file"));
}

}  // namespace

std::string flight_record_path(const std::string& path, int rank) {
  std::filesystem::path numbered = path;
  const std::string extension = numbered.extension();
  return numbered.replace_extension(concat(rank, extension));
}

Inputs open_inputs(const Config& config, int world_size, Writes writes) {
  Inputs inputs;
  const auto check_trace = [&] {
    if (!config.flags.trace.empty()) named("--trace", [&] { check_writable(config.flags.trace); });
  };
  if (config.flags.dry_run) {
    check_distinct(config, 0);
    check_trace();
    return inputs;
  }
  const Config::Data& data = config.data;
  if (!data.path.empty()) {
    inputs.loader = named("data.path", [&] {
      return data::TokenLoader(
          data::TokenFile(data.path, config.model.vocab_size, data::Scan::later),
          {.seq_len = config.training.seq_len,
           .global_batch = split_batch(config, world_size).global,
           .order = data.order,
           .seed = static_cast<std::uint64_t>(config.debug.seed),
           .heldout = data.heldout});
    });
  }
  if (!config.flags.load.empty()) {
    named("--load", [&] { inputs.load.emplace(config.flags.load); });
  }
  check_distinct(config, writes == Writes::yes ? world_size : 0);
  if (writes == Writes::no) return inputs;
  if (!config.flags.save.empty()) named("--save", [&] { check_writable(config.flags.save); });
  check_trace();
  if (config.given.contains("comm.flight_record"))
    named("comm.flight_record", [&] { check_writable(config.comm.flight_record); });
  if (!config.metrics.jsonl.empty()) {
    inputs.jsonl = named("metrics.jsonl", [&] { return JsonlWriter(config.metrics.jsonl); });
  }
  return inputs;
}

}  // namespace tessera::train
