// Hooks of users around the calls of a module: PyTorch's forward pre-hooks and forward hooks.
//
//   unit: gather, open │ pre-hooks │ the call's function │ hooks │ unit: close
//                        in the order in which they were registered
//
// Hooks run within the module's scope, so parameters are unsharded there, whether fully_shard was
// called before or after them. A function that is recomputed in backward calls its hooks once more.
// Hooks find the tensors of a call in Tensor, std::pair, tuple, array, vector and optional, and in
// types that for_each_tensor knows. Two such types are pairs that belong together: Activated
// (before and behind its function) and SumAndNorm. A hook that replaces one of the two replaces the
// other to match.
//
// Differs from PyTorch: there a hook returns new inputs or outputs. For backward there are regions
// here; see autograd/node.hpp and lesson 065.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "tessera/tensor/tensor.hpp"

namespace tessera::nn {

class Module;

// The tensors that go into a call or come out of it. A hook may look at them and replace them,
// while it runs.
class CallTensors {
 public:
  std::size_t size() const noexcept { return tensors_.size(); }
  // Throws: ContractError beyond size().
  Tensor& operator[](std::size_t i) const {
    TESSERA_EXPECT(i < size(), "a hook asks for tensor ", i, ", but its call has ", size(),
                   "; a hook sees the tensors that Module::call is given after its function");
    return *tensors_[i];
  }

  template <class... T>
  static CallTensors of(T&... values) {
    CallTensors all;
    (all.collect(values), ...);
    return all;
  }
  template <class T>
  void collect(T& value) {
    using Value = std::remove_const_t<T>;
    if constexpr (std::is_same_v<T, Tensor>) {
      tensors_.push_back(&value);
    } else if constexpr (requires { std::tuple_size<Value>::value; }) {
      std::apply([&](auto&... parts) { (collect(parts), ...); }, value);
    } else if constexpr (requires { for_each_tensor(value, [](Tensor&) {}); }) {
      for_each_tensor(value, [this](Tensor& t) { collect(t); });
    } else if constexpr (requires { value.has_value(), collect(*value); }) {
      if (value.has_value()) collect(*value);
    } else if constexpr (requires { collect(*value.begin()), value.end(); }) {
      for (auto& part : value) collect(part);
    }
  }

 private:
  std::vector<Tensor*> tensors_;
};

// The function of a call, without its type. So the code around it is compiled once for all calls of
// the same inputs and result.
template <class Result, class... Inputs>
class CalledRef {
 public:
  template <class F>
  explicit CalledRef(F& f)
      : f_(const_cast<void*>(static_cast<const void*>(&f))),
        run_([](void* of, const Inputs&... inputs) -> Result {
          return (*static_cast<F*>(of))(inputs...);
        }) {}
  Result operator()(const Inputs&... inputs) const { return run_(f_, inputs...); }

 private:
  void* f_;
  Result (*run_)(void*, const Inputs&...);
};

using ForwardPreHook = std::function<void(Module&, const CallTensors& inputs)>;
using ForwardHook =
    std::function<void(Module&, const CallTensors& inputs, const CallTensors& outputs)>;

// Removes a hook. A handle that is dropped leaves its hook in place.
class HookHandle {
 public:
  HookHandle() = default;  // of no hook
  // Removes the hook from the next call on. It does nothing if the hook or its module is gone
  // already.
  void remove() {
    if (const auto alive = alive_.lock()) *alive = false;
  }

 private:
  friend class ForwardHooks;
  explicit HookHandle(const std::shared_ptr<bool>& alive) : alive_(alive) {}
  std::weak_ptr<bool> alive_;
};

// The hooks of one module.
class ForwardHooks {
 public:
  HookHandle add(ForwardPreHook before) { return add(Hook{.before = std::move(before)}); }
  HookHandle add(ForwardHook after) { return add(Hook{.after = std::move(after)}); }
  bool any() const {  // that is not removed
    for (const Hook& hook : hooks_)
      if (*hook.is_alive) return true;
    return false;
  }

  // Runs f(inputs...) with the hooks around it.
  template <class Result, class... Inputs>
  Result run(Module& module, const CalledRef<Result, Inputs...>& f, const Inputs&... inputs) {
    const std::vector<Hook> hooks = living();
    std::tuple<Inputs...> given(inputs...);
    const CallTensors in = CallTensors::of(given);
    run_before(hooks, module, in);
    Result result = std::apply(f, std::as_const(given));
    run_after(hooks, module, in, CallTensors::of(result));
    return result;
  }

 private:
  struct Hook {
    ForwardPreHook before{};
    ForwardHook after{};
    std::shared_ptr<bool> is_alive = std::make_shared<bool>(true);
  };
  HookHandle add(Hook hook) { return HookHandle(hooks_.emplace_back(std::move(hook)).is_alive); }
  std::vector<Hook> living();  // as they are now: a hook may add another
  static void run_before(const std::vector<Hook>& hooks, Module& module, const CallTensors& in);
  static void run_after(const std::vector<Hook>& hooks, Module& module, const CallTensors& in,
                        const CallTensors& out);

  std::vector<Hook> hooks_;
};

// Whether a floating tensor of these has another dtype; and the cast of all such to `dtype`.
bool are_others(const CallTensors& tensors, DType dtype);
void cast_tensors(const CallTensors& tensors, DType dtype);

// f of the inputs, with their floating tensors in this dtype. Where they have it already, f gets
// the inputs themselves, so that nobody else holds a tensor.
template <class F, class... Inputs>
auto with_dtype(DType dtype, const F& f, const Inputs&... inputs) {
  if (!are_others(CallTensors::of(const_cast<Inputs&>(inputs)...), dtype)) return f(inputs...);
  std::tuple<Inputs...> given(inputs...);
  cast_tensors(CallTensors::of(given), dtype);
  return std::apply(f, std::as_const(given));
}

}  // namespace tessera::nn
