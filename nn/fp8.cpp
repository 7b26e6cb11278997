#include "tessera/nn/fp8.hpp"

#include <algorithm>
#include <functional>
#include <utility>

#include "tessera/nn/linear.hpp"

namespace tessera::nn {
namespace {

using NamedLinears = std::vector<std::pair<std::string, Linear*>>;

// The linear layers below `module` that `takes`, but those that the options leave out.
NamedLinears linears_of(const char* function, Module& module, const Fp8Options& options,
                        const std::function<bool(const Linear&)>& takes) {
  TESSERA_EXPECT(std::ranges::find(options.skip, "") == options.skip.end(), function,
                 ": skip has an empty text, which would skip every layer; leave it out");
  std::vector<std::string> unmatched = options.skip;
  std::string first;
  NamedLinears layers;
  for (const auto& [name, part] : module.named_modules()) {
    auto* const linear = dynamic_cast<Linear*>(part);
    if (!linear || !linear->weight.defined()) continue;
    if (first.empty()) first = name;
    const auto is_in_name = [&name](const std::string& text) {
      return name.find(text) != std::string::npos;
    };
    std::erase_if(unmatched, is_in_name);
    if (std::ranges::none_of(options.skip, is_in_name) && takes(*linear))
      layers.emplace_back(name, linear);
  }
  TESSERA_EXPECT(unmatched.empty(), function, ": no linear layer has '", unmatched.front(),
                 "' in its name", first.empty() ? "" : concat("; one layer is '", first, "'"));
  return layers;
}

}  // namespace

std::vector<std::string> set_fp8(Module& module, Fp8Recipe recipe, const Fp8Options& options) {
  std::vector<std::string> set;
  for (const auto& [name, linear] : linears_of("set_fp8", module, options, [](const Linear& l) {
         return fits_fp8(l.weight.shape()[1], l.weight.shape()[0]) && !l.weight.is_streamed() &&
                !l.weight_scale.defined();
       })) {
    linear->product.set_fp8(recipe);
    set.push_back(name);
  }
  return set;
}

std::vector<std::string> store_in_8_bits(Module& module, const Fp8Options& options) {
  std::vector<std::string> stored;
  for (const auto& [name, linear] :
       linears_of("store_in_8_bits", module, options,
                  [](const Linear& l) { return !l.weight.is_shared(); })) {
    linear->store_in_8_bits();
    stored.push_back(name);
  }
  return stored;
}

Parameter store_rows_in_8_bits(Module& layer, const Parameter& weight) {
  TESSERA_EXPECT(!weight.is_shared(), "store_in_8_bits: parameter '", weight.name(),
                 "' belongs to several modules, as a tied head's does; make a model whose weights "
                 "are not tied, or leave this layer as it is");
  TESSERA_EXPECT(!weight.unit(), "store_in_8_bits: parameter '", weight.name(),
                 "' is sharded; call it before fully_shard");
  const bool was_trainable = weight.trainable();
  weight.freeze();
  try {
    weight.set_dtype(e4m3);
  } catch (...) {
    weight.set_trainable(was_trainable);
    throw;
  }
  Shape shape = weight.shape();
  for (int d = 1; d < shape.ndim(); ++d) shape[d] = 1;
  const Parameter scales(shape, Initializer::constant(1));
  scales.freeze();
  scales.set_row_parts(weight.row_parts());
  layer.register_parameter("weight_scale", scales);
  return scales;
}

}  // namespace tessera::nn
