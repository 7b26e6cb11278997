// State by name without sharding: dicts out and in, buffers, what is refused, and that a refusal
// changes nothing.
#include "tessera/nn/state.hpp"

#include "tessera/nn/linear.hpp"
#include "tessera/nn/module_list.hpp"
#include "tests/nn/helpers.hpp"
#include "tests/support/thrown.hpp"

using namespace tessera;
using namespace tessera::testing;

namespace {

// A layer with all kinds of state: a tied weight, a running mean, a counter and a table.
struct Stateful : nn::Module {
  Stateful() : up(2, 3), tied(up.weight) {
    register_module("up", up);
    register_module("tied", tied);
    register_buffer("mean", mean);
    register_buffer("count", count);
    register_buffer("table", table, nn::Persistent::no);
  }
  nn::Linear up, tied;
  nn::Buffer mean{{3}, Initializer::constant(0.5)};
  nn::Buffer count{{}, Initializer::constant(0), i64};
  nn::Buffer table{{4}, Initializer::by_index([](std::int64_t i) { return 10. * double(i); })};
};

std::vector<std::byte> bytes_of(nn::Module& module) {
  std::vector<std::byte> all;
  for (const auto& [name, entry] : module.state_dict()) {
    std::vector<std::byte> own(static_cast<std::size_t>(entry.values.numel()) *
                               size_bytes(entry.values.dtype()));
    entry.values.to_bytes(own);
    all.insert(all.end(), own.begin(), own.end());
  }
  return all;
}

std::vector<std::string> names_of(const StateDict& state) {
  std::vector<std::string> names;
  for (const auto& [name, entry] : state) names.push_back(name);
  return names;
}

}  // namespace

TEST_CASE("a state dict has parameters and persistent buffers, copied", "[nn]") {
  const Device device = Device::cpu();
  Stateful module;
  module.materialize(device);
  nn::init(module, {1});
  const StateDict before = module.state_dict();
  CHECK(names_of(before) == std::vector<std::string>{"count", "mean", "up.bias", "up.weight"});
  CHECK(before.at("up.weight").spec.shape == Shape{3, 2});
  const auto weight = before.at("up.weight").values.to_vector<float>();
  module.up.weight.assign(Tensor::full({3, 2}, 7, f32, device));
  module.mean.assign(Tensor::full({3}, 7, f32, device));
  CHECK(before.at("up.weight").values.to_vector<float>() == weight);
  CHECK(before.at("mean").values.to_vector<float>() == std::vector<float>(3, 0.5f));
  const nn::LoadReport report = module.load(before);
  CHECK(report.missing.empty());
  CHECK(report.unexpected.empty());
  CHECK(module.up.weight.shard().to_vector<float>() == weight);
  CHECK(module.mean.value().to_vector<float>() == std::vector<float>(3, 0.5f));
}

TEST_CASE("a map of whole tensors is loaded, of any floating dtype and from another device",
          "[nn]") {
  const Device device = Device::cpu(), other = Device::cpu();
  Stateful module;
  module.materialize(device);
  const std::vector<float> sixths{0, 1, 2, 3, 4, 5};
  module.load({{"up.weight", raw::cast(Tensor::from(sixths, {3, 2}, other), bf16)},
               {"up.bias", Tensor::ones({3}, f64, device)},
               {"mean", raw::transpose(Tensor::zeros({3, 1}, f16, other), 0, 1).view({3}, {1}, 0)},
               {"count", Tensor::from(std::vector<std::int64_t>{5}, {}, other)}});
  CHECK(module.up.weight.shard().to_vector<float>() == sixths);
  CHECK(module.up.bias.shard().to_vector<float>() == std::vector<float>(3, 1));
  CHECK(module.mean.value().to_vector<float>() == std::vector<float>(3, 0));
  CHECK(module.count.value().to_vector<std::int64_t>()[0] == 5);
}

TEST_CASE("a tied parameter is loaded from any of its names, and from several that agree", "[nn]") {
  const Device device = Device::cpu();
  Stateful module;
  module.materialize(device);
  StateDict state = module.state_dict();
  const Tensor ones = Tensor::ones({3, 2}, f32, device);
  state.erase("up.weight");
  state["tied.weight"] = ones;
  module.load(state);
  CHECK(values(module.up.weight) == std::vector<float>(6, 1));
  state["up.weight"] = Tensor::full({3, 2}, 1, f32, device);
  CHECK_NOTHROW(module.load(state));
  state["up.weight"] = Tensor::full({3, 2}, 2, f32, device);
  CHECK(thrown_by([&] { module.load(state); }).find("ties to another tensor") != std::string::npos);
}

