// The tape: nodes, edges, leaves, regions, and the pass that walks them backwards.
//
// An operation computes its result, then `record`s how a gradient of the result becomes gradients
// of its inputs. Nodes are numbered as they are made, inputs before their users, so walking the
// reachable nodes by falling number is a valid order; no counting of dependencies is needed.
// Derivatives of derivatives are not recorded. Threads: a graph belongs to the thread that made it.
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "tessera/tensor/tensor.hpp"

namespace tessera {

namespace autograd {

// Where one contribution to a gradient is written, on the compute stream: `scale * contribution`,
// added to what is there when `accumulate`. Kernels write weight gradients straight into a sink;
// PyTorch's autograd makes them aside and adds them up afterwards (AccumulateGrad).
struct GradientSink {
  Tensor tensor;  // the leaf's shape; its dtype may be wider than the contribution's
  double scale = 1;
  bool accumulate = false;
};

// An end of the tape, where a gradient accumulates: an ordinary tensor, or a parameter.
class Leaf {
 public:
  virtual ~Leaf() = default;
  // The sink of one more contribution, which the caller then launches.
  virtual GradientSink sink() = 0;
  // What has been accumulated, undefined for none.
  virtual Tensor gradient() const = 0;
  virtual void clear() = 0;
};

// The nodes that one call of a module has recorded, as backward sees them. The engine calls
// on_backward_begin before the first of them runs, and on_backward_end after the last. The sharding
// engine opens and closes its units there. Regions nest: a node belongs to the innermost one.
class Region {
 public:
  virtual ~Region() = default;
  virtual void on_backward_begin() = 0;
  virtual void on_backward_end() = 0;

  // Nodes made in it so far.
  std::int64_t nodes() const noexcept { return nodes_; }
  void add_node() noexcept { ++nodes_; }

 private:
  friend class Engine;
  std::int64_t nodes_ = 0;
  std::int64_t pending_ = 0;  // nodes that this backward will still reach
  bool running_ = false;
};

struct Node;

// An input of a node: another node, a leaf, or neither when it needs no gradient.
struct Edge {
  std::shared_ptr<Node> node;
  std::shared_ptr<Leaf> leaf;
  explicit operator bool() const noexcept { return node != nullptr || leaf != nullptr; }
};

// What a backward function hands its results to; `i` numbers the inputs given to `record`.
class Gradients {
 public:
  explicit Gradients(const std::vector<Edge>& inputs) : inputs_(inputs) {}

  // Whether input i needs a gradient. Computing one that nobody wants is allowed, and wasted.
  bool wants(int i) const { return static_cast<bool>(inputs_[static_cast<std::size_t>(i)]); }
  // Adds a gradient of input i, of that input's shape.
  void set(int i, Tensor gradient);
  // Removes and returns the gradient accumulated for input i so far, undefined for none. For
  // kernels that add it while they compute, and then `set` the sum.
  Tensor extract(int i);
  // When input i is a leaf: where to write its gradient directly, instead of calling `set`.
  std::optional<GradientSink> sink(int i);

 private:
  const std::vector<Edge>& inputs_;
};

using Backward = std::function<void(const Tensor& gradient, Gradients& out)>;

struct Node {
  const char* name = "";
  std::uint64_t sequence = 0;
  std::vector<Edge> inputs;
  Backward backward;  // empty once it has run
  std::shared_ptr<Region> region;
  Tensor gradient;         // of the output, during a pass
  std::uint64_t pass = 0;  // the last pass that visited it

  ~Node();
};

// A tensor kept for backward. Of a sharded parameter it keeps the view only; see Note [Windows].
class Saved {
 public:
  Saved() = default;
  explicit Saved(const Tensor& tensor);
  Saved(const Saved& other);
  Saved(Saved&& other) noexcept : tensor_(std::exchange(other.tensor_, {})) {}
  Saved& operator=(Saved other) noexcept {
    std::swap(tensor_, other.tensor_);
    return *this;
  }
  ~Saved();

  // The tensor without history.
  const Tensor& get() const noexcept { return tensor_; }

 private:
  Tensor tensor_;
};

// Gives `out` its history. Without gradients enabled, or when no input requires one, `out` is
// returned as it is. Undefined inputs are allowed and never want a gradient. `name` has static
// lifetime.
Tensor record(const char* name, std::initializer_list<Tensor> inputs, Tensor out,
              Backward backward);
Tensor record(const char* name, std::span<const Tensor> inputs, Tensor out, Backward backward);
// Records the node even if no input requires a gradient, because the function has parameters of its
// own (recomputation). Without gradients enabled it records nothing, like `record`.
Tensor record_always(const char* name, std::initializer_list<Tensor> inputs, Tensor out,
                     Backward backward);

// Whether operations record history on this thread.
bool grad_enabled() noexcept;
class GradModeGuard {
 public:
  explicit GradModeGuard(bool enabled) noexcept;
  ~GradModeGuard();
  GradModeGuard(const GradModeGuard&) = delete;
  GradModeGuard& operator=(const GradModeGuard&) = delete;

 private:
  bool before_;
};

// Nodes recorded in this scope belong to `region`.
class RegionGuard {
 public:
  explicit RegionGuard(std::shared_ptr<Region> region) noexcept;
  ~RegionGuard();
  RegionGuard(const RegionGuard&) = delete;
  RegionGuard& operator=(const RegionGuard&) = delete;

 private:
  std::shared_ptr<Region> before_;
};
const std::shared_ptr<Region>& current_region() noexcept;

// Whether a backward pass is running on this thread (recomputation included).
bool in_backward() noexcept;
// Calls `f` once, when the outermost backward pass of this thread has run its last node. Requires:
// in_backward().
void at_end_of_backward(std::function<void()> f);

}  // namespace autograd

// What a tensor carries for autograd.
struct GradMeta {
  std::shared_ptr<autograd::Node> node;  // the operation that made it
  std::shared_ptr<autograd::Leaf> leaf;  // or where its gradient accumulates
};

// Operations in its scope record no history.
class NoGradGuard : public autograd::GradModeGuard {
 public:
  NoGradGuard() noexcept : GradModeGuard(false) {}
};

}  // namespace tessera
