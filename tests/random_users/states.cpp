// State of random modules and of their optimizers: given on one number of ranks, taken there in
// every form, and put back on another number, to the byte. What is refused changes nothing.
#include <cstring>
#include <map>
#include <memory>

#include "tessera/nn/buffer.hpp"
#include "tessera/nn/module.hpp"
#include "tessera/optim/adamw.hpp"
#include "tessera/optim/muon.hpp"
#include "tessera/optim/sgd.hpp"
#include "tessera/shard/fully_shard.hpp"
#include "tests/random_users/draw.hpp"
#include "tests/random_users/users.hpp"

namespace tessera::testing {
namespace {

struct RandomPart : nn::Module {
  std::vector<Parameter> parameters;
  std::vector<nn::Buffer> buffers;
  bool is_unit = false;
};

enum class Optimizer { adamw, sgd, muon };

// Parts with parameters of any shape, some frozen, in 16 bits perhaps, one of them tied perhaps,
// and buffers.
struct RandomModel : nn::Module {
  explicit RandomModel(std::uint64_t seed) {
    Draw draw(seed);
    ranks = draw.number(1, 4);
    ranks_later = draw.number(1, 4);
    constexpr Optimizer kOptimizers[] = {Optimizer::adamw, Optimizer::sgd, Optimizer::muon};
    optimizer = draw.one_of(kOptimizers);
    for (int i = 0; i < draw.number(1, 4) || i == 0; ++i) {
      auto part = std::make_unique<RandomPart>();
      for (int k = draw.number(i == 0 ? 1 : 0, 3); k > 0; --k) {
        part->parameters.emplace_back(draw.shape(0, 3), Initializer::normal(0, 1));
        if (!draw.chance(0.15)) continue;
        part->parameters.back().freeze();
        if (draw.chance(0.5)) part->parameters.back().set_dtype(bf16);
      }
      if (i > 0 && draw.chance(0.2)) {
        part->parameters.push_back(parts[0]->parameters[0]);
        is_tied = true;
      }
      constexpr DType kDtypes[] = {f32, bf16, f64, i32, i64, boolean};
      for (int k = draw.number(0, 2); k > 0; --k)
        part->buffers.emplace_back(draw.shape(0, 2), Initializer::constant(1),
                                   draw.one_of(kDtypes));
      part->is_unit = !part->parameters.empty() && draw.chance(0.5);
      parts.push_back(std::move(part));
    }
    for (std::size_t i = 0; i < parts.size(); ++i) {
      RandomPart& part = *parts[i];
      for (std::size_t k = 0; k < part.parameters.size(); ++k)
        part.register_parameter(concat('w', k), part.parameters[k]);
      for (std::size_t k = 0; k < part.buffers.size(); ++k)
        part.register_buffer(concat('b', k), part.buffers[k],
                             draw.chance(0.7) ? nn::Persistent::yes : nn::Persistent::no);
      register_module(concat("part", i), part);
    }
  }
  void shard(const World& world) {
    const ShardOptions options{.mesh = DeviceMesh::flat(world)};
    for (const auto& part : parts)  // what is tied across parts is the root's
      if (part->is_unit && !is_tied) fully_shard(*part, options);
    fully_shard(*this, options);
  }
  std::unique_ptr<optim::Optimizer> make_optimizer() const {
    std::vector<Parameter> matrices, others;
    for (const Parameter& p : parameters())
      (p.shape().ndim() == 2 ? matrices : others).push_back(p);
    if (optimizer == Optimizer::muon && !matrices.empty())
      return std::make_unique<optim::Muon>(matrices, others);
    if (optimizer != Optimizer::sgd) return std::make_unique<optim::AdamW>(parameters());
    return std::make_unique<optim::SGD>(parameters(),
                                        optim::SGDOptions{.lr = 0.1, .momentum = 0.9});
  }

