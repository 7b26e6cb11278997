// Parameters that are there one slice at a time: how they are cut, and that nobody can tell from
// what a training leaves.
#include "runtime/shard/streamed_parameter.hpp"

#include <set>

#include "tessera/nn/embedding.hpp"
#include "tessera/nn/generate.hpp"
#include "tessera/nn/llama.hpp"
#include "tests/shard/support.hpp"

using namespace tessera;
using namespace tessera::testing;

namespace {

struct Streaming {
  bool tied = false, freezes = false, recomputes = false;
  int micro_batches = 1;
  DType param = f32, reduce = f32;
  Reshard reshard = Reshard::automatic;
  std::int64_t slice_bytes = 1;  // a row of each rank's chunk
  bool looks = false;            // samples and evaluates beside the steps
  std::int64_t loss_chunk = nn::kLossChunk;
  bool is_fast = false;  // the loss knows its gradient
};

constexpr std::int64_t kVocab = 29, kTokens = 48;  // of a global batch

std::vector<std::int32_t> some_tokens(int step, int shift) {
  std::vector<std::int32_t> tokens;
  for (std::int64_t i = 0; i < kTokens; ++i)
    tokens.push_back(static_cast<std::int32_t>((i * i + 5 * step + shift) % kVocab));
  return tokens;
}

struct Learned {
  Values parameters;
  std::vector<double> losses;
  std::map<std::string, float> counts;
  std::size_t units = 0;
  std::uint64_t unplanned = 0, gathers = 0;
};

nn::LlamaConfig config_of(const Streaming& c) {
  return {.dim = 12,
          .n_layers = 2,
          .n_heads = 2,
          .n_kv_heads = 1,
          .ffn_dim = 20,
          .vocab_size = kVocab,
          .max_seq_len = 8,
          .tie_embeddings = c.tied,
          .recompute = c.recomputes ? nn::Recompute::blocks : nn::Recompute::none};
}

void shard_streamed(World& world, const Streaming& c, nn::LanguageModel& model) {
  const ShardOptions options{.mesh = DeviceMesh::flat(world),
                             .precision = {.param = c.param, .reduce = c.reduce},
                             .reshard_after_forward = c.reshard,
                             .slice_bytes = c.slice_bytes};
  shard_parts(model, options);
}

// What a model says when it is asked, without gradients.
struct Answers {
  std::vector<std::int32_t> greedy, drawn;
  std::vector<float> logits;
  double loss = 0;
};

Answers ask(nn::LanguageModel& model, const Device& device) {
  const auto batch = [&](int shift) {
    return Tensor::from(some_tokens(0, shift), {kTokens / 4, 4}, device);
  };
  Answers said;
  const std::vector<std::int32_t> prompt{3, 1, 4};
  said.greedy = nn::generate(model, prompt, 6, {.temperature = 0});
  said.drawn = nn::generate(model, prompt, 6, {.top_k = 9, .seed = 5});
  const NoGradGuard no_gradient;
  said.logits = model(batch(0)).to_vector<float>();
  said.loss = model.loss(batch(0), batch(7)).item();
  return said;
}

Learned train_streamed(World& world, const Streaming& c) {
  nn::Llama model(config_of(c));
  model.set_loss_chunk(c.loss_chunk);
  if (c.freezes) model.embedding.weight.freeze();
  shard_streamed(world, c, model);
  nn::init(model, {3}, world.device());
  if (c.looks) ask(model, world.device());  // the root's first call
  optim::AdamW optimizer(model.parameters(), {.lr = 1e-2, .eps = 1e-2});
  Learned result;
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    for (int m = 0; m < c.micro_batches; ++m) {
      const std::int64_t rows = kTokens / 4 / world.size() / c.micro_batches,
                         first = 4 * rows * (world.rank() * c.micro_batches + m);
      const auto upload = [&](const std::vector<std::int32_t>& all) {
        return Tensor::from(
            std::vector<std::int32_t>(all.begin() + first, all.begin() + first + 4 * rows),
            {rows, 4}, world.device());
      };
      nn::LossOrder order;
      if (c.is_fast) order.gradient = 1.0 / c.micro_batches;
      const Tensor loss =
          model.loss(upload(some_tokens(step, 0)), upload(some_tokens(step, 7)), order) /
          c.micro_batches;
      loss.backward();
      result.losses.push_back(world.sum(loss.item()) / world.size());
    }
    result.counts = arrival_counts(model);
    optimizer.step();
    if (c.looks) ask(model, world.device());
  }
  result.parameters = full_values(model);
  result.units = shard_plan(model).units.size();
  result.unplanned = shard_counters(model).unplanned_slots;
  result.gathers = shard_counters(model).gathers;
  return result;
}

// Two tables of one unit, whose rows end anywhere.
struct TwoTables : nn::Module {
  TwoTables() { register_modules("a", a, "b", b); }
  Tensor operator()(const Tensor& index) {
    return call([&] { return a_is_last ? b(index) + a(index) : a(index) + b(index); });
  }
  nn::Embedding a{7, 3}, b{7, 3};
  bool a_is_last = false;
};

}  // namespace

