#include <algorithm>
#include <exception>

#include "runtime/autograd/call_tree.hpp"
#include "runtime/autograd/gradient_sink.hpp"
#include "runtime/autograd/recomputed_scope.hpp"

namespace tessera {
namespace autograd {
namespace {

class Walk;

struct ThreadState {
  bool grad_enabled = true;
  bool history_is_wanted = true;
  FirstRunGuard* first_run = nullptr;  // of a recomputed function
  // Of the forward that records, in backward of the node that runs; null outside of calls.
  std::shared_ptr<CallGraph> calls;
  // Forwards that no pass has covered for good; the way back of the running one.
  std::vector<std::shared_ptr<CallTree>> waiting;
  Walk* walk = nullptr;
  std::uint64_t sequence = 0;
  std::uint64_t forwards = 0;
  std::uint64_t pass = 0;
  std::uint64_t outermost = 0;  // the pass that the running ones are nested in, while depth > 0
  std::uint64_t running = 0;    // the number of the node that runs
  int depth = 0;
  std::vector<std::function<void()>> at_end;
};

ThreadState& state() {
  thread_local ThreadState instance;
  return instance;
}

void accumulate(const Edge& edge, Tensor gradient) {
  if (edge.leaf) {
    write(edge.leaf->sink(), gradient);
    return;
  }
  Tensor& held = edge.node->gradient;
  if (!held.defined()) {
    held = std::move(gradient);
  } else if (held.is_exclusive() && held.is_contiguous()) {
    raw::axpby(held, gradient, 1, 1);  // nobody else sees it
  } else {
    held = raw::add(held, gradient);
  }
}

}  // namespace

// Chains of nodes end one by one: a long graph that nobody ran backwards must not recurse through
// destructors.
Node::~Node() {
  std::vector<std::shared_ptr<Node>> dying;
  const auto take = [&](Node& node) {
    for (Edge& edge : node.inputs)
      if (edge.node && edge.node.use_count() == 1) dying.push_back(std::move(edge.node));
    node.inputs.clear();
  };
  take(*this);
  while (!dying.empty()) {
    const std::shared_ptr<Node> node = std::move(dying.back());
    dying.pop_back();
    take(*node);
  }
}

void Gradients::set(int i, Tensor gradient) {
  TESSERA_EXPECT(i >= 0 && i < std::ssize(inputs_), "backward: a gradient for input ", i,
                 " of an operation that has ", inputs_.size(), "; inputs count from 0");
  const Edge& edge = inputs_[static_cast<std::size_t>(i)];
  if (!edge) return;
  if (!shapes_.empty()) expect_shape(i, gradient, shapes_[static_cast<std::size_t>(i)]);
  if (edge.leaf) expect_shape(i, gradient, edge.leaf->gradient_shape());
  accumulate(edge, std::move(gradient));
}

void Gradients::expect_shape(int i, const Tensor& gradient, const Shape& of) const {
  TESSERA_EXPECT(gradient.shape() == of, operation_, ": backward gives a gradient of ",
                 gradient.shape(), " for input ", i, ", which is ", of,
                 "; give one of the input's shape, e.g. by raw::sum_to or raw::expand");
}

Tensor Gradients::extract(int i) {
  const Edge& edge = inputs_[static_cast<std::size_t>(i)];
  return edge.node ? std::exchange(edge.node->gradient, {}) : Tensor();
}

std::optional<GradientSink> Gradients::sink(int i) {
  const Edge& edge = inputs_[static_cast<std::size_t>(i)];
  return edge.leaf ? std::optional(edge.leaf->sink()) : std::nullopt;
}

bool grad_enabled() noexcept { return state().grad_enabled; }
bool history_is_wanted() noexcept { return state().history_is_wanted; }
bool runs_again() noexcept { return state().first_run != nullptr; }
void note_captured(std::span<const Tensor> tensors) {
  const ThreadState& s = state();
  if (!s.first_run || !s.history_is_wanted || s.grad_enabled) return;
  for (const Tensor& x : tensors)
    if (x.defined() && x.history().node) s.first_run->note_captured(x);
}
void FirstRunGuard::note_captured(const Tensor& tensor) {
  const auto is_same = [&](const Tensor& x) { return x.history().node == tensor.history().node; };
  if (std::ranges::none_of(captured_, is_same)) captured_.push_back(tensor);
}
void note_use(const std::shared_ptr<Leaf>& leaf) {
  if (FirstRunGuard* const run = state().first_run) run->note_use(leaf);
}
GradModeGuard::GradModeGuard(bool enabled) noexcept
    : before_(std::exchange(state().grad_enabled, enabled)),
      wanted_before_(std::exchange(state().history_is_wanted, enabled)) {}
GradModeGuard::~GradModeGuard() {
  state().grad_enabled = before_;
  state().history_is_wanted = wanted_before_;
}
FirstRunGuard::FirstRunGuard() noexcept
    : grad_enabled_before_(std::exchange(state().grad_enabled, false)),
      before_(std::exchange(state().first_run, this)) {}
FirstRunGuard::~FirstRunGuard() {
  state().grad_enabled = grad_enabled_before_;
  state().first_run = before_;
}

// --- the call tree, in forward ---

namespace {

// What is made from here on is of a call, or a recomputed function, of its own: of this thread's
// forward, which begins where there is none. Returns that.
CallTree& begin_graph(ThreadState& s) {
  const std::shared_ptr<CallGraph> around = s.calls;
  s.calls = std::make_shared<CallGraph>();
  s.calls->tree = around ? around->tree : std::make_shared<CallTree>(++s.forwards);
  s.calls->around = around;
  if (!around) s.calls->tree->graph = s.calls;
  return *s.calls->tree;
}

// Back to the one around it.
void end_graph(ThreadState& s, CallTree::Mark end) {
  const std::shared_ptr<CallGraph> calls = s.calls;
  calls->tree->add(std::move(end));
  s.calls = calls->around;
  if (s.calls) return;
  calls->tree->goes_on = false;
  if (calls->tree->has([](Region&) { return true; })) s.waiting.push_back(calls->tree);
}

}  // namespace

RegionGuard::RegionGuard(std::shared_ptr<Region> region, std::shared_ptr<const void> kept,
                         std::uint64_t begins) {
  ThreadState& s = state();
  if (s.depth > 0) return;
  region_ = std::move(region);
  const std::uint64_t number = s.calls || begins == 0 ? next_number() : begins;
  CallTree& tree = begin_graph(s);
  tree.add({region_, number, CallTree::Mark::begin, s.calls});
  if (kept) tree.graph.lock()->kept.push_back(std::move(kept));
}
RegionGuard::~RegionGuard() {
  if (!region_) return;
  ThreadState& s = state();
  end_graph(s, {std::move(region_), ++s.sequence, CallTree::Mark::end});
}

RecomputedScope::RecomputedScope() {
  ThreadState& s = state();
  is_entry_ = s.depth == 0;
  if (!is_entry_) return;
  CallTree& tree = begin_graph(s);
  tree.add({nullptr, ++s.sequence, CallTree::Mark::begin_recomputed, s.calls});
}
RecomputedScope::~RecomputedScope() {
  if (!is_entry_) return;
  ThreadState& s = state();
  end_graph(s, {nullptr, ++s.sequence, CallTree::Mark::end_recomputed});
}

std::uint64_t next_number() noexcept { return ++state().sequence; }
void forget_forwards() noexcept { state().waiting.clear(); }
std::uint64_t& forwards() noexcept { return state().forwards; }
bool forget_forwards(const std::function<bool(Region&)>& is_mine) {
  auto& waiting = state().waiting;
  const auto mine = std::partition(waiting.begin(), waiting.end(),
                                   [&](const auto& tree) { return !tree->has(is_mine); });
  if (std::any_of(mine, waiting.end(), [](const auto& tree) { return !tree->graph.expired(); }))
    return false;
  waiting.erase(mine, waiting.end());
  return true;
}

bool in_backward() noexcept { return state().depth > 0; }
bool in_call() noexcept { return state().calls != nullptr; }
void at_end_of_backward(std::function<void()> f) {
  TESSERA_EXPECT(in_backward(), "at_end_of_backward: no backward pass is running; call it in one");
  state().at_end.push_back(std::move(f));
}

namespace {
Tensor record_if(bool always, const char* name, std::span<const Tensor> inputs, Tensor out,
                 Backward backward) {
  ThreadState& s = state();
  if (!s.grad_enabled) {
    if (s.first_run) note_captured(inputs);
    return out;
  }
  auto node = std::make_shared<Node>();
  bool any = always;
  node->inputs.reserve(inputs.size());
  for (const Tensor& input : inputs) {
    node->inputs.push_back(input.defined() ? input.history() : Edge());
    any = any || node->inputs.back();
  }
  if (!any) return out;
  node->name = name;
  node->sequence = ++s.sequence;
  node->backward = std::move(backward);
  node->calls = s.calls;
  if (out.history()) out = out.detach();  // an input itself, which keeps its own
  out.history() = {std::move(node), nullptr};
  return out;
}
}  // namespace

Tensor record(const char* name, std::span<const Tensor> inputs, Tensor out, Backward backward) {
  return record_if(false, name, inputs, std::move(out), std::move(backward));
}
Tensor record(const char* name, std::initializer_list<Tensor> inputs, Tensor out,
              Backward backward) {
  return record_if(false, name, {inputs.begin(), inputs.size()}, std::move(out),
                   std::move(backward));
}
Tensor record_always(const char* name, std::span<const Tensor> inputs, Tensor out,
                     Backward backward) {
  return record_if(true, name, inputs, std::move(out), std::move(backward));
}

namespace {

// The way back along the forwards that a pass covers.
class Walk {
 public:
  Walk(ThreadState& s, bool retain_graph) : s_(s), retain_graph_(retain_graph), before_(s.walk) {
    s.walk = this;
  }
  ~Walk() {
    for (const auto& tree : trees_) tree->finish(retain_graph_ && !tree->graph.expired());
    s_.walk = before_;
  }
  Walk(const Walk&) = delete;
  Walk& operator=(const Walk&) = delete;

