// The kernels with the largest blocks run on the stack that the smallest systems give a thread.
#include <pthread.h>

#include "tests/kernels/support.hpp"

using namespace kernel_test;

namespace {

// musl's threads have that much, and nobody's have less.
constexpr std::size_t kStackBytes = std::size_t{128} << 10;

template <class F>
void on_a_small_stack(F f) {
  pthread_attr_t attributes;
  REQUIRE(::pthread_attr_init(&attributes) == 0);
  REQUIRE(::pthread_attr_setstacksize(&attributes, kStackBytes) == 0);
  pthread_t thread{};
  const auto body = [](void* function) -> void* {
    (*static_cast<F*>(function))();
    return nullptr;
  };
  REQUIRE(::pthread_create(&thread, &attributes, body, &f) == 0);
  REQUIRE(::pthread_join(thread, nullptr) == 0);
  ::pthread_attr_destroy(&attributes);
}

}  // namespace

TEST_CASE("products and attention run on a stack of 128 KiB", "[kernels][threads]") {
  constexpr std::int32_t kSize = 130;  // more than a block of A, and three tiles
  constexpr std::uint16_t kHeadDim = kAttentionMaxHeadDim;
  kernel_test::Random random;
  INFO("seed " << random.seed);
  for (const DType dtype : kFloats) {
    INFO(dtype);
    const Array a = random.array(dtype, kSize * kSize, -1, 1),
                q = random.array(dtype, kSize * kHeadDim, -1, 1);
    Array c(dtype, kSize * kSize), o(dtype, kSize * kHeadDim), dq = o, dk = o, dv = o;
    Array lse(dtype == DType::f64 ? DType::f64 : DType::f32, kSize);
    const auto run = [&] {
      Exec exec;
      GemmArgs product{};
      product.c = c.data();
      product.a = product.b = a.data();
      product.alpha = product.batch = 1;
      product.m = product.n = product.k = product.lda = product.ldb = product.ldc = kSize;
      product.dtype = product.c_dtype = dtype;
      cpu_kernels().gemm(product, exec);
      AttentionArgs forward{};
      forward.o = o.data();
      forward.lse = lse.data();
      forward.q = forward.k = forward.v = q.data();
      forward.scale = 0.1f;
      forward.batch = 1;
      forward.length = kSize;
      forward.heads = forward.kv_heads = forward.q_row = forward.k_row = forward.v_row = 1;
      forward.head_dim = kHeadDim;
      forward.dtype = dtype;
      cpu_kernels().attention(forward, exec);
      AttentionBackwardArgs backward{};
      backward.dq = dq.data();
      backward.dk = dk.data();
      backward.dv = dv.data();
      backward.q = backward.k = backward.v = q.data();
      backward.o = backward.d_o = o.data();
      backward.lse = lse.data();
      backward.scale = 0.1f;
      backward.batch = 1;
      backward.length = kSize;
      backward.heads = backward.kv_heads = 1;
      backward.q_row = backward.k_row = backward.v_row = 1;
      backward.dq_row = backward.dk_row = backward.dv_row = 1;
      backward.head_dim = kHeadDim;
      backward.dtype = dtype;
      cpu_kernels().attention_backward(backward, exec);
    };
    run();
    const auto expected = std::make_tuple(c.bytes, o.bytes, dq.bytes, dk.bytes, dv.bytes);
    for (Array* out : {&c, &o, &dq, &dk, &dv}) out->fill(NAN);
    on_a_small_stack(run);
    const bool same_bits =
        std::make_tuple(c.bytes, o.bytes, dq.bytes, dk.bytes, dv.bytes) == expected;
    CHECK(same_bits);
  }
}
