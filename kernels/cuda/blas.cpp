// Matrix products through cuBLASLt, behind the contracts of kernels/gemm.hpp and gemm_fp8.hpp.
//
// cuBLASLt's matrices are stored by columns. Seen so, our row-major C = op(A) op(B) is its
// C^T = op(B)^T op(A)^T: our B is its A, [n, m] its result, and a bias runs along its columns.
//
// The heuristic is asked once for each shape, layout, alignment, epilogue and device; its first
// answer is kept, so that equal calls give equal bits. Sums that are split over k are added in f32,
// never in the output's 16 bits. Workspace is the stream's, 256-byte aligned and never allocated
// here. What cuBLASLt refuses is put together from a plain product and elementwise kernels.
#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdio>
#include <exception>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "kernels/cuda/kernels.hpp"
#include "kernels/gemm_gelu.hpp"

namespace tessera::kernels::cuda {
namespace {

constexpr int kDevices = 64;
constexpr int kMostChoices = 32;
constexpr std::uintptr_t kAligned = 256;  // more does not matter to any algorithm

// A product with all that it may do at its end.
struct Problem {
  GemmArgs gemm;
  cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  void* aux = nullptr;
  std::int32_t ld_aux = 0;
  const GemmFp8Args* fp8 = nullptr;  // what GemmArgs has no place for
};

// What an algorithm may depend on.
struct Key {
  std::int64_t a_stride, b_stride, c_stride, workspace_bytes;
  std::int32_t device, batch, m, n, k, lda, ldb, ldc, ld_aux, epilogue, choices;
  DType dtype, b_dtype, c_dtype;
  Scaling a_scaling, b_scaling;
  std::uint8_t flags;  // trans_a, trans_b, tf32, fast, c0
  std::uint8_t align_a, align_b, align_c, align_bias, align_aux;  // logarithms
  std::uint8_t zeros[1];
  bool operator==(const Key&) const = default;
};
static_assert(std::has_unique_object_representations_v<Key>, "it is hashed as bytes");

struct KeyHash {
  std::size_t operator()(const Key& key) const noexcept {
    return std::hash<std::string_view>()({reinterpret_cast<const char*>(&key), sizeof key});
  }
};

using Algorithms = std::vector<cublasLtMatmulAlgo_t>;

// Shared by all threads; an entry stays where it is.
struct Cache {
  std::mutex mutex;
  std::array<cublasLtHandle_t, kDevices> handles{};
  std::unordered_map<Key, Algorithms, KeyHash> algorithms;
};
Cache& cache() {
  static Cache* const kept = new Cache;  // outlives threads that still submit when the process ends
  return *kept;
}

thread_local char g_refusal[256];

void refuse(Exec& exec, const GemmArgs& p, const char* what) {
  const std::string dtype(name(p.dtype));
  std::snprintf(g_refusal, sizeof g_refusal, "matmul: [%d, %d] by [%d, %d] of %s, batch %d: %s",
                p.m, p.k, p.k, p.n, dtype.c_str(), p.batch, what);
  exec.error = g_refusal;
}

cudaDataType_t type_of(DType dtype) {
  switch (dtype) {
    case DType::bf16:
      return CUDA_R_16BF;
    case DType::f16:
      return CUDA_R_16F;
    case DType::f64:
      return CUDA_R_64F;
    case DType::e4m3:
      return CUDA_R_8F_E4M3;
    case DType::e5m2:
      return CUDA_R_8F_E5M2;
    default:
      return CUDA_R_32F;
  }
}

// Bytes on which an address and the distance of matrices are aligned, at most kAligned.
std::uintptr_t alignment_of(const void* data, std::int64_t stride, std::int32_t batch,
                            DType dtype) {
  auto bits = reinterpret_cast<std::uintptr_t>(data) | kAligned;
  if (batch > 1) bits |= static_cast<std::uintptr_t>(stride) * size_bytes(dtype);
  return bits & (~bits + 1);
}

// The two of blocks are VEC128_32F and BLK128x128_32F, whose names came with 12.9.
std::int32_t mode_of(Scaling scaling) {
  return scaling == Scaling::tensor ? CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F
         : scaling == Scaling::rows ? 4
                                    : 5;
}

// The first failure of a row of calls.
struct Status {
  cublasStatus_t first = CUBLAS_STATUS_SUCCESS;
  Status& operator=(cublasStatus_t next) {
    if (first == CUBLAS_STATUS_SUCCESS) first = next;
    return *this;
  }
};

// cuBLASLt's description of a problem. Lives on the stack: nothing is allocated.
struct Described {
  cublasLtMatmulDescOpaque_t op;
  cublasLtMatrixLayoutOpaque_t a, b, c;
  Status status;

