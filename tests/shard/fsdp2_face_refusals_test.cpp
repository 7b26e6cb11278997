// FSDP2's tests of bad input: every rank hears what is wrong with which unit or parameter, and the
// remedy, in one line and before anything is submitted. The model is as it was, and trains.
#include <memory>
#include <string>
#include <vector>

#include "tessera/nn/embedding.hpp"
#include "tessera/nn/llama.hpp"
#include "tessera/param/gather_transform.hpp"
#include "tessera/shard/runtime_control.hpp"
#include "tests/shard/small_llama.hpp"
#include "tests/shard/support.hpp"
#include "tests/support/launches.hpp"

using namespace tessera;
using namespace tessera::testing;

namespace {

using Lines = std::vector<std::string>;

const std::vector<std::int64_t> kUneven = {5, 7, 1, 3};  // 1 row: most ranks own nothing of it

struct Refused {
  Lines lines;
  bool works = true;  // what was refused, afterwards
};

// What calls are refused with on this rank.
class Refusals {
 public:
  explicit Refusals(const World& world) : device_(world.device()) {}
  template <class F>
  void operator()(const F& f) {
    const Launches launches(device_);
    std::string line = thrown_by(f);
    for (const auto& [name, count] : launches.counts())
      line = concat("submits '", name, "' before it says: ", line);
    lines_.push_back(std::move(line));
  }
  Refused with(bool works) const { return {lines_, works}; }

 private:
  Device device_;
  Lines lines_;
};

// `f(world, said)` on so many ranks, and what each of them is to hear.
template <class F>
void check_refusals(int ranks, const Lines& expected, const F& f) {
  for (const auto& [lines, works] : on_ranks(ranks, [&](World& world) {
         Refusals said(world);
         const bool works = f(world, said);
         return said.with(works);
       })) {
    CHECK(lines == expected);
    CHECK(works);
  }
}

Tensor input(const World& world, std::int64_t width = 5) {
  return rows_of(1, world.rank(), 2, width, world.device());
}

// The gradients of a step, by which a model that was refused something is one that was not.
Values step_of(Stack& model, const World& world) {
  if (model.scale.device().is_meta()) model.materialize(world.device());
  nn::init(model, {3});
  mean_square(model(input(world, model.layers[0].weight.shape()[1]))).backward();
  return shard_gradients(model);
}
bool trains(Stack& model, World& world) {
  Stack plain(kUneven);
  plain.shard({.mesh = DeviceMesh::flat(world)});
  return same_bits(step_of(model, world), step_of(plain, world));
}

template <class T>
concept LimitsReductions = requires(const DeviceMesh& mesh, T limit) {
  ShardOptions{.mesh = mesh, .reductions_in_flight = {limit}};
};
static_assert(LimitsReductions<int> && !LimitsReductions<double>);

}  // namespace

