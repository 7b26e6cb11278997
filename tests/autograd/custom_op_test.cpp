// Operations of one's own: what CustomOp does around a body, on every executor.
#include <algorithm>
#include <cmath>

#include "tessera/autograd/custom_op.hpp"
#include "tessera/autograd/recompute.hpp"
#include "tessera/device/device_context.hpp"
#include "tessera/device/observe/race_checker.hpp"
#include "tests/autograd/helpers.hpp"

using namespace tessera;
using autograd::Gradients;
using autograd::Saved;
using Catch::Matchers::Contains;
using tessera::testing::any_device;
using tessera::testing::check_gradients;
using tessera::testing::Draw;

namespace {

// x y + 1.
Tensor multiply_add(const Tensor& x, const Tensor& y,
                    const std::source_location& line = std::source_location::current()) {
  const CustomOp op("multiply_add", line);
  const Tensor out = op.map([](auto a, auto b) { return a * b + 1; }, x, y);
  return op.record({x, y}, out, [op, x = Saved(x), y = Saved(y)](const Tensor& g, Gradients& to) {
    const auto product = [](auto a, auto b) { return a * b; };
    if (to.wants(0)) to.set(0, raw::sum_to(op.map(product, g, y.get()), x.get().shape()));
    if (to.wants(1)) to.set(1, raw::sum_to(op.map(product, g, x.get()), y.get().shape()));
  });
}

// The columns of x [rows, n] in reverse.
Tensor reversed(const Tensor& x) {
  const CustomOp op("reversed");
  return op.run(
      x.shape(), x.size(0),
      [n = x.size(1)]<class T>(std::int64_t row, T* out, const T* in) {
        std::reverse_copy(in + row * n, in + (row + 1) * n, out + row * n);
      },
      x);
}

}  // namespace

TEST_CASE("a body of one's own runs in every floating dtype, on any layout") {
  const Device device = any_device();
  const Tensor x = Tensor::from({1, 2, 3, 4, 5, 6}, {2, 3}, device);
  for (const DType dtype : {f32, f64, bf16, f16}) {
    const Tensor strided = raw::transpose(raw::cast(x, dtype), 0, 1);  // [3, 2]
    const Tensor row = raw::cast(Tensor::from({1, 0.5}, {2}, device), dtype);
    const Tensor y = multiply_add(strided, row);
    INFO(dtype);
    CHECK(y.dtype() == dtype);
    CHECK(y.is_contiguous());
    CHECK(raw::cast(y, f32).to_vector<float>() == std::vector<float>{2, 3, 3, 3.5, 4, 4});
    CHECK(raw::cast(reversed(strided), f32).to_vector<float>() ==
          std::vector<float>{4, 1, 5, 2, 6, 3});
  }
  CHECK(multiply_add(Tensor::zeros({0, 3}, f32, device), raw::slice(x, 0, 0, 1)).shape() ==
        Shape{0, 3});
}

TEST_CASE("16-bit elements are computed in float and rounded once") {
  const Device device = any_device();
  const Tensor x = raw::cast(Tensor::from({3}, {1}, device), bf16);
  const Tensor y = CustomOp("triple").map([](auto v) { return (v + 0.001F) * 1000 - 3000; }, x);
  CHECK(raw::cast(y, f32).to_vector<float>()[0] ==
        static_cast<float>(BFloat16(3.001F * 1000 - 3000)));
}

TEST_CASE("derivatives of an operation of one's own") {
  Draw draw;
  INFO("seed " << draw.seed);
  const auto f = [](const std::vector<Tensor>& v) { return multiply_add(v[0], v[1]); };
  check_gradients(f, {draw.normal({3, 2}), draw.normal({2})});
  check_gradients(f, {draw.normal({}), draw.normal({2, 1, 3})});
  check_gradients(f, {draw.normal({0, 2}), draw.normal({1, 2})});
  const auto again = [](std::span<const Tensor> in) { return multiply_add(in[0], in[1]) * 2.0; };
  check_gradients([&](const auto& v) { return recompute(again, {transpose(v[0], 0, 1), v[1]}); },
                  {draw.normal({2, 3}), draw.normal({3, 1})});
}

TEST_CASE("an operation of one's own needs no memory on meta, and runs no body in a plan") {
  const Tensor x = Tensor::empty({4, 3}, bf16, Device::meta());
  CHECK(multiply_add(x, x).shape() == Shape{4, 3});
  CHECK(reversed(x).dtype() == bf16);
  const Device planned = Device::cpu({.executor = ExecutorKind::virtual_});
  CHECK(reversed(Tensor::empty({4, 3}, f32, planned)).shape() == Shape{4, 3});
}

