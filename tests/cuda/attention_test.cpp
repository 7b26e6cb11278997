// What kernels/cuda/cudnn*.cpp ask of cuDNN, and what its heuristic answers for an H200 that is not
// there: descriptors are built, engines checked and their kernels compiled; nothing runs.
#include <cublasLt.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <filesystem>
#include <fstream>
#include <random>

#include "kernels/cuda/cudnn_attention.hpp"
#include "kernels/cuda/kernels.hpp"
#include "tests/support/catch.hpp"

using namespace tessera;
using namespace tessera::kernels;
using namespace tessera::kernels::cuda::cudnn;

// What the calls of cudnn.cpp end in here.
static int g_own = 0;
static bool g_has_warpgroups = false;
extern "C" cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
extern "C" cudaError_t cudaMemsetAsync(void*, int, std::size_t, cudaStream_t) {
  return cudaErrorNotSupported;
}
extern "C" cublasStatus_t cublasLtCreate(cublasLtHandle_t*) { return CUBLAS_STATUS_NOT_SUPPORTED; }
namespace tessera::kernels::cuda {
bool has_warpgroup_products() { return g_has_warpgroups; }
void attention_in_tiles(const AttentionArgs&, Exec&) { ++g_own; }
void attention_backward_in_tiles(const AttentionBackwardArgs&, Exec&) { ++g_own; }
bool attention_backward_on_tensor_cores(const AttentionBackwardArgs&, Exec&) {
  ++g_own;
  return true;
}
}  // namespace tessera::kernels::cuda

namespace {

constexpr const char* kH200 =
    R"({"maxGridSize":[2147483647,65535,65535],"maxBlockSize":[1024,1024,64],"regsPerBlock":65536,)"
    R"("multiProcessorCount":132,"warpSize":32,"maxSharedMemoryPerBlock":49152,)"
    R"("maxSharedMemoryPerBlockOptin":232448,"reservedSharedMemoryPerBlock":1024,)"
    R"("maxRegistersPerSM":65536,"maxCtasPerSM":32,"maxThreadsPerBlock":1024,)"
    R"("maxThreadsPerSM":2048,"pciDeviceId":0,"isTccDriver":0,"supportCoopLaunch":1,)"
    R"("totalGlobalMem":150122201088,"smClockRateKHz":1980000,"memClockRateKHz":3201000,)"
    R"("l2CacheSize":62914560,"cudaDeviceId":0,"deviceVer":900,"driverVer":13000,)"
    R"("deviceName":"NVIDIA H200"})";
constexpr std::int64_t kForwardBytes = std::int64_t{32} << 20;  // a stream's, see memory/memory.hpp

// Null, with a line, where there is none to test with.
const Library* cudnn_or_none() {
  static const Library library = [] {
    // Its name is libcuda.so.1: who asks for that from here on gets it.
    REQUIRE(dlopen(TESSERA_LOADING_DRIVER, RTLD_NOW | RTLD_GLOBAL) != nullptr);
    return open_library({TESSERA_CUDNN, "libcudnn.so.9"});
  }();
  if (!library) WARN("not tested: " << library.reason);
  return library ? &library : nullptr;
}

struct Shape {
  std::int32_t batch, length;
  std::uint16_t heads, kv_heads, dim;
  bool fused = false, causal = true;
  DType dtype = bf16;
};

AttentionBackwardArgs args_of(const Shape& s) {
  AttentionBackwardArgs a{};
  a.batch = s.batch;
  a.length = s.length;
  a.heads = s.heads;
  a.kv_heads = s.kv_heads;
  a.head_dim = s.dim;
  const auto row = static_cast<std::uint16_t>(s.heads + 2 * s.kv_heads);
  a.q_row = a.dq_row = s.fused ? row : s.heads;
  a.k_row = a.v_row = a.dk_row = a.dv_row = s.fused ? row : s.kv_heads;
  a.dtype = s.dtype;
  a.causal = s.causal;
  return a;
}
AttentionArgs forward_of(const AttentionBackwardArgs& b) {
  AttentionArgs a{};
  a.batch = b.batch;
  a.length = b.length;
  a.heads = b.heads;
  a.kv_heads = b.kv_heads;
  a.head_dim = b.head_dim;
  a.q_row = b.q_row;
  a.k_row = b.k_row;
  a.v_row = b.v_row;
  a.dtype = b.dtype;
  a.causal = b.causal;
  return a;
}
std::int64_t workspace_of(const AttentionBackwardArgs& a) {
  return attention_workspace_bytes(a.batch, a.length, a.heads, a.kv_heads, a.head_dim, a.dtype,
                                   false);
}

}  // namespace

TEST_CASE("cuDNN is opened from the first folder that has it", "[cuda]") {
  if (!cudnn_or_none()) return;
  const Library found = open_library({"/nowhere/libcudnn.so.9", TESSERA_CUDNN});
  REQUIRE(found);
  CHECK(std::filesystem::canonical(found.file).parent_path() ==
        std::filesystem::canonical(TESSERA_CUDNN).parent_path());
  CHECK(found.version >= 91000);
  CHECK(found.reason.empty());
}

TEST_CASE("where there is no cuDNN one line says so, and what to do", "[cuda]") {
  const Library none = open_library({"/nowhere/libcudnn.so.9", TESSERA_LOADING_DRIVER});
  CHECK_FALSE(none);
  CHECK_THAT(none.absence(),
             Catch::Contains("our own kernels") && Catch::Contains("/nowhere/libcudnn.so.9") &&
                 Catch::Contains("not cuDNN 9.10") && Catch::Contains("LD_LIBRARY_PATH"));
  CHECK(none.absence().find('\n') == std::string::npos);
}