  // In order: from the last node.
  void add(const std::vector<std::shared_ptr<Node>>& reached) {
    const CallTree::IsReached is_reached = [&](std::uint64_t begin, std::uint64_t end) {
      const auto last = std::ranges::upper_bound(reached, end, std::greater(), sequence_of);
      return last != reached.end() && (*last)->sequence > begin;
    };
    for (const auto& node : reached)
      if (node->calls) add(node->calls->tree, is_reached);
  }
  void add(const std::shared_ptr<CallTree>& tree, const CallTree::IsReached& is_reached = {}) {
    if (std::exchange(tree->is_walked, true)) return;  // by a pass around this one, too
    tree->rewind(is_reached);
    trees_.push_back(tree);
    if (!retain_graph_ || tree->graph.expired()) std::erase(s_.waiting, tree);
  }
  // Those whose graphs are gone: peers may reach them.
  void add_gone() {
    for (const auto& tree : std::vector(s_.waiting))
      if (tree->graph.expired()) add(tree);
  }
  void add_if(const std::function<bool(Region&)>& is_mine) {
    for (const auto& tree : std::vector(s_.waiting))
      if (tree->has(is_mine)) add(tree);
  }
  // Takes all steps that come before the node of this number; 0 for the end of the pass.
  void go_back_to(std::uint64_t number) {
    for (;;) {
      latest_ = nullptr;
      for (const auto& tree : trees_)
        if (!latest_ || tree->next() > latest_->next()) latest_ = tree.get();
      if (!latest_ || latest_->next() <= number) return;
      latest_->step();
    }
  }
  const CallTree* latest() const noexcept { return latest_; }