TEST_CASE("what does not fit is named in one line, and nothing changes", "[nn]") {
  const Device device = Device::cpu();
  Stateful module;
  module.materialize(device);
  nn::init(module, {3});
  const StateDict good = module.state_dict();
  module.up.bias.assign(Tensor::full({3}, 9, f32, device));
  const auto before = bytes_of(module);
  struct Bad {
    const char* said;
    std::function<void(StateDict&)> change;
  };
  const Tensor two = Tensor::ones({2}, f32, device);
  const std::vector<Bad> table = {
      {"load: the state dict has no tensor 'up.bias'; is it",
       [](StateDict& s) { s.erase("up.bias"); }},
      {"has no tensor 'up.bias' and 1 more",
       [](StateDict& s) {
         s.erase("up.bias");
         s.erase("mean");
       }},
      {"holds 'up.scale', which the model does not have",
       [&](StateDict& s) { s["up.scale"] = two; }},
      {"holds 'table', which the model does not have", [&](StateDict& s) { s["table"] = two; }},
      {"tensor 'up.bias' in the state dict is [2] of f32, the model has [3]",
       [&](StateDict& s) { s["up.bias"] = two; }},
      {"tensor 'up.weight' in the state dict is of i32, but weights are floating",
       [&](StateDict& s) { s["up.weight"] = Tensor::ones({3, 2}, i32, device); }},
      {"tensor 'count' in the state dict is of f32, the buffer is of i64",
       [&](StateDict& s) { s["count"] = Tensor::ones({}, f32, device); }},
      {"'up.weight' in the state dict is on meta",
       [](StateDict& s) { s["up.weight"] = Tensor::ones({3, 2}, f32, Device::meta()); }},
      {"holds 'up.weight' without a tensor", [](StateDict& s) { s["up.weight"] = {}; }},
      {"is the rows of rank 1 of 2, but this is rank 0 of 1",
       [&](StateDict& s) {
         s["up.weight"] = {Tensor::ones({1, 2}, f32, device), ShardSpec{{3, 2}, 2, 1}};
       }},
      {"is of [3, 2] as rows 2 to 3 of [3, 2]",
       [&](StateDict& s) { s["up.weight"].spec = {{3, 2}, 2, 1}; }},
  };
  for (const Bad& bad : table) {
    StateDict state = good;
    bad.change(state);
    const std::string said = thrown_by([&] { module.load(state); });
    INFO(said);
    CHECK(said.find(bad.said) != std::string::npos);
    CHECK(said.find('\n') == std::string::npos);
    CHECK(bytes_of(module) == before);
  }
}

TEST_CASE("rules change the names of a source before they are looked up", "[nn]") {
  const Device device = Device::cpu();
  Stateful module;
  module.materialize(device);
  nn::init(module, {3});
  const auto trained = bytes_of(module);
  const StateDict own = module.state_dict();
  const StateDict other{{"net._orig_mod.lin.weight", own.at("up.weight")},
                        {"net._orig_mod.lin.bias", own.at("up.bias")},
                        {"net.stats.mean", own.at("mean")},
                        {"net.stats.count", own.at("count")}};
  nn::init(module, {4});
  const auto before = bytes_of(module);
  const std::vector<std::pair<std::string, std::vector<Rename>>> wrong = {
      {"no name in the state dict fits 'nope.*', 'net' of LoadOptions::rename; one name is "
       "'net._orig_mod.lin.bias'",
       {{"nope.*", "*"}, {"net.*", "*"}, {"net", "up"}}},
      {"rename 'net.*' to 'up'; give both sides the same number of *", {{"net.*", "up"}}},
      {"rename makes 'net.stats.mean' of 'net._orig_mod.lin.bias' and of 'net.stats.mean' in the "
       "state dict; give rules that keep names apart",
       {{"net._orig_mod.lin.bias", "net.stats.mean"}}},
      {"has no tensor 'up.weight'", {{"net.stats.*", "*"}}}};
  for (const auto& [part, rules] : wrong) {
    const std::string said = thrown_by([&] { module.load(other, {.rename = rules}); });
    INFO(said);
    CHECK(said.find(part) != std::string::npos);
    CHECK(bytes_of(module) == before);
  }
  const LoadOptions options{
      .rename = {{"net.*", "*"}, {"_orig_mod.lin.*", "up.*"}, {"stats.*", "*"}}};
  CHECK(nn::check_load(module, DictSource(other), options).missing.empty());
  module.load(other, options);
  CHECK(bytes_of(module) == trained);
}

