#include "tools/train/agreement.hpp"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "build_info.hpp"
#include "tessera/base/philox.hpp"
#include "tools/train/schema.hpp"

namespace tessera::train {
namespace {

// A hash of a file's size and of 64 blocks spread evenly over it (so of all, up to 256 kB): ranks
// that were given another file, or another version of it, nearly always have another one.
std::string fingerprint(const std::string& path) {
  constexpr std::int64_t kBlocks = 64, kBlock = 4096;
  const OpenFile file(path, "file");
  const std::int64_t last = std::max<std::int64_t>(file.size_bytes() - kBlock, 0);
  std::uint64_t hash = fnv1a(static_cast<std::uint64_t>(file.size_bytes()), 0);
  std::string block(kBlock, '\0');
  for (std::int64_t i = 0; i < kBlocks; ++i) {
    const auto bytes = std::as_writable_bytes(std::span(block));
    const std::size_t size = file.read_some(last * i / (kBlocks - 1), bytes);
    hash = fnv1a(std::string_view(block).substr(0, size), hash);
  }
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(hash));
  return text;
}

std::string fingerprint(const checkpoint::WeightFiles& files) {
  std::string all;
  for (const std::string& path : files.paths()) all += fingerprint(path);
  return all;
}

// What every rank must be told alike, by name. Each machine has its own paths, threads and modules.
std::vector<std::pair<std::string, std::string>> common_facts(const Config& config,
                                                              const Inputs& inputs) {
  std::vector<std::pair<std::string, std::string>> facts = {
      {"the program's commit", tools::kCommit},
      {"the tokens in data.path", inputs.loader ? concat(inputs.loader->file().size()) : "none"},
      {"the contents of data.path", data_fingerprint(inputs)},
      {"the weights of --load", inputs.load ? fingerprint(*inputs.load) : "none"}};
  for (const Key& key : schema())
    if (const std::string name = key.full_name();
        name != "threads" && name != "device.module" && name != "data.path" && name != "load")
      facts.emplace_back(name, shown_value(key, key.get(config)));
  return facts;
}

// A line after the first second, and then every five.
class ScanReport {
 public:
  ScanReport(const data::TokenFile& file, std::int64_t all) : file_(file), all_(all) {}

  void operator()(std::int64_t done) {
    const auto now = std::chrono::steady_clock::now();
    if (now < due_) return;
    due_ = now + std::chrono::seconds(5);
    Console(Terminal::detect(), 0, 1, 0)
        .line(concat("data ", file_.path(), ": looked at ", 100 * done / all_, "% of its ",
                     file_.size(), " tokens"));
  }

 private:
  const data::TokenFile& file_;
  std::int64_t all_;
  std::chrono::steady_clock::time_point due_ =
      std::chrono::steady_clock::now() + std::chrono::seconds(1);
};

}  // namespace

std::string data_fingerprint(const Inputs& inputs) {
  return inputs.loader ? fingerprint(inputs.loader->file().path()) : "none";
}

void check_agreement(const Config& config, const Inputs& inputs, const World& world) {
  // There ranks of two jobs may have met.
  const bool meets_at_port =
      world.kind() == WorldKind::processes || world.kind() == WorldKind::nccl;
  for (const auto& [name, value] : common_facts(config, inputs)) {
    const auto hash = static_cast<double>(fnv1a(value) >> 11);  // 53 bits travel exactly
    double ends[] = {hash, -hash};
    world.max(ends);
    if (ends[0] == -ends[1]) continue;
    throw DataError(
        concat(name, ": ranks differ, rank ", world.rank(), " has ", value.empty() ? "none" : value,
               "; start every rank alike",
               meets_at_port ? ", and each job at a port or with a run id of its own" : ""));
  }
}

std::int64_t look_at_tokens(const Inputs& inputs, const World* world) {
  if (!inputs.loader) return 0;
  const data::TokenFile& file = inputs.loader->file();
  const std::int64_t rank = world ? world->rank() : 0, ranks = world ? world->size() : 1,
                     begin = checked_mul(file.size(), rank) / ranks,
                     end = checked_mul(file.size(), rank + 1) / ranks;
  ScanReport report(file, end - begin);
  std::int64_t looked = 0;
  const std::int64_t bad = file.find_bad(begin, end, [&](std::int64_t done) {
    looked = done;
    if (rank == 0) report(done);
  });
  double first = -static_cast<double>(bad < end ? bad : file.size());  // the largest is the first
  if (world) world->max({&first, 1});
  const auto position = static_cast<std::int64_t>(-first);
  std::int32_t id = 0;
  if (position < file.size()) named("data.path", [&] { file.read(position, {&id, 1}); });
  return looked;
}

}  // namespace tessera::train
