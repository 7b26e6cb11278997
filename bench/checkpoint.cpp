// How close do the save and the load of a checkpoint come to the disk, and to the page cache?
//
//   bench-checkpoint FOLDER [MIB [SAMPLES]]            defaults 1024 and 7
//   bench-checkpoint FOLDER MIB SAMPLES beside         asynchronous saves, beside steps
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
//
// `beside` runs 300 products of 1024 x 1024 one after the other, without saves and with three of
// checkpoint::Saver, in turn. It prints for how long a save holds up its step, beside a plain copy
// of the same bytes, and how long the run takes beside its bound: the run without saves, and what
// the process has computed more with them (copies and the writer), on one thread after the other.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/error.hpp"
#include "tessera/base/file.hpp"
#include "tessera/checkpoint/checkpoint.hpp"
#include "tessera/checkpoint/saver.hpp"
#include "tessera/nn/module.hpp"
#include "tessera/tensor/ops.hpp"

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

// --- Beside steps

constexpr int kSteps = 300, kSaveEvery = 100;

double computed_seconds() {
  rusage usage{};
  expect(::getrusage(RUSAGE_SELF, &usage) == 0, "getrusage");
  const auto seconds_of = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec);
  };
  return seconds_of(usage.ru_utime) + seconds_of(usage.ru_stime);
}

struct Run {
  double seconds = 0, computed = 0;
  std::vector<double> held_up{};  // by each save
};

class BesideSteps {
 public:
  BesideSteps(const std::string& folder, std::int64_t mib)
      : folder_(folder),
        world_(World::single({.threads = 1})),
        weights_(mib / 16),
        x_(Tensor::normal({1024, 1024}, 0, 1, 1, f32, world_.device())),
        saver_(folder, world_) {
    fs::create_directories(folder);
    weights_.materialize(world_.device());
    nn::init(weights_, {1});
    saver_.prepare(parts());
    copies_.resize(static_cast<std::size_t>(mib) << 20);
  }

  Run run(bool saves) {
    Run result;
    std::vector<double> plain;
    const double before = computed_seconds();
    result.seconds = seconds([&] {
      for (int i = 0; i < kSteps; ++i) {
        const bool is_save = saves && i % kSaveEvery == kSaveEvery / 4;
        const double took = seconds([&] {
          raw::matmul(x_, x_);
          if (saves) saver_.poll();
          if (is_save) saver_.save(saved_++, parts(), {});
          world_.device().synchronize();
        });
        if (is_save)
          result.held_up.push_back(took);
        else if (!saver_.in_flight())  // beside no writer
          plain.push_back(took);
      }
      saver_.wait();
    });
    result.computed = computed_seconds() - before;
    for (double& took : result.held_up) took -= spread_of(plain).median;
    while (removed_ < saved_) fs::remove_all(checkpoint::step_folder(folder_, removed_++));
    return result;
  }

  double copy() {
    return seconds([&] {
      std::byte* to = copies_.data();
      for (std::size_t i = 0; i < weights_.count(); ++i) {
        const std::span<const std::byte> from = weights_.bytes(i);
        std::memcpy(to, from.data(), from.size());
        to += from.size();
      }
    });
  }

 private:
  std::vector<checkpoint::Part> parts() { return {checkpoint::part(weights_, world_)}; }

  const std::string folder_;
  const World world_;
  Weights weights_;
  const Tensor x_;
  checkpoint::Saver saver_;
  std::vector<std::byte> copies_;
  std::int64_t saved_ = 0, removed_ = 0;
};

void print_ratio(const char* what, const std::vector<double>& own, const char* beside,
                 const std::vector<double>& others) {
  std::vector<double> ratios;
  for (std::size_t i = 0; i < own.size(); ++i) ratios.push_back(own[i] / others[i]);
  const Spread ratio = spread_of(ratios);
  std::printf("%-30s %8.3f s   %-34s %8.3f s   ratio %.2f (%.2f to %.2f)\n", what,
              spread_of(own).median, beside, spread_of(others).median, ratio.median, ratio.least,
              ratio.most);
}

void measure_beside_steps(const std::string& folder, std::int64_t mib, int samples) {
  BesideSteps steps(folder, mib);
  std::vector<double> held_up, copies, with, bounds, without;
  steps.copy();
  steps.run(true);
  for (int turn = 0; turn < samples; ++turn) {
    Run plain, saving;
    if (turn % 2 == 0) plain = steps.run(false);
    saving = steps.run(true);
    if (turn % 2 != 0) plain = steps.run(false);
    for (const double took : saving.held_up) {
      held_up.push_back(took);
      copies.push_back(steps.copy());
    }
    with.push_back(saving.seconds);
    without.push_back(plain.seconds);
    bounds.push_back(plain.seconds + saving.computed - plain.computed);
  }
  std::printf("%lld MiB, %d samples of %d steps and %d saves\n", static_cast<long long>(mib),
              samples, kSteps, kSteps / kSaveEvery);
  print_ratio("a save holds its step up by", held_up, "a copy of its bytes takes", copies);
  print_ratio("a run with saves takes", with, "its bound is", bounds);
  print_ratio("a run with saves takes", with, "a run without takes", without);
}

}  // namespace

int main(int argc, char** argv) {
  const long long mib = argc > 2 ? std::atoll(argv[2]) : 1024;
  const int samples = argc > 3 ? std::atoi(argv[3]) : 7;
  const bool is_beside = argc == 5 && std::string_view(argv[4]) == "beside";
  if (argc < 2 || mib < 16 || mib % 16 != 0 || samples < 1 || (argc > 4 && !is_beside)) {
    std::fputs("usage: bench-checkpoint FOLDER [MIB [SAMPLES [beside]]], MIB a multiple of 16\n",
               stderr);
    return 2;
  }
  try {
    (is_beside ? measure_beside_steps : measure)(argv[1], mib, samples);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
