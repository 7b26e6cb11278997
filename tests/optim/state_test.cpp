// What optimizers keep, by the names of parameters: out and in, what is refused, and that a refusal
// changes nothing.
#include "tessera/optim/adamw.hpp"
#include "tests/optim/helpers.hpp"
#include "tests/support/thrown.hpp"

using namespace tessera;
using namespace tessera::testing;

namespace {

// Two parameters with a gradient each, and an optimizer that has taken two steps on them.
struct Stepped {
  explicit Stepped(const Device& device = Device::cpu()) {
    bag.materialize(device);
    optimizer.set_weight_decay({bag.items[1]}, 0);
    optimizer.set_lr_factor({bag.items[1]}, 0.25);
  }
  void step() {
    give_gradients(bag, {{0, {1, 2, 3, 4, 5, 6}}, {1, {-1, 1, 2}}});
    optimizer.step();
    optimizer.zero_grad();
  }
  Bag bag{{{3, 2}, {3}}};
  optim::AdamW optimizer{bag.parameters(), {.lr = 0.125, .weight_decay = 0.5}};
};

std::map<std::string, std::vector<std::byte>> bytes_of(const StateDict& state) {
  std::map<std::string, std::vector<std::byte>> all;
  for (const auto& [name, entry] : state) {
    auto& own = all[name];
    own.resize(static_cast<std::size_t>(entry.values.numel()) * size_bytes(entry.values.dtype()));
    entry.values.to_bytes(own);
  }
  return all;
}

}  // namespace

TEST_CASE("an optimizer's state has moments, rates and steps by the names of the model",
          "[optim]") {
  Stepped s;
  s.step();
  s.step();
  const StateDict state = s.optimizer.state_dict(s.bag);
  std::vector<std::string> names;
  for (const auto& [name, entry] : state) names.push_back(name);
  CHECK(names == std::vector<std::string>{"0.exp_avg", "0.exp_avg_sq", "0.lr_factor",
                                          "0.weight_decay", "1.exp_avg", "1.exp_avg_sq",
                                          "1.lr_factor", "1.weight_decay", "lr", "steps"});
  CHECK(state.at("steps").values.item() == 2);
  CHECK(state.at("lr").values.item() == 0.125);
  CHECK(state.at("0.weight_decay").values.item() == 0.5);
  CHECK(state.at("1.weight_decay").values.item() == 0);
  CHECK(state.at("1.lr_factor").values.item() == 0.25);
  CHECK(state.at("0.exp_avg").spec.shape == Shape{3, 2});
  const std::vector<Tensor> moments = s.optimizer.moments(s.bag.items[0]);
  CHECK(state.at("0.exp_avg").values.to_vector<float>() == moments[0].to_vector<float>());
  CHECK(state.at("0.exp_avg_sq").values.to_vector<float>() == moments[1].to_vector<float>());
}

TEST_CASE("an optimizer that loads another's state goes on as it", "[optim]") {
  Stepped first, second(Device::cpu());
  first.step();
  second.optimizer.set_lr(9);
  second.optimizer.set_weight_decay(second.bag.parameters(), 3);
  second.bag.load(first.bag.state_dict());
  const nn::LoadReport report =
      second.optimizer.load(second.bag, first.optimizer.state_dict(first.bag));
  CHECK(report.missing.empty());
  first.step();
  second.step();
  CHECK(bytes_of(second.bag.state_dict()) == bytes_of(first.bag.state_dict()));
  CHECK(bytes_of(second.optimizer.state_dict(second.bag)) ==
        bytes_of(first.optimizer.state_dict(first.bag)));
}

TEST_CASE("an optimizer's state has no moments of what is frozen, and loads without them",
          "[optim]") {
  Stepped s;
  s.step();
  const StateDict before = s.optimizer.state_dict(s.bag);
  s.bag.items[0].freeze();
  const StateDict state = s.optimizer.state_dict(s.bag);
  CHECK(state.count("0.exp_avg") == 0);
  CHECK(state.count("0.weight_decay") == 1);
  CHECK(bytes_of(state).at("1.exp_avg") == bytes_of(before).at("1.exp_avg"));
  CHECK_NOTHROW(s.optimizer.load(s.bag, state));
  CHECK(thrown_by([&] { s.optimizer.load(s.bag, before); }) ==
        "load: the state dict holds '0.exp_avg' and 1 more, which the optimizer does not have; is "
        "it an optimizer of this kind and size?");
}

