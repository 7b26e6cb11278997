// A loss in chunks of rows: the head is one of a list, the model's forward leaves it out, and each
// chunk calls it and goes backward at once. FSDP2's tests of these, tied and untied, recomputed,
// with casts of outputs and over micro-batches, against a model without units.
#include "tessera/autograd/recompute.hpp"
#include "tessera/nn/embedding.hpp"
#include "tessera/shard/runtime_control.hpp"
#include "tests/shard/programs.hpp"

using namespace tessera;
using namespace tessera::testing;

namespace {

enum class Head { apart, tied };            // to the embedding's table
enum class Blocks { kept, recomputed };     // what they have computed, for backward
enum class Units { listed, apart };         // norm and head
enum class Batch { whole, summed, waits };  // of three micro-batches, the last reduces for all

constexpr std::int64_t kVocabulary = 7;

template <Head head_is, Blocks blocks, Batch batch, Units units = Units::listed>
struct Chunked final : Program {
  Chunked() {
    register_modules("table", table, "first", first, "second", second, "norm", norm, "head", head);
  }
  void shard(const ShardOptions& options) override {
    shard_each({&first, &second}, options);
    std::vector<nn::Module*> last{&head};
    if (head_is == Head::tied) last.push_back(&table);
    if (units == Units::listed)
      last.push_back(&norm);
    else
      fully_shard(norm, options);
    fully_shard(last, options);
    fully_shard(*this, options);
    output = options.precision.output;
  }
  Tensor step(const World& world, const Tensor& x, int k) override {
    before = 0;
    const std::int64_t rows = x.shape()[0];
    std::vector<std::int64_t> ids;
    for (std::int64_t i = 0; i < rows; ++i)
      ids.push_back((5 * (world.rank() * rows + i) + k) % kVocabulary);
    const Tensor tokens = Tensor::from(ids, {rows}, world.device());
    if (batch == Batch::whole) return chunks(tokens, 1);
    Tensor sum;
    for (int micro = 0; micro < 3; ++micro) {
      reduces = batch == Batch::summed || micro == 2;
      if (hook()) set_requires_gradient_sync(*this, reduces);
      const Tensor loss = chunks(part_of(tokens, micro, 3), 1. / 3);
      sum = sum.defined() ? sum + loss : loss;
    }
    return sum;
  }
  // The loss of the rows, a share of a step's.
  Tensor chunks(const Tensor& tokens, double share) {
    const Tensor h = call([&] {
      Tensor x = tanh(table(tokens));
      for (nn::Linear* const block : {&first, &second}) {
        const auto body = [block](const Tensor& in) { return tanh((*block)(in)); };
        x = blocks == Blocks::recomputed ? recompute(body, x) : body(x);
      }
      return tanh(norm(x));
    });
    Tensor cut = h.detach();
    cut.require_grad();
    Tensor sum;
    for (int chunk = 0; chunk < 2; ++chunk) {
      const Tensor y = head(part_of(cut, chunk, 2));
      if (output && (y.dtype() != *output || h.dtype() != *output))
        throw std::logic_error("an output is not cast");
      const Tensor loss = mean_square(y) * (share / 2);
      loss.backward();
      sum = sum.defined() ? sum + loss.detach() : loss.detach();
      if (!reduces || head.weight.shard().numel() == 0) continue;
      const double arrived = largest(head.weight.grad().to_vector<float>());
      if (!(arrived > before)) throw std::logic_error("a chunk adds nothing");
      before = arrived;
    }
    h.backward(cut.grad());
    return sum;
  }

