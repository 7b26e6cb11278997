#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdint>
#include <filesystem>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "runtime/checkpoint/box.hpp"
#include "runtime/checkpoint/finite.hpp"
#include "runtime/checkpoint/manifest.hpp"
#include "runtime/checkpoint/new_folder.hpp"
#include "runtime/checkpoint/safetensors_header.hpp"
#include "tessera/base/error.hpp"
#include "tessera/base/file.hpp"
#include "tessera/checkpoint/safetensors.hpp"
#include "tessera/detail/base/checked.hpp"
#include "tessera/detail/base/json.hpp"
#include "tessera/detail/base/utf8.hpp"
#include "tessera/device/device.hpp"
#include "tools/checkpoint/all_cores.hpp"
#include "tools/checkpoint/command.hpp"
#include "tools/checkpoint/parts.hpp"
#include "tools/checkpoint/progress.hpp"

namespace tessera::checkpoint_tool {
namespace {

using namespace checkpoint;

struct ExportFile {
  std::string name{};
  std::int64_t size_bytes = 0;  // of data
  std::vector<SafetensorsEntry> entries{};
};

bool is_converted(DType dtype) { return dtype == f32 || dtype == bf16 || dtype == f16; }

// The tensors in their order, as many to a file as it takes.
std::vector<ExportFile> files_for(const WeightFiles& weights, const Command& command) {
  std::vector<ExportFile> files;
  for (const std::string& name : weights.names()) {
    const StateSource::Entry from = weights.entry(name);
    SafetensorsEntry entry{.name = name, .dtype = from.dtype, .shape = from.shape};
    if (command.dtype && is_converted(from.dtype)) entry.dtype = *command.dtype;
    const std::int64_t bytes =
        checked_mul(numel_of(from.shape), static_cast<std::int64_t>(size_bytes(entry.dtype)));
    if (files.empty() ||
        (files.back().size_bytes > 0 && bytes > command.max_shard_bytes - files.back().size_bytes))
      files.emplace_back();
    files.back().size_bytes += bytes;
    files.back().entries.push_back(std::move(entry));
  }
  std::int64_t number = 0;
  for (ExportFile& file : files)
    file.name = concat("model-", five_digits(++number), "-of-", five_digits(std::ssize(files)),
                       ".safetensors");
  return files;
}

// A signal ends an export in order, so that nothing is left of it.
struct Stopped {
  int signal;
};
std::atomic<int> g_signal{0};
static_assert(std::atomic<int>::is_always_lock_free,
              "a signal handler may touch lock-free atomics only");

void note(int signal) {
  int none = 0;
  if (!g_signal.compare_exchange_strong(none, signal)) ::_exit(128 + signal);
}
void heed_signals() {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    struct sigaction action{};
    // One that is ignored, as by nohup, stays so.
    if (::sigaction(signal, nullptr, &action) != 0 || action.sa_handler == SIG_IGN) continue;
    action = {};
    action.sa_handler = note;
    action.sa_flags = SA_RESTART;
    ::sigemptyset(&action.sa_mask);
    ::sigaction(signal, &action, nullptr);
  }
}
void expect_no_signal() {
  if (const int signal = g_signal) throw Stopped{signal};
}

void write(const std::string& path, const ExportFile& file, const WeightFiles& weights,
           const Device& device, Progress& progress) {
  SafetensorsWriter writer(path, file.entries, {{"format", "pt"}});
  for (const SafetensorsEntry& entry : file.entries) {
    const bool is_narrowed = weights.entry(entry.name).dtype != entry.dtype;
    for (RowReader reader(weights, entry.name, entry.dtype); !reader.is_done();) {
      expect_no_signal();
      const std::vector<std::byte> bytes = reader.next(device);
      if (is_narrowed && !are_finite(bytes, entry.dtype))
        throw DataError(concat("tensor ", shown(entry.name), " of ", weights.what(),
                               " is not finite as ", entry.dtype,
                               ", so nothing is written; take another --dtype"));
      writer.write(entry.name, bytes);
      progress.add(std::ssize(bytes));
    }
  }
  writer.commit();
}

std::string index_of(const std::vector<ExportFile>& files, std::int64_t total_bytes) {
  std::string out = concat("{\"metadata\": {\"total_size\": ", total_bytes, "}, \"weight_map\": {");
  const char* comma = "";
  for (const ExportFile& file : files)
    for (const SafetensorsEntry& entry : file.entries) {
      out += concat(comma, '\n', json::quote(entry.name), ": ", json::quote(file.name));
      comma = ",";
    }
  return out + "}}\n";
}

// A checkpoint is read by what its manifest names, and other programs read all that lies in it.
void expect_outside(const std::filesystem::path& folder) {
  std::error_code ignored;
  std::filesystem::path around =
      std::filesystem::weakly_canonical(std::filesystem::absolute(folder, ignored), ignored);
  while (around.has_relative_path()) {
    around = around.parent_path();
    if (Manifest::is_in(around.string()))
      throw DataError(concat('\'', folder.string(), "' lies in checkpoint '", around.string(),
                             "', which stays as it was saved; name another folder"));
  }
}

// Told from all others that have been: a sweep of the folder around may meet it.
std::string random_id() {
  std::random_device random;
  return concat(random(), '-', random());
}

// Makes the folder with all that is in it, or nothing.
void fill(const std::filesystem::path& folder, const std::vector<ExportFile>& files,
          const WeightFiles& weights, std::int64_t total_bytes) {
  const std::string around = folder.has_parent_path() ? folder.parent_path().string() : ".",
                    name = folder.filename().string(), id = random_id(),
                    hidden = NewFolder::hidden(around, name, id);
  NewFolder made(around, name, id);
  try {
    Progress progress("export", total_bytes);
    on_all_cores(files.size(), [&] {
      return [&, device = Device::cpu({.executor = ExecutorKind::inlined})](std::size_t i) {
        write(concat(hidden, '/', files[i].name), files[i], weights, device, progress);
      };
    });
    write_whole(hidden + "/model.safetensors.index.json", index_of(files, total_bytes));
  } catch (const DeviceError& error) {
    throw DeviceError(with_path(error.what(), hidden, folder.string()), error.where());
  } catch (const DataError& error) {
    throw DataError(with_path(error.what(), hidden, folder.string()), error.where());
  }
  expect_no_signal();
  made.commit();
}

}  // namespace