TEST_CASE("fully_shard refuses what cannot take effect, naming value and remedy",
          "[threads][fsdp2-002][fsdp2-082]") {
  const std::string of = "fully_shard: the module of 'scale': ",
                    once = " is a unit already; call fully_shard once on each module";
  check_refusals(
      2,
      {of + "precision.param is f64; expected f32, bf16 or f16",
       of + "precision.reduce is i32; expected f32, bf16 or f16",
       of + "gradients of f32 parameters cannot be reduced in bf16; use f32",
       of + "gradients of bf16 parameters cannot be reduced in f16; use f32 or bf16",
       of + "prefetch_depth is 0; expected 1 to 64", of + "prefetch_depth is 65; expected 1 to 64",
       of + "reductions_in_flight is 0; expected 1 to 64",
       of + "reductions_in_flight is 65; expected 1 to 64",
       of + "forwards_ahead is 0; expected 1 to 64", of + "forwards_ahead is 65; expected 1 to 64",
       of + "slice_bytes is -1; expected 0 or more", of + "piece_bytes is 0; expected 1 or more",
       of + "packed_bytes is -1; expected 0 or more",
       "fully_shard: the module of 'layers.0.weight'" + once,
       "fully_shard: the module of 'scale'" + once,
       ("shard_plan: the module of 'layers.0.weight' is not a unit; call fully_shard on "
        "it first"),
       ("set_reductions_in_flight: the module of 'layers.0.weight': reductions is 0; "
        "expected 1 to 64")},
      [](World& world, Refusals& said) {
        const DeviceMesh mesh = DeviceMesh::flat(world);
        Stack model(kUneven);
        const auto refused = [&](const ShardOptions& options) {
          said([&] { fully_shard(model, options); });
        };
        refused({.mesh = mesh, .precision = {.param = f64}});
        refused({.mesh = mesh, .precision = {.reduce = i32}});
        refused({.mesh = mesh, .precision = {.reduce = bf16}});
        refused({.mesh = mesh, .precision = {.param = bf16, .reduce = f16}});
        refused({.mesh = mesh, .prefetch_depth = 0});
        refused({.mesh = mesh, .prefetch_depth = 65});
        refused({.mesh = mesh, .reductions_in_flight = 0});
        refused({.mesh = mesh, .reductions_in_flight = 65});
        refused({.mesh = mesh, .forwards_ahead = 0});
        refused({.mesh = mesh, .forwards_ahead = 65});
        refused({.mesh = mesh, .slice_bytes = -1});
        refused({.mesh = mesh, .piece_bytes = 0});
        refused({.mesh = mesh, .packed_bytes = -1});
        fully_shard(model.layers[0], {.mesh = mesh});
        said([&] { fully_shard(model.layers[0], {.mesh = mesh}); });
        for (const std::size_t i : {1, 2}) fully_shard(model.layers[i], {.mesh = mesh});
        fully_shard(model, {.mesh = mesh});
        refused({.mesh = mesh});
        said([&] { shard_plan(model.layers); });
        said([&] { set_reductions_in_flight(model.layers, 0); });
        return trains(model, world);
      });
  CHECK(on_ranks(2, [](World& world) {  // which is not refused
          Stack model(kUneven);
          return thrown_by([&] {
            model.shard(
                {.mesh = DeviceMesh::flat(world), .precision = {.param = bf16, .reduce = bf16}});
          });
        }) == Lines(2));
}

TEST_CASE("a mesh of three dimensions, or without names, is refused", "[threads][fsdp2-007]") {
  check_refusals(8,
                 {"fully_shard: the module of 'scale': DeviceMesh: a 2 x b 2 x c 2 are 3 "
                  "dimensions; parameters are sharded over one, and replicated over the one before "
                  "it: choose these, as mesh.select({\"b\", \"c\"})",
                  "DeviceMesh: a dimension is called '' in  2 x  4; give each a name of its own",
                  "DeviceMesh: a dimension is called 'a' in a 2 x a 4; give each a name of its "
                  "own"},
                 [](World& world, Refusals& said) {
                   const DeviceMesh mesh = DeviceMesh::grid(world, {{"a", 2}, {"b", 2}, {"c", 2}});
                   Stack model(kUneven), plain(kUneven);
                   said([&] { fully_shard(model, {.mesh = mesh}); });
                   said([&] { DeviceMesh::grid(world, {{"", 2}, {"", 4}}); });
                   said([&] { DeviceMesh::grid(world, {{"a", 2}, {"a", 4}}); });
                   for (Stack* const each : {&model, &plain})
                     each->shard({.mesh = mesh.select({"b", "c"})});
                   return same_bits(step_of(model, world), step_of(plain, world));
                 });
}

