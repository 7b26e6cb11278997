// quantize.linear.float8: torchtitan's names for nn::set_fp8; see config.hpp.
#include <algorithm>

#include "tessera/base/error.hpp"
#include "tessera/detail/base/utf8.hpp"
#include "tools/train/config.hpp"
#include "tools/train/schema.hpp"

namespace tessera::train {
namespace {

std::vector<std::string> names_of(std::string_view text) {
  std::vector<std::string> names;
  while (!text.empty()) {
    const std::string_view name = text.substr(0, text.find(','));
    names.emplace_back(name);
    text.remove_prefix(std::min(name.size() + 1, text.size()));
  }
  return names;
}

}  // namespace

void Config::Float8::apply(nn::Module& model) const {
  if (!is_on()) return;
  const auto recipe = static_cast<Fp8Recipe>(static_cast<int>(recipe_name) - 1);
  std::vector<std::string> set;
  try {
    set = nn::set_fp8(model, recipe, {.skip = names_of(filter_fqns)});
  } catch (const ContractError& error) {
    throw DataError(
        concat("quantize.linear.float8.filter_fqns=", shortened(filter_fqns), ": ", error.what()));
  }
  if (set.empty())
    throw DataError(
        "quantize.linear.float8.recipe_name: no linear layer is left whose sizes 16 divides; "
        "change quantize.linear.float8.filter_fqns or model.dim, or leave it out");
}

}  // namespace tessera::train
