// The kernels that wait for memory, at the shapes of training: activations of a Llama of width 4096
// in bf16, states of AdamW in f32. Here those that take arrays as flat. Inputs are made before the
// measurement: what is timed is the kernel alone.
//
// Not measured: clip, put_scalars and complete, which touch a few numbers; normal, uniform and
// rope_table, which compute for longer than they write; gather, scatter, scatter_add, cumsum and
// sort, which no model here calls.
#include <array>
#include <string>

#include "tessera/base/error.hpp"
#include "tools/gpu_check/bench.hpp"

namespace tessera::gpu_check {
namespace {

using namespace kernels;

constexpr std::int64_t kRows = 16384, kCols = 4096;

void elementwise(Bench& b) {
  const std::int64_t n = b.scaled(kRows) * kCols;
  const auto bytes = static_cast<double>(n);
  if (b.wanted("cast")) {
    void *out = b.array(bf16, n), *in = b.array(f32, n);
    b.measure("cast", "f32 to bf16", 6 * bytes, [&](Exec& e) {
      UnaryArgs args{};
      args.out = out, args.in = in, args.count = n, args.op = UnaryOp::copy, args.out_dtype = bf16,
      args.in_dtype = f32;
      b.k().unary(args, e);
    });
  }
  if (b.wanted("add")) {
    void *out = b.array(bf16, n), *x = b.array(bf16, n), *y = b.array(bf16, n);
    b.measure("add", "bf16", 6 * bytes, [&](Exec& e) {
      BinaryArgs args{};
      args.out = out, args.a = x, args.b = y, args.count = n, args.op = BinaryOp::add,
      args.dtype = bf16;
      b.k().binary(args, e);
    });
  }
  if (b.wanted("gelu")) {
    void *out = b.array(bf16, n), *x = b.array(bf16, n);
    b.measure("gelu", "bf16", 4 * bytes, [&](Exec& e) {
      UnaryArgs args{};
      args.out = out, args.in = x, args.count = n, args.op = UnaryOp::gelu, args.out_dtype = bf16,
      args.in_dtype = bf16;
      b.k().unary(args, e);
    });
  }
  if (b.wanted("scalar")) {
    void *out = b.array(bf16, n), *x = b.array(bf16, n);
    b.measure("scalar", "bf16 times a number", 4 * bytes, [&](Exec& e) {
      ScalarArgs args{};
      args.out = out, args.in = x, args.scalar = 0.5, args.count = n, args.op = BinaryOp::mul,
      args.dtype = bf16;
      b.k().scalar(args, e);
    });
  }
  if (b.wanted("where")) {
    void *out = b.array(bf16, n), *c = b.array(boolean, n), *x = b.array(bf16, n),
         *y = b.array(bf16, n);
    b.measure("where", "bf16", 7 * bytes, [&](Exec& e) {
      WhereArgs args{};
      args.out = out, args.condition = c, args.a = x, args.b = y, args.dtype = bf16, args.ndim = 1;
      args.shape[0] = static_cast<std::int32_t>(n);
      args.condition_strides[0] = args.a_strides[0] = args.b_strides[0] = 1;
      b.k().where(args, e);
    });
  }
  if (b.wanted("fill")) {
    void* out = b.array(bf16, n);
    b.measure("fill", "bf16", 2 * bytes, [&](Exec& e) {
      FillArgs args{};
      args.out = out, args.value = 1, args.count = n, args.dtype = bf16;
      b.k().fill(args, e);
    });
  }
  if (b.wanted("arange")) {
    void* out = b.array(i32, n);
    b.measure("arange", "i32", 4 * bytes, [&](Exec& e) {
      b.k().arange({.out = out, .start = 0, .step = 1, .count = n, .dtype = i32}, e);
    });
  }
  if (b.wanted("axpby")) {
    void *y = b.array(f32, n), *x = b.array(bf16, n);
    b.measure("axpby", "f32 += bf16", 10 * bytes, [&](Exec& e) {
      AxpbyArgs args{};
      args.y = y, args.x = x, args.alpha = 1, args.beta = 1, args.count = n, args.y_dtype = f32,
      args.x_dtype = bf16;
      b.k().axpby(args, e);
    });
  }
  if (b.wanted("swiglu")) {
    void *out = b.array(bf16, n), *g = b.array(bf16, n), *u = b.array(bf16, n);
    b.measure("swiglu", "bf16", 6 * bytes, [&](Exec& e) {
      b.k().swiglu({.out = out,
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
      b.k().swiglu_backward({.d_gate = dg,
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
      b.k().dropout({.y = y,
                     .x = x,
                     .device_key = nullptr,
                     .key = 1,
                     .offset = 0,
                     .count = n,
                     .p = 0.1f,
                     .dtype = bf16},
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
    const auto* segments = b.constant(FlatSegment{0, n, 0, 0, -1, 1, 0.1f, 0});
    const auto* scalars = b.constant(UpdateScalars{1e-3f, 0.9f, 0.95f, 1e-8f, 0.1f, 0.05f, 1, 0});
    b.measure("adamw", shape, 28 * bytes, [&](Exec& e) {
      b.k().update({.values = p,
                    .moments = {m, v},
                    .gradient = g,
                    .segments = segments,
                    .counts = nullptr,
                    .scalars = scalars,
                    .clip = nullptr,
                    .segment_count = 1,
                    .op = UpdateOp::adamw},
                   e);
    });
  }
  if (b.wanted("sgd")) {
    auto *p = b.array<float>(f32, n), *buffer = b.array<float>(f32, n), *g = b.array<float>(f32, n);
    const auto* segments = b.constant(FlatSegment{0, n, 0, 0, -1, 1, 0.1f, 0});
    const auto* scalars = b.constant(UpdateScalars{1e-3f, 0, 0, 0, 1, 1, 1, 0.9f});
    b.measure("sgd", shape, 20 * bytes, [&](Exec& e) {
      b.k().update({.values = p,
                    .moments = {buffer},
                    .gradient = g,
                    .segments = segments,
                    .counts = nullptr,
                    .scalars = scalars,
                    .clip = nullptr,
                    .segment_count = 1,
                    .op = UpdateOp::sgd},
                   e);
    });
  }
  if (b.wanted("scale_flat")) {
    auto* g = b.array<float>(f32, n);
    const auto* factor = b.constant(0.5f);
    b.measure("scale_flat", shape, 8 * bytes,
              [&](Exec& e) { b.k().scale_flat({.data = g, .factor = factor, .count = n}, e); });
  }
  if (b.wanted("sumsq")) {
    auto* g = b.array<float>(f32, n);
    void* out = b.array(f64, 1);
    b.measure("sumsq", shape, 4 * bytes, [&](Exec& e) {
      b.k().sumsq_flat(
          {.out = out, .in = {g}, .count = {n}, .arrays = 1, .out_dtype = f64, .accumulate = false},
          e);
    });
  }
  if (b.wanted("pack")) {
    auto* src = b.array<std::byte>(f32, n);
    auto* dst = b.array<std::byte>(bf16, n);
    const auto* entries = b.constant(PackEntry{0, 0, n});
    b.measure("pack", "f32 to bf16", 6 * bytes, [&](Exec& e) {
      b.k().pack({.dst = dst,
                  .src = src,
                  .entries = entries,
                  .entry_count = 1,
                  .dst_dtype = bf16,
                  .src_dtype = f32},
                 e);
    });
  }
}

void peers(Bench& b) {
  constexpr int kPeers = 8;
  const std::int64_t n = b.scaled(std::int64_t{1} << 24);
  if (b.wanted("reduce_peers")) {
    void* out = b.array(f32, n);
    std::array<const void*, kPeers> inputs;
    for (const void*& input : inputs) input = b.array(f32, n);
    b.measure("reduce_peers", concat(kPeers, " of f32 [", n, "]"),
              4 * (kPeers + 1) * static_cast<double>(n), [&](Exec& e) {
                b.k().reduce_peers({.out = out,
                                    .inputs = inputs.data(),
                                    .count = n,
                                    .n_inputs = kPeers,
                                    .dtype = f32,
                                    .op = PeersOp::sum},
                                   e);
              });
  }
  if (b.wanted("copies")) {
    auto *out = b.array<std::byte>(f32, kPeers * n), *in = b.array<std::byte>(f32, kPeers * n);
    std::array<CopyArgs, kPeers> copies;
    for (int p = 0; p < kPeers; ++p)
      copies[static_cast<std::size_t>(p)] = {out + 4 * n * p, in + 4 * n * p, 4 * n};
    b.measure("copies", concat(kPeers, " of ", 4 * n, " bytes"),
              8 * kPeers * static_cast<double>(n),
              [&](Exec& e) { b.k().copies({copies.data(), kPeers}, e); });
  }
}

}  // namespace

void measure_kernels(Bench& bench) {
  elementwise(bench);
  measure_rows(bench);
  measure_float8(bench);
  states(bench);
  peers(bench);
}

}  // namespace tessera::gpu_check
