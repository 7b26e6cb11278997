// Operations without history: each allocates its result on the device's compute stream and launches
// one kernel or a few. Differentiable operations (autograd/ops.hpp) and backward passes are built
// from these; models use those, not these. PyTorch: the aten operators (at::) below autograd.
//
// Shapes broadcast by NumPy's rule. Both operands of a binary operation have one dtype; a number
// beside integers is whole and within their range, for nothing is promoted, and so is what fills
// them. On `meta` only shapes and dtypes are computed.
// Throws: ContractError for shapes, dtypes or devices that do not fit.
#pragma once

#include <span>
#include <vector>

#include "tessera/kernels/ops.hpp"
#include "tessera/tensor/dims.hpp"
#include "tessera/tensor/tensor.hpp"

namespace tessera {
enum class Order { ascending, descending };
}

namespace tessera::raw {

// --- views: no kernel, the same storage ---
Tensor permute(const Tensor& x, std::span<const int> order);
Tensor transpose(const Tensor& x, int dim0, int dim1);
// Rows begin, begin + step, .. below end of dim.  Requires: 0 <= begin <= end <= its size.
Tensor slice(const Tensor& x, int dim, std::int64_t begin, std::int64_t end, std::int64_t step = 1);
Tensor expand(const Tensor& x, const Shape& shape);  // broadcast, strides 0; -1 keeps x's size
// Elements whose position along dim1 is `offset` more than along dim0; they become the last
// dimension.
Tensor diagonal(const Tensor& x, int offset, int dim0, int dim1);
// A view where the layout allows it, else a contiguous copy. One size may be -1.
Tensor reshape(const Tensor& x, const Shape& shape);

// --- copies ---
Tensor contiguous(const Tensor& x);  // x itself when it is
Tensor cast(const Tensor& x, DType dtype);
// out = x, cast to out's dtype; shapes equal. One of them may lie on the host beside the other's
// device (Device::host): then by `transfer`, after what was submitted for either before.
void copy_into(const Tensor& out, const Tensor& x);
// x itself where it lies on that device, else a copy there; see copy_into.
// Throws: ContractError for the device of another rank.
Tensor moved(const Tensor& x, const Device& device);
void fill(const Tensor& out, double value);
// Elements first, first + 1, .. of the values that Tensor::normal and uniform draw by `key`, into a
// contiguous floating tensor: so that each rank fills its part of one whole.
void normal_into(const Tensor& out, double mean, double deviation, std::uint64_t key,
                 std::int64_t first);
void uniform_into(const Tensor& out, double low, double high, std::uint64_t key,
                  std::int64_t first);
// The parts one behind the other along dim; their other sizes and their dtypes are equal.
Tensor cat(std::span<const Tensor> parts, int dim);

// --- elementwise: floating, but neg, abs, sign, floor, round (not boolean), logical_not (any) ---
using Unary = kernels::UnaryOp;
Tensor unary(Unary op, const Tensor& x);
Tensor neg(const Tensor& x);
Tensor exp(const Tensor& x);
Tensor log(const Tensor& x);
Tensor sqrt(const Tensor& x);
Tensor rsqrt(const Tensor& x);
Tensor tanh(const Tensor& x);
Tensor relu(const Tensor& x);
Tensor gelu(const Tensor& x);  // tanh approximation
Tensor silu(const Tensor& x);
Tensor sigmoid(const Tensor& x);
Tensor abs(const Tensor& x);
Tensor logical_not(const Tensor& x);
Tensor isfinite(const Tensor& x);

// Comparisons and logical operations give boolean, the others the operands' dtype: a quotient of
// integers is cut off towards zero, where PyTorch gives a floating one, and 0 where it has no value
// of the dtype (x / 0, the least one / -1). The derivatives take (x, gradient), those of
// tanh and sigmoid (y, gradient); kernels/ops.hpp has them all, with their dtypes.
using Binary = kernels::BinaryOp;
Tensor binary(Binary op, const Tensor& a, const Tensor& b);
Tensor binary(Binary op, const Tensor& a, double b);
Tensor binary(Binary op, double a, const Tensor& b);
inline Tensor add(const Tensor& a, const Tensor& b) { return binary(Binary::add, a, b); }
inline Tensor mul(const Tensor& a, const Tensor& b) { return binary(Binary::mul, a, b); }
inline Tensor mul(const Tensor& a, double b) { return binary(Binary::mul, a, b); }
// condition ? a : b, condition boolean.
Tensor where(const Tensor& condition, const Tensor& a, const Tensor& b);
// y = alpha x + beta y; beta 0 never reads y. Dtypes may differ. How gradients are accumulated.
void axpby(const Tensor& y, const Tensor& x, double alpha, double beta);

// silu(gate) * up, and its derivative {d_gate, d_up}, which take over the bytes of gate and up
// where these are moved in and nobody else holds them.
Tensor swiglu(const Tensor& gate, const Tensor& up);
std::pair<Tensor, Tensor> swiglu_backward(Tensor gate, Tensor up, const Tensor& d_out);
// The same of both side by side in the last dimension, and what they are then.
std::pair<Tensor, Tensor> halves(const Tensor& gate_up);
Tensor swiglu_backward(Tensor gate_up, const Tensor& d_out);

// --- reductions (dimensions kept as size 1 with `keep`) ---
// argmax and argmin go over one dimension or all, and give i64, the first of equal ones; a sum of
// integers or booleans i64; all others x's dtype. mean and sumsq are floating. NaN wins in max,
// min, argmax and argmin.
using Reduction = kernels::ReduceOp;
enum class KeepDim { no, yes };
Tensor reduce(Reduction op, const Tensor& x, const Dims& dims, KeepDim keep = KeepDim::no);
Tensor reduce_all(Reduction op, const Tensor& x);  // to a tensor of shape []
// The adjoint of broadcasting `shape` to x.shape().
Tensor sum_to(const Tensor& x, const Shape& shape);

// --- products ---
enum class Transpose { no, yes };
// op(a) op(b) over the last two dimensions; leading ones broadcast. 16-bit inputs accumulate in f32
// and round once.
Tensor matmul(const Tensor& a, const Tensor& b, Transpose ta = Transpose::no,
              Transpose tb = Transpose::no);
// out = alpha op(a) op(b) + beta out (+ bias, of their dtype, in every row), all matrices; out has
// contiguous rows, or without bias columns, and may be f32 for 16-bit inputs. With `added`, of
// out's dtype, shape and strides, beta added stands in the place of beta out.
void matmul_into(const Tensor& out, const Tensor& a, const Tensor& b, Transpose ta, Transpose tb,
                 double alpha, double beta, const Tensor& bias = {}, const Tensor& added = {});
// aux = op(a) op(b) + bias and out = gelu(aux), in one launch; contiguous matrices of one dtype.
void matmul_gelu_into(const Tensor& out, const Tensor& aux, const Tensor& a, const Tensor& b,
                      Transpose ta, Transpose tb, const Tensor& bias = {});
// out = (op(a) op(b)) gelu'(aux), its backward.
void matmul_gelu_backward_into(const Tensor& out, const Tensor& aux, const Tensor& a,
                               const Tensor& b, Transpose ta, Transpose tb);

// --- rows and indices ---
// Indices are i32 or i64. One outside x's dim reads as NaN (0 for integers and boolean) and adds
// nothing.
Tensor softmax(const Tensor& x);  // over the last dimension
Tensor softmax_backward(const Tensor& y, const Tensor& dy);
// Rows `index` [count] of dim, in its order.
Tensor index_select(const Tensor& x, int dim, const Tensor& index);
// out[..., j, ...] = x[..., index[..., j, ...], ...], j along dim; index has x's other sizes.
Tensor gather(const Tensor& x, int dim, const Tensor& index);
// The adjoints: out += source at index along dim; out is contiguous and changed.
void index_add_into(const Tensor& out, int dim, const Tensor& index, const Tensor& source);
void scatter_add_into(const Tensor& out, int dim, const Tensor& index, const Tensor& source);

// out = source at index along dim, the last of several at one position; out is contiguous.
void scatter_into(const Tensor& out, int dim, const Tensor& index, const Tensor& source);

// Sums of the elements so far along dim, or of those from here on; i64 for integers and boolean.
enum class Direction { forward, backward };
Tensor cumsum(const Tensor& x, int dim, Direction direction = Direction::forward);
// Indices along dim in the order of their elements. NaN is largest; equal ones keep their order.
Tensor argsort(const Tensor& x, int dim, Order order = Order::ascending);

// The sum of squares of a contiguous f32 tensor into out, an f32 or f64 scalar; added to it with
// `accumulate`.
enum class Accumulate { no, yes };
void sumsq_into(const Tensor& out, const Tensor& x, Accumulate accumulate);
// scale times the sum of the rows of x [N, C] into out [C] of its dtype or, of 16 bits, f32; added
// to it with `accumulate`.  Throws: ContractError for other shapes, strides and dtypes.
void sum_rows_into(const Tensor& out, const Tensor& x, double scale, Accumulate accumulate);

}  // namespace tessera::raw