 private:
  static std::uint64_t sequence_of(const std::shared_ptr<Node>& node) { return node->sequence; }

  ThreadState& s_;
  const bool retain_graph_;
  Walk* const before_;
  std::vector<std::shared_ptr<CallTree>> trees_;
  CallTree* latest_ = nullptr;
};

}  // namespace

std::uint64_t forward_of_step() noexcept {
  const Walk* const walk = state().walk;
  return walk && walk->latest() ? walk->latest()->forward() : 0;
}
void for_each_upcoming_step(const std::function<bool(Region&, bool)>& f) {
  const Walk* const walk = state().walk;
  if (walk && walk->latest()) walk->latest()->for_each_upcoming(f);
}

namespace {

// One backward pass. Passes nest: recomputation runs one inside a node of another.
class Engine {
 public:
  static void run(const std::shared_ptr<Node>& root, Tensor gradient, bool retain_graph) {
    ThreadState& s = state();
    if (is_to_come(*root, s)) return accumulate({root, nullptr}, std::move(gradient));
    std::vector<std::shared_ptr<Node>> order = reachable(root, s);
    root->gradient = std::move(gradient);
    std::size_t done = 0;
    try {
      pass(s, retain_graph, [&](Walk& walk) {
        walk.add(order);
        if (s.depth == 1) walk.add_gone();
        for (; done < order.size(); ++done) {
          walk.go_back_to(order[done]->sequence);
          step(*order[done], s, retain_graph);
          order[done].reset();
        }
      });
    } catch (...) {
      for (; done < order.size(); ++done) order[done]->gradient = {};
      throw;
    }
  }

  // A pass that runs no node: along the forwards that `add` gives it, and those whose graphs are
  // gone.
  template <class F>
  static void skip(bool retain_graph, const F& add) {
    TESSERA_EXPECT(!in_backward(), "skip_backward: a backward pass is running; call it after that");
    pass(state(), retain_graph, [&](Walk& walk) {
      add(walk);
      walk.add_gone();
    });
  }

