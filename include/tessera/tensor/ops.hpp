// Operations without history. Each allocates its result on the device's compute stream, and
// launches one kernel or a few. Differentiable operations (autograd/ops.hpp) and backward passes
// are built from these; models use those, not these. PyTorch: the aten operators (at::) below
// autograd.
//
// Shapes broadcast by NumPy's rule. Both operands of a binary operation have one dtype, since
// nothing is promoted. A number beside an integer tensor is whole and within the dtype's range; so
// is a number that fills one. On `meta` only shapes and dtypes are computed.
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
// Rows begin, begin + step, .. below end of dim. Requires: 0 <= begin <= end <= the size of dim.
Tensor slice(const Tensor& x, int dim, std::int64_t begin, std::int64_t end, std::int64_t step = 1);
Tensor expand(const Tensor& x, const Shape& shape);  // broadcast, strides 0; -1 keeps x's size
// The elements whose position along dim1 is `offset` more than along dim0, as the last dimension.
Tensor diagonal(const Tensor& x, int offset, int dim0, int dim1);
// A view if the layout allows it, otherwise a contiguous copy. One size may be -1.
Tensor reshape(const Tensor& x, const Shape& shape);

// --- copies ---
Tensor contiguous(const Tensor& x);  // x itself if it is
Tensor cast(const Tensor& x, DType dtype);
// out = x, cast to out's dtype; shapes are equal. One of the two may lie on the host beside the
// other's device (Device::host). Then the stream `transfer` copies, after the work submitted on
// either before.
void copy_into(const Tensor& out, const Tensor& x);
// x itself if it lies on `device`, otherwise a copy there; see copy_into.
// Throws: ContractError for the device of another rank.
Tensor moved(const Tensor& x, const Device& device);
void fill(const Tensor& out, double value);
// Writes elements first, first + 1, .. of the values that Tensor::normal and uniform draw by `key`,
// into a contiguous floating tensor. So each rank fills its part of one whole.
void normal_into(const Tensor& out, double mean, double deviation, std::uint64_t key,
                 std::int64_t first);
void uniform_into(const Tensor& out, double low, double high, std::uint64_t key,
                  std::int64_t first);
// Joins the parts along dim, one behind the other. Their other sizes and their dtypes are equal.
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

// Comparisons and logical operations give boolean, the others the operands' dtype. A quotient of
// integers is cut off towards zero, where PyTorch gives a floating one. It is 0 where the dtype has
// no value for it (x / 0, the least one / -1). Derivatives take (x, gradient); those of tanh and
// sigmoid take (y, gradient). kernels/ops.hpp has them all, with their dtypes.
using Binary = kernels::BinaryOp;
Tensor binary(Binary op, const Tensor& a, const Tensor& b);
Tensor binary(Binary op, const Tensor& a, double b);
Tensor binary(Binary op, double a, const Tensor& b);
inline Tensor add(const Tensor& a, const Tensor& b) { return binary(Binary::add, a, b); }
inline Tensor mul(const Tensor& a, const Tensor& b) { return binary(Binary::mul, a, b); }
inline Tensor mul(const Tensor& a, double b) { return binary(Binary::mul, a, b); }
// condition ? a : b; condition is boolean.
Tensor where(const Tensor& condition, const Tensor& a, const Tensor& b);
// y = alpha x + beta y; beta 0 never reads y. Dtypes may differ. Gradients are accumulated so.
void axpby(const Tensor& y, const Tensor& x, double alpha, double beta);

// silu(gate) * up, and its derivative {d_gate, d_up}. The derivative takes over the bytes of gate
// and up if these are moved in and nobody else holds them.
Tensor swiglu(const Tensor& gate, const Tensor& up);
std::pair<Tensor, Tensor> swiglu_backward(Tensor gate, Tensor up, const Tensor& d_out);
// halves: the views gate and up of both side by side in the last dimension. swiglu_backward: the
// derivative in that form.
std::pair<Tensor, Tensor> halves(const Tensor& gate_up);
Tensor swiglu_backward(Tensor gate_up, const Tensor& d_out);

