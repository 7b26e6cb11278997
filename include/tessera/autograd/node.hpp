// The tape: nodes, edges, leaves, regions, and the pass that walks them backwards.
//
// An operation computes its result, and then `record`s how a gradient of the result becomes
// gradients of its inputs. Nodes are numbered as they are made, inputs before their users. So to
// walk the reachable nodes by falling number is a valid order, and no dependencies need to be
// counted. Derivatives of derivatives are not recorded. Threads: a graph belongs to the thread that
// made it.
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "tessera/autograd/saved.hpp"
#include "tessera/tensor/tensor.hpp"

namespace tessera {

namespace autograd {

// Where one contribution to a gradient is written, on the compute stream: `scale * contribution`,
// added to what is there if `accumulate`. Kernels write weight gradients straight into a sink.
// PyTorch's autograd makes them aside, and adds them up afterwards (AccumulateGrad).
struct GradientSink {
  Tensor tensor;  // the leaf's shape; its dtype may be wider than the contribution's
  double scale = 1;
  bool accumulate = false;
};

// An end of the tape, where a gradient accumulates: of an ordinary tensor, or of a parameter.
class Leaf {
 public:
  virtual ~Leaf() = default;
  // The sink of one more contribution. The caller then launches the kernel that writes it.
  virtual GradientSink sink() = 0;
  // The gradient accumulated so far; undefined if there is none.
  virtual Tensor gradient() const = 0;
  virtual void clear() = 0;
  // Called in a backward pass, after the last operation of the pass that may contribute.
  virtual void on_last_contribution() {}
  // The number of writes to the values, for functions that read them again in backward.
  virtual std::uint64_t version() const { return 0; }
  // Throws: ContractError if version() is not `forward`.
  virtual void expect_version(std::uint64_t forward) const { (void)forward; }
  // The shape that contributions have.
  virtual const Shape& gradient_shape() const = 0;

  int pending = 0;         // operations that are still to run
  std::uint64_t pass = 0;  // in this pass, with those nested in it
};

// One call of a module, as backward meets it. The sharding engine opens and closes its units in
// regions.
//
//   forward    root( a( ) b( c( ) ) )
//   backward   root( b( c( ) ) a( ) )      the mirror of the calls, and of nothing else
//
// A region begins before backward runs the first node made in it, or in a region inside it. It ends
// when all those nodes have run. All regions of a forward begin and end in their turn, even if this
// rank's graph has no node for them, because another rank's may. Regions inside a recomputed
// function begin together before it runs again, in the order of their calls. They end together when
// its backward has run.
class Region {
 public:
  virtual ~Region() = default;
  virtual void on_backward_begin() = 0;
  virtual void on_backward_end() = 0;
  virtual void on_backward_inside() {}  // a pass along a forward in which the call still runs
};

struct Node;
struct CallGraph;  // what the nodes of one forward hold

// Takes the results of a backward function. `i` numbers the inputs given to `record`.
class Gradients {
 public:
  // `operation` is what errors name.
  Gradients(const char* operation, const std::vector<Edge>& inputs, bool retain_graph)
      : inputs_(inputs), graph_is_retained_(retain_graph), operation_(operation) {}

  // Whether input i needs a gradient. To compute one that nobody wants is allowed, and wasted.
  bool wants(int i) const { return static_cast<bool>(inputs_[static_cast<std::size_t>(i)]); }
  // Adds a gradient for input i, of that input's shape and dtype: gradcheck finds one of another.
  // Throws: ContractError if there is no input i; for another shape than the input's, where that is
  // a leaf, or of an operation that CustomOp has recorded.
  void set(int i, Tensor gradient);
  // From here on `set` compares with these shapes, one for each input, which the caller keeps.
  void expect_shapes(std::span<const Shape> shapes) noexcept { shapes_ = shapes; }
  // Removes and returns the gradient accumulated for input i so far; undefined if there is none. It
  // is for kernels that add it while they compute, and then `set` the sum.
  Tensor extract(int i);
  // If input i is a leaf: where to write its gradient directly, instead of calling `set`.
  std::optional<GradientSink> sink(int i);
  // Whether the function may be called again. Then what it has saved must stay as it is.
  bool graph_is_retained() const { return graph_is_retained_; }

 private:
  void expect_shape(int i, const Tensor& gradient, const Shape& of) const;

