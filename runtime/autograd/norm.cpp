// RMSNorm and LayerNorm, alone and of a sum. Backward adds what has already reached the input to
// the gradient that it writes, so that a residual's two gradients need no pass of their own.
#include <algorithm>

#include "runtime/autograd/fp8_input.hpp"
#include "runtime/autograd/gradient_sink.hpp"
#include "runtime/autograd/operands.hpp"
#include "runtime/tensor/launch.hpp"
#include "tessera/autograd/ops.hpp"

namespace tessera {

using autograd::Gradients;
using autograd::GradientSink;
using autograd::record;
using autograd::Saved;
using autograd::statistics_dtype;
using detail::launch;
using detail::reads;
using detail::table;
using detail::writes;

namespace {

std::byte* data_of(const Tensor& t) { return t.defined() ? t.data() : nullptr; }

// Whether one call of the kernel can write both: it takes one scale and one flag for them.
bool are_alike(const GradientSink& a, const GradientSink& b) {
  return a.scale == b.scale && a.accumulate == b.accumulate && a.tensor.dtype() == b.tensor.dtype();
}

// The backward pass of both norms; `mean` is undefined for rms_norm, `weight` where there is none,
// and `bias` says whether there is one.
void norm_backward(const Tensor& gradient, const Tensor& x, const Tensor& weight,
                   const Tensor& mean, const Tensor& rstd, bool bias, Gradients& out) {
  const Device& device = x.device();
  const Tensor g = raw::contiguous(gradient);
  const std::int64_t cols = x.size(-1), rows = cols == 0 ? 0 : x.numel() / cols;
  std::optional<GradientSink> dw, db;
  if (out.wants(1)) dw = out.sink(1);
  if (bias && out.wants(2)) db = out.sink(2);
  // Else both are written to tensors first.
  const bool direct =
      dw && can_write(*dw, x.dtype()) && (!bias || !out.wants(2) || (db && are_alike(*dw, *db)));
  // What the input's other users have given so far is added by the kernel, in place where nobody
  // else sees it.
  const Tensor held = out.wants(0) ? out.extract(0) : Tensor();
  const bool in_place = held.defined() && held.is_exclusive() && held.is_contiguous();
  const Tensor d_sum = held.defined() ? raw::contiguous(held) : held;
  const Tensor dx = !out.wants(0) ? Tensor()
                    : in_place    ? held
                                  : Tensor::empty(x.shape(), x.dtype(), device);
  const auto destination = [&](int i, const std::optional<GradientSink>& sink) {
    if ((i == 2 && !bias) || !out.wants(i)) return Tensor();
    return direct ? sink->tensor : Tensor::empty({cols}, statistics_dtype(x.dtype()), device);
  };
  const Tensor d_weight = destination(1, dw), d_bias = destination(2, db);
  if (!device.is_meta() && cols > 0) {
    const std::int64_t bytes =
        kernels::norm_workspace_bytes(rows, cols, x.dtype(), d_weight.defined(), d_bias.defined());
    // Not null where sums are wanted, also when there is no row to sum over.
    const bool sums = d_weight.defined() || d_bias.defined();
    const Tensor workspace =
        sums ? Tensor::empty({std::max<std::int64_t>(bytes / 4, 1)}, f32, device) : Tensor();
    kernels::NormBackwardArgs args{};
    args.dx = data_of(dx);
    args.d_weight = data_of(d_weight);
    args.d_bias = data_of(d_bias);
    args.x = x.data();
    args.dy = g.data();
    args.weight = data_of(weight);
    args.mean = data_of(mean);
    args.rstd = rstd.data();
    args.workspace = data_of(workspace);
    args.rows = rows;
    args.cols = static_cast<std::int32_t>(cols);
    args.scale = direct ? static_cast<float>(dw->scale) : 1.f;
    args.dtype = x.dtype();
    args.grad_dtype = d_weight.defined() ? d_weight.dtype()
                      : d_bias.defined() ? d_bias.dtype()
                                         : x.dtype();
    args.accumulate = direct && dw->accumulate;
    args.d_sum = data_of(d_sum);
    launch("norm_backward", device, table(device).norm_backward, args,
           {reads(x), reads(g), reads(weight), reads(mean), reads(rstd), reads(d_sum),
            writes(workspace), writes(dx), writes(d_weight), writes(d_bias)});
  }
  if (dx.defined()) out.set(0, dx);
  if (direct) return;
  if (d_weight.defined()) write_or_set(out, 1, dw, d_weight, x.dtype());
  if (d_bias.defined()) write_or_set(out, 2, db, d_bias, x.dtype());
}

void check_norm(const char* name, const Tensor& x, const Tensor& weight) {
  TESSERA_EXPECT(x.ndim() >= 1, name, ": x is ", x.shape(), "; expected [..., C]");
  if (!weight.defined()) return;
  TESSERA_EXPECT(weight.ndim() == 1 && weight.size(0) == x.size(-1) && weight.dtype() == x.dtype(),
                 name, ": x is ", x.shape(), " of ", x.dtype(), ", weight is ", weight.shape(),
                 " of ", weight.dtype(), "; expected [..., C] and [C] of one dtype");
  detail::common_device(name, x, weight);
}

Tensor contiguous_if_any(const Tensor& weight) {
  return weight.defined() ? raw::contiguous(weight) : weight;
}

std::int64_t rows_of(const Tensor& x) { return x.size(-1) == 0 ? 0 : x.numel() / x.size(-1); }

// Where the sum is written: over the residual if nobody else sees it. Undefined without residual.
Tensor output_of_sum(const char* name, const Tensor& x, const Tensor& residual) {
  if (!residual.defined()) return {};
  TESSERA_EXPECT(residual.shape() == x.shape() && residual.dtype() == x.dtype(), name, ": x is ",
                 x.shape(), " of ", x.dtype(), ", the residual is ", residual.shape(), " of ",
                 residual.dtype(), "; expected the same");
  detail::common_device(name, x, residual);
  if (residual.is_exclusive() && residual.is_contiguous()) return residual.detach();
  return Tensor::empty(x.shape(), x.dtype(), x.device());
}

// `sum` with the history of an addition.
Tensor record_sum(const Tensor& x, const Tensor& residual, const Tensor& sum) {
  return record("add", {x, residual}, sum, [](const Tensor& g, Gradients& out) {
    if (out.wants(0)) out.set(0, g);
    if (out.wants(1)) out.set(1, g);
  });
}

// Where a norm writes: y, or what rounds it to 8 bits reads in its place.
struct Output {
  Tensor y, mean, rstd, most;

