// Matrix products: shapes and strides into one batched kernel call.
#include <limits>

#include "runtime/tensor/launch.hpp"
#include "tessera/device/device_context.hpp"
#include "tessera/tensor/ops.hpp"

namespace tessera::raw {
namespace {

// A stack of matrices the kernel can walk: rows `ld` apart, columns contiguous, matrices
// `batch_stride` apart.
struct Matrices {
  Tensor tensor;
  std::int64_t batch, rows, cols, ld, batch_stride;
  bool transposed;  // the memory holds the transpose of [rows, cols]
};

std::int32_t narrow(std::int64_t value) {
  TESSERA_EXPECT(value <= std::numeric_limits<std::int32_t>::max(), "matmul: dimension ", value,
                 " exceeds 2^31 - 1");
  return static_cast<std::int32_t>(value);
}

// Describes x [..., r, c] without a copy where rows or columns are contiguous and the leading
// dimensions merge.
Matrices matrices_of(const Tensor& x, std::int64_t batch) {
  const int n = x.ndim();
  const std::int64_t rows = x.shape()[n - 2], cols = x.shape()[n - 1];
  const std::int64_t sr = x.strides()[n - 2], sc = x.strides()[n - 1];
  bool regular = true;
  std::int64_t own = 1, stride = 0;
  for (int d = n - 3; d >= 0; --d) {
    if (x.shape()[d] == 1) continue;
    if (own == 1)
      stride = x.strides()[d];
    else
      regular = regular && x.strides()[d] == stride * own;
    own *= x.shape()[d];
  }
  const bool plain = (sc == 1 || cols <= 1) && (sr >= cols || rows <= 1);
  const bool flipped = (sr == 1 || rows <= 1) && (sc >= rows || cols <= 1);
  const bool is_empty = x.numel() == 0;  // nothing is read
  if (!is_empty && (!regular || (!plain && !flipped))) return matrices_of(contiguous(x), batch);
  TESSERA_EXPECT(own == batch || own == 1, "matmul: batches of ", own, " and ", batch,
                 " do not fit");
  if (is_empty) return {x, batch, rows, cols, std::max<std::int64_t>(cols, 1), 0, false};
  if (own == 1) stride = 0;
  if (plain)
    return {x, batch, rows, cols, std::max<std::int64_t>(rows <= 1 ? cols : sr, 1), stride, false};
  return {x, batch, rows, cols, std::max<std::int64_t>(cols <= 1 ? rows : sc, 1), stride, true};
}

Shape leading_of(const Tensor& x) {
  return Shape(std::span(x.shape().begin(), static_cast<std::size_t>(x.ndim() - 2)));
}

// `added` takes the place of out in the sum, undefined: it is out.
void multiply(const Tensor& out, std::int64_t c_batch_stride, std::int64_t ldc, const Tensor& a,
              const Tensor& b, Transpose ta, Transpose tb, double alpha, double beta,
              const Tensor& strided_bias, std::int64_t batch, const Tensor& added = {}) {
  const Device& device = detail::common_device("matmul", a, b);
  detail::expect_bias("matmul", strided_bias, out.size(-1), a.dtype());
  if (out.numel() == 0 || device.is_meta()) return;
  const Tensor bias = strided_bias.defined() ? contiguous(strided_bias) : Tensor();
  const Matrices x = matrices_of(a, batch), y = matrices_of(b, batch);
  const bool flip_a = (ta == Transpose::yes) != x.transposed,
             flip_b = (tb == Transpose::yes) != y.transposed;
  kernels::GemmArgs args{};
  args.c = out.data();
  // Nothing is read from an operand without elements, but addresses are computed from its first.
  args.a = x.tensor.numel() > 0 ? x.tensor.data() : out.data();
  args.b = y.tensor.numel() > 0 ? y.tensor.data() : out.data();
  args.bias = bias.defined() ? bias.data() : nullptr;
  args.alpha = alpha;
  args.beta = beta;
  args.a_batch_stride = x.batch_stride;
  args.b_batch_stride = y.batch_stride;
  args.c_batch_stride = c_batch_stride;
  args.batch = narrow(batch);
  args.m = narrow(ta == Transpose::yes ? x.cols : x.rows);
  args.k = narrow(ta == Transpose::yes ? x.rows : x.cols);
  args.n = narrow(tb == Transpose::yes ? y.rows : y.cols);
  args.lda = narrow(x.ld);
  args.ldb = narrow(y.ld);
  args.ldc = narrow(ldc);
  args.dtype = a.dtype();
  args.c_dtype = out.dtype();
  args.trans_a = flip_a;
  args.trans_b = flip_b;
  args.tf32 = !device.is_meta() && device.context().tf32();
  args.c0 = added.defined() ? added.data() : nullptr;
  detail::launch("matmul", device, detail::table(device).gemm, args,
                 {detail::reads(x.tensor), detail::reads(y.tensor), detail::reads(bias),
                  detail::reads(added), detail::updates(out, beta != 0 && !added.defined())},
                 2.0 * static_cast<double>(batch) * args.m * args.n * args.k,
                 {.kind = Products::Kind::matrix,
                  .dtype = args.dtype,
                  .batch = args.batch,
                  .m = args.m,
                  .n = args.n,
                  .k = args.k});
}

// Both of the products with GELU: `backward` reads aux.
void multiply_gelu(const Tensor& out, const Tensor& aux, const Tensor& a, const Tensor& b,
                   Transpose ta, Transpose tb, const Tensor& strided_bias, bool backward) {
  const std::int64_t m = a.size(ta == Transpose::yes ? 1 : 0),
                     k = a.size(ta == Transpose::yes ? 0 : 1),
                     n = b.size(tb == Transpose::yes ? 0 : 1);
  TESSERA_EXPECT(b.size(tb == Transpose::yes ? 1 : 0) == k && out.shape() == (Shape{m, n}) &&
                     aux.shape() == out.shape() && out.is_contiguous() && aux.is_contiguous() &&
                     b.dtype() == a.dtype() && out.dtype() == a.dtype() && aux.dtype() == a.dtype(),
                 "matmul_gelu_into: ", a.shape(), " and ", b.shape(), " of ", a.dtype(),
                 " do not give contiguous ", out.shape(), " and ", aux.shape());
  const Device& device = detail::common_device("matmul_gelu_into", a, b);
  detail::expect_bias("matmul_gelu_into", strided_bias, n, a.dtype());
  if (out.numel() == 0 || device.is_meta()) return;
  const Tensor bias = strided_bias.defined() ? contiguous(strided_bias) : Tensor();
  const Matrices x = matrices_of(a, 1), y = matrices_of(b, 1);
  kernels::GemmGeluArgs args{};
  args.c = out.data();
  args.aux = aux.data();
  args.a = x.tensor.numel() > 0 ? x.tensor.data() : out.data();
  args.b = y.tensor.numel() > 0 ? y.tensor.data() : out.data();
  args.bias = bias.defined() ? bias.data() : nullptr;
  args.m = narrow(m);
  args.n = args.ldc = args.ld_aux = narrow(n);
  args.k = narrow(k);
  args.lda = narrow(x.ld);
  args.ldb = narrow(y.ld);
  args.dtype = a.dtype();
  args.trans_a = (ta == Transpose::yes) != x.transposed;
  args.trans_b = (tb == Transpose::yes) != y.transposed;
  args.backward = backward;
  detail::launch(backward ? "matmul_gelu_backward" : "matmul_gelu", device,
                 detail::table(device).gemm_gelu, args,
                 {detail::reads(x.tensor), detail::reads(y.tensor), detail::reads(bias),
                  backward ? detail::reads(aux) : detail::writes(aux), detail::writes(out)},
                 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k),
                 {.kind = Products::Kind::matrix,
                  .dtype = args.dtype,
                  .batch = 1,
                  .m = args.m,
                  .n = args.n,
                  .k = args.k});
}

}  // namespace

