// Lesson 75: fully sharded data parallelism by hand.
//
// Each of two ranks keeps half of the rows of every weight. To use a weight it gathers all rows,
// and lets them go again; backward gathers them a second time, and sums the gradients of all ranks
// where each keeps its rows of the sum:
//
//   forward    gather W │ y = x W^T │ free W
//   backward   gather W │ dx = g W  │ dW = g^T x │ free W │ reduce-scatter dW
//
// Peers read the shard where it lies here. `fully_shard` copies it into its place in the slot
// first, and gathers in place.
//
// That is all that sharding computes, and one operation with a derivative (lesson 50) on two
// collectives (lesson 60) says it. `fully_shard` gives the same bits. What it does beside this: a
// layer's gather does not wait for the layer before, because its slot lies elsewhere (lesson 35);
// the parameters of a unit travel together; gradients of several uses add up before they are
// reduced; all ranks issue the same collectives though their graphs differ (lesson 65).
//
// PyTorch: the same with all_gather_into_tensor and reduce_scatter_tensor in an autograd.Function;
// FSDP2 puts them into hooks before and after forward and backward of a module.
#include <iostream>
#include <vector>

#include "tessera/autograd/ops.hpp"
#include "tessera/device/device_context.hpp"
#include "tessera/nn/linear.hpp"
#include "tessera/shard/fully_shard.hpp"
#include "tests/tour/check.hpp"

namespace ts = tessera;
using ts::AccessMode;

// This rank's rows of a weight, and the gradients of all rows on their way to the ranks that keep
// them. Peers read both, so they lie in symmetric memory.
class Shard {
 public:
  // `values` [rows of this rank, columns].
  Shard(const ts::World& world, const ts::Tensor& values)
      : world_(world),
        full_{values.size(0) * world.size(), values.size(1)},
        memory_(world.allocate_symmetric(bytes(values.shape()) + bytes(full_))),
        values_(borrow(0, values.shape(), values_use_)),
        unreduced_(borrow(bytes(values.shape()), full_, unreduced_use_)) {
    ts::raw::copy_into(values_, values);
  }

  // All rows, until the tensor dies. Gather must not begin before compute has written the shard and
  // is done with the bytes that the result lies in; compute must not read before the peers' rows
  // are there.
  ts::Tensor gather() const {
    const ts::Device device = world_.device();
    const ts::Tensor full = ts::Tensor::empty(full_, ts::f32, device);
    const ts::Access touched[] = {values_.access(AccessMode::read), full.access(AccessMode::write)};
    device.gather().wait(device.compute().record());
    world_.gather().submit({.send = values_.data(),
                            .recv = full.data(),
                            .count = values_.numel(),
                            .kind = ts::CollectiveKind::all_gather},
                           "gather", touched);
    device.compute().wait(device.gather().record());
    return full;
  }

  // The mean of all ranks' `gradients` [rows, columns], of which this rank keeps its rows.
  void reduce(const ts::Tensor& gradients) {
    const ts::Device device = world_.device();
    gradient = ts::Tensor::empty(values_.shape(), ts::f32, device);
    ts::raw::axpby(unreduced_, gradients, 1.0 / world_.size(), 0);
    const ts::Access touched[] = {unreduced_.access(AccessMode::read),
                                  gradient.access(AccessMode::write)};
    device.reduce().wait(device.compute().record());
    world_.reduce().submit({.send = unreduced_.data(),
                            .recv = gradient.data(),
                            .count = gradient.numel(),
                            .kind = ts::CollectiveKind::reduce_scatter},
                           "reduce", touched);
    device.compute().wait(device.reduce().record());
  }

  ts::Tensor gradient;  // [rows of this rank, columns]

 private:
  static std::int64_t bytes(const ts::Shape& shape) { return shape.numel() * 4; }
  ts::Tensor borrow(std::int64_t offset, const ts::Shape& shape, ts::LastUse& use) const {
    return ts::Tensor::wrap(
        ts::Storage::borrowed(world_.device(), memory_->data() + offset, bytes(shape), use), shape,
        ts::f32);
  }

  const ts::World& world_;
  ts::Shape full_;
  std::shared_ptr<ts::SymmetricMemory> memory_;
  ts::LastUse values_use_, unreduced_use_;
  ts::Tensor values_, unreduced_;
};

// x W^T. All rows of W are there while the product is queued, and not in between.
static ts::Tensor linear(const ts::Tensor& x, Shard& weight) {
  using enum ts::raw::Transpose;
  const ts::Tensor y = ts::raw::matmul(x, weight.gather(), no, yes);
  return ts::autograd::record(
      "linear by hand", {x}, y,
      [x = ts::autograd::Saved(x), &weight](const ts::Tensor& g, ts::autograd::Gradients& out) {
        out.set(0, ts::raw::matmul(g, weight.gather()));
        weight.reduce(ts::raw::matmul(g, x.get(), yes, no));
      });
}

static void on_one_rank(ts::World& world) {
  // The model as the library shards it, whose values the other one takes over.
  ts::nn::Linear up(4, 8, {.bias = false}), down(8, 2, {.bias = false});
  // By default what is called last stays gathered until backward; `always` frees it, too.
  const ts::ShardOptions options{.mesh = ts::DeviceMesh::flat(world),
                                 .reshard_after_forward = ts::Reshard::always};
  for (ts::nn::Linear* layer : {&up, &down}) {
    ts::fully_shard(*layer, options);
    layer->materialize(world.device());
    ts::nn::init(*layer, {.value = 7});
  }
  Shard up_shard(world, up.weight.shard()), down_shard(world, down.weight.shard());

  const auto key = static_cast<std::uint64_t>(world.rank());  // a batch of its own
  ts::Tensor x = ts::Tensor::normal({3, 4}, 0, 1, key, ts::f32, world.device());
  x.require_grad();
  const ts::Tensor y = down(ts::tanh(up(x)));
  ts::mean(y * y).backward();
  const std::vector<float> dx = x.grad().to_vector<float>();

  x.zero_grad();
  const ts::Tensor by_hand = linear(ts::tanh(linear(x, up_shard)), down_shard);
  ts::mean(by_hand * by_hand).backward();

  CHECK(by_hand.to_vector<float>() == y.to_vector<float>());
  CHECK(x.grad().to_vector<float>() == dx);
  CHECK(up_shard.gradient.to_vector<float>() == up.weight.grad().to_vector<float>());
  CHECK(down_shard.gradient.to_vector<float>() == down.weight.grad().to_vector<float>());
  CHECK(world.gather().submitted() == 4 + 4);
  if (world.rank() == 0)
    std::cout << "Rank 0 keeps " << up.weight.shard().shape() << " of " << up.weight.shape()
              << "; outputs and gradients by hand are fully_shard's, bit by bit:\n"
              << down_shard.gradient << '\n';
}

int main() { ts::run_local(2, {}, on_one_rank); }
