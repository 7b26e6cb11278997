#include "runtime/tensor/fp8.hpp"

#include <limits>

#include "runtime/tensor/launch.hpp"
#include "tessera/tensor/ops.hpp"

namespace tessera::detail {

using kernels::Scaling;

namespace {

constexpr std::uintptr_t kAccessBytes = 16;

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

Fp8Forms quantize(const Tensor& given, DType to, Scaling scaling, Fp8Form form) {
  const Device& device = given.device();
  Tensor x = given;
  if (!is_operand(x)) {
    x = Tensor::empty(given.shape(), given.dtype(), device);
    raw::copy_into(x, given);
  }
  const std::int64_t rows = x.size(0), cols = x.size(1);
  Fp8Forms forms;
  if (form != Fp8Form::transposed) forms.plain = make({rows, cols}, to, scaling, device);
  if (form != Fp8Form::plain) forms.transposed = make({cols, rows}, to, scaling, device);
  const bool is_shared = scaling == Scaling::tensor;
  if (is_shared && form == Fp8Form::both) forms.transposed.scales = forms.plain.scales;
  if (x.numel() == 0 || device.is_meta()) return forms;

  Tensor most;
  if (is_shared) {
    most = Tensor::empty({kernels::amax_pieces(x.numel()).count}, f32, device);
    launch("amax", device, table(device).amax,
           kernels::AmaxArgs{floats(most), x.data(), x.numel(), x.dtype()},
           {reads(x), writes(most)});
  }
  const Fp8Matrix &plain = forms.plain, &transposed = forms.transposed;
  const bool has_plain = plain.codes.defined(), has_transposed = transposed.codes.defined();
  kernels::QuantizeArgs args{};
  args.codes = has_plain ? plain.codes.data() : nullptr;
  args.transposed = has_transposed ? transposed.codes.data() : nullptr;
  args.scales = floats(is_shared && !has_plain ? transposed.scales : plain.scales);
  args.transposed_scales = floats(transposed.scales);
  args.x = x.data();
  args.most = floats(most);
  args.rows = rows;
  args.cols = cols;
  args.dtype = x.dtype();
  args.to = to;
  args.scaling = scaling;
  const bool has_two_scales = has_plain && has_transposed && !is_shared;
  launch_body("quantize", device, kernels::Call{table(device).quantize, args},
              {reads(x), reads(most), writes(plain.codes), writes(transposed.codes),
               writes(has_plain ? plain.scales : transposed.scales),
               writes(has_two_scales ? transposed.scales : Tensor())});
  return forms;
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