  // What a pass from `root` runs, in order.
  static std::vector<std::shared_ptr<Node>> reachable(const std::shared_ptr<Node>& root,
                                                      ThreadState& s) {
    const std::uint64_t pass = ++s.pass;
    if (s.depth == 0) s.outermost = pass;
    std::vector<std::shared_ptr<Node>> found;
    const auto visit = [&](const std::shared_ptr<Node>& node) {
      if (!node || node->pass == pass) return;
      if (is_to_come(*node, s)) return;
      TESSERA_EXPECT(
          node->backward != nullptr, "backward: the graph behind '", node->name,
          "' has already run and was freed; call backward once per forward, or retain the "
          "graph in all backwards but the last");
      TESSERA_EXPECT(!is_of_running(*node, s), "backward: '", node->name,
                     "' was already reached by the pass that is running; give a function what it "
                     "reads in backward as an input");
      node->pass = pass;
      found.push_back(node);
    };
    visit(root);
    for (std::size_t i = 0; i < found.size(); ++i) {
      const Node& node = *found[i];
      for (const Edge& edge : node.inputs) {
        visit(edge.node);
        if (edge.leaf) count(*edge.leaf, s);
      }
      for (const auto& leaf : node.uses) count(*leaf, s);
    }
    std::ranges::sort(found, std::greater(), [](const auto& node) { return node->sequence; });
    return found;
  }

 private:
  static bool is_of_running(const Node& node, const ThreadState& s) {
    return s.depth > 0 && node.pass >= s.outermost;
  }
  // A pass around the one that begins will run it: what a recomputed function has captured.
  static bool is_to_come(const Node& node, const ThreadState& s) {
    return is_of_running(node, s) && node.sequence < s.running;
  }
  // An operation that uses the leaf will run in this pass, or one around it.
  static void count(Leaf& leaf, const ThreadState& s) {
    if (std::exchange(leaf.pass, s.outermost) != s.outermost) leaf.pending = 0;
    ++leaf.pending;
  }

  template <class F>
  static void pass(ThreadState& s, bool retain_graph, const F& f) {
    ++s.depth;
    try {
      Walk walk(s, retain_graph);
      f(walk);
      walk.go_back_to(0);
      if (s.depth == 1) finish(s);
      --s.depth;
    } catch (...) {
      if (--s.depth == 0) s.at_end.clear();
      throw;
    }
  }

  static void step(Node& node, ThreadState& s, bool retain_graph) {
    for (const auto& leaf : node.uses) --leaf->pending;  // the operations of its own pass take over
    if (node.gradient.defined()) {
      const GradModeGuard no_grad(false);
      Gradients gradients(node.name, node.inputs, retain_graph);
      const Tensor gradient = std::exchange(node.gradient, {});
      const auto around = std::exchange(s.calls, node.calls);
      const std::uint64_t running = std::exchange(s.running, node.sequence);
      try {
        node.backward(gradient, gradients);
      } catch (...) {
        s.calls = around;
        s.running = running;
        throw;
      }
      s.calls = around;
      s.running = running;
    }
    for (const auto& leaf : node.uses)
      if (leaf->pending == 0) leaf->on_last_contribution();
    for (const Edge& edge : node.inputs)
      if (edge.leaf && --edge.leaf->pending == 0) edge.leaf->on_last_contribution();
    if (retain_graph) return;
    node.backward = nullptr;  // what it saved is freed here, in program order
    node.inputs.clear();
    node.uses.clear();
  }

  static void finish(ThreadState& s) {
    for (std::size_t i = 0; i < s.at_end.size(); ++i) {
      const auto f = std::move(s.at_end[i]);  // it may add another one
      f();
    }
    s.at_end.clear();
  }
};

}  // namespace

void skip_backward(const Tensor& loss, bool retain_graph) {
  TESSERA_EXPECT(loss.requires_grad() && loss.history().node,
                 "skip_backward: the tensor has no history; give the model instead");
  const auto order = Engine::reachable(loss.history().node, state());
  Engine::skip(retain_graph, [&](Walk& walk) { walk.add(order); });
}
void skip_backward(const std::function<bool(Region&)>& is_mine) {
  Engine::skip(false, [&](Walk& walk) { walk.add_if(is_mine); });
}

}  // namespace autograd

void Tensor::backward(const Tensor& gradient, bool retain_graph, Caller at) const {
  const CallSite site(at);
  TESSERA_EXPECT(requires_grad(),
                 "backward: the tensor has no history; was it made without gradients, or of frozen "
                 "parameters alone?");
  TESSERA_EXPECT(gradient.defined() || numel() == 1, "backward: the tensor has shape ", shape(),
                 "; give a gradient of that shape, or reduce it to a single element");
  TESSERA_EXPECT(
      !gradient.defined() || (gradient.shape() == shape() && gradient.dtype() == dtype()),
      "backward: the gradient is ", gradient.shape(), " of ", gradient.dtype(), ", the tensor ",
      shape(), " of ", dtype(), "; expected the same");
  const Tensor first =
      gradient.defined() ? gradient.detach() : Tensor::ones(shape(), dtype(), device());
  if (history().leaf) {
    write(history().leaf->sink(), first);
    return;
  }
  autograd::Engine::run(history().node, first, retain_graph);
}

}  // namespace tessera
