// Lesson 76: two slots, and a gather that is queued before it is needed.
//
// Lesson 75 gathers where it needs a weight, and compute waits each time. Two things are in the
// way. The first is where a weight lies: a gather may not begin before the last use of what lay
// there. With two slots, taken in turn, it waits for the layer before the last:
//
//   gather    │0│    │1│    │2│           gather    │0│1│   │2│   │3│
//   compute     │ 0  │ │ 1  │ │ 2 ..      compute     │  0  │  1  │  2 ..
//
// The second is when the host queues it. A host that is ahead of the device queues the next gather
// long before the device has come to it, and nothing else is needed. A host that reads a value of
// each layer is not ahead: it comes to the next gather when the layer has ended. So a layer first
// queues the gather of the layer that comes next, and then its own work. That is prefetching.
//
// fully_shard has both: a plan of slots, of which `prefetch_depth` beside the open unit's lie
// apart, and prefetching in backward, or in forward where a program lists units.
//
// PyTorch: FSDP2 prefetches in backward, and in forward leaves it to a host that is ahead, as here.
// Its gathers have no slots: the caching allocator finds memory for each, and events keep a gather
// from overwriting what is in use.
#include <iostream>
#include <memory>
#include <optional>
#include <vector>

#include "tessera/autograd/ops.hpp"
#include "tessera/device/device_context.hpp"
#include "tessera/nn/linear.hpp"
#include "tessera/nn/module_list.hpp"
#include "tessera/shard/fully_shard.hpp"
#include "tests/tour/check.hpp"

namespace ts = tessera;
using ts::AccessMode;

constexpr int kLayers = 4;
constexpr std::int64_t kWidth = 16, kBatch = 8;

// A chain of frozen layers; their gradients are the matter of lesson 77.
class Chain : public ts::nn::Module {
 public:
  explicit Chain(const ts::World& world) {
    for (int k = 0; k < kLayers; ++k)
      layers.emplace_back(kWidth, kWidth, ts::nn::LinearOptions{.bias = false});
    register_module("layers", layers);
    freeze();
    const ts::ShardOptions options{.mesh = ts::DeviceMesh::flat(world)};
    for (ts::nn::Linear& layer : layers) ts::fully_shard(layer, options);
    ts::fully_shard(*this, options);
    materialize(world.device());
    ts::nn::init(*this, {.value = 7});
  }
  ts::Tensor operator()(ts::Tensor x) {
    return call([&] {
      for (ts::nn::Linear& layer : layers) x = layer(x);
      return x;
    });
  }
  ts::nn::ModuleList<ts::nn::Linear> layers;
};

struct How {
  int slots = 2;
  bool prefetches = false;
  bool reads = false;  // whether the host waits for each layer
};

// The shards of all layers, and the slots in which their full weights lie.
class Weights {
 public:
  Weights(const ts::World& world, Chain& chain, const How& how)
      : world_(world),
        how_(how),
        memory_(world.allocate_symmetric(kLayers * shard_bytes())),
        slots_(static_cast<std::size_t>(how.slots)) {
    int k = 0;
    for (const ts::nn::Linear& layer : chain.layers)
      ts::raw::copy_into(shard(k++), layer.weight.shard());
    world.device().gather().wait(world.device().compute().record());
    for (Slot& slot : slots_)
      slot.full = ts::Tensor::empty({kWidth, kWidth}, ts::f32, world.device());
  }

  // All rows of layer k, for what compute does until `close`. `next` is used after it.
  ts::Tensor open(int k, int next) {
    gather(k);
    if (how_.prefetches && next >= 0 && next < kLayers) gather(next);
    world_.device().compute().wait(slot(k).ready);
    return slot(k).full;
  }
  void close(int k) {
    slot(k).free = world_.device().compute().record();
    if (how_.reads) world_.device().block(slot(k).free);
  }

 private:
  struct Slot {
    ts::Tensor full;
    int layer = -1;         // that lies there
    ts::Event ready, free;  // behind its gather, and behind its last use
  };
  Slot& slot(int k) { return slots_[static_cast<std::size_t>(k % how_.slots)]; }
  std::int64_t shard_bytes() const { return kWidth / world_.size() * kWidth * 4; }
  ts::Tensor shard(int k) {
    return ts::Tensor::wrap(
        ts::Storage::borrowed(world_.device(), memory_->data() + k * shard_bytes(), shard_bytes(),
                              use_),
        {kWidth / world_.size(), kWidth}, ts::f32);
  }

