#include "tools/train/inputs.hpp"

#include <filesystem>
#include <map>
#include <ranges>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/base/error.hpp"
#include "tessera/base/file.hpp"

namespace tessera::train {
namespace {

struct Named {
  std::string_view option;
  std::string path;
};

std::vector<Named> files_read(const Config& config, const Inputs& inputs) {
  std::vector<Named> read = {{"the configuration file", config.file},
                             {"data.path", config.data.path},
                             {"device.module", config.device.module},
                             {"--load", config.flags.load}};
  if (config.checkpoint.enable) read.push_back({"checkpoint.folder", config.checkpoint.folder});
  if (inputs.load) {
    read.push_back({"--load", inputs.load->index()});
    for (std::string& file : inputs.load->paths()) read.push_back({"--load", std::move(file)});
  }
  std::erase_if(read, [](const Named& file) { return file.path.empty(); });
  return read;
}

// By this rank, and its flight record by each that comes after rank 0.
std::vector<Named> files_written(const Config& config, int world_size, int rank) {
  std::vector<Named> written;
  if (rank == 0)
    written = {{"--save", config.flags.save},
               {"--trace", config.flags.trace},
               {"metrics.jsonl", config.metrics.jsonl}};
  const int end = config.flags.dry_run ? rank : rank == 0 ? world_size : rank + 1;
  for (int r = rank; r < end; ++r)
    written.push_back({"comm.flight_record", flight_record_path(config.comm.flight_record, r)});
  std::erase_if(written, [](const Named& file) { return file.path.empty(); });
  return written;
}

// Writing over what is read would destroy it, and of two that are written one would be lost.
void check_distinct(const std::vector<Named>& read, const std::vector<Named>& written,
                    const std::string& replaced) {
  std::map<std::string, std::string_view> taken;
  for (const Named& file : read) taken.emplace(file_identity(file.path), file.option);
  for (const Named& file : written) {
    const auto input = taken.find(file_identity(file.path));
    if (input == taken.end()) continue;
    if (file.option == "--save" && input->first == replaced) continue;
    throw DataError(concat(file.option, ": '", file.path, "' would overwrite ", input->second,
                           "; name another file"));
  }
  taken.clear();
  for (const auto& [option, path] : {Named{"stdout", "/dev/stdout"}, {"stderr", "/dev/stderr"}}) {
    std::error_code ignored;  // of a program without them
    if (std::filesystem::is_regular_file(path, ignored)) taken.emplace(file_identity(path), option);
  }
  for (const Named& file : std::views::reverse(written)) {
    const auto [other, is_new] = taken.emplace(file_identity(file.path), file.option);
    if (is_new) continue;
    throw DataError(concat(file.option, ": '", file.path, "' is ",
                           other->second == file.option ? "another rank's" : other->second,
                           " too; name another file"));
  }
}

}  // namespace

std::string flight_record_path(const std::string& path, int rank) {
  std::filesystem::path numbered = path;
  const std::string extension = numbered.extension();
  return numbered.replace_extension(concat(rank, extension));
}

Inputs open_inputs(const Config& config, int world_size, int rank) {
  Inputs inputs;
  const auto check_trace = [&] {
    if (!config.flags.trace.empty()) named("--trace", [&] { check_writable(config.flags.trace); });
  };
  if (config.flags.dry_run) {
    check_distinct(files_read(config, inputs), files_written(config, world_size, rank), "");
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
  // Only of a single file does --save leave nothing behind that is part of what was loaded.
  const std::vector<std::string> loaded =
      inputs.load ? inputs.load->paths() : std::vector<std::string>();
  check_distinct(files_read(config, inputs), files_written(config, world_size, rank),
                 loaded.size() == 1 ? file_identity(loaded[0]) : "");
  if (rank != 0) return inputs;
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
