// Floating loops run on vectors whose tails use the same instructions; integer loops are left to
// the compiler.
#include "kernels/host/loops.hpp"

#include <cmath>
#include <limits>
#include <type_traits>

#include "kernels/host/math.hpp"
#include "kernels/host/rows.hpp"

namespace tessera::kernels::host {
namespace {

// Each loop takes its operation as a constant: a lambda over vectors (float loops) or elements
// (plain loops).
template <class C, auto F>
void float_unary(void* out, const void* in, std::int64_t n) {
  map(static_cast<C*>(out), n, F, static_cast<const C*>(in));
}

template <class C, auto F>
void float_binary(void* out, const void* a, const void* b, std::int64_t n) {
  map(static_cast<C*>(out), n, F, static_cast<const C*>(a), static_cast<const C*>(b));
}

template <class Out, class In, auto F>
void plain_unary(void* out, const void* in, std::int64_t n) {
  Out* to = static_cast<Out*>(out);
  const In* from = static_cast<const In*>(in);
  for (std::int64_t i = 0; i < n; ++i) to[i] = F(from[i]);
}

template <class Out, class In, auto F>
void plain_binary(void* out, const void* a, const void* b, std::int64_t n) {
  Out* to = static_cast<Out*>(out);
  const In *x = static_cast<const In*>(a), *y = static_cast<const In*>(b);
  for (std::int64_t i = 0; i < n; ++i) to[i] = F(x[i], y[i]);
}

constexpr auto kExp = [](auto x) { return exp(x); };
constexpr auto kLog = [](auto x) { return log(x); };
constexpr auto kSqrt = [](auto x) { return sqrt(x); };
constexpr auto kRsqrt = []<class C>(Vec<C> x) { return Vec<C>(C(1)) / sqrt(x); };
constexpr auto kTanh = [](auto x) { return tanh(x); };
constexpr auto kGelu = [](auto x) { return gelu(x); };
constexpr auto kSilu = [](auto x) { return silu(x); };
constexpr auto kSigmoid = [](auto x) { return sigmoid(x); };
constexpr auto kNegate = [](auto x) { return -x; };
constexpr auto kAbs = [](auto x) { return abs(x); };
constexpr auto kRelu = []<class C>(Vec<C> x) {
  return select(less(x, Vec<C>(C(0))), Vec<C>(C(0)), x);
};
constexpr auto kIsFinite = []<class C>(C x) {
  return std::abs(x) <= std::numeric_limits<C>::max();
};
constexpr auto kNot = [](bool x) { return !x; };

constexpr auto kAdd = [](auto a, auto b) { return a + b; };
constexpr auto kSub = [](auto a, auto b) { return a - b; };
constexpr auto kMul = [](auto a, auto b) { return a * b; };
constexpr auto kDiv = [](auto a, auto b) { return a / b; };
constexpr auto kMin = [](auto a, auto b) { return min(a, b); };
constexpr auto kMax = [](auto a, auto b) { return max(a, b); };
constexpr auto kPow = [](auto a, auto b) { return std::pow(a, b); };
constexpr auto kGeluBackward = [](auto x, auto g) { return g * gelu_slope(x); };
constexpr auto kSiluBackward = [](auto x, auto g) { return g * silu_slope(x); };
constexpr auto kReluBackward = []<class C>(Vec<C> x, Vec<C> g) {
  return select(less(Vec<C>(C(0)), x), g, Vec<C>(C(0)));
};
constexpr auto kTanhBackward = []<class C>(Vec<C> y, Vec<C> g) {
  return g * (Vec<C>(C(1)) - y * y);
};

// Integers wrap.
template <class T>
constexpr auto bits(T x) {
  return static_cast<std::make_unsigned_t<T>>(x);
}
constexpr auto kIntNegate = []<class T>(T x) { return static_cast<T>(0 - bits(x)); };
constexpr auto kIntAbs = [](auto x) { return x < 0 ? kIntNegate(x) : x; };
constexpr auto kIntAdd = []<class T>(T a, T b) { return static_cast<T>(bits(a) + bits(b)); };
constexpr auto kIntSub = []<class T>(T a, T b) { return static_cast<T>(bits(a) - bits(b)); };
constexpr auto kIntMul = []<class T>(T a, T b) { return static_cast<T>(bits(a) * bits(b)); };
constexpr auto kIntDiv = []<class T>(T a, T b) {
  const bool undefined = b == 0 || (b == -1 && a == std::numeric_limits<T>::min());
  return undefined ? T{0} : static_cast<T>(a / b);
};
constexpr auto kPlainMin = [](auto a, auto b) { return b < a ? b : a; };
constexpr auto kPlainMax = [](auto a, auto b) { return a < b ? b : a; };

constexpr auto kEq = [](auto a, auto b) { return a == b; };
constexpr auto kNe = [](auto a, auto b) { return a != b; };
constexpr auto kLt = [](auto a, auto b) { return a < b; };
constexpr auto kLe = [](auto a, auto b) { return a <= b; };
constexpr auto kGt = [](auto a, auto b) { return a > b; };
constexpr auto kGe = [](auto a, auto b) { return a >= b; };
constexpr auto kAnd = []<class T>(T a, T b) { return (a != T{0}) & (b != T{0}); };
constexpr auto kOr = []<class T>(T a, T b) { return (a != T{0}) | (b != T{0}); };

template <class C>
UnaryLoop float_loop(UnaryOp op) {
  switch (op) {
    case UnaryOp::neg:
      return float_unary<C, kNegate>;
    case UnaryOp::exp:
      return float_unary<C, kExp>;
    case UnaryOp::log:
      return float_unary<C, kLog>;
    case UnaryOp::sqrt:
      return float_unary<C, kSqrt>;
    case UnaryOp::rsqrt:
      return float_unary<C, kRsqrt>;
    case UnaryOp::tanh:
      return float_unary<C, kTanh>;
    case UnaryOp::relu:
      return float_unary<C, kRelu>;
    case UnaryOp::gelu:
      return float_unary<C, kGelu>;
    case UnaryOp::silu:
      return float_unary<C, kSilu>;
    case UnaryOp::abs:
      return float_unary<C, kAbs>;
    case UnaryOp::sigmoid:
      return float_unary<C, kSigmoid>;
    case UnaryOp::isfinite:
      return plain_unary<bool, C, kIsFinite>;
    default:
      return nullptr;
  }
}

template <class T>
UnaryLoop integer_loop(UnaryOp op) {
  if (op == UnaryOp::neg) return plain_unary<T, T, kIntNegate>;
  if (op == UnaryOp::abs) return plain_unary<T, T, kIntAbs>;
  return nullptr;
}

template <class T>
BinaryLoop comparison(BinaryOp op) {
  switch (op) {
    case BinaryOp::eq:
      return plain_binary<bool, T, kEq>;
    case BinaryOp::ne:
      return plain_binary<bool, T, kNe>;
    case BinaryOp::lt:
      return plain_binary<bool, T, kLt>;
    case BinaryOp::le:
      return plain_binary<bool, T, kLe>;
    case BinaryOp::gt:
      return plain_binary<bool, T, kGt>;
    case BinaryOp::ge:
      return plain_binary<bool, T, kGe>;
    case BinaryOp::logical_and:
      return plain_binary<bool, T, kAnd>;
    case BinaryOp::logical_or:
      return plain_binary<bool, T, kOr>;
    default:
      return nullptr;
  }
}

template <class C>
BinaryLoop float_loop(BinaryOp op) {
  switch (op) {
    case BinaryOp::add:
      return float_binary<C, kAdd>;
    case BinaryOp::sub:
      return float_binary<C, kSub>;
    case BinaryOp::mul:
      return float_binary<C, kMul>;
    case BinaryOp::div:
      return float_binary<C, kDiv>;
    case BinaryOp::min:
      return float_binary<C, kMin>;
    case BinaryOp::max:
      return float_binary<C, kMax>;
    case BinaryOp::pow:
      return plain_binary<C, C, kPow>;
    case BinaryOp::gelu_backward:
      return float_binary<C, kGeluBackward>;
    case BinaryOp::silu_backward:
      return float_binary<C, kSiluBackward>;
    case BinaryOp::relu_backward:
      return float_binary<C, kReluBackward>;
    case BinaryOp::tanh_backward:
      return float_binary<C, kTanhBackward>;
    default:
      return comparison<C>(op);
  }
}

template <class T>
BinaryLoop integer_loop(BinaryOp op) {
  switch (op) {
    case BinaryOp::add:
      return plain_binary<T, T, kIntAdd>;
    case BinaryOp::sub:
      return plain_binary<T, T, kIntSub>;
    case BinaryOp::mul:
      return plain_binary<T, T, kIntMul>;
    case BinaryOp::div:
      return plain_binary<T, T, kIntDiv>;
    case BinaryOp::min:
      return plain_binary<T, T, kPlainMin>;
    case BinaryOp::max:
      return plain_binary<T, T, kPlainMax>;
    default:
      return comparison<T>(op);
  }
}

BinaryLoop boolean_loop(BinaryOp op) {
  if (op == BinaryOp::min) return plain_binary<bool, bool, kPlainMin>;
  if (op == BinaryOp::max) return plain_binary<bool, bool, kPlainMax>;
  return comparison<bool>(op);
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
      return op == UnaryOp::logical_not ? plain_unary<bool, bool, kNot> : nullptr;
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
