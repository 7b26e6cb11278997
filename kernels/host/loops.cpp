// Floating loops run on vectors whose tails use the same instructions; loops over single elements
// are left to the compiler.
#include "kernels/host/loops.hpp"

#include <cmath>
#include <limits>

#include "kernels/formulas.hpp"
#include "kernels/host/rows.hpp"

namespace tessera::kernels::host {
namespace {

// A loop takes its formula F as a type.
template <class F, class C>
void unary_of_floats(void* out, const void* in, std::int64_t n) {
  map(static_cast<C*>(out), n, [](auto x) { return F::floats(x); }, static_cast<const C*>(in));
}

template <class F, class C>
void binary_of_floats(void* out, const void* a, const void* b, std::int64_t n) {
  map(
      static_cast<C*>(out), n, [](auto x, auto y) { return F::floats(x, y); },
      static_cast<const C*>(a), static_cast<const C*>(b));
}

template <class F, class I>
void unary_of_integers(void* out, const void* in, std::int64_t n) {
  I* to = static_cast<I*>(out);
  const I* from = static_cast<const I*>(in);
  for (std::int64_t i = 0; i < n; ++i) to[i] = static_cast<I>(F::integers(from[i]));
}

// Also the comparisons of every type: single elements, whatever they are.
template <class F, class Out, class In>
void binary_of_elements(void* out, const void* a, const void* b, std::int64_t n) {
  Out* to = static_cast<Out*>(out);
  const In *x = static_cast<const In*>(a), *y = static_cast<const In*>(b);
  for (std::int64_t i = 0; i < n; ++i) to[i] = static_cast<Out>(F::integers(x[i], y[i]));
}

template <class C>
void are_finite(void* out, const void* in, std::int64_t n) {
  bool* to = static_cast<bool*>(out);
  const C* from = static_cast<const C*>(in);
  for (std::int64_t i = 0; i < n; ++i) to[i] = std::abs(from[i]) <= std::numeric_limits<C>::max();
}

void negate(void* out, const void* in, std::int64_t n) {
  bool* to = static_cast<bool*>(out);
  const bool* from = static_cast<const bool*>(in);
  for (std::int64_t i = 0; i < n; ++i) to[i] = !from[i];
}

template <class C>
UnaryLoop float_loop(UnaryOp op) {
  if (op == UnaryOp::isfinite) return are_finite<C>;
  return visit_formula(op, []<class F>(F) -> UnaryLoop {
    if constexpr (has_floats<F, Vec<C>>())
      return unary_of_floats<F, C>;
    else
      return nullptr;
  });
}

template <class I>
UnaryLoop integer_loop(UnaryOp op) {
  return visit_formula(op, []<class F>(F) -> UnaryLoop {
    if constexpr (has_integers<F, I>())
      return unary_of_integers<F, I>;
    else
      return nullptr;
  });
}

template <class C>
BinaryLoop float_loop(BinaryOp op) {
  return visit_formula(op, []<class F>(F) -> BinaryLoop {
    if constexpr (gives_boolean(F::op))
      return binary_of_elements<F, bool, C>;
    else
      return binary_of_floats<F, C>;
  });
}

template <class I>
BinaryLoop integer_loop(BinaryOp op) {
  return visit_formula(op, []<class F>(F) -> BinaryLoop {
    if constexpr (gives_boolean(F::op))
      return binary_of_elements<F, bool, I>;
    else if constexpr (has_integers<F, I>())
      return binary_of_elements<F, I, I>;
    else
      return nullptr;
  });
}

BinaryLoop boolean_loop(BinaryOp op) {
  return visit_formula(op, []<class F>(F) -> BinaryLoop {
    if constexpr (gives_boolean(F::op) || F::op == BinaryOp::min || F::op == BinaryOp::max)
      return binary_of_elements<F, bool, bool>;
    else
      return nullptr;
  });
}

}  // namespace

UnaryLoop unary_loop(UnaryOp op, DType compute) {
  switch (compute) {
    case DType::f32:
      return float_loop<float>(op);
    case DType::f64:
      return float_loop<double>(op);
    case DType::i32:
      return integer_loop<std::int32_t>(op);
    case DType::i64:
      return integer_loop<std::int64_t>(op);
    case DType::boolean:
      return op == UnaryOp::logical_not ? negate : nullptr;
    default:
      return nullptr;
  }
}

BinaryLoop binary_loop(BinaryOp op, DType compute) {
  switch (compute) {
    case DType::f32:
      return float_loop<float>(op);
    case DType::f64:
      return float_loop<double>(op);
    case DType::i32:
      return integer_loop<std::int32_t>(op);
    case DType::i64:
      return integer_loop<std::int64_t>(op);
    case DType::boolean:
      return boolean_loop(op);
    default:
      return nullptr;
  }
}

}  // namespace tessera::kernels::host
