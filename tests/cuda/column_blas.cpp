#include "tests/cuda/column_blas.hpp"

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <cmath>
#include <cstring>
#include <numeric>

#include "tessera/base/dtype.hpp"
#include "tests/emulator/gpu_thread.hpp"

namespace kernel_test {
namespace {

using namespace tessera;

int g_asked = 0;
Epilogues g_epilogues = Epilogues::offered;

// How this library uses the words of the vendor's opaque structs.
struct Layout {
  std::uint64_t type, rows, cols, ld, batch, stride, unused[2];
};
static_assert(sizeof(Layout) == sizeof(cublasLtMatrixLayoutOpaque_t));
// By its number; the one beyond the words lies where one does that nobody sets.
constexpr std::size_t word_of(cublasLtMatmulDescAttributes_t attribute) {
  return attribute == CUBLASLT_MATMUL_DESC_B_SCALE_MODE ? CUBLASLT_MATMUL_DESC_POINTER_MODE
                                                        : attribute;
}
struct Operation {
  std::uint64_t attributes[32];

  template <class T = std::uint64_t>
  T get(cublasLtMatmulDescAttributes_t attribute) const {
    T value;
    std::memcpy(&value, &attributes[word_of(attribute)], sizeof value);
    return value;
  }
};
static_assert(sizeof(Operation) == sizeof(cublasLtMatmulDescOpaque_t));
struct Algorithm {
  std::uint64_t align_a, align_b, align_c, workspace_bytes, operation, number, unused[2];
};
static_assert(sizeof(Algorithm) == sizeof(cublasLtMatmulAlgo_t));

template <class To, class From>
To read(const From* from) {
  To to;
  static_assert(sizeof to == sizeof *from);
  std::memcpy(&to, from, sizeof to);
  return to;
}

DType dtype_of_type(std::uint64_t type) {
  return type == CUDA_R_16BF      ? bf16
         : type == CUDA_R_16F     ? f16
         : type == CUDA_R_64F     ? f64
         : type == CUDA_R_8F_E4M3 ? e4m3
         : type == CUDA_R_8F_E5M2 ? e5m2
                                  : f32;
}
bool is_fp8(std::uint64_t type) { return is_storage_only(dtype_of_type(type)); }
// Scales of the operand, [rows, depth] along the sum; null, where its number of bits has none.
struct Scales {
  const float* data;
  std::uint64_t mode, rows, depth;

  double at(std::uint64_t row, std::uint64_t l) const {
    if (!data) return 1;
    return data[mode == 4   ? l / 128 * rows + row
                : mode == 5 ? row / 128 * ((depth + 511) / 512 * 4) + l / 128
                            : 0];
  }
};
double element(const void* data, DType dtype, std::uint64_t i) {
  return visit(dtype, [&](auto tag) {
    return static_cast<double>(static_cast<const typename decltype(tag)::type*>(data)[i]);
  });
}
void put(void* data, DType dtype, std::uint64_t i, double value) {
  visit(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (std::is_class_v<T>)
      static_cast<T*>(data)[i] = T(static_cast<float>(value));
    else
      static_cast<T*>(data)[i] = static_cast<T>(value);
  });
}

struct Matmul {
  Operation op;
  Layout a, b, c;
  const void *a_data, *b_data, *c_data;
  void* d_data;
  double alpha, beta;

  bool trans_a() const { return op.get(CUBLASLT_MATMUL_DESC_TRANSA) == CUBLAS_OP_T; }
  bool trans_b() const { return op.get(CUBLASLT_MATMUL_DESC_TRANSB) == CUBLAS_OP_T; }
  std::uint64_t epilogue() const { return op.get(CUBLASLT_MATMUL_DESC_EPILOGUE); }
  bool ends_in(int part) const { return (epilogue() & static_cast<unsigned>(part)) != 0; }

  bool is_valid() const {
    const bool fit = (trans_a() ? a.cols : a.rows) == c.rows &&
                     (trans_b() ? b.rows : b.cols) == c.cols &&
                     (trans_a() ? a.rows : a.cols) == (trans_b() ? b.cols : b.rows);
    const bool apart = a.ld >= a.rows && b.ld >= b.rows && c.ld >= c.rows;
    return fit && apart && a.rows > 0 && a.cols > 0 && b.rows > 0 && b.cols > 0 &&
           (a.type == b.type || (is_fp8(a.type) && is_fp8(b.type))) && a.batch == c.batch &&
           b.batch == c.batch;
  }
  // The table of types under cublasLtMatmul in the reference, as far as we go.
  bool is_offered() const {
    const bool wide = a.type == CUDA_R_64F;
    if (op.get(CUBLASLT_MATMUL_DESC_SCALE_TYPE) != (wide ? CUDA_R_64F : CUDA_R_32F)) return false;
    if (is_fp8(a.type)) return is_offered_in_fp8();
    if (c.type != a.type && (wide || c.type != CUDA_R_32F)) return false;
    if (epilogue() == CUBLASLT_EPILOGUE_DEFAULT) return true;
    if (g_epilogues != Epilogues::offered || wide || c.type != a.type) return false;
    const auto aux = op.get(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER),
               ld = op.get(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD);
    return !ends_in(128) || (aux % 16 == 0 && ld % 8 == 0 && ld >= c.rows);
  }