TEST_CASE("a star of a rule stands for as little as can be, and a rule for the whole name",
          "[nn]") {
  const Device device = Device::cpu();
  Stateful module;
  module.materialize(device);
  struct Case {
    Rename rule;
    std::string name, becomes;  // empty: does not fit
  };
  for (const auto& [rule, name, becomes] : std::vector<Case>{
           {{"*.b.*", "*-*"}, "a.b.a.b.c", "a-a.b.c"},
           {{"*", "x.*"}, "w", "x.w"},
           {{"a*", "b*"}, "a", "b"},
           {{"*a*a", "[*][*]"}, "aa", "[][]"},
           {{"w", "v"}, "w", "v"},
           {{"layers.*.w", "blocks.*.v"}, "layers.0.w", "blocks.0.v"},
           {{"layers.*.w", "blocks.*.v"}, "layers.0.ww", ""},
           {{"aa*aa", "*"}, "aaa", ""},
           {{"*b*c", "**"}, "acb", ""},
           {{"w", "v"}, "ww", ""},
       }) {
    INFO(rule.pattern << " of " << name);
    const StateDict state{{name, Tensor::ones({1}, f32, device)}};
    const LoadOptions options{.strict = false, .rename = {rule}};
    if (becomes.empty())
      CHECK(thrown_by([&] { module.load(state, options); }).find("no name") != std::string::npos);
    else
      CHECK(module.load(state, options).unexpected == std::vector<std::string>{becomes});
  }
}

TEST_CASE("a load that is not strict takes what is there and reports the rest", "[nn]") {
  const Device device = Device::cpu();
  Stateful module;
  module.materialize(device);
  const nn::LoadReport report = module.load(
      {{"up.bias", Tensor::full({3}, 4, f32, device)}, {"other", Tensor::ones({1}, f32, device)}},
      {.strict = false});
  CHECK(report.missing == std::vector<std::string>{"up.weight", "mean", "count"});
  CHECK(report.unexpected == std::vector<std::string>{"other"});
  CHECK(values(module.up.bias) == std::vector<float>(3, 4));
  CHECK(thrown_by([&] {
          module.load({{"up.bias", Tensor::ones({4}, f32, device)}}, {.strict = false});
        }).find("the model has [3]") != std::string::npos);
}

TEST_CASE("a module on meta has no state to take or to load into", "[nn]") {
  Stateful module;
  CHECK(thrown_by([&] { module.state_dict(); }).find("call materialize") != std::string::npos);
  CHECK(thrown_by([&] {
          module.load({{"up.bias", Tensor::ones({3}, f32, Device::cpu())}}, {.strict = false});
        }).find("call materialize") != std::string::npos);
}

TEST_CASE("buffers have their initial values without init, and init gives them back", "[nn]") {
  Stateful module;
  CHECK(thrown_by([&] { module.mean.value(); }).find("buffer '") != std::string::npos);
  module.materialize(Device::cpu());
  CHECK(module.table.value().to_vector<float>() == std::vector<float>{0, 10, 20, 30});
  const Tensor held = module.mean.value();
  module.mean.assign(Tensor::ones({3}, f32, held.device()));
  CHECK(held.to_vector<float>() == std::vector<float>(3, 0.5f));  // who holds them keeps them
  CHECK(module.mean.value().to_vector<float>() == std::vector<float>(3, 1));
  nn::init(module, {1});
  CHECK(module.mean.value().to_vector<float>() == std::vector<float>(3, 0.5f));
  CHECK(module.mean.name() == "mean");
}

TEST_CASE("materialize moves buffers to another device and leaves those that are there", "[nn]") {
  struct Counted : nn::Module {
    Counted() { register_buffer("count", count); }
    nn::Buffer count{{2}, Initializer::constant(1), i32};
  } module;
  const Device first = Device::cpu(), second = Device::cpu();
  module.materialize(first);
  module.count.assign(Tensor::full({2}, 8, i32, first));
  module.materialize(second);
  CHECK(module.count.value().device() == second);
  CHECK(module.count.value().to_vector<std::int32_t>() == std::vector<std::int32_t>(2, 8));
  module.materialize(second);
  CHECK(module.count.value().to_vector<std::int32_t>() == std::vector<std::int32_t>(2, 8));
}