Answer export_weights(const Command& command) {
  if (command.paths[1].empty()) throw DataError("export: the new folder has no name; give it one");
  const WeightFiles weights(command.paths[0]);
  const std::filesystem::path target = std::filesystem::path(command.paths[1]) / "";
  const std::filesystem::path folder = target.parent_path();  // without a slash at its end
  std::error_code ignored;
  if (std::filesystem::exists(std::filesystem::symlink_status(folder, ignored)))
    throw DataError(
        concat('\'', folder.string(), "' exists already and is kept; name another folder"));
  expect_outside(folder);
  const std::vector<ExportFile> files = files_for(weights, command);
  std::int64_t total_bytes = 0;
  for (const ExportFile& file : files) total_bytes = checked_add(total_bytes, file.size_bytes);
  check_space(folder.string(), total_bytes);
  heed_signals();
  try {
    fill(folder, files, weights, total_bytes);
  } catch (const Stopped& stopped) {
    std::signal(stopped.signal, SIG_DFL);
    std::raise(stopped.signal);
  }
  if (command.json)
    return {concat("{\"path\": ", json::quote(folder.string()), ", \"files\": ", files.size(),
                   ", \"tensors\": ", weights.names().size(), ", \"bytes\": ", total_bytes, "}\n")};
  return {concat('\'', printable(folder.string()),
                 "': ", counted(std::ssize(weights.names()), "tensor"), ", ",
                 counted(total_bytes, "byte"), " in ", counted(std::ssize(files), "file"), '\n')};
}

}  // namespace tessera::checkpoint_tool
