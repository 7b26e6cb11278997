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
#include <span>
#include <vector>

#include "tessera/autograd/saved.hpp"
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
  // In a backward pass, after the last operation of it that may contribute.
  virtual void on_last_contribution() {}
  // Counts writes of the values, for functions that read them again in backward.
  virtual std::uint64_t version() const { return 0; }
  // Throws: ContractError where that is another one now.
  virtual void expect_version(std::uint64_t forward) const { (void)forward; }

  int pending = 0;         // operations that are still to run
  std::uint64_t pass = 0;  // in this pass, with those nested in it
};

// One call of a module, as backward meets it. The sharding engine opens and closes its units there.
//
//   forward    root( a( ) b( c( ) ) )
//   backward   root( b( c( ) ) a( ) )      the mirror of the calls, and of nothing else
//
// A region begins before backward runs the first node made in it, or in a region inside it, and
// ends when those have run. All regions of a forward begin and end in their turn, also where this
// graph has no node for them: another rank's may. Those inside a recomputed function begin
// together, in the order of their calls, before it runs again, and end together when its backward
// has run.
class Region {
 public:
  virtual ~Region() = default;
  virtual void on_backward_begin() = 0;
  virtual void on_backward_end() = 0;
  virtual void on_backward_inside() {}  // a pass along a forward in which the call still runs
};

struct Node;
struct CallGraph;  // what the nodes of one forward hold

// What a backward function hands its results to; `i` numbers the inputs given to `record`.
class Gradients {
 public:
  explicit Gradients(const std::vector<Edge>& inputs, bool retain_graph = false)
      : inputs_(inputs), graph_is_retained_(retain_graph) {}

  // Whether input i needs a gradient. Computing one that nobody wants is allowed, and wasted.
  bool wants(int i) const { return static_cast<bool>(inputs_[static_cast<std::size_t>(i)]); }
  // Adds a gradient of input i, of that input's shape.
  void set(int i, Tensor gradient);
  // Removes and returns the gradient accumulated for input i so far, undefined for none. For
  // kernels that add it while they compute, and then `set` the sum.
  Tensor extract(int i);
  // When input i is a leaf: where to write its gradient directly, instead of calling `set`.
  std::optional<GradientSink> sink(int i);
  // Whether the function may be called again, so that what it has saved stays as it is.
  bool graph_is_retained() const { return graph_is_retained_; }

 private:
  const std::vector<Edge>& inputs_;
  const bool graph_is_retained_;
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

// Gives `out` its history. Without gradients enabled, or when no input requires one, `out` is
// returned as it is. Undefined inputs are allowed and never want a gradient. `name` has static
// lifetime.
Tensor record(const char* name, std::initializer_list<Tensor> inputs, Tensor out,
              Backward backward);
Tensor record(const char* name, std::span<const Tensor> inputs, Tensor out, Backward backward);
// Records the node even if no input requires a gradient, because the function has parameters of its
// own (recomputation). Without gradients enabled it records nothing, like `record`.
Tensor record_always(const char* name, std::span<const Tensor> inputs, Tensor out,
                     Backward backward);

// Whether operations record history on this thread.
bool grad_enabled() noexcept;
// The same, or whether this is the first run of a recomputed function, whose second run records.
bool history_is_wanted() noexcept;
// Whether this is the first run of a recomputed function. Backward runs all of it again, what has
// no gradients too.
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

// A call runs in this scope, and `region` is what backward will meet of it. The outermost scope is
// a forward. A backward pass goes back along every forward that it reaches. It also goes back along
// earlier ones whose graphs are gone and that no pass has covered, or only with retain_graph.
//   A backward inside of a call treats each call that has ended in it as a forward of its own. What
// it does not reach, and somebody may still go back along, it leaves to a later pass.
//   `kept` lives as long as the graph. `begins` is a next_number from before, where no forward has
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
// A number of its own between those of the nodes made before and after.
std::uint64_t next_number() noexcept;
// In the two calls of a Region: the number of their forward on this thread, from 1. Else 0.
std::uint64_t forward_of_step() noexcept;
// In the two calls of a Region: f(region, whether it begins or ends) for what comes next in the
// same forward, until f says false.
void for_each_upcoming_step(const std::function<bool(Region&, bool)>& f);
// An operation has the leaf as an input. In the first run of a recomputed function it is one that
// is still to come.
void note_use(const std::shared_ptr<Leaf>& leaf);
// A pass that runs no node. It goes along the forwards that a backward of `loss` would reach, or,
// without a loss, along those that no pass has covered and of which one region is_mine. Either goes
// along those whose graphs are gone.
void skip_backward(const Tensor& loss, bool retain_graph = false);
void skip_backward(const std::function<bool(Region&)>& is_mine);
// Drops the forwards that no pass has covered.
void forget_forwards() noexcept;
// Drops those of which one region is_mine. Returns false, and drops none, where a backward could
// still reach one of them.
bool forget_forwards(const std::function<bool(Region&)>& is_mine);
// How many forwards this thread has begun. After a failure ranks agree on it.
std::uint64_t& forwards() noexcept;

// Whether a backward pass is running on this thread (recomputation included), a call with regions.
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
