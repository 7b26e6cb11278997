// Buffers: the state of a module that is no parameter, such as running means, counters and tables.
// A buffer has no gradient, no optimizer and no shards. Every rank has the whole of it, in a copy
// of its own.
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
// A step that fails leaves buffers as far as it came. After a `reset`, load or initialise the
// buffers that the step assigns.
//
// PyTorch: register_buffer. There, too, fully_shard leaves buffers as they are, even if they differ
// between ranks. What ranks must agree on, they make from sums (World::sum, a collective).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "tessera/tensor/initializer.hpp"

namespace tessera::nn {

class Module;

// Whether a buffer is part of state dicts and files. A table that is computed anew need not be.
enum class Persistent : std::uint8_t { no, yes };

// A handle; copies mean the same buffer.
class Buffer {
 public:
  Buffer() = default;  // undefined
  // On `meta` until its module is materialized, which gives it its initial values. So a table has
  // the right values even if nn::init is never called.
  Buffer(const Shape& shape, Initializer initializer, DType dtype = f32);

  bool defined() const noexcept { return state_ != nullptr; }
  const Shape& shape() const { return state_->shape; }
  DType dtype() const { return state_->dtype; }
  const std::string& name() const { return state_->name; }

  // The values, to be read, without history. Throws: ContractError before it is materialized, and
  // from an operation that writes to them.
  operator Tensor() const { return value(); }
  Tensor value() const;
  // Puts a copy of `values` in their place. A holder of the old ones, such as a graph, keeps them.
  // In a forward that is recomputed it is called twice. Throws: ContractError for another shape,
  // for another dtype unless both are floating, and before it is materialized.
  void assign(const Tensor& values) const;
  // Puts new memory in their place, which `fill` writes. Throws: ContractError before it is
  // materialized.
  void replace(const std::function<void(const Tensor& values)>& fill) const;

  // Equal for all handles of one buffer.
  const void* id() const noexcept { return state_.get(); }
  bool operator==(const Buffer& other) const noexcept { return state_ == other.state_; }

  // --- for modules ---
  // Sets its initial values, on `device`, by the key of a seed and its name.
  void initialize(std::uint64_t key, const Device& device) const;
  // Moves its values to `device`, or sets initial ones if it has none.
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
