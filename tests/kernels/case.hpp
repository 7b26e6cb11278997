// Cases of kernels, which run on any table of them, and hold it to double precision: the CPU's, the
// emulated GPU's, a GPU's.
//
//   TESSERA_CASE("softmax", "rows of any length") {
//     for (const DType dtype : {f32, bf16}) {
//       Operand& x = c.input(dtype, 3 * 1000), &y = c.output(dtype, 3 * 1000);
//       c.compute([&](const Kernels& k, Side side, Exec& exec) {
//         k.softmax({.y = y.at(side), .x = x.at(side), .rows = 3, .cols = 1000,
//                            .dtype = dtype}, exec);
//       });
//       for (std::int64_t i = 0; i < y.size(); ++i)
//         c.near(y, i, softmax_of(x, i), ...);   // with the derivation of the bound: bounded.hpp
//       c.next();
//     }
//   }
//
// Outputs start as NaN. Every operand on the device lies between guard bytes, which `compute`
// checks; it also requires that inputs stay, and that a second run from the same contents gives the
// same bits, on the CPU with three threads. `Operand::shifted` moves it off 16-byte boundaries. No
// test framework: tools/gpu-check runs the cases where there is none.
#pragma once

#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/kernel_table.hpp"
#include "tessera/base/error.hpp"
#include "tests/kernels/target.hpp"

namespace kernel_test {

using namespace tessera;
using namespace tessera::kernels;

enum class Side : std::uint8_t { reference, device };

// Half the distance between 1 and the next number: the largest relative error of one rounding.
constexpr double epsilon(DType dtype) {
  return dtype == bf16 ? 0x1p-8 : dtype == f16 ? 0x1p-11 : dtype == f64 ? 0x1p-53 : 0x1p-24;
}

// `value` as an element of `dtype` holds it.
inline double rounded_to(DType dtype, double value) {
  return visit(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (std::is_class_v<T>)
      return static_cast<double>(static_cast<float>(T(static_cast<float>(value))));
    else
      return static_cast<double>(static_cast<T>(value));
  });
}

// A case has found a difference, a touched guard or a refusal.
struct CaseFailure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// An array that exists twice: for the reference and on the device. Its elements are seen as
// doubles.
class Operand {
 public:
  // `shift_bytes`: off the 16-byte boundary, on both sides.
  Operand(const Target& target, DType dtype, std::int64_t size, std::int64_t shift_bytes);
  ~Operand();
  Operand(const Operand&) = delete;
  Operand& operator=(const Operand&) = delete;

  DType dtype() const noexcept { return dtype_; }
  std::int64_t size() const noexcept { return size_; }
  // Address of element 0, for kernels.
  template <class T = void>
  T* at(Side side) const {
    return reinterpret_cast<T*>(side == Side::reference ? host_ : device_);
  }
  // The reference's element, before and after.
  double get(std::int64_t i) const { return get(host_, i); }
  void set(std::int64_t i, double value);

 private:
  friend class Case;
  double get(const std::byte* from, std::int64_t i) const;
  std::size_t bytes() const { return static_cast<std::size_t>(size_) * size_bytes(dtype_); }
  void upload();
  std::vector<std::byte> download() const;  // of the elements, after a look at the guards

  const Target& target_;
  DType dtype_;
  std::int64_t size_;
  std::unique_ptr<std::byte[]> host_memory_;
  std::byte* device_memory_ = nullptr;
  std::byte *host_ = nullptr, *device_ = nullptr;
  std::vector<std::byte> before_, after_;  // the device's contents around the first run
  bool is_input_ = false;
};

class Case {
 public:
  Case(const Target& target, std::uint64_t seed) : target_(target), seed_(seed), engine_(seed) {}

  // Uniform in [low, high], whole numbers for integers, both values for boolean; checked to stay.
  Operand& input(DType dtype, std::int64_t size, double low = -2, double high = 2,
                 std::int64_t shift_bytes = 0);
  // The same, read and written.
  Operand& updated(DType dtype, std::int64_t size, double low = -2, double high = 2,
                   std::int64_t shift_bytes = 0);
  // NaN, or -1 for integers.
  Operand& output(DType dtype, std::int64_t size, std::int64_t shift_bytes = 0);

  double uniform(double low, double high) {
    return std::uniform_real_distribution<double>(low, high)(engine_);
  }
  std::int64_t integer(std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(engine_);
  }

  using Call = std::function<void(const Kernels&, Side, Exec&)>;
  // `call` twice on the device; operands keep what they held before for `get`.  Throws:
  // CaseFailure.
  void compute(const Call& call);

  // Lets go of all operands so far: a case of many parts calls it between them.
  void next() { operands_.clear(); }

  // The device's element i is within `bound` of `expected`; NaN and infinities agree.
  void near(const Operand& operand, std::int64_t i, double expected, double bound);
  // The device's element after the run.
  double on_device(const Operand& operand, std::int64_t i) const;
  template <class T>
  T bits(const Operand& operand, std::int64_t i) const {
    T x;
    std::memcpy(&x, operand.after_.data() + static_cast<std::size_t>(i) * sizeof x, sizeof x);
    return x;
  }
  [[noreturn]] void fail(const std::string& what) const;

  const Target& target() const noexcept { return target_; }
  // Elements compared so far, and the largest share of its bound that one has used.
  std::int64_t compared() const noexcept { return compared_; }
  double worst() const noexcept { return worst_; }
  // What kernels had for the log.
  const std::vector<std::string>& notes() const noexcept { return notes_; }

 private:
  Operand& add(DType dtype, std::int64_t size, std::int64_t shift_bytes);
  void draw(Operand& operand, double low, double high);

  const Target& target_;
  std::uint64_t seed_;
  std::mt19937_64 engine_;
  std::vector<std::unique_ptr<Operand>> operands_;
  std::int64_t compared_ = 0;
  double worst_ = 0;
  std::vector<std::string> notes_;
};

struct NamedCase {
  const char* op;
  const char* name;
  void (*body)(Case& c);
};
// In the order of registration within a file, files in the order of linking.
std::vector<NamedCase>& all_cases();

struct RegisterCase {
  RegisterCase(const char* op, const char* name, void (*body)(Case&)) {
    all_cases().push_back({op, name, body});
  }
};

}  // namespace kernel_test

// Numbered, so that files which are compiled as one have names of their own.
#define TESSERA_CASE_BODY(number, op, name)                                               \
  static void case_##number(kernel_test::Case&);                                          \
  static const kernel_test::RegisterCase register_case_##number(op, name, case_##number); \
  static void case_##number([[maybe_unused]] kernel_test::Case& c)
#define TESSERA_CASE_NUMBERED(number, op, name) TESSERA_CASE_BODY(number, op, name)
#define TESSERA_CASE(op, name) TESSERA_CASE_NUMBERED(__COUNTER__, op, name)