TEST_CASE("the race checker sees what a body of one's own touches") {
  const auto checker = RaceChecker::make();
  const Device device = Device::cpu({.executor = ExecutorKind::inlined});
  checker->watch(device.context());
  const Tensor x = Tensor::zeros({4, 3}, f32, device);
  const Tensor y = reversed(x);
  CHECK(checker->race_count() == 0);
  const Stream other = device.stream(StreamId::gather);
  const Access writes_x = x.access(AccessMode::write), reads_y = y.access(AccessMode::read);
  other.launch({.name = "writer", .accesses = {&writes_x, 1}}, [](Exec&) {});
  other.launch({.name = "reader", .accesses = {&reads_y, 1}}, [](Exec&) {});
  std::string races;
  for (const Race& race : checker->races()) races += race.to_string() + ' ';
  CHECK_THAT(races, Contains("'writer' on gather (rank 0, tick 1) may write while 'reversed' on "
                             "compute (rank 0, tick 2) may read"));
  CHECK_THAT(races, Contains("'reader' on gather (rank 0, tick 2) may read while 'reversed' on "
                             "compute (rank 0, tick 2) may write"));
  const std::uint64_t found = checker->race_count();
  other.wait(device.compute().record());
  other.launch({.name = "ordered", .accesses = {&writes_x, 1}}, [](Exec&) {});
  CHECK(checker->race_count() == found);
}

// The largest of each row of x [rows, n], its place, and what `of` [rows], if any, adds.
std::array<Tensor, 2> largest(const Tensor& x, const Tensor& of,
                              const std::source_location& line = std::source_location::current()) {
  using Op = CustomOp;
  const Op op("largest", line);
  const std::int64_t rows = x.size(0), n = x.size(1);
  const auto found = op.run(
      rows,
      [n](std::int64_t row, float* value, std::int32_t* place, const float* from,
          const double* of) {
        const float* const begin = from + row * n;
        const float* const most = std::max_element(begin, begin + n);
        value[row] = *most + (of ? static_cast<float>(of[row]) : 0.F);
        place[row] = static_cast<std::int32_t>(most - begin);
      },
      Op::Out<float>{{rows}}, Op::Out<std::int32_t>{{rows}}, Op::In<float>{x}, Op::In<double>{of});
  return op.record({x}, found,
                   [rows, n, place = found[1]](std::span<const Tensor> g, Gradients& to) {
                     const Tensor ids = raw::reshape(raw::cast(place, f32), {rows, 1});
                     const Tensor here = Tensor::arange(n, f32, place.device());
                     to.set(0, raw::where(ids == here, raw::reshape(g[0], {rows, 1}),
                                          Tensor::zeros({}, f32, place.device())));
                   });
}

TEST_CASE("an operation of one's own has results and inputs of several dtypes, or none") {
  const Device device = any_device();
  Tensor x = Tensor::from({1, 5, 3, 4, 2, 6}, {2, 3}, device).require_grad();
  const Tensor more = raw::cast(Tensor::from({10, 20}, {2}, device), f64);
  const auto [value, place] = largest(x, more);
  CHECK(value.to_vector<float>() == std::vector<float>{15, 26});
  CHECK(place.to_vector<std::int32_t>() == std::vector<std::int32_t>{1, 2});
  CHECK(largest(x, {})[0].to_vector<float>() == std::vector<float>{5, 6});
  CHECK(value.requires_grad());
  CHECK_FALSE(place.requires_grad());
  value.backward(Tensor::from({2, 3}, {2}, device));
  CHECK(x.grad().to_vector<float>() == std::vector<float>{0, 2, 0, 0, 0, 3});
  const auto planned = largest(Tensor::empty({4, 3}, f32, Device::meta()), {});
  CHECK((planned[0].shape() == Shape{4} && planned[1].dtype() == i32));
  CHECK_FALSE(largest(x.detach(), {})[0].requires_grad());
  std::string said;
  try {
    largest(x, raw::cast(more, f32));
  } catch (const ContractError& error) {
    said = error.what();
  }
  CHECK_THAT(said, Contains("largest: input 1 is f32, its body takes f64; cast it first "
                            "(custom_op_test.cpp"));
}

TEST_CASE("a body has as many operands as it wants, and each is known to the race checker") {
  using Op = CustomOp;
  const auto checker = RaceChecker::make();
  const Device device = Device::cpu({.executor = ExecutorKind::inlined});
  checker->watch(device.context());
  const Tensor x = Tensor::from({1, 2}, {2}, device);
  const Op op("add_many");
  const Op::In<float> in{x};
  const auto [y] = op.run(
      2, [](std::int64_t i, float* out, const auto*... from) { out[i] = (from[i] + ...); },
      Op::Out<float>{{2}}, in, in, in, in, in, in, in, in, in, in, in, in, in, in, in, in, in, in,
      Op::In<float>{Tensor::from({100, 200}, {2}, device)});
  const Stream other = device.stream(StreamId::gather);
  const Access writes_x = x.access(AccessMode::write);
  other.launch({.name = "writer", .accesses = {&writes_x, 1}}, [](Exec&) {});
  CHECK(checker->race_count() > 0);  // which nothing has ordered yet, as the host does now
  CHECK(y.to_vector<float>() == std::vector<float>{118, 236});
}

