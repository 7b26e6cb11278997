// Drivers of the elementwise kernels: operands become contiguous blocks of the computing type,
// loops do the rest.
#include "kernels/elementwise.hpp"

#include <cstring>

#include "kernels/host/cpu.hpp"
#include "kernels/host/loops.hpp"
#include "kernels/host/rows.hpp"
#include "kernels/host/strided.hpp"

namespace tessera::kernels::cpu {

using namespace host;

void unary(const UnaryArgs& args, Exec& exec) {
  const Extent extent{args.shape, args.ndim, args.count};
  // A copy converts straight from one dtype to the other: its computing type is the output's.
  const bool copies = args.op == UnaryOp::copy, negates = args.op == UnaryOp::logical_not;
  const DType in_compute = copies    ? args.out_dtype
                           : negates ? DType::boolean
                                     : compute_dtype(args.in_dtype);
  const DType out_compute = args.op == UnaryOp::isfinite ? DType::boolean : in_compute;
  const UnaryLoop loop =
      copies ? converter(args.out_dtype, args.out_dtype) : unary_loop(args.op, in_compute);
  if (loop == nullptr) return;
  const Operand in = Operand::input(args.in, args.in_strides, args.in_dtype, in_compute);
  const Operand out = Operand::output(args.out, args.out_strides, args.out_dtype, out_compute);
  const bool staged = in.conversion != nullptr || out.conversion != nullptr;
  for_blocks(exec, extent, out, staged,
             [&](void* to, std::int64_t p, std::int64_t n, Buffer* buffers) {
               loop(to, in.read(extent, p, n, buffers[0]), n);
             });
}

void binary(const BinaryArgs& args, Exec& exec) {
  const Extent extent{args.shape, args.ndim, args.count};
  const DType compute = compute_dtype(args.dtype);
  const bool boolean = gives_boolean(args.op);
  const BinaryLoop loop = binary_loop(args.op, compute);
  if (loop == nullptr) return;
  const Operand a = Operand::input(args.a, args.a_strides, args.dtype, compute);
  const Operand b = Operand::input(args.b, args.b_strides, args.dtype, compute);
  const Operand out =
      Operand::output(args.out, args.out_strides, boolean ? DType::boolean : args.dtype,
                      boolean ? DType::boolean : compute);
  for_blocks(exec, extent, out, a.conversion != nullptr,
             [&](void* to, std::int64_t p, std::int64_t n, Buffer* buffers) {
               loop(to, a.read(extent, p, n, buffers[0]), b.read(extent, p, n, buffers[1]), n);
             });
}

// The scalar is spread over one block, which stays in the L1 cache: every binary loop serves
// scalars too.
void scalar(const ScalarArgs& args, Exec& exec) {
  const Extent extent{args.shape, args.ndim, args.count};
  const DType compute = compute_dtype(args.dtype);
  const bool boolean = gives_boolean(args.op);
  const BinaryLoop loop = binary_loop(args.op, compute);
  if (loop == nullptr) return;
  double spread[kBlock];
  std::fill_n(spread, kBlock, args.scalar);
  alignas(64) std::byte block[kBlock * 8];
  converter(compute, DType::f64)(block, spread, kBlock);
  const Operand in = Operand::input(args.in, args.in_strides, args.dtype, compute);
  const Operand out =
      Operand::output(args.out, args.out_strides, boolean ? DType::boolean : args.dtype,
                      boolean ? DType::boolean : compute);
  for_blocks(exec, extent, out, true,
             [&](void* to, std::int64_t p, std::int64_t n, Buffer* buffers) {
               const void* from = in.read(extent, p, n, buffers[0]);
               if (args.scalar_left)
                 loop(to, block, from, n);
               else
                 loop(to, from, block, n);
             });
}

namespace {

template <class Raw>
void choose(void* out, const void* condition, const void* a, const void* b, std::int64_t n) {
  Raw* to = static_cast<Raw*>(out);
  const bool* c = static_cast<const bool*>(condition);
  const Raw *x = static_cast<const Raw*>(a), *y = static_cast<const Raw*>(b);
  for (std::int64_t i = 0; i < n; ++i) to[i] = c[i] ? x[i] : y[i];
}

auto chooser(std::size_t size) {
  switch (size) {
    case 1:
      return choose<std::uint8_t>;
    case 2:
      return choose<std::uint16_t>;
    case 4:
      return choose<std::uint32_t>;
    default:
      return choose<std::uint64_t>;
  }
}

// y = alpha x + beta y on computing-type blocks; `old` is null when beta is 0.
template <class C>
void combine(void* out, const void* x, const void* old, double alpha, double beta, std::int64_t n) {
  const Vec<C> va{C(alpha)}, vb{C(beta)};
  const C* from = static_cast<const C*>(x);
  C* to = static_cast<C*>(out);
  if (old == nullptr)
    map(to, n, [va](Vec<C> v) { return va * v; }, from);
  else
    map(
        to, n, [va, vb](Vec<C> v, Vec<C> w) { return fma(va, v, vb * w); }, from,
        static_cast<const C*>(old));
}

}  // namespace

void where(const WhereArgs& args, Exec& exec) {
  Extent extent{args.shape, args.ndim, 1};
  std::int32_t out_strides[kWhereDims];
  for (int d = args.ndim - 1; d >= 0; --d) {
    out_strides[d] = static_cast<std::int32_t>(extent.count);
    extent.count *= args.shape[d];
  }
  const Operand c =
      Operand::input(args.condition, args.condition_strides, DType::boolean, DType::boolean);
  const Operand a = Operand::input(args.a, args.a_strides, args.dtype, args.dtype);
  const Operand b = Operand::input(args.b, args.b_strides, args.dtype, args.dtype);
  const auto loop = chooser(size_bytes(args.dtype));
  const Operand out = Operand::output(args.out, out_strides, args.dtype, args.dtype);
  for_blocks(exec, extent, out, true,
             [&](void* to, std::int64_t p, std::int64_t n, Buffer* buffers) {
               loop(to, c.read(extent, p, n, buffers[0]), a.read(extent, p, n, buffers[1]),
                    b.read(extent, p, n, buffers[2]), n);
             });
}

void fill(const FillArgs& args, Exec& exec) {
  const Extent extent{args.shape, args.ndim, args.count};
  const Operand out = Operand::output(args.out, args.out_strides, args.dtype, args.dtype);
  const std::size_t size = size_bytes(args.dtype);
  alignas(8) std::byte value[8];
  converter(args.dtype, DType::f64)(value, &args.value, 1);
  for_blocks(exec, extent, out, false, [&](void* to, std::int64_t, std::int64_t n, Buffer*) {
    gather_strided(to, value, 0, n, size);
  });
}

void arange(const ArangeArgs& args, Exec& exec) {
  const Extent extent{nullptr, 0, args.count};
  const Operand out = Operand::output(args.out, nullptr, args.dtype, args.dtype);
  const Converter narrow = converter(args.dtype, DType::f64);
  for_blocks(exec, extent, out, true, [&](void* to, std::int64_t p, std::int64_t n, Buffer*) {
    double values[kBlock];
    for (std::int64_t i = 0; i < n; ++i)
      values[i] = args.start + static_cast<double>(p + i) * args.step;
    narrow(to, values, n);
  });
}

void axpby(const AxpbyArgs& args, Exec& exec) {
  const Extent extent{args.shape, args.ndim, args.count};
  const bool wide = args.x_dtype == DType::f64 || args.y_dtype == DType::f64;
  const DType compute = wide ? DType::f64 : DType::f32;
  const Operand x = Operand::input(args.x, args.x_strides, args.x_dtype, compute);
  const Operand old = Operand::input(args.y, args.y_strides, args.y_dtype, compute);
  const Operand out = Operand::output(args.y, args.y_strides, args.y_dtype, compute);
  const bool staged = x.conversion != nullptr || out.conversion != nullptr;
  for_blocks(
      exec, extent, out, staged, [&](void* to, std::int64_t p, std::int64_t n, Buffer* buffers) {
        const void* from = x.read(extent, p, n, buffers[0]);
        const void* before = args.beta == 0 ? nullptr : old.read(extent, p, n, buffers[1]);
        (wide ? combine<double> : combine<float>)(to, from, before, args.alpha, args.beta, n);
      });
}

}  // namespace tessera::kernels::cpu
