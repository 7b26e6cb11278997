// How close do the save and the load of a checkpoint come to the disk, and to the page cache?
//
//   bench-checkpoint FOLDER [MIB [SAMPLES]]      defaults 1024 and 7
//
// One rank has MIB of weights in matrices of 16 MiB. In turn, the order changed from sample to
// sample, are timed
//   write   their bytes to a new file of FOLDER in calls of 4 MiB, and fsync
//   save    checkpoint::save: checksums, headers, manifest, every fsync and the rename
//   read    the checkpoint's files in calls of 4 MiB, to where the weights lie
//   load    Checkpoint and Module::load of it: every byte is checked
// Reads are timed twice, from the disk (the page cache is told to drop the files, and says how much
// it has kept) and from the page cache. Files are removed and the disk is idle before each time is
// taken. Medians and ranges are printed; a ratio is the median of the ratios of neighbours. "read
// on" is a read into one buffer of 4 MiB, which stays in the processor's cache: a bound of what any
// load from the page cache could reach.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "tessera/base/error.hpp"
#include "tessera/base/file.hpp"
#include "tessera/checkpoint/checkpoint.hpp"
#include "tessera/nn/module.hpp"

namespace {

using namespace tessera;
namespace fs = std::filesystem;

constexpr std::size_t kCall = 4 << 20;
constexpr std::int64_t kSide = 2048;  // of a matrix of 16 MiB

class Weights final : public nn::Module {
 public:
  explicit Weights(std::int64_t matrices) {
    for (std::int64_t i = 0; i < matrices; ++i) {
      matrices_.emplace_back(Shape{kSide, kSide}, Initializer::normal(0, 1));
      register_parameter(concat("weight_", i), matrices_.back());
    }
  }
  std::span<std::byte> bytes(std::size_t matrix) {
    std::span<std::byte> found;
    matrices_[matrix].edit([&](const Tensor& rows) {
      found = {rows.host_data(AccessMode::write), std::size_t{kSide} * kSide * sizeof(float)};
    });
    return found;
  }
  std::size_t count() const { return matrices_.size(); }

