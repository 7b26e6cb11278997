// Modules: trees of named parameters, and the call that opens a scope.
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
// The sharding engine, or anything else that acts around a module's call, sees modules only through
// this header.
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

// What acts around the calls of a module. One per module.
class ModuleHook {
 public:
  virtual ~ModuleHook() = default;
  virtual void before_call(Module& module) = 0;
  virtual void after_call(Module& module) = 0;
  // The call ended by an exception.
  virtual void abandon_call(Module& module) noexcept = 0;
  // What floating tensors become that go into a call, before other hooks see them, and that come
  // out of it, after these; unset: they stay.
  virtual std::optional<DType> input_dtype() const { return {}; }
  virtual std::optional<DType> output_dtype() const { return {}; }
  // Gives the parameters that the hook has claimed their memory on `device`.
  virtual void materialize(const Device& device) = 0;
};

// Base of all layers and models. Registers its parts by name; neither copied nor moved, since
// parents point to it.
class Module {
 public:
  Module() = default;
  virtual ~Module();
  Module(const Module&) = delete;
  Module& operator=(const Module&) = delete;

  // All parameters below this module with their dotted names, in order of registration; a tied one
  // under its first name, or under every one. Also sets the parameters' names to the first, unless
  // a module around this one has named them.
  NamedParameters named_parameters(Tied tied = Tied::once) const;
  std::vector<Parameter> parameters() const;
  // Those that this module has registered itself, with their names in it.
  const NamedParameters& own_parameters() const noexcept { return parameters_; }
  // This module and all below it, parents first, with their dotted names ("" for this one).
  std::vector<std::pair<std::string, Module*>> named_modules();
  // The parameter or module of a dotted name below this one, by any of its names; "" is this
  // module. Throws: ContractError naming what is missing, and the names that are there.
  Parameter get_parameter(std::string_view name) const;
  Module& get_submodule(std::string_view name);
  // Parameter::set_trainable of all parameters below this module (PyTorch: requires_grad_).
  void set_trainable(bool trainable);
  void freeze() { set_trainable(false); }
  // Drops the gradients of all parameters below this module, as Optimizer::zero_grad does of its
  // own: none is there until the next backward (PyTorch: zero_grad). What has no memory has none.
  void zero_grad();
  // All buffers below this module, or the persistent ones; otherwise as named_parameters.
  std::vector<std::pair<std::string, Buffer>> named_buffers(Persistent least = Persistent::no,
                                                            Tied tied = Tied::once) const;
  // Calls f for this module and all below it, children first, each once: for those that are an M.
  //   model.apply<nn::Linear>([](nn::Linear& l) { l.weight.set_initializer(...); });
  template <class M = Module, class F>
  void apply(const F& f) {
    for_each_module([&](Module& module) {
      if (auto* const m = dynamic_cast<M*>(&module)) f(*m);
    });
  }
  // Elements of all parameters, each counted once.
  std::int64_t numel() const;
  // The tree: names, types, shapes, bytes, and what of them this rank has. Needs no memory.
  std::string to_string() const;

  // --- state: see state.hpp; where files are read stands in checkpoint/model.hpp ---
  StateDict state_dict(const StateDictOptions& options = {}) const;
  LoadReport load(const StateSource& source, const LoadOptions& options = {});
  LoadReport load(const StateDict& state, const LoadOptions& options = {});
  LoadReport load(const std::string& path, const LoadOptions& options = {});
  LoadReport load(const std::vector<std::string>& paths, const LoadOptions& options = {});

  // How files hold this model's state; asked of the module that is saved or loaded, with the names
  // that they have there. Whether a parameter, a matrix, is transposed: [in, out].
  virtual bool saves_transposed(std::string_view parameter) const;
  // The beginning of its names that all names of a file may lack, as "transformer.".
  virtual std::string_view optional_prefix() const { return {}; }
  // Whether a tensor that is no state of this model is left in the file, as a mask is.
  virtual bool is_left_in_files(std::string_view) const { return false; }