  std::vector<std::unique_ptr<RandomPart>> parts;
  int ranks = 1, ranks_later = 1;
  bool is_tied = false;
  Optimizer optimizer = Optimizer::adamw;
};

// Values without a device, so that ranks may share them.
struct Whole {
  Shape shape;
  DType dtype = f32;
  std::vector<std::byte> bytes;
  bool operator==(const Whole&) const = default;
};
using Wholes = std::map<std::string, Whole>;

Whole whole_of(const Tensor& values) {
  Whole out{values.shape(), values.dtype(), {}};
  out.bytes.resize(static_cast<std::size_t>(values.numel()) * size_bytes(out.dtype));
  values.to_bytes(out.bytes);
  return out;
}
Wholes wholes_of(const StateDict& state) {
  Wholes out;
  for (const auto& [name, entry] : state) out[name] = whole_of(entry.values);
  return out;
}
StateDict dict_of(const Wholes& wholes, const Device& device) {
  StateDict out;
  for (const auto& [name, w] : wholes)
    out[name] = Tensor::from_bytes(w.bytes, w.shape, w.dtype, device);
  return out;
}
Whole rows_of(const Whole& whole, const ShardSpec& spec) {
  const RowRange rows = spec.owned();
  const std::size_t row = static_cast<std::size_t>(spec.row_numel()) * size_bytes(whole.dtype);
  Whole out{spec.local_shape(), whole.dtype, {}};
  out.bytes.assign(whole.bytes.begin() + static_cast<std::ptrdiff_t>(row) * rows.begin,
                   whole.bytes.begin() + static_cast<std::ptrdiff_t>(row) * rows.end);
  return out;
}

void expect_same(const std::string& what, const Wholes& expected, const Wholes& got) {
  for (const auto& [name, whole] : expected) {
    const auto at = got.find(name);
    if (at == got.end()) throw std::runtime_error(concat(what, " lacks '", name, "'"));
    if (at->second != whole) throw std::runtime_error(concat(what, " has another '", name, "'"));
  }
  for (const auto& [name, whole] : got)
    if (!expected.contains(name)) throw std::runtime_error(concat(what, " has '", name, "', too"));
}

// Another value for every element that may have any; the optimizer's numbers have ranges.
Wholes redrawn(Wholes wholes, Draw& draw) {
  for (auto& [name, whole] : wholes) {
    const bool is_number = name == "steps" || name == "lr" || name.ends_with("lr_factor") ||
                           name.ends_with("weight_decay");
    visit(whole.dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      for (std::size_t at = 0; at < whole.bytes.size(); at += sizeof(T)) {
        T value{};
        if constexpr (std::is_class_v<T>)
          value = T(static_cast<float>(draw.real(-9, 9)));
        else if constexpr (std::is_same_v<T, bool>)
          value = draw.chance(0.5);
        else
          value = static_cast<T>(is_number ? draw.number(0, 8) : draw.real(-9, 9));
        std::memcpy(whole.bytes.data() + at, &value, sizeof(T));
      }
    });
  }
  return wholes;
}

// What one rank without units has first, and what is then loaded.
struct Given {
  explicit Given(std::uint64_t seed) {
    RandomModel model(seed);
    const Device device = Device::cpu({.executor = ExecutorKind::inlined, .threads = 1});
    model.materialize(device);
    nn::init(model, {seed});
    const auto optimizer = model.make_optimizer();
    Draw draw(seed + 1);
    first = wholes_of(model.state_dict());
    this->model = redrawn(first, draw);
    this->optimizer = redrawn(wholes_of(optimizer->state_dict(model)), draw);
    ranks = model.ranks;
    ranks_later = model.ranks_later;
  }
  Wholes first, model, optimizer;
  int ranks, ranks_later;
};

// One rank's model and optimizer; every choice of `draw` is the same on all ranks.
class OneRank {
 public:
  OneRank(std::uint64_t seed, const Given& given, World& world, Draw& draw)
      : given_(given), world_(world), draw_(draw), model_(seed) {
    const bool is_sharded_first = draw.chance(0.5);
    if (is_sharded_first) model_.shard(world);
    optimizer_ = model_.make_optimizer();
    if (!is_sharded_first) model_.shard(world);
  }

  void begin(std::uint64_t seed) {
    model_.materialize(world_.device());
    has_memory_ = true;
    nn::init(model_, {seed});
    for (const StateForm form : {StateForm::sharded, StateForm::view}) {
      Wholes rows, got;
      for (const auto& [name, entry] : model_.state_dict({.form = form})) {
        // A scalar lies on rank 0.
        if (entry.spec.world > 1 && entry.spec.shape.ndim() == 0 && entry.spec.rank > 0) continue;
        rows[name] = entry.spec.shape.ndim() == 0 ? given_.first.at(name)
                                                  : rows_of(given_.first.at(name), entry.spec);
        got[name] = whole_of(entry.values);
      }
      expect_same("this rank's rows", rows, got);
    }
    expect_same("the first state", given_.first,
                wholes_of(model_.state_dict({.form = StateForm::full})));
  }

