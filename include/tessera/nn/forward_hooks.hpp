// What users do around the calls of a module: PyTorch's forward pre-hooks and forward hooks.
//
//   unit: gather, open │ pre-hooks │ the call's function │ hooks │ unit: close
//                        in the order in which they were registered
//
// Hooks run within the module's scope, so parameters are unsharded there, whether fully_shard was
// called before or after them. A function that is recomputed in backward calls them once more.
// What a call passes on and gives is seen where it stands in Tensor, std::pair, tuple, array,
// vector or optional, and in a type that for_each_tensor knows (as of Activated, in linear.hpp).
// Where a layer hands on a pair that belongs together (Activated: before and behind its function; a
// norm with the sum that it is of), a hook that replaces one of them replaces the other to match.
//
// PyTorch: there a hook returns what takes the place of inputs or outputs; around backward stand
// regions here, see autograd/node.hpp and lesson 065.
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

// The tensors that go into a call or come out of it, to be looked at or replaced, for as long as
// the hook runs.
class CallTensors {
 public:
  std::size_t size() const noexcept { return tensors_.size(); }
  // Throws: ContractError beyond size().
  Tensor& operator[](std::size_t i) const {
    TESSERA_EXPECT(i < size(), "a hook asks for tensor ", i, " of a call that has ", size(),
                   "; a call shows what is passed to Module::call behind its function");
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

// The function of a call, without its type: what is around it is compiled once for all calls of the
// same inputs and result.
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

// The way to remove a hook. A handle that is dropped leaves its hook where it is.
class HookHandle {
 public:
  HookHandle() = default;  // of no hook
  // From the next call on; nothing where the hook or its module is gone already.
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

  // f(inputs...) with the hooks around it.
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

// Whether one of these is floating, and of another dtype; makes all such ones be of it.
bool are_others(const CallTensors& tensors, DType dtype);
void cast_tensors(const CallTensors& tensors, DType dtype);

// f of the inputs with their floating tensors in this dtype; where they are, of the inputs
// themselves, so that nobody holds a tensor beside those who give it.
template <class F, class... Inputs>
auto with_dtype(DType dtype, const F& f, const Inputs&... inputs) {
  if (!are_others(CallTensors::of(const_cast<Inputs&>(inputs)...), dtype)) return f(inputs...);
  std::tuple<Inputs...> given(inputs...);
  cast_tensors(CallTensors::of(given), dtype);
  return std::apply(f, std::as_const(given));
}

}  // namespace tessera::nn
