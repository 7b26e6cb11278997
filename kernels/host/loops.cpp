// Floating loops run on vectors whose tails use the same instructions; integer loops are left to
// the compiler.
#include "kernels/host/loops.hpp"

#include <cmath>
#include <limits>
#include <type_traits>

#include "kernels/host/math.hpp"

namespace tessera::kernels::host {
namespace {

template <class C, class F>
struct FloatUnary {
  static void run(void* out, const void* in, std::int64_t n) {
    map(static_cast<C*>(out), n, F{}, static_cast<const C*>(in));
  }
};

template <class C, class F>
struct FloatBinary {
  static void run(void* out, const void* a, const void* b, std::int64_t n) {
    map(static_cast<C*>(out), n, F{}, static_cast<const C*>(a), static_cast<const C*>(b));
  }
};

// Any types, element by element; Out may differ from In.
template <class Out, class In, class F>
struct PlainUnary {
  static void run(void* out, const void* in, std::int64_t n) {
    Out* to = static_cast<Out*>(out);
    const In* from = static_cast<const In*>(in);
    for (std::int64_t i = 0; i < n; ++i) to[i] = F{}(from[i]);
  }
};

template <class Out, class In, class F>
struct PlainBinary {
  static void run(void* out, const void* a, const void* b, std::int64_t n) {
    Out* to = static_cast<Out*>(out);
    const In *x = static_cast<const In*>(a), *y = static_cast<const In*>(b);
    for (std::int64_t i = 0; i < n; ++i) to[i] = F{}(x[i], y[i]);
  }
};

struct Exp {
  template <class V>
  V operator()(V x) const {
    return exp(x);
  }
};
struct Log {
  template <class V>
  V operator()(V x) const {
    return log(x);
  }
};
struct Sqrt {
  template <class V>
  V operator()(V x) const {
    return sqrt(x);
  }
};
struct Tanh {
  template <class V>
  V operator()(V x) const {
    return tanh(x);
  }
};
struct Gelu {
  template <class V>
  V operator()(V x) const {
    return gelu(x);
  }
};
struct Silu {
  template <class V>
  V operator()(V x) const {
    return silu(x);
  }
};
struct Sigmoid {
  template <class V>
  V operator()(V x) const {
    return sigmoid(x);
  }
};
struct Negate {
  template <class V>
  V operator()(V x) const {
    return -x;
  }
};
struct Abs {
  template <class V>
  V operator()(V x) const {
    return abs(x);
  }
};
struct Rsqrt {
  template <class C>
  Vec<C> operator()(Vec<C> x) const {
    return Vec<C>(C(1)) / sqrt(x);
  }
};
struct Relu {
  template <class C>
  Vec<C> operator()(Vec<C> x) const {
    return select(less(x, Vec<C>(C(0))), Vec<C>(C(0)), x);
  }
};
struct IsFinite {
  template <class C>
  bool operator()(C x) const {
    return std::abs(x) <= std::numeric_limits<C>::max();
  }
};
struct Not {
  bool operator()(bool x) const { return !x; }
};

template <class T>
using Unsigned = std::make_unsigned_t<T>;

struct IntNegate {
  template <class T>
  T operator()(T x) const {
    return static_cast<T>(Unsigned<T>{0} - static_cast<Unsigned<T>>(x));
  }
};
struct IntAbs {
  template <class T>
  T operator()(T x) const {
    return x < 0 ? IntNegate{}(x) : x;
  }
};

struct Add {
  template <class V>
  V operator()(V a, V b) const {
    return a + b;
  }
};
struct Sub {
  template <class V>
  V operator()(V a, V b) const {
    return a - b;
  }
};
struct Mul {
  template <class V>
  V operator()(V a, V b) const {
    return a * b;
  }
};
struct Div {
  template <class V>
  V operator()(V a, V b) const {
    return a / b;
  }
};
struct Min {
  template <class V>
  V operator()(V a, V b) const {
    return min(a, b);
  }
};
struct Max {
  template <class V>
  V operator()(V a, V b) const {
    return max(a, b);
  }
};
struct Pow {
  template <class C>
  C operator()(C a, C b) const {
    return std::pow(a, b);
  }
};
struct GeluBackward {
  template <class V>
  V operator()(V x, V g) const {
    return g * gelu_slope(x);
  }
};
struct SiluBackward {
  template <class V>
  V operator()(V x, V g) const {
    return g * silu_slope(x);
  }
};
struct ReluBackward {
  template <class C>
  Vec<C> operator()(Vec<C> x, Vec<C> g) const {
    return select(less(Vec<C>(C(0)), x), g, Vec<C>(C(0)));
  }
};
struct TanhBackward {
  template <class C>
  Vec<C> operator()(Vec<C> y, Vec<C> g) const {
    return g * (Vec<C>(C(1)) - y * y);
  }
};

// Signed overflow wraps.
struct IntAdd {
  template <class T>
  T operator()(T a, T b) const {
    return static_cast<T>(static_cast<Unsigned<T>>(a) + static_cast<Unsigned<T>>(b));
  }
};
struct IntSub {
  template <class T>
  T operator()(T a, T b) const {
    return static_cast<T>(static_cast<Unsigned<T>>(a) - static_cast<Unsigned<T>>(b));
  }
};
struct IntMul {
  template <class T>
  T operator()(T a, T b) const {
    return static_cast<T>(static_cast<Unsigned<T>>(a) * static_cast<Unsigned<T>>(b));
  }
};
struct IntDiv {
  template <class T>
  T operator()(T a, T b) const {
    return b == 0 || (b == -1 && a == std::numeric_limits<T>::min()) ? T{0} : static_cast<T>(a / b);
  }
};
struct PlainMin {
  template <class T>
  T operator()(T a, T b) const {
    return b < a ? b : a;
  }
};
struct PlainMax {
  template <class T>
  T operator()(T a, T b) const {
    return a < b ? b : a;
  }
};

struct Eq {
  template <class T>
  bool operator()(T a, T b) const {
    return a == b;
  }
};
struct Ne {
  template <class T>
  bool operator()(T a, T b) const {
    return a != b;
  }
};
struct Lt {
  template <class T>
  bool operator()(T a, T b) const {
    return a < b;
  }
};
struct Le {
  template <class T>
  bool operator()(T a, T b) const {
    return a <= b;
  }
};
struct Gt {
  template <class T>
  bool operator()(T a, T b) const {
    return a > b;
  }
};
struct Ge {
  template <class T>
  bool operator()(T a, T b) const {
    return a >= b;
  }
};
struct And {
  template <class T>
  bool operator()(T a, T b) const {
    return (a != T{0}) & (b != T{0});
  }
};
struct Or {
  template <class T>
  bool operator()(T a, T b) const {
    return (a != T{0}) | (b != T{0});
  }
};

template <class C>
UnaryLoop float_unary(UnaryOp op) {
  switch (op) {
    case UnaryOp::neg:
      return FloatUnary<C, Negate>::run;
    case UnaryOp::exp:
      return FloatUnary<C, Exp>::run;
    case UnaryOp::log:
      return FloatUnary<C, Log>::run;
    case UnaryOp::sqrt:
      return FloatUnary<C, Sqrt>::run;
    case UnaryOp::rsqrt:
      return FloatUnary<C, Rsqrt>::run;
    case UnaryOp::tanh:
      return FloatUnary<C, Tanh>::run;
    case UnaryOp::relu:
      return FloatUnary<C, Relu>::run;
    case UnaryOp::gelu:
      return FloatUnary<C, Gelu>::run;
    case UnaryOp::silu:
      return FloatUnary<C, Silu>::run;
    case UnaryOp::abs:
      return FloatUnary<C, Abs>::run;
    case UnaryOp::sigmoid:
      return FloatUnary<C, Sigmoid>::run;
    case UnaryOp::isfinite:
      return PlainUnary<bool, C, IsFinite>::run;
    default:
      return nullptr;
  }
}

template <class T>
UnaryLoop integer_unary(UnaryOp op) {
  if (op == UnaryOp::neg) return PlainUnary<T, T, IntNegate>::run;
  if (op == UnaryOp::abs) return PlainUnary<T, T, IntAbs>::run;
  return nullptr;
}

template <class T>
BinaryLoop comparison(BinaryOp op) {
  switch (op) {
    case BinaryOp::eq:
      return PlainBinary<bool, T, Eq>::run;
    case BinaryOp::ne:
      return PlainBinary<bool, T, Ne>::run;
    case BinaryOp::lt:
      return PlainBinary<bool, T, Lt>::run;
    case BinaryOp::le:
      return PlainBinary<bool, T, Le>::run;
    case BinaryOp::gt:
      return PlainBinary<bool, T, Gt>::run;
    case BinaryOp::ge:
      return PlainBinary<bool, T, Ge>::run;
    case BinaryOp::logical_and:
      return PlainBinary<bool, T, And>::run;
    case BinaryOp::logical_or:
      return PlainBinary<bool, T, Or>::run;
    default:
      return nullptr;
  }
}

template <class C>
BinaryLoop float_binary(BinaryOp op) {
  switch (op) {
    case BinaryOp::add:
      return FloatBinary<C, Add>::run;
    case BinaryOp::sub:
      return FloatBinary<C, Sub>::run;
    case BinaryOp::mul:
      return FloatBinary<C, Mul>::run;
    case BinaryOp::div:
      return FloatBinary<C, Div>::run;
    case BinaryOp::min:
      return FloatBinary<C, Min>::run;
    case BinaryOp::max:
      return FloatBinary<C, Max>::run;
    case BinaryOp::pow:
      return PlainBinary<C, C, Pow>::run;
    case BinaryOp::gelu_backward:
      return FloatBinary<C, GeluBackward>::run;
    case BinaryOp::silu_backward:
      return FloatBinary<C, SiluBackward>::run;
    case BinaryOp::relu_backward:
      return FloatBinary<C, ReluBackward>::run;
    case BinaryOp::tanh_backward:
      return FloatBinary<C, TanhBackward>::run;
    default:
      return comparison<C>(op);
  }
}

template <class T>
BinaryLoop integer_binary(BinaryOp op) {
  switch (op) {
    case BinaryOp::add:
      return PlainBinary<T, T, IntAdd>::run;
    case BinaryOp::sub:
      return PlainBinary<T, T, IntSub>::run;
    case BinaryOp::mul:
      return PlainBinary<T, T, IntMul>::run;
    case BinaryOp::div:
      return PlainBinary<T, T, IntDiv>::run;
    case BinaryOp::min:
      return PlainBinary<T, T, PlainMin>::run;
    case BinaryOp::max:
      return PlainBinary<T, T, PlainMax>::run;
    default:
      return comparison<T>(op);
  }
}

BinaryLoop boolean_binary(BinaryOp op) {
  if (op == BinaryOp::min) return PlainBinary<bool, bool, PlainMin>::run;
  if (op == BinaryOp::max) return PlainBinary<bool, bool, PlainMax>::run;
  return comparison<bool>(op);
}

}  // namespace

UnaryLoop unary_loop(UnaryOp op, DType compute) {
  switch (compute) {
    case DType::f32:
      return float_unary<float>(op);
    case DType::f64:
      return float_unary<double>(op);
    case DType::i32:
      return integer_unary<std::int32_t>(op);
    case DType::i64:
      return integer_unary<std::int64_t>(op);
    case DType::boolean:
      return op == UnaryOp::logical_not ? PlainUnary<bool, bool, Not>::run : nullptr;
    default:
      return nullptr;
  }
}

BinaryLoop binary_loop(BinaryOp op, DType compute) {
  switch (compute) {
    case DType::f32:
      return float_binary<float>(op);
    case DType::f64:
      return float_binary<double>(op);
    case DType::i32:
      return integer_binary<std::int32_t>(op);
    case DType::i64:
      return integer_binary<std::int64_t>(op);
    case DType::boolean:
      return boolean_binary(op);
    default:
      return nullptr;
  }
}

}  // namespace tessera::kernels::host