  // Under "Float8 kernels", and under "128-element 1D block scaling": of sm_90.
  bool is_offered_in_fp8() const {
    const auto mode_a = op.get<std::int32_t>(CUBLASLT_MATMUL_DESC_A_SCALE_MODE),
               mode_b = op.get<std::int32_t>(CUBLASLT_MATMUL_DESC_B_SCALE_MODE);
    const bool modes_fit = (mode_a == 0) == (mode_b == 0) && (mode_a != 5 || mode_b != 5);
    return trans_a() && !trans_b() && a.rows % 16 == 0 && c.rows % 16 == 0 && !is_fp8(c.type) &&
           (a.type == CUDA_R_8F_E4M3 || b.type == CUDA_R_8F_E4M3) && modes_fit &&
           (epilogue() == CUBLASLT_EPILOGUE_DEFAULT ||
            (epilogue() == CUBLASLT_EPILOGUE_BIAS && c.type != CUDA_R_32F));
  }

  void run() const {
    const std::uint64_t depth = trans_a() ? a.rows : a.cols;
    const Scales of_a{op.get<const float*>(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER),
                      op.get<std::uint32_t>(CUBLASLT_MATMUL_DESC_A_SCALE_MODE), c.rows, depth},
        of_b{op.get<const float*>(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER),
             op.get<std::uint32_t>(CUBLASLT_MATMUL_DESC_B_SCALE_MODE), c.cols, depth};
    for (std::uint64_t i = 0; i < c.batch; ++i) {
      const auto rows = widened(a, a_data, trans_a(), of_a, i),
                 cols = widened(b, b_data, !trans_b(), of_b, i);
      for (std::uint64_t col = 0; col < c.cols; ++col)
        for (std::uint64_t row = 0; row < c.rows; ++row)
          finish(i, row, col,
                 std::inner_product(rows.begin() + row * depth, rows.begin() + (row + 1) * depth,
                                    cols.begin() + col * depth, 0.));
    }
  }

 private:
  // The operand's rows one after another, each along the sum.
  static std::vector<double> widened(const Layout& x, const void* data, bool lies_so,
                                     const Scales& scales, std::uint64_t batch) {
    std::vector<double> out(scales.rows * scales.depth);
    for (std::uint64_t row = 0; row < scales.rows; ++row)
      for (std::uint64_t l = 0; l < scales.depth; ++l)
        out[row * scales.depth + l] =
            scales.at(row, l) *
            element(data, dtype_of_type(x.type),
                    batch * x.stride + (lies_so ? row * x.ld + l : l * x.ld + row));
    return out;
  }
  void finish(std::uint64_t batch, std::uint64_t row, std::uint64_t col, double product) const {
    const DType dtype = dtype_of_type(c.type);
    const std::uint64_t at = batch * c.stride + col * c.ld + row;
    double value = alpha * product;
    if (beta != 0) value += beta * element(c_data, dtype, at);
    if (ends_in(CUBLASLT_EPILOGUE_BIAS))
      value += element(op.get<const void*>(CUBLASLT_MATMUL_DESC_BIAS_POINTER), dtype, row);
    if (ends_in(128)) {
      void* aux = op.get<void*>(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER);
      const std::uint64_t there = col * op.get(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD) + row;
      if (ends_in(CUBLASLT_EPILOGUE_GELU))
        put(aux, dtype, there, value);
      else
        value *= slope(element(aux, dtype, there));
    }
    if (ends_in(CUBLASLT_EPILOGUE_GELU)) value = value / (1 + std::exp(-2 * inner(value)));
    put(d_data, dtype, at, value);
  }
  static double inner(double x) { return std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x); }
  static double slope(double x) {
    const double t = std::tanh(inner(x));
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * std::sqrt(2 / M_PI) * (1 + 3 * 0.044715 * x * x);
  }
};

std::uint64_t kind_of(const Matmul& call) {  // what an algorithm serves
  std::uint64_t out = call.epilogue();
  for (const Layout* x : {&call.a, &call.b, &call.c})
    for (const std::uint64_t word : {x->type, x->rows, x->cols, x->ld, x->batch, x->stride})
      out = out * 1099511628211u + word;
  return out * 4 + 2 * call.trans_a() + call.trans_b();
}

bool is_aligned(const void* data, std::uint64_t bytes) {
  return reinterpret_cast<std::uintptr_t>(data) % bytes == 0;
}

}  // namespace

int heuristic_calls() { return g_asked; }
void set_epilogues(Epilogues epilogues) { g_epilogues = epilogues; }

}  // namespace kernel_test

using namespace kernel_test;

