// Making tensors and reading them back; joining them; what `meta` and planning give; refusals.
#include <cmath>
#include <future>
#include <memory>
#include <span>
#include <stdexcept>
#include <vector>

#include "tessera/device/device_context.hpp"
#include "tessera/tensor/make.hpp"
#include "tests/support/seed.hpp"
#include "tests/tensor/host.hpp"

using namespace tessera;
using namespace tessera::testing;

TEST_CASE("tensors are made from values, constants and ranges") {
  const Device device = any_device();
  CHECK(Tensor::from({1, 2, 3, 4}, {2, 2}, device).to_vector<float>() ==
        std::vector<float>{1, 2, 3, 4});
  CHECK(Tensor::from(std::vector<std::int64_t>{-1, 1ll << 60}, {2}, device)
            .to_vector<std::int64_t>() == std::vector<std::int64_t>{-1, 1ll << 60});
  for (const DType dtype : {f32, f64, bf16, f16, i32, i64, boolean}) {
    INFO(dtype);
    check_values(Tensor::full({2, 2}, 1, dtype, device), dtype, {{2, 2}, {1, 1, 1, 1}});
    check_values(Tensor::zeros({3}, dtype, device), dtype, {{3}, {0, 0, 0}});
    check_values(Tensor::ones({}, dtype, device), dtype, {{}, {1}});
    check_values(Tensor::ones({2, 0}, dtype, device), dtype, {{2, 0}, {}});
    if (dtype != boolean)
      check_values(Tensor::arange(5, dtype, device), dtype, {{5}, {0, 1, 2, 3, 4}});
  }
  CHECK(Tensor::arange(0, f32, device).numel() == 0);
  CHECK_FALSE(Tensor().defined());
}

TEST_CASE("values on their way to the device are booked as batch until the copy is submitted") {
  const Device device = any_device();
  Ledger& ledger = Memory::of(device).ledger();
  const Tensor x = Tensor::from(std::vector<float>(1000, 1), {1000}, device);
  CHECK(ledger.live_bytes("host staging") == 0);
  CHECK(ledger.live_bytes() == 4096);
  CHECK(ledger.peak_bytes() == 2 * 4096);
}

TEST_CASE("random tensors depend on key and index only and have the moments asked for") {
  const Device device = any_device();
  const std::uint64_t key = fresh_seed();
  INFO("key " << key);
  const std::int64_t n = 100000;
  const auto moments = [](const std::vector<double>& v) {
    double sum = 0, squares = 0;
    for (const double x : v) {
      sum += x;
      squares += x * x;
    }
    const double mean = sum / static_cast<double>(v.size());
    return std::pair(mean, std::sqrt(squares / static_cast<double>(v.size()) - mean * mean));
  };
  const auto normal = Tensor::normal({n}, 2, 0.5, key, f64, device).to_vector<double>();
  const auto [mean, deviation] = moments(normal);
  // Standard errors: 0.5 / sqrt(n) = 0.0016 for the mean, that over sqrt(2) for the deviation; six
  // of them are left by chance once in 5e8.
  CHECK(std::abs(mean - 2) < 6 * 0.0016);
  CHECK(std::abs(deviation - 0.5) < 6 * 0.0012);
  const auto uniform = Tensor::uniform({n}, -1, 3, key, f64, device).to_vector<double>();
  CHECK(*std::min_element(uniform.begin(), uniform.end()) >= -1);
  CHECK(*std::max_element(uniform.begin(), uniform.end()) < 3);
  // The deviation of a uniform variable is its width / sqrt(12) = 1.155.
  CHECK(std::abs(moments(uniform).first - 1) < 6 * 1.155 / std::sqrt(static_cast<double>(n)));

  CHECK(Tensor::normal({100, n / 100}, 2, 0.5, key, f64, device).to_vector<double>() == normal);
  CHECK(Tensor::normal({n}, 2, 0.5, key + 1, f64, device).to_vector<double>() != normal);
  const auto narrow = Tensor::normal({10}, 2, 0.5, key, f32, device).to_vector<float>();
  for (std::size_t i = 0; i < 10; ++i) CHECK(narrow[i] == static_cast<float>(normal[i]));
}

TEST_CASE("item reads one value of any dtype") {
  const Device device = any_device();
  CHECK(Tensor::full({}, 2.5, f32, device).item() == 2.5);
  CHECK(Tensor::full({1, 1}, -3, bf16, device).item() == -3);
  CHECK(Tensor::full({1}, 7, i64, device).item() == 7);
  CHECK(Tensor::ones({}, boolean, device).item() == 1);
  CHECK(raw::slice(Tensor::arange(5, f64, device), 0, 3, 4).item() == 3);
  CHECK(Tensor::full({}, 1, f32, device).item(9.0) == 1);  // a stand-in is for planning only
  CHECK_THROWS_WITH(Tensor::zeros({2}, f32, device).item(), Catch::Contains("2 elements"));
  CHECK_THROWS_WITH(Tensor::zeros({2}, f32, device).to_vector<double>(),
                    Catch::Contains("f32") && Catch::Contains("f64"));
  CHECK_THROWS_WITH(Tensor().shape(), Catch::Contains("undefined tensor"));
}

