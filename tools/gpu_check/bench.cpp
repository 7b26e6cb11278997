// How close the memory-bound kernels of a driver module come to the bandwidth of a plain copy on
// the same device, in the same process, and its products to the fastest algorithm of the library:
//
//   gpu-check-bench MODULE [--device N] [--scale X] [--machine NAME] [NAME...]
//
// One line a kernel on stdout, as JSON. Bytes are what the contract makes a kernel read and write
// once, so a kernel that passes twice over its input shows half the share. Time is the shortest of
// several samples of back-to-back launches. `--scale` makes the arrays smaller, for a look at the
// program itself on the emulated GPU. `--machine` is one of detail/device/machine.hpp, and adds
// what that table predicts: each kernel alone, at the table's whole rates.
#include "tools/gpu_check/bench.hpp"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <exception>
#include <limits>
#include <utility>

#include "tessera/base/error.hpp"
#include "tessera/detail/base/json.hpp"

namespace tessera::gpu_check {
namespace {

using namespace kernels;

constexpr double kSampleSeconds = 0.02;
constexpr int kSamples = 7;
// Of many algorithms, only those that a few launches show near the best are timed.
constexpr int kGlances = 4;
constexpr double kPromising = 1.1;
// Larger than any cache, so that a copy is one of memory.
constexpr std::int64_t kCopyBytes = std::int64_t{1} << 30;

// Seconds since 1970, by which a figure finds the clocks and the power of its moment.
double now() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

}  // namespace

Bench::Bench(const kernel_test::Target& target, double scale, std::vector<std::string> names,
             const Machine* machine)
    : target_(target), scale_(scale), names_(std::move(names)), machine_(machine) {}

std::int64_t Bench::scaled(std::int64_t rows) const {
  return std::max<std::int64_t>(1, static_cast<std::int64_t>(static_cast<double>(rows) * scale_));
}

bool Bench::wanted(const std::string& name) const {
  return names_.empty() || std::find(names_.begin(), names_.end(), name) != names_.end();
}

bool Bench::named(const std::string& name) const { return !names_.empty() && wanted(name); }

void* Bench::zeros(std::int64_t bytes) {
  void* data = nullptr;
  expect(target_.driver->allocate(bytes, &data), "allocate");
  if (!data) throw OutOfMemory(concat("the device has no ", bytes, " bytes left"));
  arrays_.push_back(data);
  expect(target_.driver->fill(data, 0, bytes, target_.stream), "fill");
  return data;
}

void* Bench::random_array(DType dtype, std::int64_t size) {
  void* const data = array(dtype, size);
  prepare([&](Exec& e) {
    k().normal(
        {.out = data, .key = 1, .begin = 0, .count = size, .mean = 0, .std = 1, .dtype = dtype}, e);
  });
  return data;
}

void Bench::release() {
  expect(target_.drain(), "stream");
  for (void* data : arrays_) expect(target_.driver->release(data), "release");
  arrays_.clear();
}

double Bench::run(const Work& work, int calls) {
  expect(target_.drain(), "stream");
  const auto begin = std::chrono::steady_clock::now();
  Exec exec = target_.exec();
  for (int i = 0; i < calls && !exec.error; ++i) work(exec);
  if (exec.error) throw DeviceError(exec.error);
  if (exec.note) note_ = exec.note;
  expect(target_.drain(), "stream");
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

double Bench::time(const Work& work) {
  run(work, 2);
  const double once = std::max(run(work, 1), 1e-7);
  const int calls = static_cast<int>(std::clamp(kSampleSeconds / once, 1., 1000.));
  double best = std::numeric_limits<double>::infinity();
  for (int i = 0; i < kSamples; ++i) best = std::min(best, run(work, calls) / calls);
  return best;
}

void Bench::copy() {
  const auto bytes = scaled(kCopyBytes);
  void *to = zeros(bytes), *from = zeros(bytes);
  const double seconds = time(
      [&](Exec& exec) { expect(exec.driver->copy(to, from, bytes, exec.native_stream), "copy"); });
  copy_bytes_per_second_ = 2 * static_cast<double>(bytes) / seconds;
  print("copy", "memory to memory", 2 * static_cast<double>(bytes), seconds);
  release();
}

void Bench::measure(const std::string& name, const std::string& shape, double bytes,
                    const Work& work) {
  try {
    print(name, shape, bytes, time(work));
  } catch (const DeviceError& e) {
    std::printf("{\"kernel\": %s, \"error\": %s}\n", json::quote(name).c_str(),
                json::quote(e.what()).c_str());
  }
  release();
}

void Bench::measure_arithmetic(const std::vector<Arithmetic>& works) {
  for (const Arithmetic& w : works) {
    try {
      note_.clear();
      const double seconds = time(w.work);
      std::printf(
          "{\"arithmetic\": \"%s\", \"shape\": \"%s\", \"seconds\": %.4g, \"tflops\": %.1f, "
          "\"workspace_bytes\": %lld, \"note\": %s%s, \"ended\": %.1f}\n",
          w.name.c_str(), w.shape.c_str(), seconds, w.flops / seconds * 1e-12,
          static_cast<long long>(w.workspace_bytes), json::quote(note_).c_str(),
          predicted({.flops = w.flops, .products = w.products}).c_str(), now());
    } catch (const DeviceError& e) {
      std::printf("{\"kernel\": %s, \"error\": %s}\n", json::quote(w.name).c_str(),
                  json::quote(e.what()).c_str());
    }
    std::fflush(stdout);
  }
  release();
}

void Bench::product(const std::string& name, const GemmArgs& args) {
  const double flops = 2. * args.m * args.n * args.k;
  const Products products{.kind = Products::Kind::matrix,
                          .dtype = args.dtype,
                          .batch = args.batch,
                          .m = args.m,
                          .n = args.n,
                          .k = args.k};
  const double ours = time([&](Exec& exec) { k().gemm(args, exec); });
  double best = ours;
  int choices = 0;
  for (bool more = k().gemm_choice != nullptr; more; choices += more) {
    Exec exec = target_.exec();
    more = k().gemm_choice(args, choices, exec);
    const Work choice = [&](Exec& e) { k().gemm_choice(args, choices, e); };
    if (more && run(choice, kGlances) / kGlances < kPromising * best)
      best = std::min(best, time(choice));
  }
  std::printf(
      "{\"product\": \"%s\", \"shape\": \"[%d, %d, %d]\", \"seconds\": %.4g, "
      "\"tflops\": %.1f, \"choices\": %d, \"share_of_best\": %.3f%s, \"ended\": %.1f}\n",
      name.c_str(), args.m, args.n, args.k, ours, flops / ours * 1e-12, choices, best / ours,
      predicted({.flops = flops, .products = products}).c_str(), now());
  std::fflush(stdout);
  release();
}

void Bench::print(const std::string& name, const std::string& shape, double bytes, double seconds) {
  const double rate = bytes / seconds;
  std::printf(
      "{\"kernel\": \"%s\", \"shape\": \"%s\", \"bytes\": %.0f, \"seconds\": %.4g, "
      "\"gb_per_second\": %.1f, \"share_of_copy\": %.3f%s, \"ended\": %.1f}\n",
      name.c_str(), shape.c_str(), bytes, seconds, rate * 1e-9, rate / copy_bytes_per_second_,
      predicted({.bytes = bytes}).c_str(), now());
  std::fflush(stdout);
}

std::string Bench::predicted(const Cost& cost) const {
  if (machine_ == nullptr) return "";
  char text[64];
  std::snprintf(text, sizeof text, ", \"predicted_seconds\": %.4g", price(*machine_, cost).seconds);
  return text;
}

namespace {

const Machine* machine_of(const std::string& name) {
  const auto* const found = std::find_if(kMachines.begin(), kMachines.end(),
                                         [&](const Machine& m) { return m.name == name; });
  if (found == kMachines.end()) throw DataError("--machine " + name + ": the table has none");
  return found;
}

int run(const std::vector<std::string>& arguments) {
  std::string module;
  int device = 0;
  double scale = 1;
  const Machine* machine = nullptr;
  std::vector<std::string> names;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const std::string& a = arguments[i];
    const bool takes = a == "--device" || a == "--scale" || a == "--machine";
    if (takes && i + 1 == arguments.size()) throw DataError(a + ": wants a value");
    if (a == "--device")
      device = std::stoi(arguments[++i]);
    else if (a == "--scale")
      scale = std::stod(arguments[++i]);
    else if (a == "--machine")
      machine = machine_of(arguments[++i]);
    else if (module.empty())
      module = a;
    else
      names.push_back(a);
  }
  if (module.empty()) throw DataError("which module?");
  const kernel_test::Target target = open_module(module, device);
  Bench bench(target, scale, names, machine);
  bench.copy();
  measure_kernels(bench);
  measure_products(bench);
  measure_attentions(bench);
  measure_fp8_products(bench);
  return 0;
}

}  // namespace
}  // namespace tessera::gpu_check

int main(int argc, char** argv) {
  try {
    return tessera::gpu_check::run({argv + 1, argv + argc});
  } catch (const std::exception& e) {
    std::fprintf(stderr, "gpu-check-bench: %s\n", e.what());
    return 2;
  }
}
