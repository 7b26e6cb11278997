// Gradient buffers in pieces: when a piece is reduced, what waits for its piece, and who has said
// too early that a gradient is whole. Values are compared with one rank's, which has no pieces.
#include <array>
#include <functional>

#include "tessera/autograd/recompute.hpp"
#include "tessera/device/device_context.hpp"
#include "tests/shard/support.hpp"

using namespace tessera;
using namespace tessera::testing;
using Catch::Matchers::Contains;

namespace {

// One unit; each weight is a piece of its own, the biases are one together.
class FourLayers final : public nn::Module {
 public:
  using Body = std::function<Tensor(FourLayers&, const Tensor&)>;
  static constexpr std::int64_t kPiece = 6 * 6 * 4;

  explicit FourLayers(Body f) : body(std::move(f)) {
    for (int i = 0; i < 4; ++i) layers.emplace_back(6, 6);
    register_module("layers", layers);
    make_positive(*this);
  }
  Tensor operator()(const Tensor& x) {
    return call([&] { return body(*this, x); });
  }
  nn::ModuleList<nn::Linear> layers;
  Body body;
};

// The sum of what the layers make of x, in any order: their gradients come in the reverse of it.
Tensor sum_of(FourLayers& model, const Tensor& x, const std::array<std::size_t, 4>& order) {
  Tensor y;
  for (const std::size_t i : order) {
    const Tensor one = tanh(model.layers[i](x));
    y = y.defined() ? y + one : one;
  }
  return y;
}

Tensor chain(FourLayers& model, const Tensor& x) {
  Tensor h = x;
  for (nn::Linear& layer : model.layers) h = tanh(layer(h));
  return h;
}

// The names of what is launched, in the order of the program.
struct LaunchNames final : Observer {
  explicit LaunchNames(const Device& d) : device(d) { device.context().add_observer(*this); }
  ~LaunchNames() override { device.context().remove_observer(*this); }
  void launched(StreamId, Tick, const Op& op) override { names.emplace_back(op.name); }
  // Of the n-th whose name has `part` in it, from 0.
  std::ptrdiff_t at(std::string_view part, int n) const {
    for (std::size_t i = 0; i < names.size(); ++i)
      if (names[i].find(part) != std::string::npos && n-- == 0)
        return static_cast<std::ptrdiff_t>(i);
    return -1;
  }
  Device device;
  std::vector<std::string> names;
};

struct Passes {
  Values gradients;
  ShardCounters counters;
  std::vector<std::ptrdiff_t> reduced, written;  // places in the order of the program
};

using BodyOf = std::function<FourLayers::Body(int rank)>;

Passes two_passes(World& world, int rank, const BodyOf& body) {
  FourLayers model(body(rank));
  fully_shard(model, {.mesh = DeviceMesh::flat(world), .piece_bytes = FourLayers::kPiece});
  nn::init(model, {3}, world.device());
  Passes seen;
  for (int k = 0; k < 2; ++k) {
    const Tensor loss = mean_square(model(positive_rows(7 + k, rank * 3, 3, 6, world.device())));
    world.device().synchronize();  // an observer comes and goes while the device is idle
    const LaunchNames launches(world.device());
    loss.backward();
    world.device().synchronize();
    for (int i = 0; i < 5; ++i) seen.reduced.push_back(launches.at("reduce_scatter", i));
    for (int i = 0; i < 4; ++i) seen.written.push_back(launches.at("tanh_backward", i));
  }
  seen.gradients = shard_gradients(model);
  seen.counters = shard_counters(model);
  return seen;
}

// Two ranks' gradients are the mean of what each has alone.
std::vector<Passes> check_pieces(const BodyOf& body) {
  const std::vector<Passes> both =
      on_ranks(2, [&](World& w) { return two_passes(w, w.rank(), body); });
  std::vector<Values> alone;
  for (int rank = 0; rank < 2; ++rank)
    alone.push_back(on_ranks(1, [&](World& w) { return two_passes(w, rank, body); })[0].gradients);
  const Values whole = assemble({both[0].gradients, both[1].gradients});
  CHECK(distance(mean_of(alone, whole), whole) < kRounding);
  CHECK(both[0].counters.reductions == 2);
  CHECK(both[0].counters.unplanned_slots == 0);
  return both;
}

}  // namespace

