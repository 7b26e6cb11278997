#include "tessera/autograd/rows_in_8_bits.hpp"

#include "runtime/autograd/kept_results.hpp"
#include "runtime/autograd/linear_layer.hpp"
#include "runtime/autograd/operands.hpp"
#include "runtime/tensor/launch.hpp"
#include "tessera/autograd/ops.hpp"

namespace tessera {

using autograd::Gradients;
using autograd::Saved;
using raw::Transpose;

namespace {

Shape shape_of_scales(const Shape& codes) {
  Shape shape = codes;
  for (int d = 1; d < shape.ndim(); ++d) shape[d] = 1;
  return shape;
}

void check_codes(const char* name, const Tensor& codes, const Tensor& scales) {
  TESSERA_EXPECT(codes.dtype() == e4m3 && codes.ndim() >= 2 && is_floating(scales.dtype()) &&
                     scales.shape() == shape_of_scales(codes.shape()),
                 name, ": codes are ", codes.shape(), " of ", codes.dtype(), ", scales ",
                 scales.shape(), " of ", scales.dtype(),
                 "; expected e4m3 [n, ...] and a floating scale a row, [n, 1, ...]");
}

}  // namespace

RowsIn8Bits encode_rows(const Tensor& x) {
  TESSERA_EXPECT(x.ndim() >= 2 && is_floating(x.dtype()) && x.dtype() != f64, "encode_rows: x is ",
                 x.shape(), " of ", x.dtype(),
                 "; expected two dimensions or more, of f32, bf16 or f16");
  const Device& device = x.device();
  RowsIn8Bits out{Tensor::empty(x.shape(), e4m3, device),
                  Tensor::empty(shape_of_scales(x.shape()), f32, device)};
  if (x.numel() == 0) {
    if (out.scales.numel() > 0) raw::fill(out.scales, 1);
    return out;
  }
  const Tensor in = raw::contiguous(raw::cast(x, f32));
  if (device.is_meta()) return out;
  detail::launch_body(
      "encode_e4m3", device,
      kernels::Call<kernels::EncodeE4m3Args>{
          detail::table(device).encode_e4m3,
          {reinterpret_cast<Float8E4M3*>(out.codes.data()),
           reinterpret_cast<float*>(out.scales.data()), reinterpret_cast<const float*>(in.data()),
           x.size(0), x.numel() / x.size(0)}},
      {detail::reads(in), detail::writes(out.codes), detail::writes(out.scales)});
  return out;
}

Tensor decode_rows(const Tensor& codes, const Tensor& scales, DType dtype) {
  check_codes("decode_rows", codes, scales);
  TESSERA_EXPECT(is_floating(dtype) && !is_storage_only(dtype) && dtype != f64,
                 "decode_rows: values in ", dtype, "; expected f32, bf16 or f16");
  const Device& device = detail::common_device("decode_rows", codes, scales);
  const Tensor out = Tensor::empty(codes.shape(), dtype, device);
  if (codes.numel() == 0 || device.is_meta()) return out;
  const Tensor in = raw::contiguous(codes), each = raw::contiguous(raw::cast(scales, f32));
  detail::launch_body("decode_e4m3", device,
                      kernels::Call<kernels::DecodeE4m3Args>{
                          detail::table(device).decode_e4m3,
                          {out.data(), reinterpret_cast<const Float8E4M3*>(in.data()),
                           reinterpret_cast<const float*>(each.data()), codes.size(0),
                           codes.numel() / codes.size(0), dtype}},
                      {detail::reads(in), detail::reads(each), detail::writes(out)});
  return out;
}

Tensor linear_in_8_bits(const Tensor& x, const Tensor& codes, const Tensor& scales,
                        const Tensor& bias, Caller at) {
  constexpr const char* kName = "linear_in_8_bits";
  const CallSite site(kName, at);
  check_codes(kName, codes, scales);
  autograd::expect_floating(x);
  const Tensor rows = autograd::rows_of_linear(
      kName, x, Tensor::empty(codes.shape(), x.dtype(), Device::meta()), bias);
  Saved saved_codes(codes), saved_scales(scales);
  const Tensor y = autograd::kept_product_or(kName, rows, codes, [&] {
    const Tensor out = Tensor::empty({rows.size(0), codes.size(0)}, x.dtype(), x.device());
    raw::matmul_into(out, rows, decode_rows(codes, scales, x.dtype()), Transpose::no,
                     Transpose::yes, 1, 0, bias);
    return out;
  });
  const Tensor out = raw::reshape(y, autograd::shape_of_linear(x, codes));
  return autograd::record(
      kName, std::array{x, Tensor(), bias}, out,
      [codes = std::move(saved_codes), scales = std::move(saved_scales), shape = x.shape()](
          const Tensor& gradient, Gradients& to) {
        const Tensor g = raw::reshape(gradient, {-1, codes.get().size(0)});
        autograd::set_bias(to, g);
        if (!to.wants(0)) return;
        const Tensor w = decode_rows(codes.get(), scales.get(), g.dtype());
        autograd::set_input(to, shape, {g.size(0), w.size(1)}, g.dtype(), g.device(),
                            [&](const Tensor& d, double alpha, double beta) {
                              raw::matmul_into(d, g, w, Transpose::no, Transpose::no, alpha, beta);
                            });
      });
}

}  // namespace tessera