TEST_CASE("a parameter shared by two units belongs to the module that holds both",
          "[threads][fsdp2-043]") {
  const std::string remedy =
      " already; shard inner modules before outer ones; where two modules share a parameter, shard "
      "them as one list, or the module that holds both";
  check_refusals(2,
                 {"fully_shard: parameter 'weight' belongs to unit '(with weight)'" + remedy,
                  "fully_shard: parameter 'weight' belongs to unit '(with scale)'" + remedy},
                 [](World& world, Refusals& said) {
                   const DeviceMesh mesh = DeviceMesh::flat(world);
                   nn::LlamaConfig tied = small_llama(1);
                   tied.tie_embeddings = true;
                   nn::Llama apart(tied);
                   fully_shard(apart.embedding, {.mesh = mesh});
                   said([&] { fully_shard(apart.head, {.mesh = mesh}); });
                   // So it is where the outer module came first: what is wrong then is the order.
                   Stack outer_first(kUneven), plain(kUneven);
                   fully_shard(outer_first, {.mesh = mesh});
                   fully_shard(plain, {.mesh = mesh});
                   said([&] { fully_shard(outer_first.layers[1], {.mesh = mesh}); });
                   nn::Llama together(tied);
                   shard_parts(together, {.mesh = mesh});
                   nn::init(together, {1}, world.device());
                   const ShardPlan plan = shard_plan(together);
                   const Tensor tokens =
                       Tensor::from(std::vector<std::int32_t>{1, 5, 9, 2}, {1, 4}, world.device());
                   together.loss(tokens, tokens).backward();
                   bool trains =
                       plan.units.size() == 3 && plan.units[0].numel == 8 &&    // the last norm
                       plan.units[2].name == "model.embed_tokens.weight[0]" &&  // shared, so once
                       plan.units[2].numel == 11 * 8;
                   for (const Parameter& p : together.parameters())
                     trains = trains && p.grad().defined();
                   return trains && !apart.head.hook() && !outer_first.layers[1].hook() &&
                          same_bits(step_of(outer_first, world), step_of(plain, world));
                 });
}

TEST_CASE("layers that come and go at one address are each sharded once", "[threads][fsdp2-043]") {
  check_refusals(2, Lines(20), [](World& world, Refusals& said) {
    std::vector<std::unique_ptr<Stack>> kept;
    const Tensor x = input(world);
    for (int i = 0; i < 20; ++i) {
      auto layer = std::make_unique<Stack>(kUneven);
      said([&] { layer->shard({.mesh = DeviceMesh::flat(world)}); });
      if (i % 2 == 0) kept.push_back(std::move(layer));
    }
    bool works = true;
    for (const auto& layer : kept) works = works && trains(*layer, world);
    return works;
  });
}

