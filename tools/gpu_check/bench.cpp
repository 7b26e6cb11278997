// How close the memory-bound kernels of a driver module come to the bandwidth of a plain copy on
// the same device, in the same process, and its products to the fastest algorithm of the library:
//
//   gpu-check-bench MODULE [--device N] [--scale X] [NAME...]
//
// One line a kernel on stdout, as JSON. Bytes are what the contract makes a kernel read and write
// once, so a kernel that passes twice over its input shows half the share. Time is the shortest of
// several samples of back-to-back launches. `--scale` makes the arrays smaller, for a look at the
// program itself on the emulator.
#include "tools/gpu_check/bench.hpp"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <exception>
#include <limits>
#include <utility>

#include "tessera/base/error.hpp"
#include "tessera/base/json.hpp"

namespace tessera::gpu_check {
namespace {

using namespace kernels;

constexpr double kSampleSeconds = 0.02;
constexpr int kSamples = 7;
// Larger than any cache, so that a copy is one of memory.
constexpr std::int64_t kCopyBytes = std::int64_t{1} << 30;

}  // namespace

Bench::Bench(const cuda_test::Target& target, double scale, std::vector<std::string> names)
    : target_(target), scale_(scale), names_(std::move(names)) {}

std::int64_t Bench::scaled(std::int64_t rows) const {
  return std::max<std::int64_t>(1, static_cast<std::int64_t>(static_cast<double>(rows) * scale_));
}

bool Bench::wanted(const std::string& name) const {
  return names_.empty() || std::find(names_.begin(), names_.end(), name) != names_.end();
}

void* Bench::zeros(std::int64_t bytes) {
  void* data = nullptr;
  expect(target_.driver->allocate(bytes, &data), "allocate");
  if (!data) throw OutOfMemory(concat("the device has no ", bytes, " bytes left"));
  arrays_.push_back(data);
  expect(target_.driver->fill(data, 0, bytes, target_.stream), "fill");
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

void Bench::product(const std::string& name, const GemmArgs& args) {
  const double flops = 2. * args.m * args.n * args.k;
  const double ours = time([&](Exec& exec) { k().gemm(args, exec); });
  double best = ours;
  int choices = 0;
  for (bool more = k().gemm_choice != nullptr; more; choices += more) {
    Exec exec = target_.exec();
    more = k().gemm_choice(args, choices, exec);
    if (more) best = std::min(best, time([&](Exec& e) { k().gemm_choice(args, choices, e); }));
  }
  std::printf(
      "{\"product\": \"%s\", \"shape\": \"[%d, %d, %d]\", \"seconds\": %.4g, "
      "\"tflops\": %.1f, \"choices\": %d, \"share_of_best\": %.3f}\n",
      name.c_str(), args.m, args.n, args.k, ours, flops / ours * 1e-12, choices, best / ours);
  std::fflush(stdout);
  release();
}

void Bench::print(const std::string& name, const std::string& shape, double bytes, double seconds) {
  const double rate = bytes / seconds;
  std::printf(
      "{\"kernel\": \"%s\", \"shape\": \"%s\", \"bytes\": %.0f, \"seconds\": %.4g, "
      "\"gb_per_second\": %.1f, \"share_of_copy\": %.3f}\n",
      name.c_str(), shape.c_str(), bytes, seconds, rate * 1e-9, rate / copy_bytes_per_second_);
  std::fflush(stdout);
}

namespace {

// ---- products: of a linear layer forward, backward to its input, and to its weight

struct Product {
  const char* name;
  std::int64_t m, n, k;
  bool trans_a, trans_b, accumulates;
};

// Products of zeros take less power, and so less time, than those of a training step.
void randomize(Bench& b, const void* data, std::int64_t size) {
  b.prepare([&](Exec& e) {
    b.k().normal({.out = const_cast<void*>(data),
                  .key = 1,
                  .begin = 0,
                  .count = size,
                  .mean = 0,
                  .std = 1,
                  .dtype = bf16},
                 e);
  });
}

void products(Bench& b) {
  constexpr Product kProducts[] = {
      {"forward", 16384, 4096, 4096, false, true, false},
      {"to the input", 16384, 4096, 4096, false, false, false},
      {"to the weight", 4096, 4096, 16384, true, false, true},
      {"GPT-2's fused projection", 8192, 2304, 768, false, true, false},
      {"GPT-2's head", 8192, 50304, 768, false, true, false},
      {"Llama's head", 4096, 128256, 2048, false, true, false},
  };
  if (!b.wanted("products")) return;
  for (const Product& p : kProducts) {
    const std::int64_t m = b.scaled(p.m), n = b.scaled(p.n), k = b.scaled(p.k);
    GemmArgs args{};
    args.a = b.array(bf16, m * k), args.b = b.array(bf16, k * n);
    args.c_dtype = p.accumulates ? f32 : bf16, args.c = b.array(args.c_dtype, m * n);
    args.alpha = 1, args.beta = p.accumulates ? 1 : 0, args.batch = 1, args.dtype = bf16;
    args.m = static_cast<std::int32_t>(m), args.n = static_cast<std::int32_t>(n);
    args.k = static_cast<std::int32_t>(k), args.ldc = args.n;
    args.trans_a = p.trans_a, args.lda = p.trans_a ? args.m : args.k;
    args.trans_b = p.trans_b, args.ldb = p.trans_b ? args.k : args.n;
    randomize(b, args.a, m * k), randomize(b, args.b, k * n);
    b.product(p.name, args);
  }
}

int run(const std::vector<std::string>& arguments) {
  std::string module;
  int device = 0;
  double scale = 1;
  std::vector<std::string> names;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const std::string& a = arguments[i];
    const bool takes = a == "--device" || a == "--scale";
    if (takes && i + 1 == arguments.size()) throw DataError(a + ": wants a number");
    if (a == "--device")
      device = std::stoi(arguments[++i]);
    else if (a == "--scale")
      scale = std::stod(arguments[++i]);
    else if (module.empty())
      module = a;
    else
      names.push_back(a);
  }
  if (module.empty()) throw DataError("which module?");
  const cuda_test::Target target = open_module(module, device);
  Bench bench(target, scale, names);
  bench.copy();
  measure_kernels(bench);
  products(bench);
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