Tensor matmul(const Tensor& a, const Tensor& b, Transpose ta, Transpose tb) {
  for (const Tensor* x : {&a, &b}) detail::expect_computed("matmul", x->dtype());
  TESSERA_EXPECT(a.ndim() >= 2 && b.ndim() >= 2 && is_floating(a.dtype()) && a.dtype() == b.dtype(),
                 "matmul: got ", a.shape(), " of ", a.dtype(), " and ", b.shape(), " of ",
                 b.dtype(), "; expected two floating matrices, or stacks of them, of one dtype");
  const std::int64_t m = a.size(ta == Transpose::yes ? -1 : -2),
                     k = a.size(ta == Transpose::yes ? -2 : -1);
  const std::int64_t k2 = b.size(tb == Transpose::yes ? -1 : -2),
                     n = b.size(tb == Transpose::yes ? -2 : -1);
  TESSERA_EXPECT(k == k2, "matmul: inner dimensions of ", a.shape(), " and ", b.shape(), " are ", k,
                 " and ", k2);
  // A stack times one matrix is one tall product.
  if (b.ndim() == 2 && a.ndim() > 2 && ta == Transpose::no) {
    Shape shape = a.shape();
    shape[a.ndim() - 1] = n;
    const std::int64_t rows = leading_of(a).numel() * m;
    return reshape(matmul(reshape(a, {rows, k}), b, ta, tb), shape);
  }
  const Shape leading_a = leading_of(a), leading_b = leading_of(b);
  const Shape leading = broadcast(leading_a, leading_b);
  Shape shape = leading;
  shape.push_back(m);
  shape.push_back(n);
  const auto fit = [&](const Tensor& x, const Shape& own) {  // partial broadcasts become copies
    if (own == leading || own.numel() == 1) return x;
    Shape full = leading;
    full.push_back(x.size(-2));
    full.push_back(x.size(-1));
    return contiguous(expand(x, full));
  };
  Tensor out = Tensor::empty(shape, a.dtype(), a.device());
  multiply(out, m * n, std::max<std::int64_t>(n, 1), fit(a, leading_a), fit(b, leading_b), ta, tb,
           1, 0, {}, leading.numel());
  return out;
}