TEST_CASE("cat joins tensors of any layout along any dimension") {
  const Device device = any_device();
  Draw draw;
  for (const DType dtype : {f32, bf16, i64, boolean})
    for (const View& view : same_shape_views())
      for (int dim = -3; dim < 3; ++dim) {
        INFO(view.name << ", " << dtype << ", dimension " << dim << ", seed " << draw.seed);
        const int d = normalize_dim(dim, 3);
        const Pair a = draw(view, dtype, device);
        const Pair b = draw(Shape{2, 3, 4}.with(d, 5), dtype, device);
        const Pair c = draw(Shape{2, 3, 4}.with(d, 0), dtype, device);
        const Shape shape = a.host.shape.with(d, a.host.shape[d] + 5);
        const Host expected = Host::build(shape, [&](Shape at) {
          if (at[d] < a.host.shape[d]) return a.host.at(at);
          at[d] -= a.host.shape[d];
          return b.host.at(at);
        });
        check_values(raw::cat(std::vector{a.tensor, c.tensor, b.tensor}, dim), dtype, expected);
      }
  const Tensor x = Tensor::zeros({2, 3}, f32, device);
  CHECK_THROWS_WITH(raw::cat(std::vector{x, Tensor::zeros({3, 3}, f32, device)}, 1),
                    Catch::Contains("[3, 3]") && Catch::Contains("[2, 3]"));
  CHECK_THROWS_WITH(raw::cat(std::vector{x, Tensor::zeros({2, 3}, f64, device)}, 0),
                    Catch::Contains("f64"));
  CHECK_THROWS_WITH(raw::cat(std::vector<Tensor>{}, 0), Catch::Contains("no tensors"));
}

TEST_CASE("on meta there are shapes and dtypes but neither memory nor values") {
  const Device meta = Device::meta();
  const Tensor x = Tensor::empty({std::int64_t{1} << 40, 3}, f32, meta);
  CHECK(x.data() == nullptr);
  CHECK(raw::add(x, x).shape() == x.shape());
  CHECK(raw::matmul(x, Tensor::empty({3, 5}, f32, meta)).shape() ==
        Shape{std::int64_t{1} << 40, 5});
  CHECK(raw::reduce(raw::Reduction::argmax, x, 1).dtype() == i64);
  CHECK(raw::reduce_all(raw::Reduction::sum, x).shape() == Shape{});
  CHECK(raw::binary(raw::Binary::lt, x, 0.0).dtype() == boolean);
  CHECK(raw::cast(x, bf16).dtype() == bf16);
  CHECK(raw::softmax(x).shape() == x.shape());
  CHECK(raw::cat(std::vector{x, x}, 1).shape() == Shape{std::int64_t{1} << 40, 6});
  CHECK(raw::contiguous(raw::transpose(x, 0, 1)).shape() == Shape{3, std::int64_t{1} << 40});
  CHECK(x.to_string() == "meta [1099511627776, 3] f32");
  CHECK_THROWS_WITH(Tensor::zeros({}, f32, meta).item(), Catch::Contains("materialize"));
}

TEST_CASE("planning has no values: reading one throws unless a stand-in is given") {
  const Device device = Device::cpu({.executor = ExecutorKind::virtual_});
  const Tensor x = Tensor::zeros({1 << 20, 1 << 20}, f32, device);  // 4 TiB
  const Tensor y = raw::reduce_all(raw::Reduction::sum, raw::add(x, x));
  CHECK_THROWS_WITH(y.item(), Catch::Contains("planning") && Catch::Contains("stand-in"));
  CHECK(y.item(2.5) == 2.5);
  CHECK_THROWS_AS(y.to_vector<float>(), ContractError);
  CHECK(y.to_string() == "meta [] f32");
  // The host learns what it would have learnt from reading.
  CHECK(device.context().host_clock()[StreamId::compute] ==
        device.compute().clock()[StreamId::compute]);
}