  explicit Described(const Problem& problem) {
    const GemmArgs& p = problem.gemm;
    const bool wide = p.dtype == DType::f64;
    status = cublasLtMatmulDescInit(&op,
                                    wide     ? CUBLAS_COMPUTE_64F
                                    : p.tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32
                                             : CUBLAS_COMPUTE_32F,
                                    wide ? CUDA_R_64F : CUDA_R_32F);
    set(CUBLASLT_MATMUL_DESC_TRANSA, p.trans_b ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(CUBLASLT_MATMUL_DESC_TRANSB, p.trans_a ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(CUBLASLT_MATMUL_DESC_EPILOGUE, problem.epilogue);
    if (p.bias) set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, p.bias);
    if (problem.aux) {
      set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, problem.aux);
      set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, std::int64_t{problem.ld_aux});
    }
    if (problem.fp8) set_scales(*problem.fp8);
    lay_out(a, problem.fp8 ? problem.fp8->b_dtype : p.dtype, p.trans_b ? p.k : p.n,
            p.trans_b ? p.n : p.k, p.ldb, p.b_batch_stride, p);
    lay_out(b, p.dtype, p.trans_a ? p.m : p.k, p.trans_a ? p.k : p.m, p.lda, p.a_batch_stride, p);
    lay_out(c, p.c_dtype, p.n, p.m, p.ldc, p.c_batch_stride, p);
  }

 private:
  template <class T>
  void set(cublasLtMatmulDescAttributes_t attribute, const T& value) {
    status = cublasLtMatmulDescSetAttribute(&op, attribute, static_cast<const void*>(&value),
                                            sizeof value);
  }
  void set_scales(const GemmFp8Args& p) {
    set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, p.b_scales);
    set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, p.a_scales);
    set(CUBLASLT_MATMUL_DESC_A_SCALE_MODE, mode_of(p.b_scaling));
    set(CUBLASLT_MATMUL_DESC_B_SCALE_MODE, mode_of(p.a_scaling));
    set(CUBLASLT_MATMUL_DESC_FAST_ACCUM, static_cast<std::int8_t>(p.fast));
  }
  void lay_out(cublasLtMatrixLayoutOpaque_t& layout, DType dtype, std::int32_t rows,
               std::int32_t cols, std::int32_t ld, std::int64_t stride, const GemmArgs& p) {
    status = cublasLtMatrixLayoutInit(&layout, type_of(dtype), static_cast<std::uint64_t>(rows),
                                      static_cast<std::uint64_t>(cols), ld);
    if (p.batch <= 1) return;
    status = cublasLtMatrixLayoutSetAttribute(&layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &p.batch,
                                              sizeof p.batch);
    status = cublasLtMatrixLayoutSetAttribute(&layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                                              &stride, sizeof stride);
  }
};

Key key_of(const Problem& problem, int device, int choices, const Exec& exec) {
  const GemmArgs& p = problem.gemm;
  const auto log = [](std::uintptr_t alignment) {
    return static_cast<std::uint8_t>(std::countr_zero(alignment));
  };
  Key key{};
  if (p.batch > 1) {
    key.a_stride = p.a_batch_stride;
    key.b_stride = p.b_batch_stride;
    key.c_stride = p.c_batch_stride;
  }
  key.workspace_bytes = static_cast<std::int64_t>(exec.workspace_bytes);
  key.device = device;
  key.batch = p.batch;
  key.m = p.m;
  key.n = p.n;
  key.k = p.k;
  key.lda = p.lda;
  key.ldb = p.ldb;
  key.ldc = p.ldc;
  key.ld_aux = problem.ld_aux;
  key.epilogue = static_cast<std::int32_t>(problem.epilogue);
  key.choices = choices;
  key.dtype = p.dtype;
  key.c_dtype = p.c_dtype;
  key.flags =
      static_cast<std::uint8_t>(p.trans_a + 2 * p.trans_b + 4 * p.tf32 + 16 * (p.c0 != nullptr));
  if (const GemmFp8Args* const fp8 = problem.fp8) {
    key.b_dtype = fp8->b_dtype;
    key.a_scaling = fp8->a_scaling;
    key.b_scaling = fp8->b_scaling;
    key.flags = static_cast<std::uint8_t>(key.flags + 8 * fp8->fast);
  }
  key.align_a = log(alignment_of(p.a, p.a_batch_stride, p.batch, p.dtype));
  key.align_b = log(alignment_of(p.b, p.b_batch_stride, p.batch, p.dtype));
  key.align_c = log(std::min(alignment_of(p.c, p.c_batch_stride, p.batch, p.c_dtype),
                             alignment_of(p.c0, p.c_batch_stride, p.batch, p.c_dtype)));
  key.align_bias = log(alignment_of(p.bias, 0, 1, p.dtype));
  key.align_aux = log(alignment_of(problem.aux, 0, 1, p.dtype));
  return key;
}