// --- reductions (dimensions kept as size 1 with `keep`) ---
// argmax and argmin go over one dimension or all, and give i64, the first of equal ones. A sum of
// integers or booleans is i64. All others have x's dtype. mean and sumsq are floating. NaN wins in
// max, min, argmax and argmin.
using Reduction = kernels::ReduceOp;
enum class KeepDim { no, yes };
Tensor reduce(Reduction op, const Tensor& x, const Dims& dims, KeepDim keep = KeepDim::no);
Tensor reduce_all(Reduction op, const Tensor& x);  // to a tensor of shape []
// The adjoint of broadcasting `shape` to x.shape().
Tensor sum_to(const Tensor& x, const Shape& shape);

// --- products ---
enum class Transpose { no, yes };
// op(a) op(b) over the last two dimensions; leading ones broadcast. 16-bit inputs are summed in f32
// and rounded once.
Tensor matmul(const Tensor& a, const Tensor& b, Transpose ta = Transpose::no,
              Transpose tb = Transpose::no);
// out = alpha op(a) op(b) + beta out + bias, all matrices. `bias`, in every row, has the dtype of a
// and b, and may be undefined. `out` has contiguous rows, or without bias contiguous columns; it
// may be f32 for 16-bit inputs. `added`, of out's dtype, shape and strides, replaces beta out by
// beta added.
void matmul_into(const Tensor& out, const Tensor& a, const Tensor& b, Transpose ta, Transpose tb,
                 double alpha, double beta, const Tensor& bias = {}, const Tensor& added = {});
// aux = op(a) op(b) + bias and out = gelu(aux), in one launch. All are contiguous matrices of one
// dtype.
void matmul_gelu_into(const Tensor& out, const Tensor& aux, const Tensor& a, const Tensor& b,
                      Transpose ta, Transpose tb, const Tensor& bias = {});
// Its backward: out = (op(a) op(b)) gelu'(aux).
void matmul_gelu_backward_into(const Tensor& out, const Tensor& aux, const Tensor& a,
                               const Tensor& b, Transpose ta, Transpose tb);

// --- rows and indices ---
// Indices are i32 or i64. An index outside of x's dim reads as NaN (0 for integers and boolean),
// and adds nothing.
Tensor softmax(const Tensor& x);  // over the last dimension
Tensor softmax_backward(const Tensor& y, const Tensor& dy);
// Rows `index` [count] of dim, in the order of `index`.
Tensor index_select(const Tensor& x, int dim, const Tensor& index);
// out[..., j, ...] = x[..., index[..., j, ...], ...], with j along dim; index has x's other sizes.
Tensor gather(const Tensor& x, int dim, const Tensor& index);
// Their adjoints: out += source at index along dim; out is contiguous.
void index_add_into(const Tensor& out, int dim, const Tensor& index, const Tensor& source);
void scatter_add_into(const Tensor& out, int dim, const Tensor& index, const Tensor& source);

// out = source at index along dim; of several at one position the last counts. out is contiguous.
void scatter_into(const Tensor& out, int dim, const Tensor& index, const Tensor& source);

// Sums along dim of the elements so far, or (backward) of those from here on; i64 for integers and
// boolean.
enum class Direction { forward, backward };
Tensor cumsum(const Tensor& x, int dim, Direction direction = Direction::forward);
// Indices along dim, sorted by their elements. NaN is largest; equal elements keep their order.
Tensor argsort(const Tensor& x, int dim, Order order = Order::ascending);

// Writes the sum of squares of a contiguous f32 tensor into out, an f32 or f64 scalar; `accumulate`
// adds it.
enum class Accumulate { no, yes };
void sumsq_into(const Tensor& out, const Tensor& x, Accumulate accumulate);
// Writes scale times the sum of the rows of x [N, C] into out [C]; `accumulate` adds it. out has
// x's dtype, or f32 for 16 bits. Throws: ContractError for other shapes, strides and dtypes.
void sum_rows_into(const Tensor& out, const Tensor& x, double scale, Accumulate accumulate);

}  // namespace tessera::raw
