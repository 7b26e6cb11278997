// Lesson 70: shard one parameter.
//
// A matrix W of 5 rows on 2 ranks: a chunk is ceil(5 / 2) = 3 rows, so rank 0 owns rows 0..2 and
// rank 1 owns rows 3..4 and one row of padding. Between uses that is all a rank keeps. Calling the
// module gathers W; leaving it frees W again.
//
//   rank 0   │ 0 1 2 │              │ 0 1 2 3 4 │             │ 0 1 2 │
//   rank 1   │ 3 4 · │  ─ gather ▶  │ 0 1 2 3 4 │  ─ leave ▶  │ 3 4 · │
//
// PyTorch: FSDP2's `fully_shard` cuts along dimension 0 into the same chunks, and the parameter is
// a DTensor between calls. There an operation on it outside of the call computes on the DTensor,
// with communication of its own; here it is an error that names the parameter.
#include <iostream>
#include <string>

#include "tessera/autograd/ops.hpp"
#include "tessera/shard/fully_shard.hpp"
#include "tessera/shard/shard_plan.hpp"
#include "tests/tour/check.hpp"

namespace ts = tessera;

// A module with one parameter. Its call opens the scope in which W is whole.
class Project : public ts::nn::Module {
 public:
  Project() { register_parameter("W", W); }
  ts::Tensor operator()(const ts::Tensor& x) {
    return call([&] { return ts::linear(x, W); });  // x W^T
  }
  ts::Parameter W{ts::Shape{5, 2}, ts::Initializer::normal(0, 1)};
};

static void on_one_rank(ts::World& world) {
  const bool speaks = world.rank() == 0;
  Project project;
  ts::fully_shard(
      project, {.mesh = ts::DeviceMesh::flat(world), .reshard_after_forward = ts::Reshard::always});
  project.materialize(world.device());
  ts::nn::init(project, {.value = 1});

  // The handle is always the shard; its shape is always the global shape.
  const ts::Shape shard = project.W.shard().shape();
  if (speaks)
    std::cout << "1. W is " << project.W.shape() << "; rank 0 keeps " << shard << " of it.\n";
  CHECK((project.W.shape() == ts::Shape{5, 2}));
  CHECK((shard == (world.rank() == 0 ? ts::Shape{3, 2} : ts::Shape{2, 2})));

  // Outside its module's call the parameter has no values, and using it is an error that says so.
  std::string message;
  try {
    project.W.value();
  } catch (const ts::ContractError& error) {
    message = error.what();
  }
  CHECK(message.find("closed") != std::string::npos);

  // Inside, it is a full tensor. Each rank has rows of its own; their gradients are averaged on the
  // way back.
  const double own = world.rank() + 1;
  const ts::Tensor x = ts::Tensor::full({1, 2}, own, ts::f32, world.device());
  ts::sum(project(x)).backward();
  const ts::ShardCounters counters = ts::shard_counters(project);
  if (speaks)
    std::cout << "2. Forward and backward: " << counters.gathers << " gathers, "
              << counters.reductions << " reduction.\n";
  CHECK(counters.gathers == 2 && counters.reductions == 1);

  // d sum(x W^T) / dW is x in every row: (1 + 2) / 2 = 1.5 after averaging, and each rank holds its
  // rows of it.
  const ts::Tensor gradient = project.W.grad();
  if (speaks) std::cout << "3. Rank 0's rows of the gradient:\n" << gradient << '\n';
  for (const float g : gradient.to_vector<float>()) CHECK(g == 1.5f);
  CHECK(gradient.shape() == shard);
}

int main() { ts::run_local(2, {}, on_one_rank); }
