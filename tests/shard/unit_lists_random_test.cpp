// Random programs of lists of modules: what is listed, in which order and depth it is called, which
// calls run again or have no gradients, and what the program decides about units.
#include <algorithm>
#include <random>

#include "tessera/autograd/recompute.hpp"
#include "tests/shard/trained.hpp"

using namespace tessera;
using namespace tessera::testing;

namespace {

// A layer is called by itself, or with others inside of a block's call.
struct CallOf {
  int block = -1;
  bool runs_again = false, has_no_gradients = false;
  std::vector<std::size_t> layers{};
};

// At most six layers deep, a layer of at most 15 u with what stands around it, so that kRounding
// holds: 6 * 15 < 9 * 12.
struct ListProgram {
  static constexpr std::size_t kLayers = 6;
  std::vector<std::vector<std::size_t>>
      lists;  // of layers; others are their block's, or the root's
  bool block_is_unit[2] = {};
  bool is_frozen[kLayers] = {};
  std::vector<CallOf> calls;
  std::vector<std::size_t> alone;  // called by themselves, outside of the root
  Reshard way = Reshard::automatic;
  int prefetch_depth = 1, micro_batches = 1;
  bool syncs_last = false, reshards = true, lists_prefetch = false, opens_by_hand = false;
};

ListProgram random_list_program(std::uint64_t seed) {
  std::mt19937_64 engine(seed);
  const auto below = [&](std::size_t n) { return static_cast<std::size_t>(engine() % n); };
  const auto one_in = [&](std::size_t n) { return below(n) == 0; };
  ListProgram out;
  out.lists.resize(2);
  for (std::size_t i = 0; i < out.kLayers; ++i) {
    const std::size_t list = below(3);
    if (list < 2) out.lists[list].push_back(i);
    out.is_frozen[i] = one_in(6);
  }
  std::erase_if(out.lists, [](const auto& list) { return list.empty(); });
  for (auto& list : out.lists) std::shuffle(list.begin(), list.end(), engine);
  for (bool& is_unit : out.block_is_unit) is_unit = one_in(2);
  for (std::size_t used = 0; used < out.kLayers;) {
    CallOf call{.has_no_gradients = used + 1 < out.kLayers && one_in(6)};
    if (one_in(2)) {
      call.block = static_cast<int>(below(2));
      call.runs_again = one_in(2);
      for (std::size_t k = below(3); k > 0; --k) call.layers.push_back(below(4));
    } else {
      call.layers.push_back(below(4));
    }
    used += call.layers.size() + (call.block >= 0 ? 1 : 0);
    if (used > out.kLayers) break;
    out.calls.push_back(call);
  }
  for (std::size_t k = below(3); k > 0; --k) out.alone.push_back(below(out.kLayers));
  out.way = kReshards[below(3)];
  out.prefetch_depth = 1 + static_cast<int>(below(2));
  out.micro_batches = 1 + static_cast<int>(below(2));
  out.syncs_last = one_in(2);
  out.reshards = !one_in(3);
  out.lists_prefetch = one_in(3);
  out.opens_by_hand = one_in(3);
  return out;
}

class ListModel final : public nn::Module {
 public:
  struct Block final : nn::Module {
    Block() { register_module("own", own); }
    nn::Linear own{5, 5};
  };
  explicit ListModel(const ListProgram& program) : program_(program) {
    for (int i = 0; i < 4; ++i) layers_.emplace_back(5, 5);
    for (int i = 0; i < 2; ++i) blocks_.emplace_back();
    register_modules("layers", layers_, "blocks", blocks_, "last", last_);
    make_positive(*this);
    for (std::size_t i = 0; i < program.kLayers; ++i)
      if (program.is_frozen[i]) layer(i).freeze();
  }
  nn::Linear& layer(std::size_t i) { return i < 4 ? layers_[i] : blocks_[i - 4].own; }
  void shard(const ShardOptions& options) {
    for (const auto& list : program_.lists) {
      std::vector<nn::Module*> modules;
      for (const std::size_t i : list) modules.push_back(&layer(i));
      fully_shard(modules, options);
    }
    for (std::size_t i = 0; i < 2; ++i)
      if (program_.block_is_unit[i]) fully_shard(blocks_[i], options);
    fully_shard(*this, options);
  }
  Tensor loss(const Tensor& x) {
    Tensor out = mean_square(call([&] {
      Tensor h = x;
      for (const CallOf& one : program_.calls) {
        if (!one.has_no_gradients) {
          h = run(one, h);
          continue;
        }
        Tensor y;
        {
          const NoGradGuard none;
          y = run(one, h);
        }
        h = (h + y) * 0.5;
      }
      return last_(h);
    }));
    for (const std::size_t i : program_.alone)
      if (layer(i).weight.trainable() && callable_alone(i)) out = out + mean_square(layer(i)(x));
    return out;
  }
  // Whether its parameters are there outside of the root's call.
  bool callable_alone(std::size_t i) const {
    for (const auto& list : program_.lists)
      if (std::find(list.begin(), list.end(), i) != list.end()) return true;
    return false;
  }

