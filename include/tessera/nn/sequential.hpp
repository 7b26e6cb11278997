// Modules and functions of one tensor, one after the other.
//
//   nn::Sequential model(std::make_unique<nn::Linear>(16, 64), relu,
//                        std::make_unique<nn::Linear>(64, 4));        0.weight, 0.bias, 2.weight,
//                        ..
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
  // Each a std::unique_ptr of a module, or what push_back takes.
  template <class... Parts>
  explicit Sequential(Parts... parts) {
    (push_back(std::move(parts)), ...);
  }

  template <std::derived_from<Module> M>
  M& push_back(std::unique_ptr<M> module) {
    TESSERA_EXPECT(module != nullptr, "Sequential: part ", parts_.size(), " is null");
    register_module(std::to_string(parts_.size()), *module);
    const std::shared_ptr<M> owned = std::move(module);
    parts_.push_back([owned](const Tensor& x) { return (*owned)(x); });
    return *owned;
  }
  // f(x) is a tensor; an operation such as relu gets the line of its caller, too.
  template <class F>
    requires std::is_invocable_r_v<Tensor, F&, const Tensor&> ||
             std::is_invocable_r_v<Tensor, F&, const Tensor&, Caller>
  void push_back(F f) {
    if constexpr (std::is_invocable_v<F&, const Tensor&>)
      parts_.push_back(std::move(f));
    else
      parts_.push_back([f](const Tensor& x) { return f(x, Caller::current()); });
  }
  std::size_t size() const noexcept { return parts_.size(); }

  Tensor operator()(const Tensor& x) {
    return call(
        [this](Tensor y) {
          for (const auto& part : parts_) y = part(y);
          return y;
        },
        x);
  }

 private:
  std::vector<std::function<Tensor(const Tensor&)>> parts_;
};

}  // namespace tessera::nn
