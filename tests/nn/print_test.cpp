// A module as a tree.
#include <sstream>

#include "tessera/nn/gpt2.hpp"
#include "tests/nn/helpers.hpp"

using namespace tessera;

namespace {

struct Printed : nn::Module {
  Printed() {
    frozen.weight.freeze();
    register_parameter("scale", scale);
    register_buffer("mean", mean);
    register_buffer("mask", mask, nn::Persistent::no);
    register_module("up", up);
    register_module("same", up);
    register_module("frozen", frozen);
  }
  Parameter scale{Shape{}, Initializer::constant(1)};
  nn::Buffer mean{{1500}, Initializer::constant(0)};
  nn::Buffer mask{{2, 2}, Initializer::constant(0), boolean};
  nn::Linear up{1, 3, nn::LinearOptions{.bias = false}}, frozen{2, 2};
};

}  // namespace

TEST_CASE("a module prints its tree, with kinds, shapes and bytes", "[nn]") {
  Printed module;
  CHECK(module.to_string() ==
        "Printed: 4 parameters, 10 elements, 40 bytes, on meta\n"
        "├─ scale      f32 []       4 bytes\n"
        "├─ mean       f32 [1500]   6,000 bytes, buffer\n"
        "├─ mask       bool [2, 2]  4 bytes, buffer, not saved\n"
        "├─ up         Linear\n"
        "│  └─ weight  f32 [3, 1]   12 bytes\n"
        "├─ same       Linear, shown above\n"
        "└─ frozen     Linear\n"
        "   ├─ weight  f32 [2, 2]   16 bytes, frozen\n"
        "   └─ bias    f32 [2]      8 bytes\n");
  module.materialize(Device::cpu());
  std::ostringstream out;
  out << module;
  CHECK(out.str().starts_with("Printed: 4 parameters, 10 elements, 40 bytes\n"));
}

TEST_CASE("blocks that are alike are printed once, and a tied weight says whose it is", "[nn]") {
  const nn::Gpt2 model({.dim = 6, .n_layers = 12, .n_heads = 3, .vocab_size = 7, .max_seq_len = 3});
  const std::string text = model.to_string();
  INFO(text);
  CHECK(text.find("│  │  └─ 0 to 11          Gpt2Block, 12 alike\n") != std::string::npos);
  CHECK(text.find("   └─ weight              f32 [7, 6]   is transformer.wte.weight\n") !=
        std::string::npos);
  CHECK(std::count(text.begin(), text.end(), '\n') == 35);
}
