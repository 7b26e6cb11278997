// Lesson 77: gradients in pieces, beside compute.
//
// Lesson 75 waits for each reduction before it computes on. Nobody needs the sum before the
// optimizer, so compute may go on, as long as it does not write where a reduction still reads. A
// piece is what one reduction takes: all gradients of a unit, or one matrix. Backward fills pieces
// in turn, and before it fills one again it waits, on the device, for its last reduction:
//
//   one piece of two matrices                   two pieces of one
//   compute  │w dx w dx│     │w dx w dx│        compute  │w│dx│w│dx│w│dx│w│dx│
//   reduce         │   0,1   │     │  2,3 ..    reduce     │  0  │  1  │  2  │  3  │
//
// Both have the memory of two matrices. In pieces reductions begin as soon as a matrix's gradient
// is there, and less is left at the end, where no compute is beside it.
//
// fully_shard cuts a unit's gradients by `piece_bytes`, the last parameter first, and
// `reductions_in_flight` says how much may be on its way while backward writes the next. In the
// plan of slots, a piece stays taken behind its give-back for as long as that allows.
//
// PyTorch: FSDP2 reduces a module's gradients at once, when its backward has ended, out of a buffer
// that they are copied to. DDP has buckets, which are pieces of this kind.
#include <functional>
#include <iostream>
#include <vector>

#include "tessera/autograd/ops.hpp"
#include "tessera/device/device_context.hpp"
#include "tessera/nn/linear.hpp"
#include "tessera/shard/fully_shard.hpp"
#include "tests/tour/check.hpp"

namespace ts = tessera;
using ts::AccessMode;

constexpr int kBlocks = 3, kMatrices = 2 * kBlocks;  // two in each block
constexpr std::int64_t kWidth = 16, kBatch = 8, kMatrixBytes = kWidth * kWidth * 4;

struct How {
  int matrices;             // of a piece
  int pieces;               // that have memory
  bool waits_each = false;  // compute waits for every reduction, as in lesson 75
};

// Unreduced gradients in pieces, and this rank's rows of the sums.
class Gradients {
 public:
  Gradients(const ts::World& world, const How& how)
      : world_(world),
        how_(how),
        memory_(world.allocate_symmetric(how.pieces * how.matrices * kMatrixBytes)),
        free_(static_cast<std::size_t>(how.pieces)),
        uses_(static_cast<std::size_t>(how.pieces)) {
    for (int k = 0; k < kMatrices; ++k)
      sums.push_back(ts::Tensor::empty({kWidth / world.size(), kWidth}, ts::f32, world.device()));
  }

  // dW = g^T x of matrix k, over the number of ranks. Backward comes from the last to the first.
  void add(int k, const ts::Tensor& g, const ts::Tensor& x) {
    using enum ts::raw::Transpose;
    const ts::Stream compute = world_.device().compute();
    const bool is_first = (k + 1) % how_.matrices == 0, is_last = k % how_.matrices == 0;
    if (is_first) compute.wait(free_[piece(k)]);
    ts::raw::matmul_into(unreduced(k), g, x, yes, no, 1. / world_.size(), 0);
    if (!is_last) return;
    world_.device().reduce().wait(compute.record());
    for (int done = k + how_.matrices - 1; done >= k; --done) reduce(done);
    free_[piece(k)] = world_.device().reduce().record();
    if (how_.waits_each) finish();
  }
  // Before the sums are read.
  void finish() const { world_.device().compute().wait(world_.device().reduce().record()); }

  std::vector<ts::Tensor> sums;  // [rows of this rank, kWidth] of each matrix

 private:
  std::size_t piece(int k) const {
    return static_cast<std::size_t>(k / how_.matrices % how_.pieces);
  }
  ts::Tensor unreduced(int k) {
    const auto place = static_cast<std::int64_t>(piece(k)) * how_.matrices + k % how_.matrices;
    return ts::Tensor::wrap(
        ts::Storage::borrowed(world_.device(), memory_->data() + place * kMatrixBytes, kMatrixBytes,
                              uses_[piece(k)]),
        {kWidth, kWidth}, ts::f32);
  }
  void reduce(int k) {
    const ts::Tensor from = unreduced(k), to = sums[static_cast<std::size_t>(k)];
    const ts::Access touched[] = {from.access(AccessMode::read), to.access(AccessMode::write)};
    world_.reduce().submit({.send = from.data(),
                            .recv = to.data(),
                            .count = to.numel(),
                            .kind = ts::CollectiveKind::reduce_scatter},
                           "reduce", touched);
  }