// Asks the heuristic; none where it knows no algorithm.
Algorithms ask(cublasLtHandle_t handle, Described& described, const Key& key, Status& status) {
  cublasLtMatmulPreferenceOpaque_t preference;
  status = cublasLtMatmulPreferenceInit(&preference);
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
    status = cublasLtMatmulPreferenceSetAttribute(&preference, attribute, &value, sizeof value);
  };
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<std::uint64_t>(key.workspace_bytes));
  prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
         std::uint32_t{CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, std::uint32_t{1} << key.align_b);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, std::uint32_t{1} << key.align_a);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, std::uint32_t{1} << key.align_c);
  // The alignment of a bias has no preference of its own; the output's stands for both.
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
         std::uint32_t{1} << std::min(key.align_c, key.align_bias));
  if (status.first != CUBLAS_STATUS_SUCCESS) return {};
  std::array<cublasLtMatmulHeuristicResult_t, kMostChoices> found{};
  int count = 0;
  const cublasStatus_t asked = cublasLtMatmulAlgoGetHeuristic(
      handle, &described.op, &described.a, &described.b, &described.c, &described.c, &preference,
      key.choices, found.data(), &count);
  // Some combinations with an epilogue are no valid value to it, rather than not supported.
  const bool has_none =
      asked == CUBLAS_STATUS_NOT_SUPPORTED ||
      (asked == CUBLAS_STATUS_INVALID_VALUE && key.epilogue != CUBLASLT_EPILOGUE_DEFAULT);
  if (asked != CUBLAS_STATUS_SUCCESS && !has_none) status = asked;
  Algorithms out;
  for (int i = 0; i < count; ++i)
    if (found[static_cast<std::size_t>(i)].state == CUBLAS_STATUS_SUCCESS)
      out.push_back(found[static_cast<std::size_t>(i)].algo);
  return out;
}

// Queues the product by algorithm `choice` of the first `choices`. False where cuBLASLt has none,
// and when exec.error has been set.
bool multiply(const Problem& problem, Exec& exec, int choice = 0, int choices = 1) {
  const GemmArgs& p = problem.gemm;
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= kDevices) {
    refuse(exec, p, "no device has been chosen");
    return false;
  }
  Described described(problem);
  Status status = described.status;
  const Key key = key_of(problem, device, choices, exec);
  const Algorithms* algorithms = nullptr;
  cublasLtHandle_t handle = nullptr;
  try {
    Cache& known = cache();
    const std::lock_guard lock(known.mutex);
    cublasLtHandle_t& own = known.handles[static_cast<std::size_t>(device)];
    if (!own) status = cublasLtCreate(&own);
    handle = own;
    auto at = known.algorithms.find(key);
    if (at == known.algorithms.end() && status.first == CUBLAS_STATUS_SUCCESS) {
      Algorithms found = ask(handle, described, key, status);
      if (status.first == CUBLAS_STATUS_SUCCESS)
        at = known.algorithms.emplace(key, std::move(found)).first;
    }
    if (at != known.algorithms.end()) algorithms = &at->second;
  } catch (const std::exception& e) {
    refuse(exec, p, e.what());
    return false;
  }
  if (algorithms) {
    if (static_cast<std::size_t>(choice) >= algorithms->size()) return false;
    const bool wide = p.dtype == DType::f64;
    const std::array factors{static_cast<float>(p.alpha), static_cast<float>(p.beta)};
    status = cublasLtMatmul(
        handle, &described.op, wide ? static_cast<const void*>(&p.alpha) : &factors[0], p.b,
        &described.a, p.a, &described.b, wide ? static_cast<const void*>(&p.beta) : &factors[1],
        p.c0 ? p.c0 : p.c, &described.c, p.c, &described.c,
        &(*algorithms)[static_cast<std::size_t>(choice)], exec.workspace, exec.workspace_bytes,
        static_cast<cudaStream_t>(exec.native_stream));
  }
  if (status.first == CUBLAS_STATUS_SUCCESS) return true;
  refuse(exec, p, cublasLtGetStatusString(status.first));
  return false;
}

