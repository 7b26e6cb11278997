// Lesson 65: regions, or what happens around a module's call.
//
// A module's call goes through its hook: `before_call`, the computation, `after_call`. Backward
// comes later and knows nothing of modules, only of nodes. So the hook opens a region: what
// backward meets of this one call. Backward goes back along the calls in mirrored order, and a
// region is begun before the first node of its call, or of a call inside it, is due:
//
//   forward    mlp( up( matmul ) tanh  down( matmul ) ) sum
//   backward   sum  mlp{ down{ matmul } tanh  up{ matmul } }
//
// Whether a call has nodes at all changes nothing, as long as gradients are enabled: the order is
// the same on every rank. These four moments are all that sharding needs: `fully_shard` sets a hook
// that gathers before the call and frees after it, has all rows there again when the region begins,
// and has reduced gradients when it ends.
//
// The gather for backward is seldom queued where its own region begins, for then compute would wait
// for it. A region that begins queues the gather of the call that comes next in backward, and then
// its own work: the gather for `up` is queued where backward enters `down`, and compute waits for
// it where backward enters `up`. `prefetch_depth` says how many calls ahead are gathered, one by
// default. Where backward enters the root, it queues the gather of the first call that it will
// enter, before the root's own gather. By default that call, here of `down`, was the last of
// forward and is still gathered, so nothing is queued for it. Lesson 76 does so by hand.
//
// A module has one such hook. What a program does around calls, as PyTorch's forward hooks, is
// nn/forward_hooks.hpp: any number of them, within the scope that this one opens.
//
// PyTorch: FSDP2 gathers and frees in forward pre-hooks and forward hooks. For backward, it hooks
// the tensors that a module returns and wraps those that it is given; where no input needs a
// gradient, only a callback at the end of the pass notices that the module is done.
#include <iostream>
#include <optional>
#include <string>
#include <vector>

#include "tessera/autograd/ops.hpp"
#include "tessera/nn/linear.hpp"
#include "tests/tour/check.hpp"

namespace ts = tessera;

static std::vector<std::string> said;
static void say(const std::string& what) {
  said.push_back(what);
  std::cout << "   " << what << '\n';
}

// The whole hook: it prints, and does nothing else.
struct CallRegion : ts::autograd::Region {
  explicit CallRegion(const std::string& module) : name(module) {}
  void on_backward_begin() override { say("backward of " + name + " begins"); }
  void on_backward_end() override { say("backward of " + name + " ends"); }
  const std::string name;
};

class Narrator : public ts::nn::ModuleHook {
 public:
  explicit Narrator(const std::string& module) : name_(module) {}
  void before_call(ts::nn::Module&) override {
    say("before " + name_);
    call_.emplace(std::make_shared<CallRegion>(name_));  // until it is reset
  }
  void after_call(ts::nn::Module&) override {
    call_.reset();
    say("after " + name_);
  }
  void abandon_call(ts::nn::Module&) noexcept override { call_.reset(); }  // the call threw
  void materialize(const ts::Device&) override {}  // it claims no parameters

 private:
  std::string name_;
  std::optional<ts::autograd::RegionGuard> call_;
};

class Mlp : public ts::nn::Module {
 public:
  Mlp() : up(2, 4), down(4, 1) {
    register_module("up", up);
    register_module("down", down);
  }
  ts::Tensor operator()(const ts::Tensor& x) {
    return call([&] { return down(ts::tanh(up(x))); });
  }
  ts::nn::Linear up, down;
};

static void narrate(Mlp& mlp, const ts::Device& device) {
  for (const auto& [name, module] : mlp.named_modules())
    module->set_hook(std::make_shared<Narrator>(name.empty() ? "mlp" : name));
  mlp.materialize(device);
  ts::nn::init(mlp, {.value = 1});
}

static void around_a_call(Mlp& mlp, const ts::Tensor& x) {
  std::cout << "1. A call of the MLP:\n";
  const ts::Tensor loss = ts::sum(mlp(x));
  CHECK((said == std::vector<std::string>{"before mlp", "before up", "after up", "before down",
                                          "after down", "after mlp"}));
  said.clear();
  std::cout << "2. Its backward, in reverse:\n";
  loss.backward();
  CHECK((said == std::vector<std::string>{"backward of mlp begins", "backward of down begins",
                                          "backward of down ends", "backward of up begins",
                                          "backward of up ends", "backward of mlp ends"}));
}

// A region is of one call, not of a module: two calls make two, and backward meets the later first.
static void every_call_has_its_own(Mlp& mlp, const ts::Tensor& x) {
  std::cout << "3. The layer `up` called twice, then backward:\n";
  const ts::Tensor loss = ts::sum(mlp.up(x)) + ts::sum(mlp.up(x));
  said.clear();
  loss.backward();
  CHECK(said.size() == 4 && said[0] == said[2] && said[1] == said[3]);
}

static void no_graph_no_region(Mlp& mlp, const ts::Tensor& x) {
  std::cout << "4. Where gradients are disabled there is nothing to come back to:\n";
  const ts::NoGradGuard guard;
  said.clear();
  CHECK(!mlp.up(x).requires_grad());
  CHECK(said.size() == 2);
}

int main() {
  const ts::Device device = ts::Device::cpu();
  Mlp mlp;
  narrate(mlp, device);
  const ts::Tensor x = ts::Tensor::ones({3, 2}, ts::f32, device);
  around_a_call(mlp, x);
  every_call_has_its_own(mlp, x);
  no_graph_no_region(mlp, x);
}