extern "C" {

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  static int one;
  *handle = reinterpret_cast<cublasLtHandle_t>(&one);
  return CUBLAS_STATUS_SUCCESS;
}

const char* cublasLtGetStatusString(cublasStatus_t status) {
  return status == CUBLAS_STATUS_SUCCESS ? "success" : "an invalid value";
}

cublasStatus_t cublasLtMatrixLayoutInit_internal(cublasLtMatrixLayout_t layout, size_t,
                                                 cudaDataType type, uint64_t rows, uint64_t cols,
                                                 int64_t ld) {
  const Layout made{
      static_cast<std::uint64_t>(type), rows, cols, static_cast<std::uint64_t>(ld), 1, 0, {}};
  std::memcpy(layout, &made, sizeof made);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout,
                                                cublasLtMatrixLayoutAttribute_t attribute,
                                                const void* value, size_t bytes) {
  const bool batch = attribute == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT;
  if (!batch && attribute != CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET)
    return CUBLAS_STATUS_INVALID_VALUE;
  if (bytes != (batch ? 4 : 8)) return CUBLAS_STATUS_INVALID_VALUE;
  std::memcpy(&layout->data[batch ? 4 : 5], value, bytes);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescInit_internal(cublasLtMatmulDesc_t op, size_t size,
                                               cublasComputeType_t compute, cudaDataType_t scale) {
  std::memset(op, 0, size);
  op->data[CUBLASLT_MATMUL_DESC_COMPUTE_TYPE] = compute;
  op->data[CUBLASLT_MATMUL_DESC_SCALE_TYPE] = scale;
  op->data[CUBLASLT_MATMUL_DESC_EPILOGUE] = CUBLASLT_EPILOGUE_DEFAULT;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t op,
                                              cublasLtMatmulDescAttributes_t attribute,
                                              const void* value, size_t bytes) {
  std::memcpy(&op->data[word_of(attribute)], value, bytes);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceInit_internal(cublasLtMatmulPreference_t preference,
                                                     size_t size) {
  std::memset(preference, 0, size);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute,
                                                    const void* value, size_t bytes) {
  if (attribute > CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES) return CUBLAS_STATUS_INVALID_VALUE;
  std::memcpy(&preference->data[attribute - 1], value, bytes);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t op,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t,
                                              cublasLtMatmulPreference_t preference, int wanted,
                                              cublasLtMatmulHeuristicResult_t* results,
                                              int* count) {
  ++g_asked;
  *count = 0;
  const Matmul call{read<Operation>(op),
                    read<Layout>(a),
                    read<Layout>(b),
                    read<Layout>(c),
                    {},
                    {},
                    {},
                    {},
                    {},
                    {}};
  if (!call.is_valid()) return CUBLAS_STATUS_INVALID_VALUE;
  if (!call.is_offered())
    return g_epilogues == Epilogues::invalid ? CUBLAS_STATUS_INVALID_VALUE
                                             : CUBLAS_STATUS_NOT_SUPPORTED;
  for (; *count < wanted && *count < 3; ++*count) {
    const Algorithm found{preference->data[CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES - 1],
                          preference->data[CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES - 1],
                          preference->data[CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES - 1],
                          preference->data[CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES - 1],
                          kind_of(call),
                          static_cast<std::uint64_t>(*count),
                          {}};
    std::memcpy(&results[*count].algo, &found, sizeof found);
    results[*count].state = CUBLAS_STATUS_SUCCESS;
  }
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t op, const void* alpha,
                              const void* a, cublasLtMatrixLayout_t a_layout, const void* b,
                              cublasLtMatrixLayout_t b_layout, const void* beta, const void* c,
                              cublasLtMatrixLayout_t c_layout, void* d,
                              cublasLtMatrixLayout_t d_layout,
                              const cublasLtMatmulAlgo_t* algorithm, void*, size_t workspace_bytes,
                              cudaStream_t stream) {
  const bool wide = op->data[CUBLASLT_MATMUL_DESC_SCALE_TYPE] == CUDA_R_64F;
  const auto factor = [&](const void* x) {
    return wide ? *static_cast<const double*>(x) : *static_cast<const float*>(x);
  };
  const Matmul call{read<Operation>(op),
                    read<Layout>(a_layout),
                    read<Layout>(b_layout),
                    read<Layout>(c_layout),
                    a,
                    b,
                    c,
                    d,
                    factor(alpha),
                    factor(beta)};
  const auto chosen = read<Algorithm>(algorithm);
  if (d_layout != c_layout || !is_aligned(c, chosen.align_c) || chosen.operation != kind_of(call) ||
      chosen.workspace_bytes > workspace_bytes || !is_aligned(a, chosen.align_a) ||
      !is_aligned(b, chosen.align_b) || !is_aligned(d, chosen.align_c))
    return CUBLAS_STATUS_INVALID_VALUE;
  tessera::kernels::cuda::emulator::enqueue(stream, [call] { call.run(); });
  return CUBLAS_STATUS_SUCCESS;
}

}  // extern "C"
