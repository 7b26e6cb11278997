// In which form an operation writes what others read.
#pragma once

#include <cstdint>
#include <optional>

namespace tessera {

enum class Fp8Recipe : std::uint8_t;  // autograd/fp8.hpp

// Values, which every operation reads; or, where the layers behind say so, what their products read
// and nothing else does: 8-bit floats by a recipe. Layers say their form, whoever makes their input
// hands it on, and neither looks into it.
class InputForm {
 public:
  InputForm() = default;  // values
  InputForm(Fp8Recipe recipe) noexcept : recipe_(recipe) {}
  InputForm(std::optional<Fp8Recipe> recipe) noexcept : recipe_(recipe) {}

  // Whether it is another form than values.
  explicit operator bool() const noexcept { return recipe_.has_value(); }
  bool operator==(const InputForm&) const = default;
  const std::optional<Fp8Recipe>& recipe() const noexcept { return recipe_; }

 private:
  std::optional<Fp8Recipe> recipe_;
};

}  // namespace tessera