  const std::vector<Edge>& inputs_;
  const bool graph_is_retained_;
  const char* const operation_;
  std::span<const Shape> shapes_{};
};

using Backward = std::function<void(const Tensor& gradient, Gradients& out)>;

struct Node {
  const char* name = "";
  std::uint64_t sequence = 0;
  std::vector<Edge> inputs;
  std::vector<std::shared_ptr<Leaf>> uses;  // leaves that its backward reaches by a pass of its own
  Backward backward;                        // empty once it has run and the graph was not retained
  std::shared_ptr<CallGraph> calls;
  Tensor gradient;         // of the output, during a pass
  std::uint64_t pass = 0;  // the last pass that visited it

  ~Node();
};

// Gives `out` its history. `out` is returned as it is if gradients are not enabled, or if no input
// requires one. Undefined inputs are allowed and never want a gradient. `name` has static lifetime.
Tensor record(const char* name, std::initializer_list<Tensor> inputs, Tensor out,
              Backward backward);
Tensor record(const char* name, std::span<const Tensor> inputs, Tensor out, Backward backward);
// Records the node even if no input requires a gradient, because the function has parameters of its
// own (recomputation). Without gradients enabled it records nothing, like `record`.
Tensor record_always(const char* name, std::span<const Tensor> inputs, Tensor out,
                     Backward backward);

// Whether operations record history on this thread.
bool grad_enabled() noexcept;
// Whether operations record history now, or will in the second run of the recomputed function that
// runs.
bool history_is_wanted() noexcept;
// Whether this is the first run of a recomputed function. Backward runs all of it again, also
// operations without gradients.
bool runs_again() noexcept;
class GradModeGuard {
 public:
  explicit GradModeGuard(bool enabled) noexcept;
  ~GradModeGuard();
  GradModeGuard(const GradModeGuard&) = delete;
  GradModeGuard& operator=(const GradModeGuard&) = delete;

 private:
  bool before_, wanted_before_;
};

// A call runs in this scope, and `region` is how backward will meet it. The outermost scope is a
// forward. A backward pass goes back along every forward that it reaches. It also goes back along
// earlier ones whose graphs are gone, if no pass has covered them, or only passes with
// retain_graph.
//   A backward inside of a call treats each call that has ended there as a forward of its own. A
// call that it does not reach, and that somebody may still go back along, is left to a later pass.
//   `kept` lives as long as the graph. `begins` is a next_number from before, if no forward has
// begun since; nodes made in between belong to this scope. 0: from here on. In backward the scope
// does nothing, since a recomputed function has its regions from its first run.
class RegionGuard {
 public:
  explicit RegionGuard(std::shared_ptr<Region> region, std::shared_ptr<const void> kept = {},
                       std::uint64_t begins = 0);
  ~RegionGuard();
  RegionGuard(const RegionGuard&) = delete;
  RegionGuard& operator=(const RegionGuard&) = delete;

 private:
  std::shared_ptr<Region> region_;  // null in backward
};
// A new number, between those of the nodes made before and after.
std::uint64_t next_number() noexcept;
// Within a Region's two calls: the number of their forward on this thread, from 1. Elsewhere 0.
std::uint64_t forward_of_step() noexcept;
// Within a Region's two calls: calls f(region, whether it begins or ends) for what comes next in
// the same forward, until f returns false.
void for_each_upcoming_step(const std::function<bool(Region&, bool)>& f);
// Notes that an operation has the leaf as an input. In the first run of a recomputed function the
// operation is still to come.
void note_use(const std::shared_ptr<Leaf>& leaf);
// Makes a pass that runs no node. It goes along the forwards that a backward of `loss` would reach.
// Without a loss, it goes along those that no pass has covered and of which one region is_mine.
// Either goes along forwards whose graphs are gone.
void skip_backward(const Tensor& loss, bool retain_graph = false);
void skip_backward(const std::function<bool(Region&)>& is_mine);
// Drops the forwards that no pass has covered.
void forget_forwards() noexcept;
// Drops those forwards of which one region is_mine. Returns false, and drops none, if a backward
// could still reach one of them.
bool forget_forwards(const std::function<bool(Region&)>& is_mine);
// How many forwards this thread has begun. After a failure ranks agree on this number.
std::uint64_t& forwards() noexcept;

// Whether a backward pass runs on this thread, recomputation included; and whether a call with
// regions runs.
bool in_backward() noexcept;
bool in_call() noexcept;
// Calls `f` once, when the outermost backward pass of this thread has run its last node. Requires:
// in_backward().
void at_end_of_backward(std::function<void()> f);

}  // namespace autograd

// Operations in its scope record no history.
class NoGradGuard : public autograd::GradModeGuard {
 public:
  NoGradGuard() noexcept : GradModeGuard(false) {}
};

}  // namespace tessera
