// Modules: trees of named parameters, and the call that opens a scope.
//
//   class Mlp : public nn::Module {
//    public:
//     Mlp(std::int64_t dim, const Device& device)
//         : up(dim, 4 * dim, device), down(4 * dim, dim, device) {
//       register_module("up", up);
//       register_module("down", down);
//     }
//     Tensor operator()(const Tensor& x) {
//       return call([&] { return down(gelu(up(x))); });  // inside, parameters are unsharded
//     }
//     nn::Linear up, down;
//   };
//
// The sharding engine, or anything else that acts around a module's call, sees modules only through
// this header.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

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
  // under its first name, or under every one. Also sets the parameters' names to the first.
  std::vector<std::pair<std::string, Parameter>> named_parameters(Tied tied = Tied::once) const;
  std::vector<Parameter> parameters() const;
  // Those that this module has registered itself, with their names in it.
  const std::vector<std::pair<std::string, Parameter>>& own_parameters() const noexcept {
    return parameters_;
  }
  // This module and all below it, parents first, with their dotted names ("" for this one).
  std::vector<std::pair<std::string, Module*>> named_modules();
  // Elements of all parameters, each counted once.
  std::int64_t numel() const;

  // Whether files of weights hold this parameter, a matrix, transposed: as [in, out]. Asked of the
  // module that is saved or loaded, with the name that it has there.
  virtual bool saves_transposed(std::string_view parameter) const;

  // Whether derivatives of this module's operations read its parameters. Where they do not, as of a
  // table of which rows are copied, a unit of this module alone isn't gathered for backward, and a
  // saved tensor that reads one there is an error.
  virtual bool reads_parameters_in_backward() const { return true; }

  // Gives every parameter memory on `device`: its unit's shards, or, without a unit, one flat
  // group. Values are zero until they are initialised or loaded.
  // Throws: ContractError for meta, and for a unit that has memory already; OutOfMemory.
  void materialize(const Device& device);

  // Whether layers like dropout act as in training; for this module and all below it.
  void train() { set_training(true); }
  void eval() { set_training(false); }
  bool is_training() const noexcept { return training_; }

  // Runs f, which returns a value, inside this module's scope. Every public method that uses
  // parameters goes through here.
  template <class F>
  auto call(F&& f) {
    if (!hook_) return f();
    CallScope scope(*this);
    auto result = f();
    scope.leave();
    return result;
  }

  // At most one. Throws: ContractError when there is one already.
  void set_hook(std::shared_ptr<ModuleHook> hook);
  const std::shared_ptr<ModuleHook>& hook() const noexcept { return hook_; }

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

 private:
  class CallScope {
   public:
    explicit CallScope(Module& module) : module_(module) { module.hook_->before_call(module); }
    ~CallScope() {
      if (!left_) module_.hook_->abandon_call(module_);
    }
    void leave() {
      left_ = true;
      module_.hook_->after_call(module_);
    }

   private:
    Module& module_;
    bool left_ = false;
  };
  void set_training(bool training);

  std::vector<std::pair<std::string, Parameter>> parameters_;
  std::vector<Parameter> streamed_;  // of these
  std::vector<std::pair<std::string, Module*>> modules_;
  std::shared_ptr<ModuleHook> hook_;
  bool training_ = true;
};

// An owning list of modules of one type, whose members keep their address:
// for (auto& block : blocks) ...
template <class M>
class ModuleList : public Module {
 public:
  template <class... Args>
  M& emplace_back(Args&&... args) {
    items_.push_back(std::make_unique<M>(std::forward<Args>(args)...));
    register_module(std::to_string(items_.size() - 1), *items_.back());
    return *items_.back();
  }
  std::size_t size() const noexcept { return items_.size(); }
  M& operator[](std::size_t i) { return *items_[i]; }

  class iterator {
   public:
    explicit iterator(const std::unique_ptr<M>* at) : at_(at) {}
    M& operator*() const { return **at_; }
    iterator& operator++() {
      ++at_;
      return *this;
    }
    bool operator==(const iterator&) const = default;

   private:
    const std::unique_ptr<M>* at_;
  };
  iterator begin() { return iterator(items_.data()); }
  iterator end() { return iterator(items_.data() + items_.size()); }

 private:
  std::vector<std::unique_ptr<M>> items_;
};

struct Seed {
  std::uint64_t value = 0;
};
// Sets every parameter's values by its initializer: element e of parameter p depends on (seed, name
// of p, e) only, so the values are the same for any number of ranks, sharded or not.
// Throws: ContractError for a parameter without memory.
void init(Module& module, Seed seed);

}  // namespace tessera::nn