  // Whether derivatives of this module's operations read its parameters. Where they do not, as of a
  // table of which rows are copied, a unit of this module alone isn't gathered for backward, and a
  // saved tensor that reads one there is an error.
  virtual bool reads_parameters_in_backward() const { return true; }

  // Gives every parameter that has none memory on `device`: its unit's shards, or, without a unit,
  // one flat group. Values are zero until they are initialised or loaded. Buffers have their
  // initial values, and move here from another device.
  // Throws: ContractError for meta, and for a unit of another device; OutOfMemory.
  void materialize(const Device& device);

  // Whether layers like dropout act as in training; for this module and all below it.
  void train() { set_training(true); }
  void eval() { set_training(false); }
  bool is_training() const noexcept { return training_; }

  // Runs f(inputs...), which returns a value, inside this module's scope. Every public method that
  // uses parameters goes through here, with the tensors that hooks are to see behind f.
  template <class F, class... Inputs>
  auto call(F&& f, const Inputs&... inputs) {
    using Result = std::decay_t<decltype(f(inputs...))>;
    static_assert(!std::is_void_v<Result>,
                  "Module::call: the function returns nothing; return what the call gives");
    if (!is_hooked()) return Result(f(inputs...));
    return call_hooked(CalledRef<Result, Inputs...>(f), inputs...);
  }
  // Around the calls of this module, within its scope; see forward_hooks.hpp.
  HookHandle register_forward_pre_hook(ForwardPreHook hook);
  HookHandle register_forward_hook(ForwardHook hook);

  // At most one, null for none; hooked is what is a unit, or observed. Throws: ContractError for
  // another one while it has one.
  void set_hook(std::shared_ptr<ModuleHook> hook);
  const std::shared_ptr<ModuleHook>& hook() const noexcept { return hook_; }
  bool is_hooked() const noexcept { return hook_ || (forward_hooks_ && forward_hooks_->any()); }

  // Names are unique within a module and hold no dot, or it is a ContractError. An undefined
  // parameter is left out; what is registered must live as long as this module.
  void register_parameter(std::string_view name, const Parameter& parameter);
  // Says that this module uses the parameter by Parameter::for_each_slice only, before fully_shard;
  // to say it twice is to say it once. Where all modules that have registered it and are alive say
  // so when it is sharded, a unit gathers it slice by slice, and reduces its gradient so: large
  // tables never lie in memory as a whole. Throws: ContractError for what this module has not
  // registered, for a scalar, and for a parameter that is sharded already.
  void stream_parameter(const Parameter& parameter);
  void register_module(std::string_view name, Module& module);
  // The same of several: register_modules("up", up, "down", down).
  template <class... Rest>
  void register_modules(std::string_view name, Module& module, Rest&&... rest) {
    register_module(name, module);
    if constexpr (sizeof...(rest) > 0) register_modules(std::forward<Rest>(rest)...);
  }
  // How often parameters, modules and hooks of any module of this process were set: as long as it
  // stays, so do all trees.
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

// Of every weight matrix, as GPT-2 and Llama start.
inline constexpr double kInitialDeviation = 0.02;

struct Seed {
  std::uint64_t value = 0;
};
// Sets the values of every parameter and buffer by its initializer: element e of parameter p
// depends on (seed, name of p, e) only, so the values are the same for any number of ranks, sharded
// or not. Throws: ContractError for a parameter without memory, and what an initializer throws.
void init(Module& module, Seed seed);
// The same of a module on meta: materializes it on `device` first. Throws: as materialize, too.
void init(Module& module, Seed seed, const Device& device);
// What such an element depends on beside e.
std::uint64_t key_of(Seed seed, std::string_view name);

// As to_string.
std::ostream& operator<<(std::ostream& out, const Module& module);

}  // namespace tessera::nn