  Output(const char* name, const Tensor& x, bool has_mean, const InputForm& form) {
    if (form) autograd::expect_rounded(name, x);
    const std::int64_t rows = rows_of(x);
    const auto statistics = [&](std::int64_t count) {
      return Tensor::empty({count}, statistics_dtype(x.dtype()), x.device());
    };
    if (!form) y = Tensor::empty(x.shape(), x.dtype(), x.device());
    if (has_mean) mean = statistics(rows);
    rstd = statistics(rows);
    if (form && autograd::scaling_of_rows(*form.recipe()) == kernels::Scaling::tensor)
      most = statistics(kernels::norm_magnitudes(rows));
  }
  float* magnitudes() const { return reinterpret_cast<float*>(data_of(most)); }
  // Of x by weight and bias, what the norm gives.
  Tensor take(const Tensor& x, const Tensor& weight, const Tensor& bias, const InputForm& form) {
    return form ? autograd::rounded_input({x, weight, bias, mean, rstd, most}, x.shape(),
                                          *form.recipe())
                : y;
  }
};

// Of x + residual, or of x where there is no residual; the sum is then x.
SumAndNorm rms_norm_of(const char* name, const Tensor& input, const Tensor& residual,
                       const Tensor& weight, double eps, const InputForm& form) {
  check_norm(name, input, weight);
  const Device& device = input.device();
  const Tensor sum = output_of_sum(name, input, residual);
  const Tensor x = raw::contiguous(input), w = contiguous_if_any(weight);
  const Tensor other = sum.defined() ? raw::contiguous(residual) : Tensor();
  Output out(name, x, false, form);
  if (x.numel() > 0 && !device.is_meta())
    launch(name, device, table(device).rms_norm,
           kernels::RmsNormArgs{data_of(out.y), out.rstd.data(), x.data(), data_of(w), rows_of(x),
                                x.size(-1), eps, x.dtype(), data_of(other), data_of(sum),
                                out.magnitudes()},
           {reads(x), reads(w), reads(other), writes(sum), writes(out.y), writes(out.rstd),
            writes(out.most)});
  const Tensor total = sum.defined() ? record_sum(input, residual, sum) : input;
  const Tensor& kept = sum.defined() ? sum : x;
  const Tensor y = out.take(kept, w, {}, form);
  return {total, record("rms_norm", {total, weight}, y,
                        [x = Saved(kept), w = Saved(w), rstd = Saved(out.rstd)](const Tensor& g,
                                                                                Gradients& out) {
                          norm_backward(g, x.get(), w.get(), {}, rstd.get(), false, out);
                        })};
}

SumAndNorm layer_norm_of(const char* name, const Tensor& input, const Tensor& residual,
                         const Tensor& weight, const Tensor& bias, double eps,
                         const InputForm& form) {
  check_norm(name, input, weight);
  check_norm(name, input, bias);
  const Device& device = input.device();
  const Tensor sum = output_of_sum(name, input, residual);
  const Tensor x = raw::contiguous(input), w = contiguous_if_any(weight),
               b = contiguous_if_any(bias);
  const Tensor other = sum.defined() ? raw::contiguous(residual) : Tensor();
  Output out(name, x, true, form);
  if (x.numel() > 0 && !device.is_meta())
    launch(name, device, table(device).layer_norm,
           kernels::LayerNormArgs{data_of(out.y), out.mean.data(), out.rstd.data(), x.data(),
                                  data_of(w), data_of(b), rows_of(x), x.size(-1), eps, x.dtype(),
                                  data_of(other), data_of(sum), out.magnitudes()},
           {reads(x), reads(w), reads(b), reads(other), writes(sum), writes(out.y),
            writes(out.mean), writes(out.rstd), writes(out.most)});
  const Tensor total = sum.defined() ? record_sum(input, residual, sum) : input;
  const Tensor& kept = sum.defined() ? sum : x;
  const Tensor y = out.take(kept, w, b, form);
  return {total,
          record("layer_norm", {total, weight, bias}, y,
                 [x = Saved(kept), w = Saved(w), mean = Saved(out.mean), rstd = Saved(out.rstd),
                  has_bias = bias.defined()](const Tensor& g, Gradients& out) {
                   norm_backward(g, x.get(), w.get(), mean.get(), rstd.get(), has_bias, out);
                 })};
}

}  // namespace

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps, InputForm form, Caller at) {
  const CallSite site("rms_norm", at);
  autograd::expect_floating(x);
  return rms_norm_of("rms_norm", x, {}, weight, eps, form).norm;
}

Tensor layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps,
                  InputForm form, Caller at) {
  const CallSite site("layer_norm", at);
  autograd::expect_floating(x);
  return layer_norm_of("layer_norm", x, {}, weight, bias, eps, form).norm;
}

SumAndNorm add_rms_norm(const Tensor& x, Tensor residual, const Tensor& weight, double eps,
                        InputForm form, Caller at) {
  const CallSite site("add_rms_norm", at);
  autograd::expect_floating(x);
  return rms_norm_of("add_rms_norm", x, residual, weight, eps, form);
}

SumAndNorm add_layer_norm(const Tensor& x, Tensor residual, const Tensor& weight,
                          const Tensor& bias, double eps, InputForm form, Caller at) {
  const CallSite site("add_layer_norm", at);
  autograd::expect_floating(x);
  return layer_norm_of("add_layer_norm", x, residual, weight, bias, eps, form);
}

}  // namespace tessera
