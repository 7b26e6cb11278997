#include "runtime/tensor/fp8.hpp"

#include <limits>

#include "runtime/tensor/launch.hpp"
#include "runtime/tensor/rows.hpp"
#include "tessera/tensor/ops.hpp"

namespace tessera::detail {

using kernels::Scaling;

namespace {

constexpr std::uintptr_t kAccessBytes = 16;
constexpr std::int64_t kAccessElements = 16;  // of strides, whatever is read

bool is_operand(const Tensor& x) {
  return x.is_contiguous() && (x.device().is_meta() || x.numel() == 0 ||
                               reinterpret_cast<std::uintptr_t>(x.data()) % kAccessBytes == 0);
}

Fp8Matrix make(const Shape& shape, DType dtype, Scaling scaling, const Device& device) {
  return {Tensor::empty(shape, dtype, device),
          Tensor::empty({kernels::scale_count(scaling, shape[0], shape[1])}, f32, device), scaling};
}

float* floats(const Tensor& x) {
  return x.defined() ? reinterpret_cast<float*>(x.data()) : nullptr;
}

std::int32_t narrow(std::int64_t value) {
  TESSERA_EXPECT(value <= std::numeric_limits<std::int32_t>::max(), "linear_fp8: dimension ", value,
                 " exceeds 2^31 - 1");
  return static_cast<std::int32_t>(value);
}

}  // namespace

bool can_hold_product(const Tensor& out) { return is_operand(out); }

namespace {

// Its rows one after another, where the kernels may begin an access.
Tensor operand(const Tensor& given) {
  if (is_operand(given)) return given;
  Tensor x = Tensor::empty(given.shape(), given.dtype(), given.device());
  raw::copy_into(x, given);
  return x;
}

// Rows that the kernels may read where they lie, or a copy of them.
RowsOf aligned_rows(const Tensor& x) {
  RowsOf rows = rows_of(x);
  if (!rows.tensor.device().is_meta() &&
      (reinterpret_cast<std::uintptr_t>(rows.tensor.data()) % kAccessBytes != 0 ||
       rows.stride % kAccessElements != 0))
    rows = rows_of(operand(raw::contiguous(x)));
  return rows;
}

// A matrix that is to be rounded: its size, not where it lies.
struct Rounded {
  std::int64_t rows, cols;
  DType dtype;
  const Device& device;
};

// Where the forms of a matrix go.
struct Quantizing {
  Fp8Forms forms;
  Tensor of_transposed;  // its scales, where it has its own