// C = beta C0 + bias, by the elementwise kernels.
void start(const GemmArgs& p, Exec& exec) {
  AxpbyArgs args{};
  args.count = std::int64_t{p.m} * p.n;
  args.ndim = 2;
  args.shape[0] = p.m;
  args.shape[1] = p.n;
  args.y_strides[0] = p.ldc;
  args.y_strides[1] = args.x_strides[1] = 1;
  args.y_dtype = p.c_dtype;
  const bool begins = p.c0 && p.beta != 0;  // from C0; a bias comes behind it
  const void* const bias = begins ? nullptr : p.bias;
  if (bias) {
    args.x = bias;
    args.x_dtype = p.dtype;
    args.alpha = 1;
    args.beta = p.beta;
  } else {  // C0, scaled
    args.x_strides[0] = p.ldc;
    args.x_dtype = p.c_dtype;
    args.alpha = p.beta;
  }
  FillArgs zero{};
  zero.count = args.count;
  zero.ndim = 2;
  std::copy_n(args.shape, 2, zero.shape);
  std::copy_n(args.y_strides, 2, zero.out_strides);
  zero.dtype = p.c_dtype;
  for (std::int32_t i = 0; i < p.batch && !exec.error; ++i) {
    const std::int64_t at = i * p.c_batch_stride * static_cast<std::int64_t>(size_bytes(p.c_dtype));
    args.y = zero.out = static_cast<std::byte*>(p.c) + at;
    if (!bias) args.x = begins ? static_cast<const std::byte*>(p.c0) + at : args.y;
    if (!bias && p.beta == 0)
      kKernels.fill(zero, exec);
    else
      kKernels.axpby(args, exec);
  }
  if (!begins || !p.bias) return;
  GemmArgs rest = p;
  rest.c0 = nullptr;
  rest.beta = 1;
  if (!exec.error) start(rest, exec);
}

bool is_empty(const GemmArgs& p) { return p.m == 0 || p.n == 0 || p.batch == 0; }

cublasLtEpilogue_t plain_epilogue(const GemmArgs& p) {
  return p.bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
}

}  // namespace

void gemm(const GemmArgs& args, Exec& exec) {
  if (is_empty(args) || exec.error) return;
  if (args.k == 0) return start(args, exec);
  const bool bias_fits = args.dtype == args.c_dtype && args.dtype != DType::f64;
  if (!args.bias || bias_fits) {
    if (multiply({.gemm = args, .epilogue = plain_epilogue(args)}, exec) || exec.error) return;
    if (!args.bias) return refuse(exec, args, "cuBLASLt has no algorithm");
  }
  start(args, exec);
  GemmArgs rest = args;
  rest.bias = rest.c0 = nullptr;
  rest.beta = 1;
  if (!exec.error && !multiply({.gemm = rest}, exec) && !exec.error)
    refuse(exec, args, "cuBLASLt has no algorithm");
}

void gemm_gelu(const GemmGeluArgs& args, Exec& exec) {
  if (args.m == 0 || args.n == 0 || exec.error) return;
  // f32 keeps the function's own kernel: how exactly cuBLASLt computes tanh is not stated.
  const bool fits = args.k > 0 && size_bytes(args.dtype) == 2 && args.ld_aux % 8 == 0 &&
                    alignment_of(args.aux, 0, 1, args.dtype) >= 16;
  if (fits) {
    const Problem fused{.gemm = product_of(args, args.c, args.ldc),
                        .epilogue = args.backward ? CUBLASLT_EPILOGUE_DGELU
                                    : args.bias   ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS
                                                  : CUBLASLT_EPILOGUE_GELU_AUX,
                        .aux = args.aux,
                        .ld_aux = args.ld_aux};
    if (multiply(fused, exec) || exec.error) return;
  }
  gemm_then_gelu(args, exec, gemm, kKernels.unary, kKernels.binary);
}

void gemm_fp8(const GemmFp8Args& args, Exec& exec) {
  GemmArgs product{};
  product.c = args.c;
  product.a = args.a;
  product.b = args.b;
  product.bias = args.bias;
  product.alpha = args.alpha;
  product.beta = args.beta;
  product.batch = 1;
  product.m = args.m;
  product.n = product.ldc = args.n;
  product.k = product.lda = product.ldb = args.k;
  product.dtype = args.a_dtype;
  product.c_dtype = args.c_dtype;
  product.trans_b = true;
  if (is_empty(product) || exec.error) return;
  const bool bias_fits = size_bytes(args.c_dtype) == 2 && args.k > 0;
  if (args.bias && !bias_fits) {
    GemmArgs begin = product;
    begin.dtype = args.c_dtype;  // the bias's
    start(begin, exec);
    product.bias = nullptr;
    product.beta = 1;
  }
  if (args.k == 0 && !args.bias) start(product, exec);
  if (args.k == 0 || exec.error) return;
  if (!multiply({.gemm = product, .epilogue = plain_epilogue(product), .fp8 = &args}, exec) &&
      !exec.error)
    refuse(exec, product,
           "cuBLASLt has no algorithm for 8-bit floats; it needs sm_89 or newer, and sm_90 for "
           "scales by block");
}

bool gemm_choice(const GemmArgs& args, int choice, Exec& exec) {
  return !exec.error && !is_empty(args) && args.k > 0 &&
         multiply({.gemm = args, .epilogue = plain_epilogue(args)}, exec, choice, kMostChoices);
}

}  // namespace tessera::kernels::cuda