TEST_CASE("a misuse of an operation of one's own names it and the line that called it") {
  const Device device = Device::cpu({.executor = ExecutorKind::inlined});
  const Tensor x = Tensor::zeros({2, 3}, f32, device);
  const auto message_of = [](const auto& f) {
    try {
      f();
    } catch (const ContractError& error) {
      return std::pair(std::string(error.what()), error.where().line());
    }
    return std::pair(std::string("no error"), std::uint_least32_t{0});
  };
  const auto line = std::source_location::current().line() + 1;
  const auto [message, where] = message_of([&] { multiply_add(x, raw::cast(x, i32)); });
  CHECK(message == concat("multiply_add: input 1 is i32, expected f32, f64, bf16 or f16; cast it "
                          "first (custom_op_test.cpp:",
                          line, ")"));
  CHECK(where == line);
  CHECK_THAT(
      message_of([&] { multiply_add(x, raw::cast(x, f64)); }).first,
      Contains("multiply_add: input 0 is f32, input 1 f64; cast one of them (custom_op_test"));
  CHECK_THAT(message_of([&] { multiply_add(x, Tensor::zeros({2}, f32, device)); }).first,
             Contains("multiply_add: shapes [2, 3] and [2] do not broadcast (custom_op_test"));
  CHECK_THAT(message_of([&] { multiply_add(x, {}); }).first, Contains("input 1 is undefined"));
  CHECK_THAT(message_of([&] { multiply_add(x, Tensor::zeros({3}, f32, Device::meta())); }).first,
             Contains("another device"));
  CHECK_THAT(message_of([&] { CustomOp("mine").expect(false, "n is ", 3); }).first,
             Contains("mine: n is 3 (custom_op_test.cpp:"));
}

TEST_CASE("a gradient that would only broadcast to its input names the operation and both shapes") {
  const Device device = any_device();
  // Of `results` results; backward gives input 1 a gradient of `given`.
  const auto give = [&](const Shape& given, int results, bool is_leaf) {
    const CustomOp op("scaled");
    const Tensor x = Tensor::ones({2, 3}, f32, device).require_grad(),
                 y = Tensor::ones({2, 3}, f32, device).require_grad(), by = is_leaf ? y : y * 2.0;
    const auto set = [given, device](Gradients& to) {
      to.set(1, Tensor::ones(given, f32, device));
    };
    Tensor out = Tensor::ones({2, 3}, f32, device);
    if (results == 1)
      out = op.record({x, by}, out, [set](const Tensor&, Gradients& to) { set(to); });
    else
      out = op.record({x, by}, std::array{out, Tensor::ones({}, f32, device)},
                      [set](std::span<const Tensor>, Gradients& to) { set(to); })[0];
    sum(out).backward();
    return y;
  };
  for (const int results : {1, 2})
    for (const bool is_leaf : {true, false}) {
      CHECK(give({2, 3}, results, is_leaf).grad().shape() == Shape{2, 3});
      for (const auto& [shape, text] :
           {std::pair(Shape{3}, "[3]"), std::pair(Shape{2, 1}, "[2, 1]"), std::pair(Shape{}, "[]"),
            std::pair(Shape{1, 2, 3}, "[1, 2, 3]")})
        CHECK_THROWS_WITH(give(shape, results, is_leaf),
                          Contains(concat("scaled: backward gives a gradient of ", text,
                                          " for input 1, which is [2, 3]; give one of the input's "
                                          "shape")));
    }
}

TEST_CASE("a gradient of another shape than its leaf's leaves the leaf as it was") {
  const Device device = any_device();
  const Tensor x = Tensor::ones({2, 3}, f32, device).require_grad();
  const auto backward = [&](const Shape& given) {
    sum(autograd::record(
            "raw", {x}, Tensor::ones({2, 3}, f32, device),
            [&](const Tensor&, Gradients& to) { to.set(0, Tensor::ones(given, f32, device)); }))
        .backward();
  };
  CHECK_THROWS_WITH(backward({3}), Contains("raw: backward gives a gradient of [3] for input 0"));
  CHECK_FALSE(x.grad().defined());
  backward({2, 3});
  CHECK_THROWS_AS(backward({2, 1}), ContractError);
  CHECK(x.grad().to_vector<float>() == std::vector<float>(6, 1));
}
