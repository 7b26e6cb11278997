// Modules and functions of one tensor, one after the other.
//
//   nn::Sequential model(std::make_unique<nn::Linear>(16, 64), relu,
//                        std::make_unique<nn::Linear>(64, 4));  // 0.weight, 0.bias, 2.weight, ..
//   model.apply<nn::Linear>([&](nn::Linear& layer) { fully_shard(layer, options); });
//   const Tensor y = model(x);
//
// Functions count in the names, as in PyTorch's nn.Sequential, so that its files fit.
#pragma once

#include <concepts>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tessera/nn/module.hpp"

namespace tessera::nn {

class Sequential : public Module {
 public:
  Sequential() = default;
  // Calls push_back for each.
  template <class... Parts>
  explicit Sequential(Parts... parts) {
    (push_back(std::move(parts)), ...);
  }

  // Adds a module of one tensor that returns one. The sequence owns it, and its name is its
  // position. Throws: ContractError for null.
  template <std::derived_from<Module> M>
  M& push_back(std::unique_ptr<M> module) {
    TESSERA_EXPECT(module != nullptr, "Sequential: part ", parts_.size(),
                   " is null; give a module");
    register_module(std::to_string(parts_.size()), *module);
    const std::shared_ptr<M> owned = std::move(module);
    push_back([owned]<class... At>(const Tensor& x, const At&... at)
                requires std::invocable<M&, const Tensor&, const At&...>
              { return (*owned)(x, at...); });
    return *owned;
  }
  // Adds a function of one tensor that returns one, or an operation such as relu.
  template <class F>
    requires std::is_invocable_r_v<Tensor, F&, const Tensor&> ||
             std::is_invocable_r_v<Tensor, F&, const Tensor&, Caller>
  void push_back(F f) {
    if constexpr (std::is_invocable_v<F&, const Tensor&, Caller>)
      parts_.push_back(std::move(f));
    else
      parts_.push_back([f = std::move(f)](const Tensor& x, Caller) mutable { return f(x); });
  }
  std::size_t size() const noexcept { return parts_.size(); }

  // x, of a shape that the first part takes -> what the last part returns. Without parts: x itself.
  Tensor operator()(const Tensor& x, Caller at = Caller::current()) {
    return call(
        [this, at](Tensor y) {
          for (const auto& part : parts_) y = part(y, at);
          return y;
        },
        x);
  }

 private:
  std::vector<std::function<Tensor(const Tensor&, Caller)>> parts_;
};

}  // namespace tessera::nn