// What is reduced in 16 bits is staged, with the gap behind it: that of the last slice must not
// reach into the next table.
TEST_CASE("the last slice of a table leaves the next table's gradient as it is", "[threads]") {
  const int replicas = GENERATE(1, 2);
  const bool a_is_last = GENERATE(false, true);
  const auto gradients = on_ranks(2 * replicas, [&](World& world) {
    TwoTables model;
    model.a_is_last = a_is_last;
    fully_shard(model, {.mesh = DeviceMesh::hybrid(world, {.replicate = replicas, .shard = 2}),
                        .precision = {.param = bf16, .reduce = bf16},
                        .slice_bytes = 1});
    nn::init(model, {5}, world.device());
    const Tensor index =
        Tensor::from(std::vector<std::int32_t>{0, 1, 2, 3, 4, 5, 6, 2}, {8}, world.device());
    sum(cast(model(index), f32) * positive_rows(3, 0, 8, 3, world.device())).backward();
    return shard_gradients(model);
  });
  for (const Values& rank : gradients) {
    CHECK(largest(rank.at("a.weight")) > 0.5);
    CHECK(same_bits(rank.at("a.weight"), rank.at("b.weight")));
  }
}

TEST_CASE("a slice has the same rows of every rank's chunk, and slices have all") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  std::mt19937_64 random(seed);
  for (int trial = 0; trial < 200; ++trial) {
    const auto all = static_cast<std::int64_t>(1 + random() % 300),
               chunk = static_cast<std::int64_t>(1 + random() % 40),
               at_once = static_cast<std::int64_t>(1 + random() % static_cast<unsigned>(chunk));
    std::int64_t count = 0;
    for (std::int64_t begin = 0; begin < chunk; begin += at_once) {
      const SliceRows rows{all, chunk, begin, std::min(at_once, chunk - begin)};
      std::int64_t own = 0;
      for (std::int64_t row = 0; row < all; ++row)
        own += row % chunk >= begin && row % chunk < begin + rows.rows ? 1 : 0;
      CHECK(rows.count() == own);
      count += own;
    }
    CHECK(count == all);
  }
}

TEST_CASE("a table of millions of rows beside units of nothing is planned in no time") {
  const World world = World::emulated(0, 64, {.executor = ExecutorKind::virtual_});
  nn::Llama model({.dim = 8, .n_layers = 1, .n_heads = 2, .ffn_dim = 8, .vocab_size = 1 << 24});
  shard_parts(model, {.mesh = DeviceMesh::flat(world)});
  model.materialize(world.device());
  shard_plan(model);
  CHECK(model.embedding.weight.slices() > 100);
  CHECK(model.embedding.weight.slices() <= 256);
}

// Every sum of a step has at most a few hundred terms, in another order on other ranks and in other
// slices, and an update follows its gradient with a slope of lr / eps = 1.
TEST_CASE("training with streamed tables is training with whole ones", "[threads]") {
  const Streaming c = GENERATE(
      Streaming{}, Streaming{.tied = true}, Streaming{.freezes = true},
      Streaming{.tied = true, .freezes = true, .micro_batches = 2}, Streaming{.recomputes = true},
      Streaming{.tied = true, .micro_batches = 2}, Streaming{.reshard = Reshard::always},
      Streaming{.reshard = Reshard::never}, Streaming{.slice_bytes = 500},
      Streaming{.tied = true, .recomputes = true, .slice_bytes = 300});
  INFO("tied " << c.tied << ", frozen " << c.freezes << ", recompute " << c.recomputes << ", "
               << c.micro_batches << " micro-batches, slices of " << c.slice_bytes);
  const Learned one = on_ranks(1, [&](World& world) { return train_streamed(world, c); })[0];
  for (const int ranks : {2, 3}) {
    INFO(ranks << " ranks");
    const auto results = on_ranks(ranks, [&](World& world) { return train_streamed(world, c); });
    CHECK(same_bits(results[0].parameters, results[1].parameters));
    CHECK(distance(one.parameters, results[0].parameters) < 1e-4);
    CHECK(results[0].units > one.units);
    for (const auto& [name, count] : results[0].counts)
      CHECK((count > 0) == (one.counts.at(name) > 0));
    Streaming whole = c;
    whole.slice_bytes = 1 << 30;
    const auto unsliced =
        on_ranks(ranks, [&](World& world) { return train_streamed(world, whole); });
    CHECK(distance(unsliced[0].parameters, results[0].parameters) < 1e-4);
    CHECK(results[0].unplanned == 0);
  }
}

