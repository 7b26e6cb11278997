// The form in which an operation writes what others read.
#pragma once

#include <cstdint>
#include <optional>

namespace tessera {

enum class Fp8Recipe : std::uint8_t;  // autograd/fp8.hpp

// Plain values, which every operation reads; or 8-bit floats by a recipe. If the layers behind say
// so, only what their products read is written. Layers say their form, and whoever makes their
// input hands it on; neither looks into it.
class InputForm {
 public:
  InputForm() = default;  // plain values
  InputForm(Fp8Recipe recipe) noexcept : recipe_(recipe) {}
  InputForm(std::optional<Fp8Recipe> recipe) noexcept : recipe_(recipe) {}

  // Whether it is another form than plain values.
  explicit operator bool() const noexcept { return recipe_.has_value(); }
  bool operator==(const InputForm&) const = default;
  const std::optional<Fp8Recipe>& recipe() const noexcept { return recipe_; }

 private:
  std::optional<Fp8Recipe> recipe_;
};

}  // namespace tessera