void matmul_into(const Tensor& out, const Tensor& a, const Tensor& b, Transpose ta, Transpose tb,
                 double alpha, double beta, const Tensor& bias, const Tensor& added) {
  TESSERA_EXPECT(
      !added.defined() || (added.dtype() == out.dtype() && added.shape() == out.shape() &&
                           added.strides() == out.strides()),
      "matmul_into: what is added is ", added.shape(), " of ", added.dtype(), ", out is ",
      out.shape(), " of ", out.dtype(), "; expected the same, with the same strides");
  if (out.ndim() == 2 && out.strides()[1] != 1 && out.strides()[0] == 1 && !bias.defined()) {
    const auto flipped = [](Transpose t) {
      return t == Transpose::yes ? Transpose::no : Transpose::yes;
    };
    return matmul_into(transpose(out, 0, 1), b, a, flipped(tb), flipped(ta), alpha, beta, {},
                       added.defined() ? transpose(added, 0, 1) : added);
  }
  TESSERA_EXPECT(out.ndim() == 2 && a.ndim() == 2 && b.ndim() == 2 && a.dtype() == b.dtype() &&
                     (out.strides()[1] == 1 || out.size(1) <= 1),
                 "matmul_into: needs three matrices, out with contiguous rows; got ", out.shape(),
                 ", ", a.shape(), ", ", b.shape());
  const std::int64_t m = a.size(ta == Transpose::yes ? 1 : 0),
                     k = a.size(ta == Transpose::yes ? 0 : 1);
  const std::int64_t k2 = b.size(tb == Transpose::yes ? 1 : 0),
                     n = b.size(tb == Transpose::yes ? 0 : 1);
  TESSERA_EXPECT(k == k2 && out.shape() == (Shape{m, n}), "matmul_into: ", a.shape(), " and ",
                 b.shape(), " do not give ", out.shape());
  multiply(out, 0, std::max<std::int64_t>(out.strides()[0], std::max<std::int64_t>(n, 1)), a, b, ta,
           tb, alpha, beta, bias, 1, added);
}

void matmul_gelu_into(const Tensor& out, const Tensor& aux, const Tensor& a, const Tensor& b,
                      Transpose ta, Transpose tb, const Tensor& bias) {
  multiply_gelu(out, aux, a, b, ta, tb, bias, false);
}

void matmul_gelu_backward_into(const Tensor& out, const Tensor& aux, const Tensor& a,
                               const Tensor& b, Transpose ta, Transpose tb) {
  multiply_gelu(out, aux, a, b, ta, tb, {}, true);
}

}  // namespace tessera::raw
