// Values of parameters are read everywhere and written through one call: Parameter::edit.
#include <functional>
#include <map>
#include <stdexcept>

#include "runtime/param/parameter_state.hpp"
#include "runtime/tensor/launch.hpp"
#include "tessera/autograd/ops.hpp"
#include "tessera/param/parameter.hpp"
#include "tessera/tensor/ops.hpp"
#include "tests/autograd/helpers.hpp"
#include "tests/support/thrown.hpp"

using namespace tessera;
using Catch::Matchers::Contains;
using tessera::testing::thrown_by;

namespace {

struct Whole {
  Device device = Device::cpu({.executor = ExecutorKind::inlined});
  Parameter w{{2, 2}, Initializer::constant(0)}, other{{5}, Initializer::constant(0)};

  Whole() {
    state_of(w)->name = "layer.weight";
    state_of(other)->name = "other";
    materialize_whole("model", {w, other}, device);
    w.assign(two_by_two());
  }
  Tensor two_by_two() const { return Tensor::from({1, 2, 3, 4}, {2, 2}, device); }
};

using Write = std::function<void(const Tensor& out)>;

// Whatever writes to an operand that it is given, and something written outside of the library.
std::map<std::string, Write> writes(const Device& device) {
  using enum raw::Transpose;
  const Tensor x = Tensor::ones({2, 2}, f32, device);
  const Tensor index = Tensor::from(std::vector<std::int32_t>{0, 1}, {2}, device),
               grid = Tensor::from(std::vector<std::int32_t>{0, 1, 1, 0}, {2, 2}, device);
  return {
      {"fill", [](const Tensor& out) { raw::fill(out, 7); }},
      {"copy_into", [x](const Tensor& out) { raw::copy_into(out, x); }},
      {"copy_into, strided",
       [x](const Tensor& out) { raw::copy_into(raw::transpose(out, 0, 1), x); }},
      {"copy_into, cast", [x](const Tensor& out) { raw::copy_into(out, raw::cast(x, bf16)); }},
      {"normal_into", [](const Tensor& out) { raw::normal_into(out, 0, 1, 5, 0); }},
      {"axpby", [x](const Tensor& out) { raw::axpby(out, x, 2, 1); }},
      {"matmul_into", [x](const Tensor& out) { raw::matmul_into(out, x, x, no, no, 1, 0); }},
      {"matmul_gelu_into",
       [x](const Tensor& out) { raw::matmul_gelu_into(raw::mul(x, 1), out, x, x, no, no); }},
      {"index_add_into", [=](const Tensor& out) { raw::index_add_into(out, 0, index, x); }},
      {"scatter_add_into", [=](const Tensor& out) { raw::scatter_add_into(out, 0, grid, x); }},
      {"sumsq_into",
       [x](const Tensor& out) {
         raw::sumsq_into(raw::reshape(raw::slice(raw::slice(out, 0, 0, 1), 1, 0, 1), {}), x,
                         raw::Accumulate::no);
       }},
      {"an operation of one's own",
       [](const Tensor& out) {
         detail::launch_body("mine", out.device(),
                             [to = out.data()](Exec&) { std::fill_n(to, 4, std::byte{1}); },
                             {detail::writes(out)});
       }},
  };
}

}  // namespace

TEST_CASE("no operation writes to a parameter but in its edit") {
  const Whole m;
  for (const auto& [name, write] : writes(m.device)) {
    INFO(name);
    const std::vector<Tensor> handles = {m.w.shard(), m.w.value(), m.w.value().detach(),
                                         raw::contiguous(m.w.shard()), raw::cast(m.w.shard(), f32)};
    for (const Tensor& handle : handles)
      CHECK_THAT(thrown_by([&] { write(handle); }),
                 Contains("parameter 'layer.weight' is read-only") && Contains("Parameter::edit"));
    CHECK(m.w.shard().to_vector<float>() == std::vector<float>{1, 2, 3, 4});
    m.w.edit([&](const Tensor& rows) { write(rows); });
    CHECK(m.w.shard().to_vector<float>() != std::vector<float>{1, 2, 3, 4});
    m.w.assign(m.two_by_two());
  }
  CHECK(sum(m.other.value()).item() == 0);
}

TEST_CASE("what an edit gives can't be kept") {
  const Whole m;
  Tensor kept, thrown;
  m.w.edit([&](const Tensor& rows) { kept = raw::transpose(rows, 0, 1); });
  const auto fails = [&](const Tensor& rows) {
    thrown = rows;
    raw::fill(rows, 9);
    throw std::runtime_error("the callback's own");
  };
  CHECK_THROWS_WITH(m.w.edit(fails), "the callback's own");
  for (const Tensor& tensor : {kept, thrown}) {
    CHECK_THAT(thrown_by([&] { tensor.to_vector<float>(); }), Contains("Parameter::edit"));
    CHECK_THAT(thrown_by([&] { raw::fill(tensor, 1); }), Contains("lent for the callback"));
  }
  CHECK(m.w.shard().to_vector<float>() == std::vector<float>(4, 9));  // what it had written
}

TEST_CASE("assign takes this rank's rows, and refuses what they are not") {
  const Whole m;
  m.w.assign(raw::cast(Tensor::from({5, 6, 7, 8}, {2, 2}, m.device), bf16));
  CHECK(m.w.shard().to_vector<float>() == std::vector<float>{5, 6, 7, 8});
  const auto refused = [&](const Tensor& values) { return thrown_by([&] { m.w.assign(values); }); };
  CHECK_THAT(refused(Tensor::ones({4}, f32, m.device)),
             Contains("'layer.weight' is assigned [4] of f32") && Contains("[2, 2]"));
  CHECK_THAT(refused(Tensor::ones({2, 2}, i64, m.device)), Contains("of i64"));
  CHECK_THAT(refused(Tensor::ones({2, 2}, f32, Device::cpu())), Contains("different devices"));
  CHECK_THAT(refused({}), Contains("undefined"));
  CHECK(m.w.shard().to_vector<float>() == std::vector<float>{5, 6, 7, 8});
}

TEST_CASE("an edit before a backward whose forward has read older values is an error") {
  const Whole m;
  const auto edits = {
      std::function([&] { m.w.assign(m.two_by_two()); }),
      std::function([&] { m.w.edit([](const Tensor&) {}); }),  // what it wrote is not asked
  };
  for (const auto& edit : edits) {
    const Tensor before = sum(m.w.value() * m.w.value());
    edit();
    CHECK_THAT(thrown_by([&] { before.backward(); }),
               Contains("written by 'Parameter::edit' since forward"));
    sum(m.w.value() * m.w.value()).backward();
  }
}

TEST_CASE("a parameter without memory is neither read nor edited") {
  const Parameter p({3}, Initializer::constant(0));
  state_of(p)->name = "head.weight";
  for (const std::string& what :
       {thrown_by([&] { p.shard(); }), thrown_by([&] { p.edit([](const Tensor&) {}); }),
        thrown_by([&] { p.assign(Tensor::ones({3}, f32, Device::cpu())); })})
    CHECK_THAT(what, Contains("'head.weight' has no memory yet"));
}
