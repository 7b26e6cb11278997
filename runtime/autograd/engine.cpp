#include <algorithm>
#include <exception>

#include "runtime/autograd/gradient_sink.hpp"

namespace tessera {
namespace autograd {
namespace {

struct ThreadState {
  bool grad_enabled = true;
  std::shared_ptr<Region> region;
  std::uint64_t sequence = 0;
  std::uint64_t pass = 0;
  std::uint64_t outermost = 0;  // the pass that the running ones are nested in, while depth > 0
  int depth = 0;
  std::vector<std::function<void()>> at_end;
};

ThreadState& state() {
  thread_local ThreadState instance;
  return instance;
}

// The gradient of an ordinary leaf tensor.
class TensorLeaf final : public Leaf {
 public:
  explicit TensorLeaf(const Tensor& t)
      : shape_(t.shape()), dtype_(t.dtype()), device_(t.device()) {}

  GradientSink sink() override {
    const bool first = !gradient_.defined();
    if (first) gradient_ = Tensor::empty(shape_, dtype_, device_);
    return {gradient_, 1, !first};
  }
  Tensor gradient() const override { return gradient_; }
  void clear() override { gradient_ = {}; }

 private:
  Shape shape_;
  DType dtype_;
  Device device_;
  Tensor gradient_;
};

Edge edge_of(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.grad_meta()) return {};
  return {tensor.grad_meta()->node, tensor.grad_meta()->leaf};
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
  const Edge& edge = inputs_[static_cast<std::size_t>(i)];
  if (edge) accumulate(edge, std::move(gradient));
}

Tensor Gradients::extract(int i) {
  const Edge& edge = inputs_[static_cast<std::size_t>(i)];
  return edge.node ? std::exchange(edge.node->gradient, {}) : Tensor();
}

std::optional<GradientSink> Gradients::sink(int i) {
  const Edge& edge = inputs_[static_cast<std::size_t>(i)];
  return edge.leaf ? std::optional(edge.leaf->sink()) : std::nullopt;
}

Saved::Saved(const Tensor& tensor) {
  if (!tensor.defined()) return;
  tensor_ = tensor.view(tensor.shape(), tensor.strides(), 0);
  ++tensor_.storage()->saved;
}
Saved::Saved(const Saved& other) : tensor_(other.tensor_) {
  if (tensor_.defined()) ++tensor_.storage()->saved;
}
Saved::~Saved() {
  if (tensor_.defined()) --tensor_.storage()->saved;
}

bool grad_enabled() noexcept { return state().grad_enabled; }
GradModeGuard::GradModeGuard(bool enabled) noexcept
    : before_(std::exchange(state().grad_enabled, enabled)) {}
GradModeGuard::~GradModeGuard() { state().grad_enabled = before_; }

RegionGuard::RegionGuard(std::shared_ptr<Region> region) noexcept
    : before_(std::exchange(state().region, std::move(region))) {}
RegionGuard::~RegionGuard() { state().region = std::move(before_); }
const std::shared_ptr<Region>& current_region() noexcept { return state().region; }

bool in_backward() noexcept { return state().depth > 0; }
void at_end_of_backward(std::function<void()> f) {
  TESSERA_EXPECT(in_backward(), "at_end_of_backward: no backward pass is running");
  state().at_end.push_back(std::move(f));
}

namespace {
Tensor record_if(bool always, const char* name, std::span<const Tensor> inputs, Tensor out,
                 Backward backward) {
  ThreadState& s = state();
  if (!s.grad_enabled) return out;
  auto node = std::make_shared<Node>();
  bool any = always;
  node->inputs.reserve(inputs.size());
  for (const Tensor& input : inputs) {
    node->inputs.push_back(edge_of(input));
    any = any || node->inputs.back();
  }
  if (!any) return out;
  node->name = name;
  node->sequence = ++s.sequence;
  node->backward = std::move(backward);
  node->region = s.region;
  if (s.region) s.region->add_node();
  out.grad_meta() = std::make_shared<GradMeta>(GradMeta{std::move(node), nullptr});
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
Tensor record_always(const char* name, std::initializer_list<Tensor> inputs, Tensor out,
                     Backward backward) {
  return record_if(true, name, {inputs.begin(), inputs.size()}, std::move(out),
                   std::move(backward));
}

// One backward pass. Passes nest: recomputation runs one inside a node of another.
class Engine {
 public:
  static void run(const std::shared_ptr<Node>& root, Tensor gradient) {
    ThreadState& s = state();
    std::vector<std::shared_ptr<Node>> order = reachable(root, s);
    root->gradient = std::move(gradient);
    for (const auto& node : order)
      if (node->region) ++node->region->pending_;
    ++s.depth;
    std::size_t done = 0;
    try {
      for (; done < order.size(); ++done) {
        step(*order[done]);
        order[done].reset();
      }
      if (s.depth == 1) finish(s);
      --s.depth;
    } catch (...) {
      abandon(order, done);
      if (--s.depth == 0) s.at_end.clear();
      throw;
    }
  }

 private:
  static std::vector<std::shared_ptr<Node>> reachable(const std::shared_ptr<Node>& root,
                                                      ThreadState& s) {
    const std::uint64_t pass = ++s.pass;
    if (s.depth == 0) s.outermost = pass;
    std::vector<std::shared_ptr<Node>> found;
    const auto visit = [&](const std::shared_ptr<Node>& node) {
      if (!node || node->pass == pass) return;
      TESSERA_EXPECT(node->backward != nullptr, "backward: the graph behind '", node->name,
                     "' has already run and was freed; call backward once per forward");
      TESSERA_EXPECT(node->pass < s.outermost, "backward: '", node->name,
                     "' belongs to a pass that is running; a recomputed function may use its "
                     "argument and parameters, not other tensors with history");
      node->pass = pass;
      found.push_back(node);
    };
    visit(root);
    for (std::size_t i = 0; i < found.size(); ++i) {
      const Node& node = *found[i];
      for (const Edge& edge : node.inputs) visit(edge.node);
    }
    std::sort(found.begin(), found.end(),
              [](const auto& a, const auto& b) { return a->sequence > b->sequence; });
    return found;
  }

  static void step(Node& node) {
    Region* const region = node.region.get();
    if (node.gradient.defined()) {
      if (region && !region->running_) {
        region->running_ = true;
        region->on_backward_begin();
      }
      const GradModeGuard no_grad(false);
      const RegionGuard guard(node.region);
      Gradients gradients(node.inputs);
      const Tensor gradient = std::exchange(node.gradient, {});
      node.backward(gradient, gradients);
    }
    node.backward = nullptr;  // what it saved is freed here, in program order
    node.inputs.clear();
    if (region && --region->pending_ == 0 && region->running_) {
      region->running_ = false;
      region->on_backward_end();
    }
  }

  static void finish(ThreadState& s) {
    for (std::size_t i = 0; i < s.at_end.size(); ++i) {
      const auto f = std::move(s.at_end[i]);  // it may add another one
      f();
    }
    s.at_end.clear();
  }

  static void abandon(const std::vector<std::shared_ptr<Node>>& order, std::size_t from) {
    for (std::size_t i = from; i < order.size(); ++i) {
      order[i]->gradient = {};
      if (!order[i]->region) continue;
      order[i]->region->pending_ = 0;
      order[i]->region->running_ = false;
    }
  }
};

}  // namespace autograd

Tensor& Tensor::require_grad() {
  TESSERA_EXPECT(is_floating(dtype()), "require_grad: the tensor is ", dtype(),
                 "; only floating tensors have gradients");
  TESSERA_EXPECT(!grad_meta() || grad_meta()->leaf,
                 "require_grad: the tensor has a history; detach it first");
  if (!grad_meta())
    grad_meta() = std::make_shared<GradMeta>(
        GradMeta{nullptr, std::make_shared<autograd::TensorLeaf>(*this)});
  return *this;
}

bool Tensor::requires_grad() const { return defined() && grad_meta() != nullptr; }

Tensor Tensor::grad() const {
  return grad_meta() && grad_meta()->leaf ? grad_meta()->leaf->gradient() : Tensor();
}

void Tensor::zero_grad() {
  if (grad_meta() && grad_meta()->leaf) grad_meta()->leaf->clear();
}

Tensor Tensor::detach() const { return view(shape(), strides(), 0); }

void Tensor::backward(const Tensor& gradient) const {
  TESSERA_EXPECT(requires_grad(),
                 "backward: the tensor has no history; was it made without gradients?");
  TESSERA_EXPECT(gradient.defined() || numel() == 1, "backward: the tensor has shape ", shape(),
                 "; give a gradient of that shape, or reduce it to a single element");
  TESSERA_EXPECT(!gradient.defined() || gradient.shape() == shape(), "backward: gradient of shape ",
                 gradient.shape(), " for a tensor of shape ", shape());
  const Tensor first =
      gradient.defined() ? gradient.detach() : Tensor::ones(shape(), dtype(), device());
  if (grad_meta()->leaf) {
    write(grad_meta()->leaf->sink(), first);
    return;
  }
  autograd::Engine::run(grad_meta()->node, first);
}

}  // namespace tessera
