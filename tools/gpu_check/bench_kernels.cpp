// The kernels that wait for memory, at the shapes of training: activations of a Llama of width 4096
// in bf16, states of AdamW in f32. Inputs are made before the measurement: what is timed is the
// kernel alone.
#include <string>

#include "tessera/base/error.hpp"
#include "tools/gpu_check/bench.hpp"

namespace tessera::gpu_check {
namespace {

using namespace kernels;

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
    b.prepare([&](Exec& e) {
      b.k().elementwise.arange({.out = ids, .start = 0, .step = 1, .count = count, .dtype = i32},
                               e);
    });
    b.measure("embedding", concat("bf16 ", count, " rows of ", kCols),
              4 * static_cast<double>(count * kCols), [&](Exec& e) {
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
    const auto* segments = b.constant(OptimSegment{0, n, -1, 0.1f});
    const auto* scalars = b.constant(OptimScalars{1e-3f, 0.9f, 0.95f, 1e-8f, 0.1f, 0.05f, 1, 0});
    b.measure("adamw", shape, 28 * bytes, [&](Exec& e) {
      b.k().optimizer.adamw({.parameter = p,
                             .m = m,
                             .v = v,
                             .gradient = g,
                             .segments = segments,
                             .counts = nullptr,
                             .scalars = scalars,
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
    const auto* entries = b.constant(PackEntry{0, 0, n});
    b.measure("pack", "f32 to bf16", 6 * bytes, [&](Exec& e) {
      b.k().flat.pack(
          {.dst = dst, .src = src, .entries = entries, .entry_count = 1, .dst_dtype = bf16}, e);
    });
  }
}
}  // namespace

void measure_kernels(Bench& bench) {
  elementwise(bench);
  norms(bench);
  heads(bench);
  states(bench);
}

}  // namespace tessera::gpu_check