// One pass of backward less over the head. Losses before the first update have the same bits: the
// order of the sums of a gradient differs where it has two micro-batches or slices. In bf16 a sum
// that differs in its last bits may be cast to the next value, 2^-8 further.
TEST_CASE("training with a loss that knows its gradient is training without", "[threads]") {
  for (const Streaming& c :
       {Streaming{}, Streaming{.tied = true, .micro_batches = 2},
        Streaming{.freezes = true, .recomputes = true}, Streaming{.reshard = Reshard::always},
        Streaming{.micro_batches = 2, .param = bf16}, Streaming{.slice_bytes = 300}})
    for (const int ranks : {1, 2, 3}) {
      INFO(ranks << " ranks, tied " << c.tied << ", frozen " << c.freezes << ", recompute "
                 << c.recomputes << ", " << c.micro_batches << " micro-batches, " << c.param
                 << ", slices of " << c.slice_bytes);
      Streaming lean = c;
      lean.loss_chunk = 3 * kVocab;
      if (c.slice_bytes == 1) lean.slice_bytes = 1 << 30;
      Streaming fast = lean;
      fast.is_fast = true;
      const auto train = [&](const Streaming& how) {
        return on_ranks(ranks, [&](World& world) { return train_streamed(world, how); })[0];
      };
      const Learned slow = train(lean), known = train(fast);
      CHECK(known.losses[0] == slow.losses[0]);
      CHECK(known.counts == slow.counts);
      CHECK(distance(slow.parameters, known.parameters) < (c.param == bf16 ? 0x1p-7 : 1e-4));
      CHECK(known.unplanned == 0);
      // Of a whole head backward reads nothing then. Else it stays from forward on if it may.
      const bool saves = ranks > 1 && c.reshard == Reshard::always;
      CHECK(slow.gathers - known.gathers == (saves ? 3u : 0u));
    }
}

// Logits are those of a model without units within rounding: sums of 20 terms and fewer, through
// two blocks, in another order where a product has other columns beside it. So tokens are the same,
// for the two likeliest of these values are never closer than 4e-3.
TEST_CASE("a model whose tables lie in slices says what it says without units", "[threads]") {
  const auto widen = [](nn::Module& model) {  // logits that differ
    for (const Parameter& p : model.parameters()) p.set_initializer(Initializer::normal(0, 0.5));
  };
  for (const bool tied : {false, true}) {
    const Device device = Device::cpu();
    nn::Llama whole(config_of({.tied = tied}));
    widen(whole);
    nn::init(whole, {3}, device);
    const Answers expected = ask(whole, device);
    CHECK(std::set(expected.greedy.begin(), expected.greedy.end()).size() > 2);
    CHECK(expected.greedy != expected.drawn);
    for (const std::int64_t slice_bytes : {1, 300})
      for (const int ranks : {1, 2, 3}) {
        INFO("tied " << tied << ", " << ranks << " ranks, slices of " << slice_bytes);
        const auto all = on_ranks(ranks, [&](World& world) {
          const Streaming c{.tied = tied, .slice_bytes = slice_bytes};
          nn::Llama model(config_of(c));
          widen(model);
          shard_streamed(world, c, model);
          nn::init(model, {3}, world.device());
          const Answers said = ask(model, world.device());
          return std::pair(said, model.embedding.weight.slices());
        });
        for (const auto& [said, slices] : all) {
          CHECK((ranks == 1 ? slices == 1 : slices > 2));  // one rank has nothing to gather
          CHECK(said.greedy == expected.greedy);
          CHECK(said.drawn == expected.drawn);
          CHECK(distance({{"logits", expected.logits}}, {{"logits", said.logits}}) < 1e-4);
          CHECK(std::abs(said.loss - expected.loss) < 1e-4 * expected.loss);
        }
      }
  }
}

TEST_CASE("samples and evaluations between steps change no bit of what tables in slices learn",
          "[threads]") {
  for (const bool tied : {false, true})
    for (const Reshard reshard : kReshards) {
      INFO("tied " << tied << ", reshard " << reshard);
      Streaming c{.tied = tied, .reshard = reshard};
      const auto alone = on_ranks(2, [&](World& world) { return train_streamed(world, c); });
      c.looks = true;
      const auto beside = on_ranks(2, [&](World& world) { return train_streamed(world, c); });
      for (std::size_t rank = 0; rank < 2; ++rank) {
        CHECK(same_bits(alone[rank].parameters, beside[rank].parameters));
        CHECK(alone[rank].losses == beside[rank].losses);
      }
    }
}

TEST_CASE("streamed tables in 16 bits", "[threads]") {
  const Streaming c =
      GENERATE(Streaming{.param = bf16}, Streaming{.tied = true, .param = bf16, .reduce = bf16});
  const auto sliced = on_ranks(2, [&](World& world) { return train_streamed(world, c); });
  Streaming whole = c;
  whole.slice_bytes = 1 << 30;
  const auto unsliced = on_ranks(2, [&](World& world) { return train_streamed(world, whole); });
  for (std::size_t i = 0; i < sliced[0].losses.size(); ++i)  // bf16 has 8 bits
    CHECK(std::abs(sliced[0].losses[i] - unsliced[0].losses[i]) < 0x1p-6 * sliced[0].losses[i]);
  CHECK(same_bits(sliced[0].parameters, sliced[1].parameters));
}
