// How a parameter or a buffer starts. Its values depend on (key, global index) only. So any rank
// may make any rows of them, and they are the same for any number of ranks. `nn::init` makes the
// key from the seed and the name.
//
//   Parameter weight{{out, in}, Initializer::normal(0, 0.02)};
//   weight.set_initializer(Initializer::xavier_uniform());       before nn::init(model, seed)
//   weight.set_initializer(Initializer::by_index([](std::int64_t i) { return 0.1 * i; }));
#pragma once

#include <concepts>
#include <cstdint>
#include <functional>
#include <numbers>
#include <utility>

#include "tessera/tensor/tensor.hpp"

namespace tessera {

// Which side of a matrix [out, in, ...] keeps its variance: `in` in forward, `out` in backward.
enum class Fan : std::uint8_t { in, out };

class Initializer {
 public:
  Initializer() = default;  // zeros
  static Initializer constant(double value);
  static Initializer normal(double mean, double deviation);
  // Uniform values in [low, high), before they are rounded to the tensor's dtype. Throws, as all of
  // these: ContractError for numbers that are not finite, a negative deviation or gain, and a low
  // above high.
  static Initializer uniform(double low, double high);
  // Normal values within [low, high], before rounding. Values outside are drawn again, so at least
  // a hundredth must lie within. PyTorch's trunc_normal_ cuts at -2 and 2, whatever the deviation.
  // Throws: ContractError otherwise.
  static Initializer truncated_normal(double mean, double deviation, double low, double high);

  // For weights [out, in, ...]. A fan is `in` or `out`, times the other sizes. Values are normal
  // with a deviation of gain / sqrt(fan), or uniform with that deviation. The gain fits what
  // follows: 1 for a sum or sigmoid, sqrt(2) for relu, 5/3 for tanh. sqrt(1/3) gives PyTorch's own
  // nn.Linear.
  // Source: He et al., "Delving deep into rectifiers", 2015.
  static Initializer kaiming_normal(double gain = std::numbers::sqrt2, Fan fan = Fan::in);
  static Initializer kaiming_uniform(double gain = std::numbers::sqrt2, Fan fan = Fan::in);
  // Likewise, with a deviation of gain sqrt(2 / (fan in + fan out)).
  // Source: Glorot and Bengio, "Understanding the difficulty of training deep networks", 2010.
  static Initializer xavier_normal(double gain = 1);
  static Initializer xavier_uniform(double gain = 1);

  // f(i) for element i, counted row-major over the whole tensor. f(i, key) lets values depend on
  // seed and name, as by philox(key, i). It is called on the host, once for each element that this
  // rank has. It is not called where memory is only planned.
  template <class F>
    requires std::is_invocable_r_v<double, F, std::int64_t>
  static Initializer by_index(F f) {
    return by_index([f = std::move(f)](std::int64_t i, std::uint64_t) { return f(i); });
  }
  template <class F>
    requires std::is_invocable_r_v<double, F, std::int64_t, std::uint64_t>
  static Initializer by_index(F f) {
    Initializer out(Kind::by_index, 0, 0);
    out.element_ = std::move(f);
    return out;
  }

  // Makes elements first, first + 1, .. of a tensor of shape `whole` in the contiguous `out`.
  // Throws: ContractError for fans of a tensor with fewer than two dimensions, and for drawn values
  // in an integer tensor; what the function of by_index throws.
  void fill(const Tensor& out, const Shape& whole, std::uint64_t key, std::int64_t first) const;

 private:
  enum class Kind : std::uint8_t { constant, normal, uniform, kaiming, xavier, by_index };
  Initializer(Kind kind, double a, double b) : kind_(kind), a_(a), b_(b) {}
  static Initializer scaled(Kind kind, double gain, bool is_uniform, Fan fan);
  void fill_by_index(const Tensor& out, std::uint64_t key, std::int64_t first) const;

  Kind kind_ = Kind::constant;
  double a_ = 0, b_ = 0;     // mean and deviation; low and high; a_ alone: the constant, the gain
  bool is_uniform_ = false;  // for kinds with a fan
  Fan fan_ = Fan::in;
  std::function<double(std::int64_t, std::uint64_t)> element_;
};

}  // namespace tessera