TEST_CASE("state that does not fit an optimizer is named in one line, and nothing changes",
          "[optim]") {
  const Device device = Device::cpu();
  Stepped s(device);
  s.step();
  const StateDict good = s.optimizer.state_dict(s.bag);
  s.step();
  const auto before = bytes_of(s.optimizer.state_dict(s.bag));
  struct Bad {
    const char* said;
    std::function<void(StateDict&)> change;
  };
  const std::vector<Bad> table = {
      {"has no tensor '1.exp_avg'; is it an optimizer", [](StateDict& d) { d.erase("1.exp_avg"); }},
      {"has no tensor 'steps'", [](StateDict& d) { d.erase("steps"); }},
      {"holds '0.max_exp_avg_sq', which the optimizer does not have",
       [&](StateDict& d) { d["0.max_exp_avg_sq"] = Tensor::ones({3, 2}, f32, device); }},
      {"tensor '1.exp_avg' in the state dict is [2] of f32, the optimizer has [3]",
       [&](StateDict& d) { d["1.exp_avg"] = Tensor::ones({2}, f32, device); }},
      {"tensor '1.exp_avg' in the state dict is of i32, the moment is of f32",
       [&](StateDict& d) { d["1.exp_avg"] = Tensor::ones({3}, i32, device); }},
      {"tensor 'steps' in the state dict is of f32, the number is of i64",
       [&](StateDict& d) { d["steps"] = Tensor::ones({}, f32, device); }},
      {"load: 'steps' is -1, expected 0 to 2^53",
       [&](StateDict& d) { d["steps"] = Tensor::full({}, -1, i64, device); }},
      {"load: '1.weight_decay' is inf, expected a finite number",
       [&](StateDict& d) { d["1.weight_decay"] = Tensor::full({}, INFINITY, f64, device); }},
      {"the rows of rank 1 of 2, but this is rank 0 of 1",
       [&](StateDict& d) {
         d["1.exp_avg"] = {Tensor::ones({1}, f32, device), ShardSpec{{3}, 2, 1}};
       }},
  };
  for (const Bad& bad : table) {
    StateDict state = good;
    bad.change(state);
    const std::string said = thrown_by([&] { s.optimizer.load(s.bag, state); });
    INFO(said);
    CHECK(said.find(bad.said) != std::string::npos);
    CHECK(said.find('\n') == std::string::npos);
    CHECK(bytes_of(s.optimizer.state_dict(s.bag)) == before);
  }
  const nn::LoadReport report = s.optimizer.load(
      s.bag, {{"steps", Tensor::full({}, 7, i64, device)}, {"x", Tensor::ones({1}, f32, device)}},
      {.strict = false});
  CHECK(s.optimizer.steps() == 7);
  CHECK(report.unexpected == std::vector<std::string>{"x"});
  CHECK(report.missing.size() == 9);
}

TEST_CASE("the model that names an optimizer's parameters has to hold all of them", "[optim]") {
  Stepped s;
  Bag other(std::vector<Shape>{{2}});
  other.materialize(Device::cpu());
  CHECK(thrown_by([&] { s.optimizer.state_dict(other); }) ==
        "Optimizer::state_dict: parameter '0' of the optimizer is not in the model; give the "
        "module that holds all its parameters");
  CHECK(thrown_by([&] {
          s.optimizer.load(other, StateDict());
        }).starts_with("Optimizer::load: parameter"));
}

TEST_CASE("parameters that come later begin without moments, and the others go on", "[optim]") {
  const Values g{1, 2, 3};
  Bag one({{3}, {3}}), both({{3}, {3}});
  for (Bag* const bag : {&one, &both}) bag->materialize(Device::cpu());
  optim::AdamW late({one.items[0]}, {.weight_decay = 0.5}),
      early(both.parameters(), {.weight_decay = 0.5});
  give_gradients(one, {{0, g}});
  give_gradients(both, {{0, g}});
  for (optim::Optimizer* const o :
       {static_cast<optim::Optimizer*>(&late), static_cast<optim::Optimizer*>(&early)}) {
    o->step();
    o->zero_grad();
  }
  CHECK_THROWS_AS(late.add_parameters({one.items[1], Parameter()}), ContractError);
  CHECK_THROWS_AS(late.moments(one.items[1]), ContractError);
  late.add_parameters({one.items[0], one.items[1]});
  give_gradients(one, {{0, g}, {1, g}});
  give_gradients(both, {{0, g}, {1, g}});
  late.step();
  early.step();
  for (const std::size_t i : {0u, 1u}) {
    CHECK(get(one.items[i]) == get(both.items[i]));
    CHECK(late.moments(one.items[i])[1].to_vector<float>() ==
          early.moments(both.items[i])[1].to_vector<float>());
  }
}