 private:
  Tensor run(const CallOf& one, const Tensor& x) {
    const auto through = [this, &one](Tensor h) {
      for (const std::size_t i : one.layers) h = tanh(layer(i)(h));
      return h;
    };
    if (one.block < 0) return through(x);
    Block& block = blocks_[static_cast<std::size_t>(one.block)];
    const auto body = [&block, through](const Tensor& h) {
      return block.call([&] { return through(tanh(block.own(h))); });
    };
    return one.runs_again ? recompute(body, x) : body(x);
  }

  const ListProgram& program_;
  nn::ModuleList<nn::Linear> layers_;
  nn::ModuleList<Block> blocks_;
  nn::Linear last_{5, 5};
};

struct ListCourse {
  Values gradients, values;  // of the first step; at the end
};

ListCourse run_list_program(const ListProgram& program, int ranks, bool is_sharded,
                            std::uint64_t seed) {
  const auto all = on_ranks(ranks, [&](World& world) {
    ListModel model(program);
    const auto hybrid = [&] { return DeviceMesh::hybrid(world, {.replicate = 2, .shard = 2}); };
    if (is_sharded)
      model.shard({.mesh = ranks == 4 ? hybrid() : DeviceMesh::flat(world),
                   .reshard_after_forward = program.way,
                   .prefetch_depth = program.prefetch_depth});
    nn::init(model, {seed}, world.device());
    optim::SGD optimizer(model.parameters(), {.lr = 0.003});
    if (is_sharded && program.lists_prefetch && program.lists.size() == 2) {
      nn::Linear &a = model.layer(program.lists[0][0]), &b = model.layer(program.lists[1][0]);
      set_modules_to_forward_prefetch(a, {&b});
      set_modules_to_backward_prefetch(b, {&a});
    }
    if (is_sharded) {
      set_reshard_after_backward(model, program.reshards);
      shard_plan(model);  // so that units may be opened by hand
    }
    ListCourse course;
    for (int k = 0; k < 3; ++k) {
      if (is_sharded && program.opens_by_hand && !program.lists.empty()) {
        unshard(model.layer(program.lists[0].back()));
        if (k % 2 == 0) reshard(model.layer(program.lists[0].front()));
      }
      for (int micro = 0; micro < program.micro_batches; ++micro) {
        if (is_sharded)
          set_requires_gradient_sync(model,
                                     !program.syncs_last || micro + 1 == program.micro_batches);
        const std::int64_t rows = 12 / ranks;
        const Tensor x = positive_rows(seed + static_cast<std::uint64_t>(k * 7 + micro),
                                       world.rank() * rows, rows, 5, world.device());
        (model.loss(x) / program.micro_batches).backward();
      }
      if (k == 0) course.gradients = shard_gradients(model);
      optimizer.step();
      optimizer.zero_grad();
    }
    for (const auto& [name, p] : model.named_parameters())
      course.values[name] = p.shard().template to_vector<float>();
    return course;
  });
  std::vector<Values> gradients, values;
  for (std::size_t rank = 0; rank < (ranks == 4 ? 2 : all.size()); ++rank) {  // of one replica
    gradients.push_back(all[rank].gradients);
    values.push_back(all[rank].values);
  }
  ListCourse whole{assemble(gradients), assemble(values)};
  std::erase_if(whole.gradients, [](const auto& named) { return largest(named.second) == 0; });
  return whole;
}

}  // namespace

// As the programs of fsdp2_unit_test: one rank has the bits of the model without units, others
// its values.
TEST_CASE("random programs of lists train as without units", "[threads]") {
  for (int trial = 0; trial < 40; ++trial) {
    const std::uint64_t seed = fresh_seed();
    INFO("seed " << seed);
    const ListProgram program = random_list_program(seed);
    const ListCourse plain = run_list_program(program, 1, false, seed),
                     one = run_list_program(program, 1, true, seed);
    CHECK(same_bits(one.gradients, plain.gradients));
    CHECK(same_bits(one.values, plain.values));
    for (const int ranks : {2, 3, 4}) {
      INFO(ranks << " ranks");
      const ListCourse many = run_list_program(program, ranks, true, seed);
      CHECK(distance(plain.gradients, many.gradients) < kRounding);
      CHECK(distance(plain.values, many.values) < 10 * kRounding);
    }
  }
}