 private:
  std::vector<Parameter> matrices_;
};

double seconds(const std::function<void()>& f) {
  const auto begin = std::chrono::steady_clock::now();
  f();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

void expect(bool holds, const char* what) {
  if (!holds) throw DeviceError(concat("bench-checkpoint: ", what, " failed"));
}

void write_raw(const std::string& path, Weights& weights) {
  const int file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  expect(file >= 0, "open");
  for (std::size_t i = 0; i < weights.count(); ++i)
    for (std::span<std::byte> left = weights.bytes(i); !left.empty(); left = left.subspan(kCall))
      expect(::write(file, left.data(), kCall) == ssize_t{kCall}, "write");
  expect(::fsync(file) == 0, "fsync");
  ::close(file);
}

// The data of a file whose tensors are `weights`, behind its header.
void read_raw(const std::string& path, Weights& weights, bool to_one_buffer) {
  static std::vector<std::byte> buffer(kCall);
  const OpenFile file(path, "file");
  std::int64_t at = file.size_bytes();
  for (std::size_t i = 0; i < weights.count(); ++i)
    at -= static_cast<std::int64_t>(weights.bytes(i).size());
  file.read(0, std::span(buffer).first(static_cast<std::size_t>(at)));
  for (std::size_t i = 0; i < weights.count(); ++i)
    for (std::span<std::byte> left = weights.bytes(i); !left.empty(); left = left.subspan(kCall)) {
      file.read(at, to_one_buffer ? std::span(buffer) : left.first(kCall));
      at += std::int64_t{kCall};
    }
}

std::vector<fs::path> files_of(const std::string& step) {
  std::vector<fs::path> files;
  for (const auto& entry : fs::recursive_directory_iterator(step))
    if (entry.is_regular_file()) files.push_back(entry.path());
  return files;
}

// Drops files from the page cache; which share of them it has kept.
double drop(const std::string& step) {
  std::size_t pages = 0, kept = 0;
  for (const fs::path& path : files_of(step)) {
    const OpenFile file(path.string(), "file");
    ::posix_fadvise(file.descriptor(), 0, 0, POSIX_FADV_DONTNEED);
    const auto bytes = static_cast<std::size_t>(file.size_bytes());
    void* const map = ::mmap(nullptr, bytes, PROT_READ, MAP_SHARED, file.descriptor(), 0);
    expect(map != MAP_FAILED, "mmap");
    std::vector<unsigned char> is_there((bytes + 4095) / 4096);
    expect(::mincore(map, bytes, is_there.data()) == 0, "mincore");
    ::munmap(map, bytes);
    pages += is_there.size();
    kept += static_cast<std::size_t>(
        std::ranges::count_if(is_there, [](unsigned char c) { return (c & 1) != 0; }));
  }
  return static_cast<double>(kept) / static_cast<double>(pages);
}

struct Spread {
  double median, least, most;
};
Spread spread_of(std::vector<double> values) {
  std::ranges::sort(values);
  return {values[values.size() / 2], values.front(), values.back()};
}

// Two ways that take turns.
struct Pair {
  const char *name, *raw_name;
  std::vector<double> own{}, raw{};

  void sample(int turn, const std::function<double()>& take_own,
              const std::function<double()>& take_raw) {
    if (turn % 2 == 0) raw.push_back(take_raw());
    own.push_back(take_own());
    if (turn % 2 != 0) raw.push_back(take_raw());
  }
  void print(double mib) const {
    std::vector<double> ratios;
    for (std::size_t i = 0; i < own.size(); ++i) ratios.push_back(raw[i] / own[i]);
    const Spread ratio = spread_of(ratios), a = spread_of(own), b = spread_of(raw);
    std::printf(
        "%-22s %6.0f MiB/s (%5.0f to %5.0f)   %-16s %6.0f MiB/s (%5.0f to %5.0f)   ratio %.2f "
        "(%.2f to %.2f)\n",
        name, mib / a.median, mib / a.most, mib / a.least, raw_name, mib / b.median, mib / b.most,
        mib / b.least, ratio.median, ratio.least, ratio.most);
  }
};

void measure(const std::string& folder, std::int64_t mib, int samples) {
  const World world = World::single({.threads = 1});
  Weights weights(mib / 16);
  weights.materialize(world.device());
  nn::init(weights, {1});
  world.device().synchronize();
  Pair save{"save", "write, fsync"}, disk{"load from the disk", "read"},
      cache{"load from the cache", "read"}, buffer{"load from the cache", "read on"};
  double kept = 0;
  fs::create_directories(folder);
  for (int turn = 0; turn < samples; ++turn) {
    const std::string step = checkpoint::step_folder(folder, turn), raw = folder + "/raw";
    save.sample(
        turn,
        [&] {
          ::sync();
          return seconds([&] {
            checkpoint::save(folder, turn, {checkpoint::part(weights, world)}, {}, world);
          });
        },
        [&] {
          ::sync();
          const double time = seconds([&] { write_raw(raw, weights); });
          fs::remove(raw);
          return time;
        });
    const std::vector<fs::path> files = files_of(step);
    const std::string file = std::ranges::max_element(files, {}, [](const fs::path& p) {
                               return fs::file_size(p);
                             })->string();
    const auto load = [&] {
      return seconds([&] { weights.load(*checkpoint::Checkpoint(step).part("model")); });
    };
    const auto read = [&](bool to_one_buffer) {
      return seconds([&] { read_raw(file, weights, to_one_buffer); });
    };
    const auto cold = [&](const std::function<double()>& f) {
      ::sync();
      kept = std::max(kept, drop(step));
      return f();
    };
    disk.sample(
        turn, [&] { return cold(load); }, [&] { return cold([&] { return read(false); }); });
    cache.sample(turn, load, [&] { return read(false); });
    buffer.sample(turn, load, [&] { return read(true); });
    fs::remove_all(step);
  }
  std::printf("%lld MiB, %d samples; the page cache kept %.1f %% of what it was told to drop\n",
              static_cast<long long>(mib), samples, 100 * kept);
  for (const Pair* const pair : {&save, &disk, &cache, &buffer})
    pair->print(static_cast<double>(mib));
}

}  // namespace

int main(int argc, char** argv) {
  const long long mib = argc > 2 ? std::atoll(argv[2]) : 1024;
  const int samples = argc > 3 ? std::atoi(argv[3]) : 7;
  if (argc < 2 || mib < 16 || mib % 16 != 0 || samples < 1) {
    std::fputs("usage: bench-checkpoint FOLDER [MIB [SAMPLES]], MIB a multiple of 16\n", stderr);
    return 2;
  }
  try {
    measure(argv[1], mib, samples);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
