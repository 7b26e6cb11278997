// The kernels that wait for memory and go by rows; see bench_kernels.cpp.
#include <string>

#include "tessera/base/error.hpp"
#include "tools/gpu_check/bench.hpp"

namespace tessera::gpu_check {
namespace {

using namespace kernels;

constexpr std::int64_t kRows = 16384, kCols = 4096, kVocab = 128256;

// 0, 1, .. count - 1.
void* different_ids(Bench& b, std::int64_t count) {
  void* const ids = b.array(i32, count);
  b.prepare([&](Exec& e) {
    b.k().arange({.out = ids, .start = 0, .step = 1, .count = count, .dtype = i32}, e);
  });
  return ids;
}

// What sums of rows by id go along: the order, which is made each time, and the sums of pieces.
struct ById {
  ById(Bench& b, void* ids, std::int64_t outer, std::int64_t count, DType from, DType to)
      : bench(b),
        order(b.array<std::int32_t>(i32, count)),
        workspace(b.array(f32, kernels::sums_workspace_bytes(outer, count, kCols, from, to) / 4)),
        args{.order = order,
             .ids = ids,
             .workspace = b.array(i32, kernels::order_workspace_bytes(count) / 4),
             .count = count,
             .n = count,
             .id_dtype = i32} {}
  void find_order(Exec& e) const { bench.k().order_by_id(args, e); }