TEST_CASE("units of one model lie on one mesh, have memory, and start from the root",
          "[threads][fsdp2-013][fsdp2-017]") {
  const std::string materialize = "; call materialize on the model first";
  SECTION("another mesh, or the device of another world") {
    const std::string mesh_of_root =
        "fully_shard: unit 'layers.1' lies on another mesh than its root; give all units of a "
        "model one mesh";
    check_refusals(2,
                   {"materialize: unit '(with weight)' is sharded over a mesh whose world has "
                    "another device; give world.device()",
                    mesh_of_root, mesh_of_root, mesh_of_root},
                   [](World& world, Refusals& said) {
                     const World other = World::single();
                     Stack elsewhere(kUneven), mixed(kUneven);
                     fully_shard(elsewhere.layers[1], {.mesh = DeviceMesh::flat(other)});
                     said([&] { elsewhere.materialize(world.device()); });
                     const DeviceMesh mesh =
                         DeviceMesh::hybrid(world, {.replicate = 1, .shard = 2});
                     fully_shard(mixed.layers[1], {.mesh = mesh["dp_shard"]});
                     said([&] { fully_shard(mixed, {.mesh = DeviceMesh::flat(world)}); });
                     fully_shard(mixed, {.mesh = mesh["dp_shard"]});  // nothing was lost
                     mixed.materialize(world.device());
                     const Tensor x = input(world);
                     // What is registered later is seen by the first call.
                     struct Outer : nn::Module {
                       Parameter own{{3}, Initializer::constant(1)};
                     } late;
                     late.register_parameter("own", late.own);
                     fully_shard(late, {.mesh = DeviceMesh::flat(world)});
                     nn::ModuleList<Stack> none;
                     late.register_module("layers", none);
                     none.register_module("1", mixed);
                     late.materialize(world.device());
                     for (int i = 0; i < 2; ++i) said([&] { shard_plan(late); });
                     return trains(mixed, world);
                   });
  }
  // Experts on the ranks of a line of the mesh, as expert parallelism lays them out: the same ranks
  // in another order, and a part of them.
  SECTION("experts on another mesh than the rest") {
    for (const bool is_part : {false, true}) {
      const std::string refused =
          "fully_shard: unit 'layers.1' lies on another mesh than its root; give all units of a "
          "model one mesh";
      check_refusals(4, {refused}, [is_part](World& world, Refusals& said) {
        const DeviceMesh dp = DeviceMesh::flat(world),
                         ep = is_part
                                  ? DeviceMesh::grid(world, {{"dp", 2}, {"ep", 2}})["ep"]
                                  : DeviceMesh::grid(world, {{"ep", 4}}, std::array{3, 1, 2, 0});
        Stack model(kUneven);
        fully_shard(model.layers[1], {.mesh = ep});
        said([&] { fully_shard(model, {.mesh = dp}); });
        fully_shard(model, {.mesh = ep});
        Stack plain(kUneven);
        plain.shard({.mesh = ep});
        return same_bits(step_of(model, world), step_of(plain, world));
      });
    }
  }
  SECTION("no memory yet") {
    const std::string first = "unit '(root)' has no memory yet for 'scale', 'offset'" + materialize;
    check_refusals(
        2,
        {first,
         ("parameter 'scale' has no memory yet; register it and its module, and call materialize "
          "on the model first"),
         "unit '(root)' has no memory yet for 'model.layers.0.self_attn.q_proj.weight', "
         "'model.layers.0.self_attn.k_proj.weight', 'model.layers.0.self_attn.v_proj.weight', "
         "'model.layers.0.self_attn.o_proj.weight', 'model.layers.0.mlp.gate_proj.weight' and 7 "
         "more" +
             materialize,
         "unit '(root)' has no memory yet for 'weight'" + materialize, first, first, first},
        [](World& world, Refusals& said) {
          const ShardOptions options{.mesh = DeviceMesh::flat(world)};
          Stack model(kUneven);
          model.shard(options);
          said([&] { shard_plan(model); });
          said([&] { nn::init(model, {1}); });
          nn::Llama large(small_llama(1), Device::meta());
          fully_shard(large, options);
          said([&] { shard_plan(large); });
          nn::Embedding table(5, 4);  // all that its unit has is streamed
          fully_shard(table, options);
          said([&] { shard_plan(table); });
          // A call that was refused has joined nothing, and the remedy is one.
          const Tensor x = input(world);
          for (int i = 0; i < 2; ++i) said([&] { model(x); });
          said([&] { shard_plan(model); });
          return trains(model, world);
        });
  }
  SECTION("a part of a model has run, or has memory") {
    check_refusals(
        2,
        {"units below '(with scale)' have changed while a forward still waits for its backward; "
         "run backward first, or drop what the forward returned",
         "fully_shard: the module of 'scale': 2 of 8 parameters have memory; materialize "
         "all of them or none"},
        [](World& world, Refusals& said) {
          const ShardOptions options{.mesh = DeviceMesh::flat(world)};
          Stack inside_first(kUneven), half(kUneven);
          const Tensor x = input(world);
          inside_first.shard(options);
          nn::init(inside_first, {1}, world.device());
          nn::Linear& inner = inside_first.layers[0];
          const Tensor kept = inner(x);
          const auto before = kept.to_vector<float>();
          said([&] { inside_first(x); });
          const bool is_as_before = same_bits(inner(x).to_vector<float>(), before);

          nn::Linear& ready = half.layers[0];
          nn::init(ready, {1}, world.device());
          const auto values = ready.weight.shard().to_vector<float>();
          said([&] { fully_shard(half, options); });
          const bool has_values = same_bits(ready.weight.shard().to_vector<float>(), values);
          half.materialize(world.device());
          half.shard(options);
          return is_as_before && has_values && trains(half, world);
        });
  }
}

