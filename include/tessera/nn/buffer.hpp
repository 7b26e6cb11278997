// Buffers: the state of a module that is no parameter, such as running means, counters and tables.
// No gradient, no optimizer, no shards: every rank has the whole of it, and a copy of its own.
//
//   class Norm : public nn::Module {
//    public:
//     Norm() { register_buffer("mean", mean); }
//     Tensor operator()(const Tensor& x) {
//       if (is_training()) mean.assign(raw::add(mean.value() * 0.9, batch_mean(x.detach()) * 0.1));
//       return x - mean.value();
//     }
//     nn::Buffer mean{{64}, Initializer::constant(0)};
//   };
//
// A step that fails leaves buffers as far as it came: after a `reset`, load or initialise those
// that it assigns.
//
// PyTorch: register_buffer. There too fully_shard leaves buffers as they are, different ones on
// different ranks included; what ranks must agree on, they make of sums (World::sum, a collective).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "tessera/tensor/initializer.hpp"

namespace tessera::nn {

class Module;

// Whether a buffer is part of state dicts and files. Tables that are made anew are not.
enum class Persistent : std::uint8_t { no, yes };

// A handle; copies mean the same buffer.
class Buffer {
 public:
  Buffer() = default;  // undefined
  // On `meta` until its module is materialized, which gives it its initial values: the right ones
  // of a table even where nn::init is never called.
  Buffer(const Shape& shape, Initializer initializer, DType dtype = f32);

  bool defined() const noexcept { return state_ != nullptr; }
  const Shape& shape() const { return state_->shape; }
  DType dtype() const { return state_->dtype; }
  const std::string& name() const { return state_->name; }

  // The values, without history, to be read.  Throws: ContractError before it is materialized, and
  // from an operation that writes to them.
  operator Tensor() const { return value(); }
  Tensor value() const;
  // A copy of `values` takes their place; who holds the old ones, as a graph does, keeps them.
  // Called in a forward that is recomputed, it is called twice.
  // Throws: ContractError for another shape, for a dtype that isn't the buffer's where one of them
  // is not floating, and before it is materialized.
  void assign(const Tensor& values) const;
  // The same of values that `fill` gives to new memory.  Throws: before it is materialized.
  void replace(const std::function<void(const Tensor& values)>& fill) const;

  // The same for all handles of a buffer.
  const void* id() const noexcept { return state_.get(); }
  bool operator==(const Buffer& other) const noexcept { return state_ == other.state_; }

  // --- for modules ---
  // Its initial values, on `device`, for the key of a seed and its name.
  void initialize(std::uint64_t key, const Device& device) const;
  // Its values on `device`, initial ones if it has none.
  void materialize(const Device& device) const;

 private:
  friend class Module;  // which names it
  void set_name(const std::string& name) const { state_->name = name; }

  struct State {
    std::string name;  // full, dotted
    Shape shape;
    Initializer initializer;
    DType dtype = f32;
    Tensor values;  // undefined before it is materialized
  };
  std::shared_ptr<State> state_;
};

}  // namespace tessera::nn