  Quantizing(const Rounded& x, DType to, Scaling scaling, Fp8Form form) {
    if (form != Fp8Form::transposed) forms.plain = make({x.rows, x.cols}, to, scaling, x.device);
    if (form != Fp8Form::plain) forms.transposed = make({x.cols, x.rows}, to, scaling, x.device);
    if (scaling == Scaling::tensor && form == Fp8Form::both)
      forms.transposed.scales = forms.plain.scales;
    else
      of_transposed = forms.transposed.scales;
  }
  kernels::Quantized args(const Rounded& x, const Tensor& most) const {
    const auto& [plain, transposed] = forms;
    const bool has_plain = plain.codes.defined(), has_transposed = transposed.codes.defined();
    const Fp8Matrix& any = has_plain ? plain : transposed;
    kernels::Quantized out{};
    out.codes = has_plain ? plain.codes.data() : nullptr;
    out.transposed = has_transposed ? transposed.codes.data() : nullptr;
    out.scales = floats(any.scaling == Scaling::tensor ? any.scales : plain.scales);
    out.transposed_scales = floats(transposed.scales);
    out.most = floats(most);
    out.rows = x.rows;
    out.cols = x.cols;
    out.pieces = most.defined() ? narrow(most.numel()) : 0;
    out.dtype = x.dtype;
    out.to = any.codes.dtype();
    out.scaling = any.scaling;
    return out;
  }
};

Tensor pieces_of(const Rounded& x) {
  return Tensor::empty({kernels::amax_pieces(x.rows * x.cols).count}, f32, x.device);
}

}  // namespace

Fp8Forms quantize(const Tensor& given, DType to, Scaling scaling, Fp8Form form) {
  const Tensor x = operand(given);
  const Device& device = x.device();
  const Rounded of{x.size(0), x.size(1), x.dtype(), device};
  const Quantizing out(of, to, scaling, form);
  const auto& [plain, transposed] = out.forms;
  if (x.numel() == 0 || device.is_meta()) return out.forms;
  const Tensor most = scaling == Scaling::tensor ? pieces_of(of) : Tensor();
  if (most.defined())
    launch("amax", device, table(device).amax,
           kernels::AmaxArgs{floats(most), x.data(), x.numel(), x.dtype()},
           {reads(x), writes(most)});
  const kernels::QuantizeArgs args{out.args(of, most), x.data()};
  launch_body("quantize", device, kernels::Call{table(device).quantize, args},
              {reads(x), reads(most), writes(plain.codes), writes(transposed.codes),
               writes(plain.scales), writes(out.of_transposed)});
  return out.forms;
}

Fp8Forms quantize(const NormOf& norm, Scaling scaling, Fp8Form form) {
  const Device& device = norm.x.device();
  const Rounded of{norm.rstd.numel(), norm.x.size(-1), norm.x.dtype(), device};
  const Quantizing out(of, e4m3, scaling, form);
  const auto& [plain, transposed] = out.forms;
  if (norm.x.numel() == 0 || device.is_meta()) return out.forms;
  const auto operand_if_any = [](const Tensor& t) { return t.defined() ? operand(t) : t; };
  const Tensor x = operand(norm.x), weight = operand_if_any(norm.weight),
               bias = operand_if_any(norm.bias);
  const auto data_of = [](const Tensor& t) { return t.defined() ? t.data() : nullptr; };
  const kernels::QuantizeNormArgs args{out.args(of, norm.most), x.data(),
                                       data_of(weight),         data_of(bias),
                                       floats(norm.mean),       floats(norm.rstd)};
  launch_body("quantize_norm", device, kernels::Call{table(device).quantize_norm, args},
              {reads(x), reads(weight), reads(bias), reads(norm.mean), reads(norm.rstd),
               reads(norm.most), writes(plain.codes), writes(transposed.codes),
               writes(plain.scales), writes(out.of_transposed)});
  return out.forms;
}

Fp8Forms quantize(const SwigluOf& swiglu, Scaling scaling, Fp8Form form) {
  expect_gated(swiglu.gate, swiglu.up);
  const Device& device = common_device("swiglu", swiglu.gate, swiglu.up);
  const RowsOf gate = aligned_rows(swiglu.gate), up = aligned_rows(swiglu.up);
  const Rounded of{gate.rows, gate.cols, gate.tensor.dtype(), device};
  const Quantizing out(of, e4m3, scaling, form);
  const auto& [plain, transposed] = out.forms;
  if (gate.tensor.numel() == 0 || device.is_meta()) return out.forms;
  const Tensor most = scaling == Scaling::tensor ? pieces_of(of) : Tensor();
  if (most.defined())
    launch("amax_swiglu", device, table(device).amax_swiglu,
           kernels::AmaxSwigluArgs{floats(most), gate.tensor.data(), up.tensor.data(), of.rows,
                                   of.cols, gate.stride, up.stride, of.dtype},
           {reads(gate.tensor), reads(up.tensor), writes(most)});
  const kernels::QuantizeSwigluArgs args{out.args(of, most), gate.tensor.data(), up.tensor.data(),
                                         gate.stride, up.stride};
  launch_body("quantize_swiglu", device, kernels::Call{table(device).quantize_swiglu, args},
              {reads(gate.tensor), reads(up.tensor), reads(most), writes(plain.codes),
               writes(transposed.codes), writes(plain.scales), writes(out.of_transposed)});
  return out.forms;
}

void multiply_fp8(const Tensor& out, const Fp8Matrix& a, const Fp8Matrix& b, double alpha,
                  double beta, const Tensor& bias, bool fast) {
  const Device& device = common_device("linear_fp8", a.codes, b.codes);
  if (out.numel() == 0 || device.is_meta()) return;
  kernels::GemmFp8Args args{};
  args.c = out.data();
  args.a = a.codes.data();
  args.b = b.codes.data();
  args.bias = bias.defined() ? bias.data() : nullptr;
  args.a_scales = floats(a.scales);
  args.b_scales = floats(b.scales);
  args.alpha = alpha;
  args.beta = beta;
  args.m = narrow(out.size(0));
  args.n = narrow(out.size(1));
  args.k = narrow(a.codes.size(1));
  args.a_dtype = a.codes.dtype();
  args.b_dtype = b.codes.dtype();
  args.c_dtype = out.dtype();
  args.a_scaling = a.scaling;
  args.b_scaling = b.scaling;
  args.fast = fast;
  launch_body("matmul_fp8", device, kernels::Call{table(device).gemm_fp8, args},
              {reads(a.codes), reads(a.scales), reads(b.codes), reads(b.scales), reads(bias),
               updates(out, beta != 0)},
              2.0 * args.m * args.n * args.k,
              {.kind = Products::Kind::matrix,
               .dtype = args.a_dtype,
               .batch = 1,
               .m = args.m,
               .n = args.n,
               .k = args.k});
}

}  // namespace tessera::detail