TEST_CASE("lists that can't be a unit say why", "[threads][fsdp2-002][fsdp2-013]") {
  const auto of_list = [](int i, const char* why) {
    return concat("fully_shard: module ", i, " of the list, ", why);
  };
  const std::string once = "is a unit already; call fully_shard once on each module",
                    root =
                        "unit '(with weight)' is a list of modules and can't be the root; "
                        "call fully_shard on a module around them too, and run that module first";
  check_refusals(2,
                 {"fully_shard: the list of modules is empty; give one or more",
                  ("fully_shard: module 1 of the list is a null pointer; give the addresses of "
                   "modules"),
                  of_list(2, "the module of 'weight', is there already; give each once"),
                  of_list(0, "the module of 'weight', ") + once,
                  "fully_shard: the module of 'weight' " + once, root, root, root},
                 [](World& world, Refusals& said) {
                   const ShardOptions options{.mesh = DeviceMesh::flat(world)};
                   Stack model(kUneven);
                   auto& layers = model.layers;
                   const auto refused = [&](const std::vector<nn::Module*>& modules) {
                     said([&] { fully_shard(modules, options); });
                   };
                   refused({});
                   refused({&layers[0], nullptr});
                   refused({&layers[0], &layers[1], &layers[0]});
                   fully_shard(layers[2], options);
                   refused({&layers[2], &layers[0]});
                   const bool is_as_before = !layers[0].hook();
                   fully_shard({&layers[0], &layers[1]}, options);
                   refused({&layers[1]});
                   nn::init(model, {1}, world.device());
                   const Tensor x = input(world);
                   said([&] { layers[0](x); });
                   said([&] { shard_plan(layers[1]); });
                   said([&] { unshard(layers[0]); });
                   fully_shard(model, options);
                   Stack alone(kUneven);  // a list of one is that module
                   fully_shard({&alone.layers[0]}, options);
                   alone.layers[0].materialize(world.device());
                   shard_plan(alone.layers[0]);
                   return is_as_before && trains(model, world);
                 });
}

TEST_CASE("a dimension that can't be sharded is refused in one line", "[threads][fsdp2-024]") {
  const std::string gives = "fully_shard: the module of 'weight': shard_placement_fn gives ",
                    else_0 =
                        ", which has no such dimension; give Shard(0), or another of its "
                        "dimensions",
                    of_rows = ", of dimension 0; give Shard(0)";
  check_refusals(
      4,
      {gives + "Shard(1) for parameter 'weight' of shape [4, 6], whose 6 do not divide over 4 "
               "ranks; give Shard(0), the one dimension that is cut unevenly",
       gives + "Shard(1) for parameter 'bias' of shape [6]" + else_0,
       gives + "Shard(-3) for parameter 'weight' of shape [6, 4]" + else_0,
       gives + "Shard(-1) for parameter 'weight' of shape [6, 4], which has blocks of rows" +
           of_rows,
       gives + "Shard(-1) for parameter 'weight' of shape [6, 4], which has a gather transform" +
           of_rows},
      [](World& world, Refusals& said) {
        Stack model({4, 6, 4}), plain({4, 6, 4});
        nn::Linear &up = model.layers[0], &down = model.layers[1];
        const auto refused = [&](int dim, nn::Module& of) {
          said([&] {
            fully_shard(of, {.mesh = DeviceMesh::flat(world),
                             .shard_placement_fn = [dim](const Parameter&) { return Shard{dim}; }});
          });
        };
        refused(1, down);
        refused(1, up);
        refused(-3, up);
        up.weight.set_block_rows(2);
        refused(-1, up);
        up.weight.set_block_rows(0);
        for (nn::Linear* const each : {&up, &plain.layers[0]})
          each->weight.set_gather_transform(gather_in_e4m3());
        refused(-1, up);
        const bool is_as_before = !up.hook() && up.weight.spec() == ShardSpec{{6, 4}};
        for (Stack* const each : {&model, &plain}) each->shard({.mesh = DeviceMesh::flat(world)});
        return is_as_before && same_bits(step_of(model, world), step_of(plain, world));
      });
}