TEST_CASE("cuDNN is looked for in the folder of a Python wheel beside cuBLASLt's", "[cuda]") {
  namespace fs = std::filesystem;
  const fs::path packages = fs::canonical(fs::temp_directory_path()) /
                            ("tessera-" + std::to_string(std::random_device{}()));
  for (const char* wheel : {"cu13", "cublas"}) {
    const fs::path folder = packages / "nvidia" / wheel / "lib";
    fs::create_directories(folder);
    std::ofstream(folder / "libcublasLt.so.13") << "";
    const std::vector<std::string> files = candidates((folder / "libcublasLt.so.13").string());
    REQUIRE(files.size() >= 3);
    CHECK(files[0] == "libcudnn.so.9");
    CHECK(files[1] == (folder / "libcudnn.so.9").string());
    CHECK(files[2] == (packages / "nvidia/cudnn/lib/libcudnn.so.9").string());
  }
  fs::remove_all(packages);
}

TEST_CASE("what no library computes needs no workspace", "[cuda]") {
  for (const bool deterministic : {true, false}) {
    CHECK(attention_workspace_bytes(1, 64, 2, 2, 64, f32, deterministic) == 0);
    CHECK(attention_workspace_bytes(1, 64, 2, 2, 12, bf16, deterministic) == 0);
    CHECK(attention_workspace_bytes(1, 64, 2, 2, 256, bf16, deterministic) == 0);
    CHECK(attention_workspace_bytes(0, 64, 2, 2, 64, bf16, deterministic) == 0);
    CHECK(attention_workspace_bytes(1, 64, 2, 2, 64, f16, deterministic) > 0);
  }
  CHECK(attention_workspace_bytes(1, 32768, 4, 4, 64, bf16, true) == 2 * 4 * 32768 * 4);
}

TEST_CASE("cuDNN has plans within the workspace for the shapes of the models", "[cuda]") {
  const Library* const library = cudnn_or_none();
  if (!library) return;
  for (const Shape& s : {
           Shape{8, 1024, 12, 12, 64, true},        // GPT-2 124M, one fused projection
           Shape{2, 4096, 32, 8, 64},               // Llama 1.2B
           Shape{1, 8192, 32, 8, 128},              // of the width of 8B
           Shape{3, 1000, 4, 2, 128, true, false},  // no whole tiles, no mask
           Shape{2, 129, 2, 1, 80, true, true, f16},
       }) {
    INFO(s.batch << " x " << s.length << ", " << s.heads << " heads of " << s.dim);
    const AttentionBackwardArgs a = args_of(s);
    const Proposal forward =
        choose(*library, problem_of(forward_of(a)), kForwardBytes, nullptr, kH200);
    INFO(forward.reason);
    CHECK(forward.plan);
    const Problem p = problem_of(a);
    const std::int64_t most = workspace_of(a) - delta_bytes(p) - sums_bytes(p);
    const Proposal backward = choose(*library, p, most, nullptr, kH200);
    INFO(backward.reason);
    CHECK(backward.plan);
  }
}

TEST_CASE("a configuration that wants more workspace is not chosen", "[cuda]") {
  const Library* const library = cudnn_or_none();
  if (!library) return;
  const AttentionBackwardArgs a = args_of({2, 512, 2, 2, 64});
  const Problem p = problem_of(a);
  std::int64_t least = std::numeric_limits<std::int64_t>::max();
  for (const Proposal& one : proposals(*library, p, -1, nullptr, kH200))
    if (one.plan) least = std::min(least, one.plan->workspace_bytes);
  REQUIRE(least < std::numeric_limits<std::int64_t>::max());
  CHECK(choose(*library, p, least, nullptr, kH200).plan);
  const Proposal refused = choose(*library, p, least - 1, nullptr, kH200);
  CHECK_FALSE(refused.plan);
  CHECK_FALSE(refused.reason.empty());
}

TEST_CASE("what cuDNN can't serve our own kernels do, with one line for a shape", "[cuda]") {
  cudnn_or_none();  // a driver without a device: no handle can be made
  alignas(256) static std::byte memory[256];
  AttentionBackwardArgs b = args_of({1, 64, 2, 2, 64});
  b.q = b.k = b.v = b.o = b.d_o = b.lse = b.dq = b.dk = b.dv = b.workspace = memory;
  AttentionArgs a = forward_of(b);
  a.q = a.k = a.v = a.o = a.lse = memory;
  // Whether it said so.
  const auto runs = [](const auto& args, const auto& kernel) {
    Exec exec;
    const int before = g_own;
    kernel(args, exec);
    CHECK(g_own == before + 1);
    CHECK(exec.error == nullptr);
    return std::string(exec.note ? exec.note : "");
  };
  CHECK_THAT(runs(a, cuda::attention), Catch::Contains("by our own kernels"));
  CHECK(runs(a, cuda::attention).empty());
  a.dtype = f32;
  CHECK(runs(a, cuda::attention).empty());  // by contract ours
  if (!cudnn_or_none()) return;
  a.dtype = f16;
  CHECK_THAT(runs(a, cuda::attention),
             Catch::Contains("[1, 64, 2, 64], 2 heads of keys, of f16: cuDNN: no handle"));
  CHECK_THAT(runs(b, cuda::attention_backward), Catch::Contains("cuDNN: no handle"));
  CHECK(runs(b, cuda::attention_backward).empty());
  b.deterministic = true;
  CHECK(runs(b, cuda::attention_backward).empty());
  // Where warpgroups multiply, short sequences are ours in any order, too.
  b.deterministic = false;
  g_has_warpgroups = true;
  b.length = 4095;
  CHECK(runs(b, cuda::attention_backward).empty());
  b.length = 4096;
  CHECK_THAT(runs(b, cuda::attention_backward), Catch::Contains("cuDNN: no handle"));
  g_has_warpgroups = false;
}
