// Modules: trees of named parameters, and calls that open a scope.
//
//   class Mlp : public nn::Module {
//    public:
//     Mlp(std::int64_t dim, const Device& device)
//         : up(dim, 4 * dim, device), down(4 * dim, dim, device) {
//       register_modules("up", up, "down", down);
//     }
//     Tensor operator()(const Tensor& x) {
//       return call([&] { return down(gelu(up(x))); });  // unsharded inside
//     }
//     nn::Linear up, down;
//   };
//
// The sharding engine sees modules only through this header. So does anything else that acts around
// a module's call.
#pragma once

#include <cstdint>
#include <functional>
#include <iosfwd>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/nn/buffer.hpp"
#include "tessera/nn/forward_hooks.hpp"
#include "tessera/nn/state.hpp"
#include "tessera/param/parameter.hpp"

namespace tessera::nn {

class Module;

// How often named_parameters lists a parameter that several modules share.
enum class Tied : std::uint8_t { once, every_name };

// Acts around the calls of a module. A module has at most one.
class ModuleHook {
 public:
  virtual ~ModuleHook() = default;
  virtual void before_call(Module& module) = 0;
  virtual void after_call(Module& module) = 0;
  // The call ended by an exception.
  virtual void abandon_call(Module& module) noexcept = 0;
  // The dtype that floating tensors of a call are cast to; unset: they stay as they are. Inputs are
  // cast before other hooks see them, outputs after.
  virtual std::optional<DType> input_dtype() const { return {}; }
  virtual std::optional<DType> output_dtype() const { return {}; }
  // Gives the parameters that the hook has claimed their memory on `device`.
  virtual void materialize(const Device& device) = 0;
};

// The base of all layers and models. It registers its parts by name. It is neither copied nor
// moved, since parents point to it.
class Module {
 public:
  Module() = default;
  virtual ~Module();
  Module(const Module&) = delete;
  Module& operator=(const Module&) = delete;

  // All parameters below this module with their dotted names, in order of registration. A tied one
  // is listed under its first name, or under every one. The call also gives the parameters their
  // first name, unless a module around this one has named them.
  NamedParameters named_parameters(Tied tied = Tied::once) const;
  std::vector<Parameter> parameters() const;
  // The parameters that this module has registered itself, with their names in it.
  const NamedParameters& own_parameters() const noexcept { return parameters_; }
  // This module and all below it, parents first, with their dotted names ("" for this one).
  std::vector<std::pair<std::string, Module*>> named_modules();
  // The parameter or module of a dotted name below this one, by any of its names; "" is this
  // module. Throws: ContractError that names what is missing, and the names that are there.
  Parameter get_parameter(std::string_view name) const;
  Module& get_submodule(std::string_view name);
  // Calls Parameter::set_trainable for all parameters below this module (PyTorch: requires_grad_).
  void set_trainable(bool trainable);
  void freeze() { set_trainable(false); }
  // Drops the gradients of all parameters below this module (PyTorch: zero_grad).
  // Optimizer::zero_grad does so for its own parameters. There is no gradient until the next
  // backward, but that of a unit is dropped as a whole: if other modules have some of it, the
  // gradient of these parameters is 0. A parameter without memory has none.
  void zero_grad();
  // All buffers below this module, or only the persistent ones; names and order as of
  // named_parameters.
  std::vector<std::pair<std::string, Buffer>> named_buffers(Persistent least = Persistent::no,
                                                            Tied tied = Tied::once) const;
  // Calls f for every M among this module and all below it, once each, children first.
  //   model.apply<nn::Linear>([](nn::Linear& l) { l.weight.set_initializer(...); });
  template <class M = Module, class F>
  void apply(const F& f) {
    for_each_module([&](Module& module) {
      if (auto* const m = dynamic_cast<M*>(&module)) f(*m);
    });
  }
  // Elements of all parameters, each counted once.
  std::int64_t numel() const;
  // The tree as text: names, types, shapes, bytes, and this rank's part of them. It needs no
  // memory.
  std::string to_string() const;

  // --- state: see state.hpp; files: see checkpoint/model.hpp ---
  StateDict state_dict(const StateDictOptions& options = {}) const;
  LoadReport load(const StateSource& source, const LoadOptions& options = {});
  LoadReport load(const StateDict& state, const LoadOptions& options = {});
  LoadReport load(const std::string& path, const LoadOptions& options = {});
  LoadReport load(const std::vector<std::string>& paths, const LoadOptions& options = {});

  // The three below say how files hold this model's state. They are asked of the module that is
  // saved or loaded, with the names in its files. This one: whether a parameter, a matrix, is
  // transposed there: [in, out].
  virtual bool saves_transposed(std::string_view parameter) const;
  // The beginning of its names that all names of a file may lack, for example "transformer.".
  virtual std::string_view optional_prefix() const { return {}; }
  // Whether a tensor that is no state of this model may stay in the file, for example a mask.
  virtual bool is_left_in_files(std::string_view) const { return false; }

  // Whether derivatives of this module's operations read its parameters. For example, an embedding
  // copies rows and returns false. A unit of such modules alone isn't gathered for backward. A
  // saved tensor that reads a parameter there is then an error.
  virtual bool reads_parameters_in_backward() const { return true; }

  // Gives memory on `device` to every parameter that has none: its unit's shards, or one flat group
  // for all without a unit. Values are zero until they are initialised or loaded. Buffers get their
  // initial values, and move here from another device. Throws: ContractError for meta, and for a
  // unit of another device; OutOfMemory.
  void materialize(const Device& device);