  Bench& bench;
  std::int32_t* order;
  void* workspace;
  kernels::OrderByIdArgs args;
};

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
      b.k().rms_norm(args, e);
    });
  }
  if (b.wanted("layer_norm")) {
    void *y = b.array(bf16, n), *x = b.array(bf16, n), *w = b.array(bf16, kCols),
         *bias = b.array(bf16, kCols), *mean = b.array(f32, rows), *rstd = b.array(f32, rows);
    b.measure("layer_norm", shape, 4 * bytes, [&](Exec& e) {
      LayerNormArgs args{};
      args.y = y, args.mean = mean, args.rstd = rstd, args.x = x, args.weight = w;
      args.bias = bias, args.rows = rows, args.cols = kCols, args.eps = 1e-5, args.dtype = bf16;
      b.k().layer_norm(args, e);
    });
  }
  if (b.wanted("add_rms_norm")) {
    void *y = b.array(bf16, n), *x = b.array(bf16, n), *w = b.array(bf16, kCols),
         *residual = b.array(bf16, n), *sum = b.array(bf16, n), *rstd = b.array(f32, rows);
    b.measure("add_rms_norm", shape, 8 * bytes, [&](Exec& e) {
      RmsNormArgs args{};
      args.y = y, args.rstd = rstd, args.x = x, args.weight = w, args.rows = rows;
      args.cols = kCols, args.eps = 1e-5, args.dtype = bf16;
      args.residual = residual, args.sum = sum;
      b.k().rms_norm(args, e);
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
      b.k().norm_backward(args, e);
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
                b.k().softmax({.y = y, .x = x, .rows = r, .cols = kCols, .dtype = bf16}, e);
              });
  }
  if (b.wanted("softmax_backward")) {
    const std::int64_t r = b.scaled(kRows);
    void *dx = b.array(bf16, r * kCols), *y = b.array(bf16, r * kCols),
         *dy = b.array(bf16, r * kCols);
    b.measure("softmax_backward", concat("bf16 [", r, ", ", kCols, "]"),
              6 * static_cast<double>(r * kCols), [&](Exec& e) {
                b.k().softmax_backward(
                    {.dx = dx, .y = y, .dy = dy, .rows = r, .cols = kCols, .dtype = bf16}, e);
              });
  }
  if (b.wanted("cross_entropy")) {
    void *x = b.array(bf16, n), *loss = b.array(f32, rows), *lse = b.array(f32, rows),
         *targets = b.array(i32, rows);
    b.measure("cross_entropy", shape, 2 * static_cast<double>(n), [&](Exec& e) {
      b.k().cross_entropy({.loss = loss,
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
                b.k().cross_entropy_backward({.d_logits = x,
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
  // The narrow ones are GPT-2's, of whose rows a multiprocessor has room for two.
  for (const bool narrow : {false, true}) {
    const std::string name = concat(narrow ? "narrow " : "", "cross_entropy with its gradient");
    if (!b.wanted(name)) continue;
    const std::int64_t count = narrow ? b.scaled(8192) : rows, vocab = narrow ? 50304 : kVocab;
    void *x = b.array(bf16, count * vocab), *loss = b.array(f32, count),
         *targets = b.array(i32, count), *scale = b.array(f32, 1);
    b.measure(name, concat("bf16 [", count, ", ", vocab, "] in place"),
              4 * static_cast<double>(count * vocab), [&](Exec& e) {
                b.k().cross_entropy_with_gradient({.loss = loss,
                                                   .logits = x,
                                                   .targets = targets,
                                                   .scale = scale,
                                                   .host_scale = 1,
                                                   .rows = count,
                                                   .vocab = vocab,
                                                   .row_stride = vocab,
                                                   .dtype = bf16,
                                                   .target_dtype = i32},
                                                  e);
              });
  }
  if (b.wanted("embedding")) {
    const std::int64_t count = b.scaled(kRows);
    void *out = b.array(bf16, count * kCols), *table = b.array(bf16, count * kCols),
         *ids = different_ids(b, count);
    b.measure("embedding", concat("bf16 ", count, " rows of ", kCols),
              4 * static_cast<double>(count * kCols), [&](Exec& e) {
                b.k().embedding({.out = out,
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
  if (b.wanted("embedding_backward")) {
    const std::int64_t count = b.scaled(kRows);
    void *table = b.array(f32, count * kCols), *dy = b.array(bf16, count * kCols),
         *ids = different_ids(b, count);
    const ById by_id(b, ids, 1, count, bf16, f32);
    b.measure("embedding_backward", concat("f32 += bf16, ", count, " rows of ", kCols),
              10 * static_cast<double>(count * kCols), [&](Exec& e) {
                by_id.find_order(e);
                b.k().embedding_backward({.d_table = table,
                                          .dy = dy,
                                          .ids = ids,
                                          .count = count,
                                          .vocab = count,
                                          .cols = kCols,
                                          .scale = 1,
                                          .dtype = bf16,
                                          .grad_dtype = f32,
                                          .id_dtype = i32,
                                          .accumulate = true,
                                          .order = by_id.order,
                                          .workspace = by_id.workspace},
                                         e);
              });
  }
  if (b.wanted("rope")) {
    const std::int64_t batch = b.scaled(8), length = 2048, count = batch * length * 32 * 128;
    void *y = b.array(bf16, count), *x = b.array(bf16, count);
    auto *cosine = b.array<float>(f32, length * 64), *sine = b.array<float>(f32, length * 64);
    b.measure("rope", concat("bf16 [", batch, ", 2048, 32, 128]"), 4 * static_cast<double>(count),
              [&](Exec& e) {
                b.k().rope({.y = y,
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

// Rows and columns added up, and what is chosen or added by index.
void sums(Bench& b) {
  const std::int64_t rows = b.scaled(kRows), n = rows * kCols;
  const std::string shape = concat("bf16 [", rows, ", ", kCols, "]");
  const auto reduced = [&](const char* name, std::int64_t outer, std::int64_t added,
                           std::int64_t inner) {
    if (!b.wanted(name)) return;
    const std::int64_t all = outer * added * inner;
    void *out = b.array(f32, outer * inner), *in = b.array(bf16, all);
    b.measure(name, concat("bf16 [", outer, ", ", added, ", ", inner, "]"),
              2 * static_cast<double>(all), [&](Exec& e) {
                b.k().reduce({.out = out,
                              .in = in,
                              .outer = outer,
                              .n = added,
                              .inner = inner,
                              .op = kernels::ReduceOp::sum,
                              .dtype = bf16,
                              .out_dtype = f32},
                             e);
              });
  };
  reduced("reduce over columns", rows, kCols, 1);
  reduced("reduce over rows", 1, 4 * rows, kCols / 4);
  reduced("bias gradient", 1, rows, kCols);
  reduced("narrow bias gradient", 1, rows, 768);
  const auto indexed = [&](const char* name, Kernel<IndexArgs> kernel, double bytes_per_element) {
    if (!b.wanted(name)) return;
    void *big = b.array(bf16, n), *small = b.array(bf16, n), *ids = different_ids(b, rows);
    const bool adds = kernel == b.k().index_add;
    const ById by_id(b, ids, 1, rows, bf16, bf16);
    b.measure(name, shape, bytes_per_element * static_cast<double>(n), [&](Exec& e) {
      if (adds) by_id.find_order(e);
      kernel({.big = big,
              .small = small,
              .index = ids,
              .outer = 1,
              .n = rows,
              .inner = kCols,
              .count = rows,
              .dtype = bf16,
              .index_dtype = i32,
              .order = by_id.order,
              .workspace = by_id.workspace},
             e);
    });
  };
  indexed("index_select", b.k().index_select, 4);
  indexed("index_add", b.k().index_add, 6);
}

}  // namespace

void measure_rows(Bench& bench) {
  norms(bench);
  heads(bench);
  sums(bench);
}

}  // namespace tessera::gpu_check
