// What kernels/cuda/blas.cpp asks of cuBLASLt, and how often. tests/kernels/cases/gemm.cpp and
// gemm_fp8.cpp run over the same table.
#include <vector>

#include "kernels/cuda/kernels.hpp"
#include "tests/cuda/column_blas.hpp"
#include "tests/emulator/gpu_thread.hpp"
#include "tests/support/catch.hpp"

namespace tessera::kernels::cuda {
namespace {

template <auto member, class Args>
void queued(const Args& args, Exec& exec) {
  emulator::enqueue(exec.native_stream, [args] {
    Exec here;
    (cpu_kernels().*member)(args, here);
  });
}

}  // namespace

constinit const Kernels kKernels = [] {
  Kernels kernels{};
  kernels.unary = queued<&Kernels::unary>;
  kernels.binary = queued<&Kernels::binary>;
  kernels.fill = queued<&Kernels::fill>;
  kernels.axpby = queued<&Kernels::axpby>;
  kernels.gemm = gemm;
  kernels.gemm_gelu = gemm_gelu;
  kernels.gemm_fp8 = gemm_fp8;
  kernels.gemm_choice = gemm_choice;
  return kernels;
}();

}  // namespace tessera::kernels::cuda

using namespace tessera;
using namespace tessera::kernels;

namespace {

// [4, 8] by [8, 16] of ones, whose product is 8 everywhere.
struct Ones {
  std::vector<float> a = std::vector<float>(4 * 8 + 4, 1), b = std::vector<float>(8 * 16 + 4, 1),
                     bias = std::vector<float>(16, 1), c = std::vector<float>(4 * 16 + 4, -1);
  GemmArgs args{};

  Ones() {
    args.a = a.data();
    args.b = b.data();
    args.c = c.data();
    args.alpha = 1;
    args.batch = 1;
    args.m = 4;
    args.n = args.ldb = args.ldc = 16;
    args.k = args.lda = 8;
  }
};

int asked_by(const GemmArgs& args, Exec& exec) {
  const int before = kernel_test::heuristic_calls();
  cuda::gemm(args, exec);
  return kernel_test::heuristic_calls() - before;
}

}  // namespace

TEST_CASE("the heuristic is asked once for equal products, and anew for others", "[cuda]") {
  Ones ones;
  Exec exec;  // without a stream: at once
  CHECK(asked_by(ones.args, exec) == 1);
  CHECK(ones.c[5] == 8);
  CHECK(asked_by(ones.args, exec) == 0);
  GemmArgs other = ones.args;
  other.beta = 1;  // no algorithm depends on it
  CHECK(asked_by(other, exec) == 0);
  CHECK(ones.c[5] == 16);
  other = ones.args;
  other.a = ones.a.data() + 1;
  CHECK(asked_by(other, exec) == 1);
  other = ones.args;
  other.ldc = 15;
  other.n = 15;
  CHECK(asked_by(other, exec) == 1);
  other = ones.args;
  other.tf32 = true;
  CHECK(asked_by(other, exec) == 1);
  other = ones.args;
  other.bias = ones.bias.data();
  CHECK(asked_by(other, exec) == 1);
  std::vector<std::byte> workspace(1024);
  exec.workspace = workspace.data();
  exec.workspace_bytes = workspace.size();
  CHECK(asked_by(ones.args, exec) == 1);
  CHECK(exec.error == nullptr);
}

TEST_CASE("what the library refuses at the end of a product is done by kernels", "[cuda]") {
  using kernel_test::Epilogues;
  for (const Epilogues how : {Epilogues::not_supported, Epilogues::invalid}) {
    kernel_test::set_epilogues(how);
    Ones ones;
    ones.args.bias = ones.bias.data();
    ones.args.ldc = 17;
    ones.args.n = how == Epilogues::invalid ? 14 : 15;  // answers are kept
    Exec exec;
    for (const bool again : {false, true}) {
      CHECK(asked_by(ones.args, exec) == (again ? 0 : 2));
      CHECK(exec.error == nullptr);
      CHECK(ones.c[3 * 17 + 13] == 9);
    }
  }
  kernel_test::set_epilogues(Epilogues::offered);
}

TEST_CASE("a benchmark runs each of the library's algorithms", "[cuda]") {
  Ones ones;
  Exec exec;
  int choices = 0;
  for (; cuda::gemm_choice(ones.args, choices, exec); ++choices) {
    CHECK(ones.c[0] == 8);
    ones.c[0] = -1;
  }
  CHECK(choices == 3);
  CHECK(exec.error == nullptr);
}

TEST_CASE("a product that cannot be queued says which it is", "[cuda]") {
  Ones ones;
  ones.args.lda = 7;  // rows overlap
  Exec exec;
  cuda::gemm(ones.args, exec);
  REQUIRE(exec.error != nullptr);
  CHECK(std::string(exec.error) == "matmul: [4, 8] by [8, 16] of f32, batch 1: an invalid value");
  CHECK(ones.c[0] == -1);
}
