#include "tessera/nn/fp8.hpp"

#include <algorithm>

#include "tessera/nn/linear.hpp"

namespace tessera::nn {

std::vector<std::string> set_fp8(Module& module, Fp8Recipe recipe, const Fp8Options& options) {
  TESSERA_EXPECT(std::ranges::find(options.skip, "") == options.skip.end(),
                 "set_fp8: skip has an empty text, which would skip every layer; leave it out");
  std::vector<std::string> set, unmatched = options.skip;
  std::string first;
  std::vector<Linear*> layers;
  for (const auto& [name, part] : module.named_modules()) {
    auto* const linear = dynamic_cast<Linear*>(part);
    if (!linear || !linear->weight.defined()) continue;
    if (first.empty()) first = name;
    const auto is_in_name = [&name](const std::string& text) {
      return name.find(text) != std::string::npos;
    };
    std::erase_if(unmatched, is_in_name);
    const Shape& shape = linear->weight.shape();
    if (std::ranges::any_of(options.skip, is_in_name) || !fits_fp8(shape[1], shape[0]) ||
        linear->weight.is_streamed())
      continue;
    layers.push_back(linear);
    set.push_back(name);
  }
  TESSERA_EXPECT(unmatched.empty(), "set_fp8: no linear layer has '", unmatched.front(),
                 "' in its name", first.empty() ? "" : concat("; one layer is '", first, "'"));
  for (Linear* const linear : layers) linear->product.set_fp8(recipe);
  return set;
}

}  // namespace tessera::nn
