// Products beside the fastest algorithm that the library offers, and attention beside what its
// arithmetic would take: both wait for arithmetic, not for memory.
#include <array>
#include <string>
#include <vector>

#include "kernels/attention.hpp"
#include "tessera/base/error.hpp"
#include "tools/gpu_check/bench.hpp"

namespace tessera::gpu_check {
namespace {

using namespace kernels;

struct Product {
  std::string name;
  std::int64_t m, n, k;
  bool trans_a, trans_b, accumulates;
};

void measure(Bench& b, const Product& p) {
  const std::int64_t m = b.scaled(p.m), n = b.scaled(p.n), k = b.scaled(p.k);
  GemmArgs args{};
  args.a = b.random_array(bf16, m * k), args.b = b.random_array(bf16, k * n);
  args.c_dtype = p.accumulates ? f32 : bf16, args.c = b.array(args.c_dtype, m * n);
  args.alpha = 1, args.beta = p.accumulates ? 1 : 0, args.batch = 1, args.dtype = bf16;
  args.m = static_cast<std::int32_t>(m), args.n = static_cast<std::int32_t>(n);
  args.k = static_cast<std::int32_t>(k), args.ldc = args.n;
  args.trans_a = p.trans_a, args.lda = p.trans_a ? args.m : args.k;
  args.trans_b = p.trans_b, args.ldb = p.trans_b ? args.k : args.n;
  b.product(p.name, args);
}

// A linear layer's three: forward, to its input, to its weight.
void measure_layer(Bench& b, const std::string& name, std::int64_t tokens, std::int64_t in,
                   std::int64_t out) {
  measure(b, {name + ", forward", tokens, out, in, false, true, false});
  measure(b, {name + ", to the input", tokens, in, out, false, false, false});
  measure(b, {name + ", to the weight", out, in, tokens, true, false, true});
}

struct Layer {
  const char* name;
  std::int64_t tokens, in, out;
};

// As the cases of bench/compare_cuda.py have them; a head's are of one chunk of the loss.
constexpr Layer kLayers[] = {
    {"124M q, k, v", 8192, 768, 2304}, {"124M after attention", 8192, 768, 768},
    {"124M up", 8192, 768, 3072},      {"124M down", 8192, 3072, 768},
    {"124M head", 8192, 768, 50304},   {"1.2B q", 8192, 2048, 2048},
    {"1.2B k", 8192, 2048, 512},       {"1.2B gate", 8192, 2048, 8192},
    {"1.2B down", 8192, 8192, 2048},   {"1.2B head", 4096, 2048, 128256},
    {"8B q", 8192, 4096, 4096},        {"8B k", 8192, 4096, 1024},
    {"8B gate", 8192, 4096, 14336},    {"8B down", 8192, 14336, 4096},
    {"8B head", 4096, 4096, 128256},
};

struct Heads {
  std::int64_t batch, length, heads, kv_heads, head_dim;
};

void measure_attention(Bench& b, Heads s, DType dtype) {
  s.batch = b.scaled(s.batch);
  const std::int64_t length = b.scaled(s.length);
  const std::int64_t q_size = s.batch * length * s.heads * s.head_dim,
                     k_size = s.batch * length * s.kv_heads * s.head_dim;
  AttentionArgs f{};
  f.q = b.random_array(dtype, q_size), f.k = b.random_array(dtype, k_size);
  f.v = b.random_array(dtype, k_size), f.o = b.array(dtype, q_size);
  f.lse = b.array(f32, s.batch * s.heads * length), f.scale = 0.125f, f.dtype = dtype;
  f.batch = static_cast<std::int32_t>(s.batch), f.length = static_cast<std::int32_t>(length);
  f.heads = f.q_row = static_cast<std::uint16_t>(s.heads);
  f.kv_heads = f.k_row = f.v_row = static_cast<std::uint16_t>(s.kv_heads);
  f.head_dim = static_cast<std::uint16_t>(s.head_dim), f.causal = true;

  AttentionBackwardArgs g{};
  g.q = f.q, g.k = f.k, g.v = f.v, g.o = f.o, g.lse = f.lse, g.scale = f.scale;
  g.d_o = b.random_array(dtype, q_size), g.dq = b.array(dtype, q_size);
  g.dk = b.array(dtype, k_size), g.dv = b.array(dtype, k_size);
  const std::int64_t workspace =
      attention_workspace_bytes(s.batch, length, s.heads, s.kv_heads, s.head_dim, dtype, true);
  g.workspace = workspace > 0 ? b.array(boolean, workspace) : nullptr;
  g.batch = f.batch, g.length = f.length, g.heads = f.heads, g.kv_heads = f.kv_heads;
  g.head_dim = f.head_dim, g.q_row = g.dq_row = f.q_row, g.k_row = g.dk_row = f.k_row;
  g.v_row = g.dv_row = f.v_row, g.dtype = dtype, g.causal = g.deterministic = true;
  AttentionBackwardArgs any_order = g;
  const std::int64_t other_workspace =
      attention_workspace_bytes(s.batch, length, s.heads, s.kv_heads, s.head_dim, dtype, false);
  any_order.workspace = other_workspace > 0 ? b.array(boolean, other_workspace) : nullptr;
  any_order.deterministic = false;

  const std::string shape = concat(name(dtype), " [", s.batch, ", ", length, ", ", s.heads, " of ",
                                   s.kv_heads, ", ", s.head_dim, "]");
  // Two products forward and five backward, half of each under the diagonal.
  const double flops = 2. * static_cast<double>(q_size) * static_cast<double>(length);
  const auto products = [&](Products::Kind kind) {
    return Products{.kind = kind,
                    .dtype = dtype,
                    .batch = static_cast<std::int32_t>(s.batch * s.heads),
                    .m = f.length,
                    .n = f.length,
                    .k = f.head_dim};
  };
  const Products once = products(Products::Kind::attention),
                 back = products(Products::Kind::attention_backward),
                 ordered = products(Products::Kind::ordered_attention_backward);
  std::vector<Bench::Arithmetic> works = {
      {"attention", shape, flops, 0, [&](Exec& e) { b.k().attention(f, e); }, once},
      {"attention_backward", shape, 2.5 * flops, workspace,
       [&](Exec& e) { b.k().attention_backward(g, e); }, ordered}};
  if (dtype != f32)  // ours, which has one order
    works.push_back({"attention_backward, any order", shape, 2.5 * flops, other_workspace,
                     [&](Exec& e) { b.k().attention_backward(any_order, e); }, back});
  b.measure_arithmetic(works);
}

}  // namespace

void measure_products(Bench& b) {
  if (b.wanted("products")) {
    measure_layer(b, "4096 by 4096", 16384, 4096, 4096);
    measure(b, {"GPT-2's fused projection", 8192, 2304, 768, false, true, false});
    measure(b, {"GPT-2's head", 8192, 50304, 768, false, true, false});
    measure(b, {"Llama's head", 4096, 128256, 2048, false, true, false});
  }
  if (b.named("model_products"))
    for (const Layer& l : kLayers) measure_layer(b, l.name, l.tokens, l.in, l.out);
}

// bf16 as the module has it, through cuDNN where it is; f32 is always our own kernel.
void measure_attentions(Bench& b) {
  if (!b.named("attention")) return;
  constexpr std::array kShapes = {
      Heads{8, 1024, 12, 12, 64}, Heads{2, 4096, 32, 8, 64},  Heads{1, 8192, 32, 8, 64},
      Heads{4, 1024, 32, 8, 128}, Heads{2, 4096, 32, 8, 128}, Heads{1, 8192, 32, 8, 128},
  };
  for (const Heads& shape : kShapes) measure_attention(b, shape, bf16);
  measure_attention(b, kShapes[0], f32);
  measure_attention(b, kShapes[3], f32);
}

}  // namespace tessera::gpu_check