  // Of memory, it waits for the last use of what lay in the slot, and for nothing else. These
  // layers are frozen, so no update has to be waited for; `fully_shard`'s gather waits for the last
  // update of its parameters, too. The collective begins when all ranks' inputs are ready. The host
  // waits for none of these. An event that was never recorded is over, so the first wait costs
  // nothing.
  void gather(int k) {
    Slot& into = slot(k);
    if (into.layer == k) return;
    const ts::Tensor mine = shard(k);
    const ts::Access touched[] = {mine.access(AccessMode::read),
                                  into.full.access(AccessMode::write)};
    world_.device().gather().wait(into.free);
    world_.gather().submit({.send = mine.data(),
                            .recv = into.full.data(),
                            .count = mine.numel(),
                            .kind = ts::CollectiveKind::all_gather},
                           "gather", touched);
    into.ready = world_.device().gather().record();
    into.layer = k;
  }

  const ts::World& world_;
  How how_;
  std::shared_ptr<ts::SymmetricMemory> memory_;
  ts::LastUse use_;
  std::vector<Slot> slots_;
};

static ts::Tensor linear(const ts::Tensor& x, Weights& weights, int k) {
  using enum ts::raw::Transpose;
  const ts::Tensor y = ts::raw::matmul(x, weights.open(k, k + 1), no, yes);
  weights.close(k);
  return ts::autograd::record("linear by hand", {x}, y,
                              [&weights, k](const ts::Tensor& g, ts::autograd::Gradients& out) {
                                out.set(0, ts::raw::matmul(g, weights.open(k, k - 1)));
                                weights.close(k);
                              });
}

// Forward and backward; returns dx.
template <class Model>
static ts::Tensor step(const ts::World& world, const Model& model) {
  const auto key = static_cast<std::uint64_t>(world.rank());  // a batch of its own
  ts::Tensor x = ts::Tensor::normal({kBatch, kWidth}, 0, 1, key, ts::f32, world.device());
  x.require_grad();
  ts::sum(model(x)).backward();
  return x.grad();
}
static ts::Tensor by_hand(const ts::World& world, Weights& weights) {
  return step(world, [&](ts::Tensor x) {
    for (int k = 0; k < kLayers; ++k) x = linear(x, weights, k);
    return x;
  });
}

static void the_same_bits() {
  ts::run_local(2, {}, [](ts::World& world) {
    Chain chain(world);
    const std::vector<float> dx =
        step(world, [&](const ts::Tensor& x) { return chain(x); }).to_vector<float>();
    for (const How& how : {How{.slots = 1}, How{}, How{.prefetches = true}}) {
      Weights weights(world, chain, how);
      CHECK(by_hand(world, weights).to_vector<float>() == dx);
    }
  });
  std::cout << "1. By hand, in one slot and in two, the gradient is fully_shard's, bit by bit.\n";
}

// Two ranks' step, on a clock: a product takes 3 s, a gather 2 s. Without `how` it is
// fully_shard's.
static double seconds(const std::optional<How>& how) {
  const ts::CostModel cost{.flops_per_second = 2 * kBatch * kWidth * kWidth / 3.,
                           .wire_bytes_per_second = kWidth * kWidth * 4 / 2.};
  const ts::World world =
      ts::World::emulated(0, 2, {.executor = ts::ExecutorKind::virtual_, .cost = cost});
  const ts::Executor& clock = world.device().context().executor();
  Chain chain(world);
  double begin = 0;
  if (how) {
    Weights weights(world, chain, *how);
    by_hand(world, weights);
    world.device().synchronize();
    return clock.host_seconds();
  }
  for (int k = 0; k < 2; ++k) {  // in the first step ranks compare what they have sharded, too
    world.device().synchronize();
    begin = clock.host_seconds();
    step(world, [&](const ts::Tensor& x) { return chain(x); });
  }
  world.device().synchronize();
  return clock.host_seconds() - begin;
}

int main() {
  the_same_bits();
  const double one = seconds(How{.slots = 1}), two = seconds(How{});
  const double late = seconds(How{.reads = true}),
               early = seconds(How{.prefetches = true, .reads = true});
  const double library = seconds({});
  std::cout << "2. Eight products of 3 s, forward and backward, and gathers of 2 s: " << one
            << " s in one slot, " << two
            << " s in two\n3. A host that reads a value of each layer: " << late
            << " s, with prefetching " << early << " s\n"
            << "4. fully_shard, whose host reads nothing: " << library << " s\n";
  // There are eight gathers each way, and all but the first are waited for where there is one slot.
  // What lies in a slot at the turn is there in backward: one layer, or two. So backward has seven
  // gathers, or six, for which it waits.
  CHECK(one == 8 * 3 + 7 * 2 && late == 8 * 3 + 6 * 2);
  CHECK(two == 2 + 8 * 3);  // only the first gather is exposed
  CHECK(early == two && library == two);
}