  const ts::World& world_;
  How how_;
  std::shared_ptr<ts::SymmetricMemory> memory_;
  std::vector<ts::Event> free_;  // behind the last reduction of each piece
  std::vector<ts::LastUse> uses_;
};

// x W^T. The weights stay whole here; their gathers are the matter of lesson 76.
static ts::Tensor linear(const ts::Tensor& x, const ts::Tensor& weight, Gradients& into, int k) {
  using enum ts::raw::Transpose;
  return ts::autograd::record("linear by hand", {x}, ts::raw::matmul(x, weight, no, yes),
                              [x = ts::autograd::Saved(x), weight, &into, k](
                                  const ts::Tensor& g, ts::autograd::Gradients& out) {
                                into.add(k, g, x.get());
                                out.set(0, ts::raw::matmul(g, weight));
                              });
}

static ts::Tensor batch(const ts::World& world) {
  const auto key = static_cast<std::uint64_t>(world.rank());  // of its own
  ts::Tensor x = ts::Tensor::normal({kBatch, kWidth}, 0, 1, key, ts::f32, world.device());
  x.require_grad();
  return x;
}
static void backward(ts::Tensor x, const std::vector<ts::Tensor>& weights, Gradients& into) {
  for (int k = 0; k < kMatrices; ++k) x = linear(x, weights[static_cast<std::size_t>(k)], into, k);
  ts::sum(x).backward();
  into.finish();
}

class Block : public ts::nn::Module {
 public:
  Block() : up(kWidth, kWidth, {.bias = false}), down(kWidth, kWidth, {.bias = false}) {
    register_modules("up", up, "down", down);
  }
  ts::Tensor operator()(const ts::Tensor& x) {
    return call([&] { return down(up(x)); });
  }
  ts::nn::Linear up, down;
};

static void the_same_bits() {
  ts::run_local(2, {}, [](ts::World& world) {
    std::vector<Block> blocks(kBlocks);
    std::vector<ts::Tensor> weights;
    for (Block& block : blocks) {
      ts::fully_shard(block, {.mesh = ts::DeviceMesh::flat(world), .piece_bytes = kMatrixBytes});
      block.materialize(world.device());
      ts::nn::init(block, {.value = 7});
      ts::for_each_full_parameter(block, [&](const std::string&, const ts::Tensor& full) {
        weights.push_back(ts::Tensor::empty(full.shape(), ts::f32, world.device()));
        ts::raw::copy_into(weights.back(), full);
      });
    }
    ts::Tensor y = batch(world);
    for (Block& block : blocks) y = block(y);
    ts::sum(y).backward();
    for (const How& how : {How{2, 1}, How{2, 2}, How{1, 2}, How{1, 1, true}}) {
      Gradients by_hand(world, how);
      backward(batch(world), weights, by_hand);
      for (std::size_t k = 0; k < kMatrices; ++k) {
        const Block& block = blocks[k / 2];
        const ts::Parameter& weight = k % 2 == 0 ? block.up.weight : block.down.weight;
        CHECK(by_hand.sums[k].to_vector<float>() == weight.grad().to_vector<float>());
      }
    }
  });
  std::cout << "1. By hand, whole or in pieces, gradients are fully_shard's, bit by bit.\n";
}

// Two ranks' backward, on a clock: a product takes 1 s, the reduction of a matrix 2 s.
static double seconds(const How& how) {
  const ts::World world =
      ts::World::emulated(0, 2,
                          {.executor = ts::ExecutorKind::virtual_,
                           .cost = {.flops_per_second = 2. * kBatch * kWidth * kWidth,
                                    .wire_bytes_per_second = kMatrixBytes / 2.}});
  Gradients into(world, how);
  const std::vector<ts::Tensor> weights(
      kMatrices, ts::Tensor::empty({kWidth, kWidth}, ts::f32, world.device()));
  backward(batch(world), weights, into);
  return world.device().context().executor().seconds(ts::StreamId::compute) - kMatrices;  // forward
}

int main() {
  the_same_bits();
  const double each = seconds({1, 1, true}), whole = seconds({2, 1}), two = seconds({2, 2}),
               pieces = seconds({1, 2});
  std::cout << "2. Three blocks compute for 12 s in backward, their reductions take 12 s:\n"
            << "   compute waits for each         " << each << " s, memory of 1 matrix\n"
            << "   one piece, a whole block       " << whole << " s, memory of 2\n"
            << "   two pieces, each a whole block " << two << " s, memory of 4\n"
            << "   two pieces, each one matrix    " << pieces << " s, memory of 2\n";
  CHECK(each == 24 && whole == 21 && two == 15 && pieces == 13);
}