  void load() {
    const StateDict model = dict_of(given_.model, world_.device()),
                    optimizer = dict_of(given_.optimizer, world_.device()), none;
    const bool is_sent = draw_.chance(0.5), has = !is_sent || world_.rank() == 0;
    const LoadOptions options{.from_rank_0 = is_sent ? &world_ : nullptr};
    // A load from rank 0 gives memory to what has none.
    if (!has_memory_ && (!is_sent || draw_.chance(0.5))) model_.materialize(world_.device());
    if (!is_sent && draw_.chance(0.5)) {
      StateDict halves[2];
      for (const auto& [name, entry] : model) halves[draw_.number(0, 1)][name] = entry;
      for (const StateDict& half : halves)
        if (const auto report = model_.load(half, {.strict = false});
            report.missing.size() + half.size() != model.size())
          throw std::runtime_error("a load of some names reports others as missing");
    } else {
      model_.load(has ? model : none, options);
    }
    optimizer_->load(model_, has ? optimizer : none, options);
    check("after a load");
  }

  // Takes whole state in a random form.
  void check(const std::string& what) {
    const StateDictOptions options{StateForm::full,
                                   draw_.chance(0.5) ? StateRanks::rank_0 : StateRanks::every_rank,
                                   draw_.chance(0.5) ? StateMemory::host : StateMemory::device};
    const bool has = options.ranks == StateRanks::every_rank || world_.rank() == 0;
    expect_same("the model " + what, has ? given_.model : Wholes(),
                wholes_of(model_.state_dict(options)));
    expect_same("the optimizer " + what, has ? given_.optimizer : Wholes(),
                wholes_of(optimizer_->state_dict(model_, options)));
  }

  // Of other values throughout, so that a part that is loaded would show.
  void refuse() {
    const bool is_optimizer = draw_.chance(0.4), is_sent = draw_.chance(0.5);
    Wholes wholes = redrawn(is_optimizer ? given_.optimizer : given_.model, draw_);
    auto at = wholes.begin();
    std::advance(at, draw_.whole(0, std::ssize(wholes) - 1));
    const std::string name = at->first;
    const Shape shape = at->second.shape;
    const int kind = draw_.number(0, 3);
    const bool is_unknown = kind == 1, is_shaped = kind == 2;
    StateDict state = dict_of(wholes, world_.device());
    if (kind == 0) state.erase(name);
    if (is_unknown) state["stranger"] = Tensor::zeros({1}, f32, world_.device());
    if (is_shaped) {
      Shape other = shape;
      other.push_back(2);
      state[name] = Tensor::zeros(other, at->second.dtype, world_.device());
    }
    if (kind == 3)
      state[name] =
          Tensor::zeros(shape, is_floating(at->second.dtype) ? i64 : f32, world_.device());
    const LoadOptions options{.from_rank_0 = is_sent ? &world_ : nullptr};
    const StateDict none;
    const StateDict& mine = is_sent && world_.rank() > 0 ? none : state;
    std::string why;
    try {
      is_optimizer ? optimizer_->load(model_, mine, options) : model_.load(mine, options);
    } catch (const ContractError& error) {
      why = error.what();
    }
    const std::string what = concat("after a refused load, of kind ", kind, " at '", name, "'");
    if (why.find(is_unknown ? "stranger" : name) == std::string::npos)
      throw std::runtime_error(concat(what, ": it says '", why, "'"));
    world_.barrier();  // a peer may still look at what it refuses
    check(what);
  }

 private:
  const Given& given_;
  World& world_;
  Draw& draw_;
  RandomModel model_;
  bool has_memory_ = false;
  std::unique_ptr<optim::Optimizer> optimizer_;
};

}  // namespace

std::string describe_state(std::uint64_t seed) {
  const RandomModel model(seed);
  return concat("on ", model.ranks, " ranks, then on ", model.ranks_later, ", with ",
                model.optimizer == Optimizer::sgd    ? "SGD"
                : model.optimizer == Optimizer::muon ? "Muon where there is a matrix"
                                                     : "AdamW",
                model.is_tied ? ", tied" : "", '\n', model.to_string(), '\n');
}

std::string state_complaint(std::uint64_t seed) {
  try {
    const Given given(seed);
    for (const bool is_later : {false, true})
      run_local(is_later ? given.ranks_later : given.ranks, {.threads = 1, .timeout_seconds = 20},
                [&](World& world) {
                  Draw draw(2 * seed + is_later);
                  OneRank rank(seed, given, world, draw);
                  if (!is_later) rank.begin(seed);
                  rank.load();
                  for (int i = 0; i < 3; ++i) rank.refuse();
                });
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

}  // namespace tessera::testing