  // Sets whether layers like dropout act as in training, for this module and all below it.
  void train() { set_training(true); }
  void eval() { set_training(false); }
  bool is_training() const noexcept { return training_; }

  // Runs f(inputs...), which returns a value, inside this module's scope. Every public method that
  // uses parameters goes through here. The inputs are the tensors that hooks see.
  template <class F, class... Inputs>
  auto call(F&& f, const Inputs&... inputs) {
    using Result = std::decay_t<decltype(f(inputs...))>;
    static_assert(!std::is_void_v<Result>,
                  "Module::call: the function returns nothing; return what the call gives");
    if (!is_hooked()) return Result(f(inputs...));
    return call_hooked(CalledRef<Result, Inputs...>(f), inputs...);
  }
  // Registers a hook around the calls of this module, within its scope; see forward_hooks.hpp.
  HookHandle register_forward_pre_hook(ForwardPreHook hook);
  HookHandle register_forward_hook(ForwardHook hook);

  // Sets the module's one hook; null removes it. Throws: ContractError for a second one.
  void set_hook(std::shared_ptr<ModuleHook> hook);
  const std::shared_ptr<ModuleHook>& hook() const noexcept { return hook_; }
  // Whether it is a unit, or has a hook of either kind.
  bool is_hooked() const noexcept { return hook_ || (forward_hooks_ && forward_hooks_->any()); }

  // Registers a parameter. Names are unique within a module and hold no dot; otherwise they are a
  // ContractError. An undefined parameter is left out. What is registered must live as long as this
  // module.
  void register_parameter(std::string_view name, const Parameter& parameter);
  // Says, before fully_shard, that this module uses the parameter by Parameter::for_each_slice
  // only. To say it twice is to say it once. The parameter is streamed if all living modules that
  // have registered it say so. Its unit then gathers it slice by slice, and reduces its gradient
  // so, and the whole table never lies in memory. Throws: ContractError for a parameter that this
  // module has not registered, for a scalar, and for a parameter that is sharded already.
  void stream_parameter(const Parameter& parameter);
  void register_module(std::string_view name, Module& module);
  // Registers several: register_modules("up", up, "down", down).
  template <class... Rest>
  void register_modules(std::string_view name, Module& module, Rest&&... rest) {
    register_module(name, module);
    if constexpr (sizeof...(rest) > 0) register_modules(std::forward<Rest>(rest)...);
  }
  // How often parameters, modules and hooks were set in any module of this process. As long as this
  // number stays, all trees stay as they are.
  static std::uint64_t registrations() noexcept;
  void register_buffer(std::string_view name, const Buffer& buffer,
                       Persistent persistent = Persistent::yes);

 private:
  friend class ModulePrinter;
  class CallScope {
   public:
    explicit CallScope(Module& module) : module_(module), hook_(module.hook_.get()) {
      if (hook_) hook_->before_call(module);
    }
    ~CallScope() {
      if (hook_) hook_->abandon_call(module_);
    }
    void leave() {
      if (hook_) std::exchange(hook_, nullptr)->after_call(module_);
    }

   private:
    Module& module_;
    ModuleHook* hook_;  // null: none, or left
  };
  template <class Result, class... Inputs>
  Result call_hooked(const CalledRef<Result, Inputs...>& f, const Inputs&... inputs) {
    CallScope scope(*this);
    const std::optional<DType> in = hook_ ? hook_->input_dtype() : std::nullopt,
                               out = hook_ ? hook_->output_dtype() : std::nullopt;
    const auto hooked = [&](const Inputs&... cast) {
      return forward_hooks_ ? forward_hooks_->run(*this, f, cast...) : f(cast...);
    };
    Result result = in ? with_dtype(*in, hooked, inputs...) : hooked(inputs...);
    if (out) cast_tensors(CallTensors::of(result), *out);
    scope.leave();
    return result;
  }
  void set_training(bool training);
  void for_each_module(const std::function<void(Module&)>& f);
  void expect_free(const char* function, std::string_view name) const;

  NamedParameters parameters_;
  std::vector<Parameter> streamed_;  // of these
  std::vector<std::pair<std::string, Module*>> modules_;
  struct OwnBuffer {
    std::string name;
    Buffer buffer;
    Persistent persistent;
  };
  std::vector<OwnBuffer> buffers_;
  std::shared_ptr<ModuleHook> hook_;
  std::unique_ptr<ForwardHooks> forward_hooks_;  // null for none
  bool training_ = true;
};

// The standard deviation of every weight matrix at the start, as GPT-2 and Llama have it.
inline constexpr double kInitialDeviation = 0.02;

struct Seed {
  std::uint64_t value = 0;
};
// Sets the values of every parameter and buffer by its initializer. Element e of parameter p
// depends on (seed, name of p, e) only. So the values are the same for any number of ranks, sharded
// or not. Throws: ContractError for a parameter without memory, and what an initializer throws.
void init(Module& module, Seed seed);
// Materializes a module on meta on `device`, and then does the same. Throws: as materialize, too.
void init(Module& module, Seed seed, const Device& device);
// The key of seed and name, on which such an element depends beside e.
std::uint64_t key_of(Seed seed, std::string_view name);

// As to_string.
std::ostream& operator<<(std::ostream& out, const Module& module);

}  // namespace tessera::nn