TEST_CASE("buffers are written by assign only, with what fits", "[nn]") {
  Stateful module;
  module.materialize(Device::cpu());
  const Tensor mean = module.mean.value();
  CHECK(thrown_by([&] { raw::fill(mean, 1); }).find("mean") != std::string::npos);
  CHECK(thrown_by([&] { module.mean.assign(Tensor::ones({2}, f32, mean.device())); }) ==
        "buffer 'mean' is assigned [2] of f32; expected [3] of f32");
  CHECK(thrown_by([&] {
          module.count.assign(Tensor::ones({}, f32, mean.device()));
        }).find("expected [] of i64") != std::string::npos);
}

TEST_CASE("parameters and modules are found by any of their names, or those there are are told",
          "[nn]") {
  Stateful module;
  CHECK(module.get_parameter("up.bias") == module.up.bias);
  CHECK(module.get_parameter("tied.weight") == module.up.weight);
  CHECK(&module.get_submodule("up") == &module.up);
  CHECK(&module.get_submodule("") == &module);
  CHECK(thrown_by([&] { module.get_parameter("up.scale"); }) ==
        "get_parameter: there is no 'up.scale'; there are 'up.weight', 'up.bias', 'tied.weight'");
  CHECK(thrown_by([&] { module.get_submodule("down"); }) ==
        "get_submodule: there is no 'down'; there are '', 'up', 'tied'");
}

TEST_CASE("a module is frozen and thawed with all that is below it", "[nn]") {
  Stateful module;
  module.freeze();
  for (const Parameter& p : module.parameters()) CHECK_FALSE(p.trainable());
  module.up.set_trainable(true);
  for (const Parameter& p : module.parameters()) CHECK(p.trainable());
}

TEST_CASE("names are taken once, by a parameter, a buffer or a module", "[nn]") {
  struct Named : nn::Module {
    Parameter p{Shape{2}, Initializer::constant(0)};
    nn::Buffer b{{2}, Initializer::constant(0)};
    nn::Linear m{1, 1};
  } module;
  module.register_buffer("x", module.b);
  CHECK_THROWS_WITH(module.register_parameter("x", module.p), Catch::Contains("'x' is taken"));
  CHECK_THROWS_WITH(module.register_module("x", module.m), Catch::Contains("'x' is taken"));
  module.register_parameter("y", module.p);
  CHECK_THROWS_WITH(module.register_buffer("y", module.b), Catch::Contains("'y' is taken"));
  CHECK_THROWS_WITH(module.register_buffer("a.b", module.b), Catch::Contains("without a dot"));
  CHECK_THROWS_WITH(module.register_buffer("z", nn::Buffer()), Catch::Contains("is undefined"));
}

TEST_CASE("what asks a part for its state or its tree renames nothing", "[nn]") {
  Stateful module;
  module.materialize(Device::cpu());
  CHECK(module.up.state_dict().size() == 2);
  CHECK(module.up.to_string().starts_with("Linear: 2 parameters"));
  CHECK(module.up.bias.name() == "up.bias");
  module.up.load({{"weight", Tensor::ones({3, 2}, f32, Device::cpu())}}, {.strict = false});
  CHECK(module.up.weight.name() == "up.weight");
}

TEST_CASE("apply reaches each module once, children first, and only those of a type", "[nn]") {
  struct Tree : nn::Module {
    Tree() {
      for (int i = 0; i < 2; ++i) list.emplace_back(2, 2);
      register_module("list", list);
      register_module("again", list[1]);
      register_module("last", last);
    }
    nn::ModuleList<nn::Linear> list;
    nn::Linear last{2, 2};
  } tree;
  std::vector<const nn::Module*> seen;
  tree.apply([&](nn::Module& module) { seen.push_back(&module); });
  CHECK(seen == std::vector<const nn::Module*>{&tree.list[0], &tree.list[1], &tree.list, &tree.last,
                                               &tree});
  int linears = 0;
  tree.apply<nn::Linear>([&](nn::Linear& layer) {
    ++linears;
    layer.weight.set_initializer(Initializer::constant(2));
  });
  CHECK(linears == 3);
  tree.materialize(Device::cpu());
  nn::init(tree, {1});
  CHECK(values(tree.list[1].weight) == std::vector<float>(4, 2));
}
