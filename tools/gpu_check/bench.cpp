// How close the memory-bound kernels of a driver module come to the bandwidth of a plain copy on
// the same device, in the same process, and its products to the fastest algorithm of the library:
//
//   gpu-check-bench MODULE [--device N] [--scale X] [NAME...]
//
// One line a kernel on stdout, as JSON. Bytes are what the contract makes a kernel read and write
// once, so a kernel that passes twice over its input shows half the share. Time is the shortest of
// several samples of back-to-back launches. `--scale` makes the arrays smaller, for a look at the
// program itself on the emulator.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <exception>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "kernels/table.hpp"
#include "tessera/base/error.hpp"
#include "tools/gpu_check/module.hpp"

namespace tessera::gpu_check {
namespace {

using namespace kernels;

constexpr double kSampleSeconds = 0.02;
constexpr int kSamples = 7;
// Larger than any cache, so that a copy is one of memory.
constexpr std::int64_t kCopyBytes = std::int64_t{1} << 30;

class Bench {
 public:
  Bench(const Opened& opened, double scale, std::vector<std::string> names)
      : opened_(opened), scale_(scale), names_(std::move(names)) {}

  const Kernels& k() const { return *opened_.driver->kernels; }
  // `rows` of the real shape, at least one here.
  std::int64_t scaled(std::int64_t rows) const {
    return std::max<std::int64_t>(1, static_cast<std::int64_t>(static_cast<double>(rows) * scale_));
  }
  bool wanted(const std::string& name) const {
    return names_.empty() || std::find(names_.begin(), names_.end(), name) != names_.end();
  }

  // Zeros, which are finite in every dtype. Lives until `release`.
  template <class T = void>
  T* array(DType dtype, std::int64_t size) {
    const auto bytes = size * static_cast<std::int64_t>(size_bytes(dtype));
    void* data = nullptr;
    expect(opened_.driver->allocate(bytes, &data), "allocate");
    if (!data) throw OutOfMemory(concat("the device has no ", bytes, " bytes left"));
    expect(opened_.driver->fill(data, 0, bytes, opened_.stream), "fill");
    arrays_.push_back(data);
    return static_cast<T*>(data);
  }
  void release() {
    drain(opened_);
    for (void* data : arrays_) expect(opened_.driver->release(data), "release");
    arrays_.clear();
  }

  // Seconds of one call of `work`, which queues it.
  double time(const std::function<void(Exec&)>& work) {
    run(work, 2);
    const double once = std::max(run(work, 1), 1e-7);
    const int calls = static_cast<int>(std::clamp(kSampleSeconds / once, 1., 1000.));
    double best = std::numeric_limits<double>::infinity();
    for (int i = 0; i < kSamples; ++i) best = std::min(best, run(work, calls) / calls);
    return best;
  }

  void copy() {
    const auto bytes = scaled(kCopyBytes);
    void *to = array(DType::f32, bytes / 4 + 1), *from = array(DType::f32, bytes / 4 + 1);
    const double seconds = time([&](Exec& exec) {
      expect(exec.driver->copy(to, from, bytes, exec.native_stream), "copy");
    });
    copy_bytes_per_second_ = 2 * static_cast<double>(bytes) / seconds;
    print("copy", "memory to memory", 2 * static_cast<double>(bytes), seconds);
    release();
  }

  // `bytes` that the contract reads and writes once.
  void measure(const std::string& name, const std::string& shape, double bytes,
               const std::function<void(Exec&)>& work) {
    try {
      print(name, shape, bytes, time(work));
    } catch (const DeviceError& e) {
      std::printf("{\"kernel\": \"%s\", \"error\": \"%s\"}\n", name.c_str(), e.what());
    }
    release();
  }

  // Products of zeros take less power, and so less time, than those of a training step.
  void randomize(void* data, std::int64_t size) {
    Exec exec = fresh();
    k().random.normal(
        {.out = data, .key = 1, .begin = 0, .count = size, .mean = 0, .std = 1, .dtype = bf16},
        exec);
    if (exec.error) throw DeviceError(exec.error);
  }