TEST_CASE("reading that gives up before its copy has run leaves the reader's memory alone",
          "[threads]") {
  struct GivesUp final : Observer {
    void blocked(const Event&) override {
      if (armed) throw std::runtime_error("given up");
    }
    bool armed = false;
  };
  const Device device = Device::cpu({.executor = ExecutorKind::threaded});
  const auto gives_up = std::make_shared<GivesUp>();
  device.context().add_observer(gives_up);
  const Tensor x = Tensor::ones({1000}, f32, device);
  std::promise<void> opened;
  const std::future<void> gate = opened.get_future();
  device.compute().launch({.name = "gate"}, [gate = &gate](Exec&) { gate->wait(); });
  std::vector<float> out(1000, 7);
  gives_up->armed = true;
  CHECK_THROWS_WITH(x.to_bytes(std::as_writable_bytes(std::span(out))), "given up");
  gives_up->armed = false;
  opened.set_value();
  device.synchronize();
  CHECK(out == std::vector<float>(1000, 7));
}

TEST_CASE("whole numbers take no fraction: it would be cut off in silence") {
  const Device device = Device::cpu();
  const Tensor n = Tensor::arange(3, i32, device);
  for (const raw::Binary op : {raw::Binary::mul, raw::Binary::add, raw::Binary::lt})
    for (const double number : {0.5, std::nan("")})
      CHECK_THROWS_WITH(raw::binary(op, n, number), Catch::Contains("no whole number") &&
                                                        Catch::Contains("i32") &&
                                                        Catch::Contains("cast the tensor"));
  CHECK(raw::mul(n, 2.0).to_vector<std::int32_t>() == std::vector<std::int32_t>{0, 2, 4});
  CHECK_THROWS_WITH(Tensor::uniform({3}, 0, 1, 1, i32, device), Catch::Contains("floating"));
}

TEST_CASE("a range that its dtype cannot count is refused, and not cut off at its end") {
  const Device device = Device::cpu();
  CHECK_THROWS_WITH(arange(0, 5e9, 2e9, i32, device),
                    Catch::Contains("arange: 0 to 4e+09") && Catch::Contains("wider dtype"));
  CHECK_THROWS_WITH(arange(5, -1, -1, boolean, device), Catch::Contains("bool"));
  CHECK_THROWS_WITH(randint(0, 5000000000, {3}, 1, i32, device),
                    Catch::Contains("the range of i32"));
  CHECK_THROWS_WITH(randint(0, 100000, {3}, 1, f16, device), Catch::Contains("the range of f16"));
  CHECK_THROWS_WITH(randint(0, 3, {3}, 1, boolean, device), Catch::Contains("0 to 1"));
  CHECK(randint(-2048, -2047, {1}, 1, f16, device).item() == -2048);
  CHECK(arange(-2147483648., -2147483647., 1, i32, device).item() == -2147483648.);
  CHECK_THROWS_WITH(Tensor::uniform({3}, 1, 0, 1, f32, device),
                    "uniform: [1, 0) holds no number; give the lower end first");
}

TEST_CASE("operands that do not fit are refused with operation, values and remedy") {
  const Device device = Device::cpu({.executor = ExecutorKind::inlined});
  const Device other = Device::cpu({.executor = ExecutorKind::inlined});
  const Tensor a = Tensor::zeros({2, 3}, f32, device), b = Tensor::zeros({2, 3}, f32, other),
               c = Tensor::zeros({2, 3}, f64, device), d = Tensor::zeros({4}, f32, device),
               i = Tensor::zeros({2, 3}, i64, device);
  using Catch::Contains;
  CHECK_THROWS_WITH(raw::add(a, b), Contains("add") && Contains("different devices"));
  CHECK_THROWS_WITH(raw::add(a, Tensor::zeros({2, 3}, f32, Device::meta())),
                    Contains("different devices"));
  CHECK_THROWS_WITH(raw::mul(a, c), Contains("mul") && Contains("f32") && Contains("f64") &&
                                        Contains("cast one of them"));
  CHECK_THROWS_WITH(raw::add(a, d), Contains("[2, 3]") && Contains("[4]"));
  CHECK_THROWS_WITH(raw::exp(i), Contains("exp") && Contains("i64") && Contains("cast"));
  CHECK_THROWS_WITH(raw::where(a, a, a), Contains("where") && Contains("bool"));
  CHECK_THROWS_WITH(raw::where(raw::logical_not(a), a, c), Contains("f64"));
  CHECK_THROWS_WITH(raw::where(raw::logical_not(b), a, a), Contains("different devices"));
  CHECK_THROWS_WITH(raw::swiglu(a, d), Contains("swiglu") && Contains("[4]"));
  CHECK_THROWS_AS(raw::axpby(a, d, 1, 1), ContractError);
  CHECK_THROWS_WITH(Tensor::from({1, 2}, {3}, device), Contains("8 bytes") && Contains("[3]"));
  CHECK_THROWS_AS(Tensor::zeros({2, -1}, f32, device), ContractError);
  CHECK_THROWS_WITH(Tensor::zeros({std::int64_t{1} << 62, 2}, f32, device), Contains("overflow"));
}