  nn::Embedding table{kVocabulary, 5};
  nn::Linear first{5, 5}, second{5, 5}, norm{5, 5};
  nn::Linear head = head_is == Head::tied ? nn::Linear(table.weight) : nn::Linear(5, kVocabulary);
  std::optional<DType> output;
  bool reduces = true;
  double before = 0;  // what earlier chunks of the step have left
};

template <Head head_is, Batch batch>
void check_chunks() {
  check_program<Chunked<head_is, Blocks::kept, batch>>();
  check_program<Chunked<head_is, Blocks::recomputed, batch>>();
}

// Of outputs that are cast, in units of bf16's rounding, 2^-9: an output has 14, of the table and a
// tanh, and of four products whose input, weight and output are rounded. A gradient has those of
// the loss's derivative and of an activation, 14 each, 12 of the same products on the way back, and
// a fourth of the error of each of four tanhs, 14 again. Without a chunk of a micro-batch, one of
// six, a head's gradient is off by 85.
constexpr double kCast = 60 * 0x1p-9;

// Rows are scaled by 1 / 2 and 1 / 4 as 2 and 4 ranks share them: the same bits in bf16. Sums of
// weights' gradients are in f32, and differ by their order.
template <class P>
void check_casts() {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  const World nowhere = World::single();
  const Course plain = train_program<P>(1, nullptr, seed);
  GridShare share;
  for (const Reshard reshard :
       {Reshard::automatic, Reshard::always, Reshard::never, Reshard::to(2)}) {
    INFO("reshard " << reshard);
    ShardOptions options{.mesh = DeviceMesh::flat(nowhere),
                         .precision = {.param = bf16, .output = f32}};
    const Course one = train_program<P>(1, &options, seed);
    CHECK(distance(plain.gradients, one.gradients) < kCast);
    CHECK(distance(plain.losses, one.losses) < kCast);
    options.reshard_after_forward = reshard;
    for (const int ranks : {2, 4}) {
      if (reshard.is_partial() && ranks < 4) continue;  // no proper part
      if (!share.takes()) continue;
      INFO(ranks << " ranks");
      CHECK(distance(one.gradients, train_program<P>(ranks, &options, seed).gradients) < kRounding);
    }
  }
}

template <Head head_is, Blocks blocks>
void check_list() {
  const World nowhere = World::single();
  GridShare share;
  for (const Reshard reshard : kReshards)
    for (const int ranks : share.of({1, 2, 3})) {
      INFO(ranks << " ranks, reshard " << reshard);
      const ShardOptions options{.mesh = DeviceMesh::flat(nowhere),
                                 .reshard_after_forward = reshard};
      const Course listed =
          train_program<Chunked<head_is, blocks, Batch::whole>>(ranks, &options, 1);
      const Course apart =
          train_program<Chunked<head_is, blocks, Batch::whole, Units::apart>>(ranks, &options, 1);
      CHECK(listed.gradients.contains("head.weight") == (head_is == Head::apart));
      CHECK(same_bits(listed.gradients, apart.gradients));
      CHECK(same_bits(listed.losses, apart.losses));
      CHECK(same_bits(listed.values, apart.values));
    }
}

}  // namespace

TEST_CASE("a loss in chunks through one of a list, which the model's forward leaves out",
          "[threads][fsdp2-054]") {
  SECTION("a head of its own") { check_chunks<Head::apart, Batch::whole>(); }
  SECTION("the table's") { check_chunks<Head::tied, Batch::whole>(); }
}

TEST_CASE("a loss in chunks over micro-batches, each of which reduces, or the last for all",
          "[threads][fsdp2-055]") {
  SECTION("a head of its own") { check_chunks<Head::apart, Batch::summed>(); }
  SECTION("the table's") { check_chunks<Head::tied, Batch::summed>(); }
  SECTION("a head of its own, the last for all") { check_chunks<Head::apart, Batch::waits>(); }
  SECTION("the table's, the last for all") { check_chunks<Head::tied, Batch::waits>(); }
}

TEST_CASE("a loss in chunks whose outputs are cast", "[threads][fsdp2-054][fsdp2-055]") {
  check_casts<Chunked<Head::apart, Blocks::kept, Batch::whole>>();
  check_casts<Chunked<Head::apart, Blocks::recomputed, Batch::waits>>();
  check_casts<Chunked<Head::tied, Blocks::recomputed, Batch::whole>>();
  check_casts<Chunked<Head::tied, Blocks::kept, Batch::summed>>();
}

TEST_CASE("a loss in chunks has the bits of a norm and a head that are units of their own",
          "[threads][fsdp2-054]") {
  check_list<Head::apart, Blocks::kept>();
  check_list<Head::apart, Blocks::recomputed>();
  check_list<Head::tied, Blocks::kept>();
  check_list<Head::tied, Blocks::recomputed>();
}