TEST_CASE("a piece is reduced before the next gradient is made", "[threads]") {
  const std::vector<Passes> plain = check_pieces([](int) { return chain; });
  const std::vector<Passes> again = check_pieces([](int) {
    return [](FourLayers& model, const Tensor& x) {
      return recompute([&](const Tensor& h) { return chain(model, h); }, x);
    };
  });
  const std::vector<Passes> parts = check_pieces([](int) {
    return [](FourLayers& model, const Tensor& x) {
      Tensor h = x;
      for (nn::Linear& layer : model.layers)
        h = recompute([&](const Tensor& in) { return tanh(layer(in)); }, h);
      return h;
    };
  });
  for (const auto& ranks : {plain, again, parts})
    for (const Passes& seen : ranks)
      for (std::size_t i = 0; i < 3; ++i) {
        // The weight of a layer goes before the layer in front of it goes backward.
        CHECK(seen.written[i] < seen.reduced[i]);
        CHECK(seen.reduced[i] < seen.written[i + 1]);
      }
}

TEST_CASE("gradients come in an order of each rank's own, and some not at all", "[threads]") {
  check_pieces([](int rank) {
    return [rank](FourLayers& model, const Tensor& x) {
      return rank == 0 ? sum_of(model, x, {0, 1, 2, 3}) : sum_of(model, x, {3, 1, 0, 2});
    };
  });
  check_pieces([](int rank) {
    return [rank](FourLayers& model, const Tensor& x) {
      // A layer twice, and another one not at all.
      return rank == 0 ? sum_of(model, x, {1, 0, 3, 1}) : sum_of(model, x, {2, 2, 0, 3});
    };
  });
}

TEST_CASE("a parameter that is used in and outside of a recomputed function is whole after both",
          "[threads]") {
  for (const bool is_outside_first : {true, false})
    check_pieces([&](int) {
      return [is_outside_first](FourLayers& model, const Tensor& x) {
        const auto again = [&](const Tensor& h) {
          return recompute([&](const Tensor& in) { return chain(model, in); }, h);
        };
        return is_outside_first ? again(tanh(model.layers[3](x))) : tanh(model.layers[3](again(x)));
      };
    });
}

TEST_CASE("an operation that hides what it uses is told so", "[threads]") {
  // Its backward has a graph of its own, of which nobody else knows.
  const auto hides = [](FourLayers& model, const Tensor& x) {
    return autograd::record("hides", {x}, x.detach() * 1,
                            [&model](const Tensor& g, autograd::Gradients& out) {
                              const autograd::GradModeGuard history(true);
                              mean_square(model.layers[3](g)).backward();
                              out.set(0, g);
                            });
  };
  const auto errors = on_ranks(2, [&](World& world) {
    FourLayers model([&](FourLayers& m, const Tensor& x) {
      return hides(m, hides(m, sum_of(m, x, {0, 1, 2, 2})));
    });
    fully_shard(model, {.mesh = DeviceMesh::flat(world), .piece_bytes = FourLayers::kPiece});
    nn::init(model, {3}, world.device());
    const Tensor loss =
        mean_square(model(positive_rows(7, world.rank() * 3, 3, 6, world.device())));
    return thrown_by([&] { loss.backward(); });
  });
  for (const std::string& error : errors)
    CHECK_THAT(error, Contains("parameter 'layers.3.weight', which was already reduced; name the "
                               "parameter as an input"));
}

// One N-th of a gradient is taken where it is written, with other rounding in another layout.
TEST_CASE("a gradient has the same bits in any pieces, sharded along any dimension", "[threads]") {
  const auto gradients = [](int dim, std::int64_t piece_bytes) {
    return on_ranks(5, [&](World& world) {
      Stack model({12, 20, 12});
      fully_shard(model, {.mesh = DeviceMesh::flat(world),
                          .piece_bytes = piece_bytes,
                          .shard_placement_fn = [&](const Parameter& p) {
                            return Shard{p == model.layers[1].weight ? dim : 0};
                          }});
      nn::init(model, {3}, world.device());
      mean_square(model(rows_of(7, 10 * world.rank(), 10, 12, world.device()))).backward();
      return shard_gradients(model);
    });
  };
  for (const int dim : {0, 1}) {
    const std::vector<Values> whole = gradients(dim, 32 << 20);
    for (const std::int64_t piece_bytes : {1, 300, 1500}) {
      CAPTURE(dim, piece_bytes);
      const std::vector<Values> pieces = gradients(dim, piece_bytes);
      for (std::size_t rank = 0; rank < 5; ++rank) CHECK(same_bits(pieces[rank], whole[rank]));
    }
  }
}