  // Ours is the library's first guess; beside it the best of all that it offers.
  void product(const std::string& name, const GemmArgs& args) {
    const double flops = 2. * args.m * args.n * args.k;
    const double ours = time([&](Exec& exec) { k().gemm.gemm(args, exec); });
    double best = ours;
    int choices = 0;
    for (bool more = k().gemm.gemm_choice != nullptr; more; choices += more) {
      Exec exec = fresh();
      more = k().gemm.gemm_choice(args, choices, exec);
      if (more)
        best = std::min(best, time([&](Exec& e) { k().gemm.gemm_choice(args, choices, e); }));
    }
    std::printf(
        "{\"product\": \"%s\", \"shape\": \"[%d, %d, %d]\", \"seconds\": %.4g, "
        "\"tflops\": %.1f, \"choices\": %d, \"share_of_best\": %.3f}\n",
        name.c_str(), args.m, args.n, args.k, ours, flops / ours * 1e-12, choices, best / ours);
    std::fflush(stdout);
    release();
  }

 private:
  Exec fresh() const {
    Exec exec;
    exec.driver = opened_.driver;
    exec.native_stream = opened_.stream;
    exec.workspace = opened_.workspace;
    exec.workspace_bytes = static_cast<std::size_t>(opened_.workspace_bytes);
    return exec;
  }

  double run(const std::function<void(Exec&)>& work, int calls) {
    drain(opened_);
    const auto begin = std::chrono::steady_clock::now();
    Exec exec = fresh();
    for (int i = 0; i < calls && !exec.error; ++i) work(exec);
    if (exec.error) throw DeviceError(exec.error);
    drain(opened_);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }

  void print(const std::string& name, const std::string& shape, double bytes, double seconds) {
    const double rate = bytes / seconds;
    std::printf(
        "{\"kernel\": \"%s\", \"shape\": \"%s\", \"bytes\": %.0f, \"seconds\": %.4g, "
        "\"gb_per_second\": %.1f, \"share_of_copy\": %.3f}\n",
        name.c_str(), shape.c_str(), bytes, seconds, rate * 1e-9, rate / copy_bytes_per_second_);
    std::fflush(stdout);
  }

