// Lesson 86: a tied table, in slices.
//
// A language model may use one table twice: tokens look up its rows, and its head multiplies by all
// of them. Each use has a gradient, and the table's is their sum. Where is it added up? Tables are
// used in slices (lesson 87 writes such a layer), so this one is never whole on any rank, and
// neither is its gradient. Each use gathers its slices for itself, and reduces their gradients for
// itself. The sum is made where a rank keeps its rows:
//
//   forward    look up 0 1 2      head 0 1 2      gathers
//   backward   head 2 1 0         look up 2 1 0   a reduction each
//   gradient   head's rows    + looked-up rows, of this rank, in f32
//
// So a reduction is of one slice and of one use. The first one of a slice writes its rows, the next
// one adds to them. Nothing has to wait for the other use, and no rank needs the memory of the
// whole gradient. Where a tied table is not streamed, both uses add to one full gradient in the
// unit around both modules, which is reduced once. One arrival count is kept for the parameter,
// which is all that an optimizer asks.
//
// PyTorch: FSDP2 gathers a tied weight as a whole, in the unit that both modules lie in, and adds
// the two uses' gradients as full tensors before it reduces them once. It wants one unit around
// both modules.
#include <iostream>
#include <vector>

#include "tessera/autograd/losses.hpp"
#include "tessera/autograd/ops.hpp"
#include "tessera/nn/embedding.hpp"
#include "tessera/nn/linear.hpp"
#include "tessera/shard/fully_shard.hpp"
#include "tessera/shard/shard_plan.hpp"
#include "tests/tour/check.hpp"

namespace ts = tessera;

constexpr std::int64_t kTokens = 24, kWidth = 16;

// Tokens -> the loss of predicting `targets`. Tied, the head has the table's weight.
class Model : public ts::nn::Module {
 public:
  explicit Model(bool is_tied)
      : table(kTokens, kWidth),
        layer(kWidth, kWidth),
        head(is_tied ? ts::nn::Linear(table.weight)
                     : ts::nn::Linear(kWidth, kTokens, {.bias = false, .is_streamed = true})) {
    register_modules("table", table, "layer", layer, "head", head);
  }
  ts::Tensor operator()(const ts::Tensor& tokens, const ts::Tensor& targets) {
    return call([&] { return ts::cross_entropy(head(ts::tanh(layer(table(tokens)))), targets); });
  }
  ts::nn::Embedding table;
  ts::nn::Linear layer, head;
};

struct Outcome {
  std::vector<float> table, head;  // this rank's rows of the gradients
  std::uint64_t gathers, reductions;
  std::int64_t slices, arena_bytes;
};

static Outcome step(ts::World& world, bool is_tied, std::int64_t slice_bytes) {
  Model model(is_tied);
  const ts::ShardOptions options{.mesh = ts::DeviceMesh::flat(world), .slice_bytes = slice_bytes};
  ts::fully_shard(model.layer, options);
  ts::fully_shard(model, options);  // it owns the table, and streams it
  model.materialize(world.device());
  ts::nn::init(model, {.value = 7});
  if (!is_tied) model.head.weight.assign(model.table.weight.shard());

  const int rank = world.rank();
  const ts::Tensor tokens =
      ts::Tensor::from(std::vector<std::int32_t>{1 + rank, 5, 5, 20}, {4}, world.device());
  const ts::Tensor targets =
      ts::Tensor::from(std::vector<std::int32_t>{2, 5, 9, 23 - rank}, {4}, world.device());
  model(tokens, targets).backward();
  const ts::ShardCounters counters = ts::shard_counters(model);
  return {model.table.weight.grad().to_vector<float>(),
          is_tied ? std::vector<float>{} : model.head.weight.grad().to_vector<float>(),
          counters.gathers,
          counters.reductions,
          model.table.weight.slices(),
          ts::shard_plan(model).arena_bytes};
}

static void on_one_rank(ts::World& world) {
  const bool speaks = world.rank() == 0;
  constexpr std::int64_t kTable = kTokens * kWidth * 4, kSlice = kTable / 3;
  const Outcome tied = step(world, true, kSlice), untied = step(world, false, kSlice);
  if (speaks)
    std::cout << "1. A tied table in " << tied.slices << " slices: " << tied.gathers
              << " gathers and " << tied.reductions << " reductions in a step; with a table of its "
              << "own for the head " << untied.gathers << " and " << untied.reductions << '\n';
  CHECK(tied.slices == 3);
  CHECK(tied.reductions == 3 + 3 + 1);  // the head's slices, the look-up's, the layer
  CHECK(untied.reductions == tied.reductions && untied.gathers == tied.gathers);

  // The same additions in the same order: head first, then what was looked up.
  std::vector<float> sum = untied.head;
  for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += untied.table[i];
  if (speaks) std::cout << "2. Its gradient is the sum of the two, bit by bit.\n";
  CHECK(tied.table == sum);

  // In slices the head adds up the gradient of its input in another order, so bits may differ.
  const Outcome whole = step(world, true, kTable);
  if (speaks)
    std::cout << "3. In one slice: " << whole.reductions << " reductions, and " << whole.arena_bytes
              << " bytes of slots in the place of " << tied.arena_bytes << '\n';
  CHECK(whole.reductions == 1 + 1 + 1);
  CHECK(whole.arena_bytes > tied.arena_bytes);
}

int main() { ts::run_local(2, {}, on_one_rank); }