  const Opened& opened_;
  double scale_;
  std::vector<std::string> names_;
  std::vector<void*> arrays_;
  double copy_bytes_per_second_ = 1;
};

// ---- the kernels: activations of a Llama of width 4096 in bf16, states of AdamW in f32

constexpr std::int64_t kRows = 16384, kCols = 4096, kVocab = 128256;

void elementwise(Bench& b) {
  const std::int64_t n = b.scaled(kRows) * kCols;
  const auto bytes = static_cast<double>(n);
  if (b.wanted("cast")) {
    void *out = b.array(bf16, n), *in = b.array(f32, n);
    b.measure("cast", "f32 to bf16", 6 * bytes, [&](Exec& e) {
      UnaryArgs args{};
      args.out = out, args.in = in, args.count = n, args.op = UnaryOp::copy, args.out_dtype = bf16,
      args.in_dtype = f32;
      b.k().elementwise.unary(args, e);
    });
  }
  if (b.wanted("add")) {
    void *out = b.array(bf16, n), *x = b.array(bf16, n), *y = b.array(bf16, n);
    b.measure("add", "bf16", 6 * bytes, [&](Exec& e) {
      BinaryArgs args{};
      args.out = out, args.a = x, args.b = y, args.count = n, args.op = BinaryOp::add,
      args.dtype = bf16;
      b.k().elementwise.binary(args, e);
    });
  }
  if (b.wanted("gelu")) {
    void *out = b.array(bf16, n), *x = b.array(bf16, n);
    b.measure("gelu", "bf16", 4 * bytes, [&](Exec& e) {
      UnaryArgs args{};
      args.out = out, args.in = x, args.count = n, args.op = UnaryOp::gelu, args.out_dtype = bf16,
      args.in_dtype = bf16;
      b.k().elementwise.unary(args, e);
    });
  }
  if (b.wanted("axpby")) {
    void *y = b.array(f32, n), *x = b.array(bf16, n);
    b.measure("axpby", "f32 += bf16", 10 * bytes, [&](Exec& e) {
      AxpbyArgs args{};
      args.y = y, args.x = x, args.alpha = 1, args.beta = 1, args.count = n, args.y_dtype = f32,
      args.x_dtype = bf16;
      b.k().elementwise.axpby(args, e);
    });
  }
  if (b.wanted("swiglu")) {
    void *out = b.array(bf16, n), *g = b.array(bf16, n), *u = b.array(bf16, n);
    b.measure("swiglu", "bf16", 6 * bytes, [&](Exec& e) {
      b.k().elementwise.swiglu({.out = out,
                                .gate = g,
                                .up = u,
                                .rows = n / kCols,
                                .cols = kCols,
                                .out_stride = kCols,
                                .gate_stride = kCols,
                                .up_stride = kCols,
                                .dtype = bf16},
                               e);
    });
  }
  if (b.wanted("swiglu_backward")) {
    void *dg = b.array(bf16, n), *du = b.array(bf16, n), *g = b.array(bf16, n),
         *u = b.array(bf16, n), *d = b.array(bf16, n);
    b.measure("swiglu_backward", "bf16", 10 * bytes, [&](Exec& e) {
      b.k().elementwise.swiglu_backward({.d_gate = dg,
                                         .d_up = du,
                                         .gate = g,
                                         .up = u,
                                         .d_out = d,
                                         .rows = n / kCols,
                                         .cols = kCols,
                                         .d_gate_stride = kCols,
                                         .d_up_stride = kCols,
                                         .gate_stride = kCols,
                                         .up_stride = kCols,
                                         .d_out_stride = kCols,
                                         .dtype = bf16},
                                        e);
    });
  }
  if (b.wanted("dropout")) {
    void *y = b.array(bf16, n), *x = b.array(bf16, n);
    b.measure("dropout", "bf16, p 0.1", 4 * bytes, [&](Exec& e) {
      b.k().dropout.dropout({.y = y,
                             .x = x,
                             .device_offset = nullptr,
                             .key = 1,
                             .host_offset = 0,
                             .count = n,
                             .p = 0.1f,
                             .dtype = bf16},
                            e);
    });
  }
}

void norms(Bench& b) {
  const std::int64_t rows = b.scaled(kRows), n = rows * kCols;
  const auto bytes = static_cast<double>(n);
  const std::string shape = concat("bf16 [", rows, ", ", kCols, "]");
  if (b.wanted("rms_norm")) {
    void *y = b.array(bf16, n), *x = b.array(bf16, n), *w = b.array(bf16, kCols),
         *rstd = b.array(f32, rows);
    b.measure("rms_norm", shape, 4 * bytes, [&](Exec& e) {
      RmsNormArgs args{};
      args.y = y, args.rstd = rstd, args.x = x, args.weight = w, args.rows = rows;
      args.cols = kCols, args.eps = 1e-5, args.dtype = bf16;
      b.k().norm.rms_norm(args, e);
    });
  }
  if (b.wanted("layer_norm")) {
    void *y = b.array(bf16, n), *x = b.array(bf16, n), *w = b.array(bf16, kCols),
         *bias = b.array(bf16, kCols), *mean = b.array(f32, rows), *rstd = b.array(f32, rows);
    b.measure("layer_norm", shape, 4 * bytes, [&](Exec& e) {
      LayerNormArgs args{};
      args.y = y, args.mean = mean, args.rstd = rstd, args.x = x, args.weight = w;
      args.bias = bias, args.rows = rows, args.cols = kCols, args.eps = 1e-5, args.dtype = bf16;
      b.k().norm.layer_norm(args, e);
    });
  }
  for (const bool layer : {false, true}) {
    const std::string name = layer ? "layer_norm_backward" : "rms_norm_backward";
    if (!b.wanted(name)) continue;
    void *dx = b.array(bf16, n), *x = b.array(bf16, n), *dy = b.array(bf16, n),
         *w = b.array(bf16, kCols), *mean = b.array(f32, rows), *rstd = b.array(f32, rows),
         *dw = b.array(f32, kCols), *db = b.array(f32, kCols),
         *space = b.array(boolean, norm_workspace_bytes(rows, kCols, bf16, true, layer));
    b.measure(name, shape, 6 * bytes, [&](Exec& e) {
      NormBackwardArgs args{};
      args.dx = dx, args.d_weight = dw, args.d_bias = layer ? db : nullptr, args.x = x;
      args.dy = dy, args.weight = w, args.mean = layer ? mean : nullptr, args.rstd = rstd;
      args.workspace = space, args.rows = rows, args.cols = static_cast<std::int32_t>(kCols);
      args.scale = 1, args.dtype = bf16, args.grad_dtype = f32;
      b.k().norm.norm_backward(args, e);
    });
  }
}

void heads(Bench& b) {
  const std::int64_t rows = b.scaled(4096), n = rows * kVocab;
  const std::string shape = concat("bf16 [", rows, ", ", kVocab, "]");
  if (b.wanted("softmax")) {
    const std::int64_t r = b.scaled(kRows);
    void *y = b.array(bf16, r * kCols), *x = b.array(bf16, r * kCols);
    b.measure("softmax", concat("bf16 [", r, ", ", kCols, "]"), 4 * static_cast<double>(r * kCols),
              [&](Exec& e) {
                b.k().softmax.softmax({.y = y, .x = x, .rows = r, .cols = kCols, .dtype = bf16}, e);
              });
  }
  if (b.wanted("cross_entropy")) {
    void *x = b.array(bf16, n), *loss = b.array(f32, rows), *lse = b.array(f32, rows),
         *targets = b.array(i32, rows);
    b.measure("cross_entropy", shape, 2 * static_cast<double>(n), [&](Exec& e) {
      b.k().cross_entropy.cross_entropy({.loss = loss,
                                         .lse = lse,
                                         .logits = x,
                                         .targets = targets,
                                         .rows = rows,
                                         .vocab = kVocab,
                                         .row_stride = kVocab,
                                         .dtype = bf16,
                                         .target_dtype = i32},
                                        e);
    });
  }
  if (b.wanted("cross_entropy_backward")) {
    void *x = b.array(bf16, n), *lse = b.array(f32, rows), *targets = b.array(i32, rows),
         *scale = b.array(f32, 1);
    b.measure("cross_entropy_backward", shape + " in place", 4 * static_cast<double>(n),
              [&](Exec& e) {
                b.k().cross_entropy.cross_entropy_backward({.d_logits = x,
                                                            .logits = x,
                                                            .targets = targets,
                                                            .lse = lse,
                                                            .scale = scale,
                                                            .host_scale = 1,
                                                            .rows = rows,
                                                            .vocab = kVocab,
                                                            .row_stride = kVocab,
                                                            .d_row_stride = kVocab,
                                                            .scale_stride = 0,
                                                            .dtype = bf16,
                                                            .target_dtype = i32},
                                                           e);
              });
  }
  if (b.wanted("embedding")) {
    const std::int64_t count = b.scaled(kRows);
    void *out = b.array(bf16, count * kCols), *table = b.array(bf16, count * kCols),
         *ids = b.array(i32, count);
    Exec exec;
    b.measure("embedding", concat("bf16 ", count, " rows of ", kCols),
              4 * static_cast<double>(count * kCols), [&](Exec& e) {
                b.k().elementwise.arange(
                    {.out = ids, .start = 0, .step = 1, .count = count, .dtype = i32}, e);
                b.k().embedding.embedding({.out = out,
                                           .table = table,
                                           .ids = ids,
                                           .count = count,
                                           .vocab = count,
                                           .cols = kCols,
                                           .dtype = bf16,
                                           .id_dtype = i32},
                                          e);
              });
  }
  if (b.wanted("rope")) {
    const std::int64_t batch = b.scaled(8), length = 2048, count = batch * length * 32 * 128;
    void *y = b.array(bf16, count), *x = b.array(bf16, count);
    auto *cosine = b.array<float>(f32, length * 64), *sine = b.array<float>(f32, length * 64);
    b.measure("rope", concat("bf16 [", batch, ", 2048, 32, 128]"), 4 * static_cast<double>(count),
              [&](Exec& e) {
                b.k().rope.rope({.y = y,
                                 .x = x,
                                 .cos = cosine,
                                 .sin = sine,
                                 .x_strides = {length * 4096, 4096, 128},
                                 .y_strides = {length * 4096, 4096, 128},
                                 .position = 0,
                                 .batch = static_cast<std::int32_t>(batch),
                                 .length = 2048,
                                 .heads = 32,
                                 .head_dim = 128,
                                 .dtype = bf16,
                                 .inverse = false},
                                e);
              });
  }
}

void states(Bench& b) {
  const std::int64_t n = b.scaled(std::int64_t{1} << 27);
  const auto bytes = static_cast<double>(n);
  const std::string shape = concat("f32 [", n, "]");
  if (b.wanted("adamw")) {
    auto *p = b.array<float>(f32, n), *m = b.array<float>(f32, n), *v = b.array<float>(f32, n),
         *g = b.array<float>(f32, n);
    const OptimSegment segment{0, n, -1, 0.1f};
    const OptimScalars scalars{1e-3f, 0.9f, 0.95f, 1e-8f, 0.1f, 0.05f, 1, 0};
    void *segments = b.array(boolean, sizeof segment), *device_scalars = b.array(boolean, 32);
    b.measure("adamw", shape, 28 * bytes, [&](Exec& e) {
      expect(e.driver->copy(segments, &segment, sizeof segment, e.native_stream), "copy");
      expect(e.driver->copy(device_scalars, &scalars, sizeof scalars, e.native_stream), "copy");
      b.k().optimizer.adamw({.parameter = p,
                             .m = m,
                             .v = v,
                             .gradient = g,
                             .segments = static_cast<const OptimSegment*>(segments),
                             .counts = nullptr,
                             .scalars = static_cast<const OptimScalars*>(device_scalars),
                             .clip = nullptr,
                             .segment_count = 1},
                            e);
    });
  }
  if (b.wanted("sumsq")) {
    auto* g = b.array<float>(f32, n);
    void* out = b.array(f64, 1);
    b.measure("sumsq", shape, 4 * bytes, [&](Exec& e) {
      b.k().reduce.sumsq_flat(
          {.out = out, .in = g, .count = n, .out_dtype = f64, .accumulate = false}, e);
    });
  }
  if (b.wanted("pack")) {
    auto* src = b.array<float>(f32, n);
    auto* dst = b.array<std::byte>(bf16, n);
    const PackEntry entry{0, 0, n};
    void* entries = b.array(boolean, sizeof entry);
    b.measure("pack", "f32 to bf16", 6 * bytes, [&](Exec& e) {
      expect(e.driver->copy(entries, &entry, sizeof entry, e.native_stream), "copy");
      b.k().flat.pack({.dst = dst,
                       .src = src,
                       .entries = static_cast<const PackEntry*>(entries),
                       .entry_count = 1,
                       .dst_dtype = bf16},
                      e);
    });
  }
}

// ---- products: of a linear layer forward, backward to its input, and to its weight

struct Product {
  const char* name;
  std::int64_t m, n, k;
  bool trans_a, trans_b, accumulates;
};

void products(Bench& b) {
  constexpr Product kProducts[] = {
      {"forward", 16384, 4096, 4096, false, true, false},
      {"to the input", 16384, 4096, 4096, false, false, false},
      {"to the weight", 4096, 4096, 16384, true, false, true},
      {"GPT-2's fused projection", 8192, 2304, 768, false, true, false},
      {"GPT-2's head", 8192, 50304, 768, false, true, false},
      {"Llama's head", 4096, kVocab, 2048, false, true, false},
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
    b.randomize(const_cast<void*>(args.a), m * k), b.randomize(const_cast<void*>(args.b), k * n);
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
  const Opened opened = open_module(module, device);
  Bench bench(opened, scale, names);
  bench.copy();
  elementwise(bench);
  norms(bench);
  heads(bench);
  states(bench);
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
