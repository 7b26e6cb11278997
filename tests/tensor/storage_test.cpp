// The dtypes of storage: 8-bit floats and bytes are made, moved, cast and printed, and nothing is
// computed in them; bytes are compared and indexed, too. Which value a float becomes:
// tests/base/dtype_test, tests/parity/fp8_golden_test.
#include <cmath>

#include "tessera/autograd/ops.hpp"
#include "tessera/tensor/dlpack.hpp"
#include "tessera/tensor/ops.hpp"
#include "tests/support/catch.hpp"

using namespace tessera;
using Catch::Contains;

namespace {

Tensor stored(const std::vector<float>& values, const Shape& shape, DType dtype,
              const Device& device) {
  return cast(Tensor::from(values, shape, device), dtype);
}

std::vector<float> stored_values(const Tensor& x) { return raw::cast(x, f32).to_vector<float>(); }

}  // namespace

TEST_CASE("8-bit floats move as other dtypes do") {
  const Device device = Device::cpu();
  for (const DType dtype : {e4m3, e5m2}) {
    const Tensor x = stored({1, 2, 3, 4, 5, 6}, {2, 3}, dtype, device);
    CHECK(x.dtype() == dtype);
    CHECK(stored_values(transpose(x, 0, 1)) == std::vector<float>{1, 4, 2, 5, 3, 6});
    CHECK(stored_values(raw::contiguous(transpose(x, 0, 1))) ==
          std::vector<float>{1, 4, 2, 5, 3, 6});
    CHECK(stored_values(slice(x, 1, 1, 3)) == std::vector<float>{2, 3, 5, 6});
    CHECK(stored_values(cat({x, x}, 0)).size() == 12);
    CHECK(stored_values(reshape(x, {3, 2})) == std::vector<float>{1, 2, 3, 4, 5, 6});
    CHECK(stored_values(Tensor::full({2}, 1e9, dtype, device))[0] ==
          (dtype == e4m3 ? 448 : INFINITY));
    CHECK(stored_values(Tensor::zeros({2}, dtype, device)) == std::vector<float>{0, 0});
    CHECK(slice(x, 1, 0, 1).to_string() == "[[1.]\n [4.]]");
    // The fewest digits that are read back as the same: 256 of e5m2 as 260.
    CHECK(stored({0.3f, 240}, {2}, dtype, device).to_string() ==
          (dtype == e4m3 ? "[  0.3 240. ]" : "[  0.3 260. ]"));
    CHECK(select(reshape(x, {6}), 0, 4).item() == 5);
    const Tensor twin =
        from_dlpack(to_dlpack<dlpack::DLManagedTensorVersioned>(x, AccessMode::read), device);
    CHECK(twin.dtype() == dtype);
    CHECK(stored_values(twin) == stored_values(x));
    const Tensor left = cast(Tensor::from({1, 0, 1}, {3}, device), boolean);
    CHECK(stored_values(where(left, x, Tensor::zeros({}, dtype, device))) ==
          std::vector<float>{1, 0, 3, 4, 0, 6});
  }
}

TEST_CASE("nothing is computed in 8-bit floats, and an error says what to do") {
  const Device device = Device::cpu();
  const auto refuses = [](const char* name, const auto& f) {
    INFO(name);
    CHECK_THROWS_WITH(f(), Contains(std::string(name) + ": the tensor is e4m3") &&
                               Contains("cast it to f32 or bf16 first"));
  };
  for (const Device& on : {device, Device::meta()}) {
    const Tensor x = Tensor::ones({2, 2}, e4m3, on);
    refuses("add", [&] { return x + x; });
    refuses("mul", [&] { return x * 2.0; });
    refuses("lt", [&] { return x < x; });
    refuses("neg", [&] { return -x; });
    refuses("exp", [&] { return exp(x); });
    refuses("logical_not", [&] { return logical_not(x); });
    refuses("sum", [&] { return sum(x); });
    refuses("max", [&] { return max(x); });
    refuses("matmul", [&] { return matmul(x, x); });
    refuses("matmul", [&] { return matmul(cast(x, f32), x); });
  }
  const Tensor x = Tensor::ones({2, 2}, e4m3, device);
  refuses("softmax", [&] { return softmax(x, 1); });
  refuses("cumsum", [&] { return cumsum(x, 0); });
  refuses("sort", [&] { return sort(x, 1).values; });
  refuses("axpby", [&] {
    raw::axpby(x, x, 1, 1);
    return x;
  });
  refuses("normal", [&] { return Tensor::normal({4}, 0, 1, 7, e4m3, device); });
  CHECK_THROWS_WITH(Tensor(x).require_grad(), Contains("floating tensors of 16 bits and more"));
  Tensor leaf = Tensor::ones({2}, f32, device);
  leaf.require_grad();
  CHECK_THROWS_WITH(cast(leaf, e4m3), Contains("detach the tensor first"));
  CHECK(stored_values(cast(leaf.detach(), e4m3)) == std::vector<float>{1, 1});
}

TEST_CASE("bytes of images are moved, cast, compared and indexed") {
  const Device device = Device::cpu();
  const std::vector<std::uint8_t> bytes{0, 1, 127, 128, 254, 255};
  const Tensor x = Tensor::from(bytes, {2, 3}, device);
  CHECK(x.dtype() == u8);
  CHECK(x.to_vector<std::uint8_t>() == bytes);
  CHECK(x.to_span<std::uint8_t>()[5] == 255);
  CHECK(select(reshape(x, {6}), 0, 4).item() == 254);
  CHECK(stored_values(transpose(x, 0, 1)) == std::vector<float>{0, 128, 1, 254, 127, 255});
  CHECK(raw::contiguous(transpose(x, 0, 1)).to_vector<std::uint8_t>()[1] == 128);
  CHECK(cat({x, x}, 1).to_vector<std::uint8_t>()[3] == 0);
  CHECK(x.to_string() == "[[  0   1 127]\n [128 254 255]]");
  // As a model takes it, and back: what has no byte saturates, fractions are cut off.
  const Tensor scaled = cast(x, f32) * (1.0 / 255);
  CHECK(scaled.to_vector<float>()[5] == 1);
  CHECK(cast(Tensor::from({-1, -0.5f, 1.9f, 255.9f, 256, NAN}, {6}, device), u8)
            .to_vector<std::uint8_t>() == std::vector<std::uint8_t>{0, 0, 1, 255, 255, 0});
  const std::vector<std::int64_t> whole{-1, 255, 256, 513};
  CHECK(cast(Tensor::from(whole, {4}, device), u8).to_vector<std::uint8_t>() ==
        std::vector<std::uint8_t>{255, 255, 0, 1});  // integers wrap
  CHECK(cast(x, boolean).to_string() == "[[False  True  True]\n [ True  True  True]]");
  for (const DType dtype : {f32, bf16, f16, f64, i32, i64})
    CHECK(cast(cast(slice(x, 0, 0, 1), dtype), u8).to_vector<std::uint8_t>() ==
          std::vector<std::uint8_t>{0, 1, 127});
  CHECK(stored_values(cast(x > 127, f32)) == std::vector<float>{0, 0, 0, 1, 1, 1});
  CHECK(stored_values(cast(x == x, f32)) == std::vector<float>(6, 1));
  CHECK(stored_values(cast(x <= slice(x, 1, 1, 2), f32)) == std::vector<float>{1, 1, 0, 1, 1, 0});
  CHECK(stored_values(cast(x < 300, f32)) == std::vector<float>(6, 1));
  const Tensor rows = Tensor::from(std::vector<std::int64_t>{1, 0, 1, 7}, {4}, device);
  CHECK(index_select(x, 0, rows).to_vector<std::uint8_t>() ==
        std::vector<std::uint8_t>{128, 254, 255, 0, 1, 127, 128, 254, 255, 0, 0, 0});
  CHECK(index(x, {rows}).shape() == Shape{4, 3});
  const Tensor at = Tensor::from(std::vector<std::int32_t>{2, 0}, {2, 1}, device);
  CHECK(gather(x, 1, at).to_vector<std::uint8_t>() == std::vector<std::uint8_t>{127, 128});
  CHECK(where(x > 127, x, Tensor::full({}, 9, u8, device)).to_vector<std::uint8_t>() ==
        std::vector<std::uint8_t>{9, 9, 9, 128, 254, 255});
  CHECK(randint(0, 256, {100}, 7, u8, device).dtype() == u8);
  const Tensor twin =
      from_dlpack(to_dlpack<dlpack::DLManagedTensorVersioned>(x, AccessMode::read), device);
  CHECK(twin.data() == x.data());
  CHECK(twin.dtype() == u8);
}

TEST_CASE("nothing is computed in bytes, and an error says what to do") {
  const Device device = Device::cpu();
  const Tensor x = Tensor::ones({2, 2}, u8, device);
  const auto refuses = [](const char* name, const auto& f) {
    INFO(name);
    CHECK_THROWS_WITH(f(), Contains(std::string(name) + ": the tensor is u8") &&
                               Contains("cast it to f32 or bf16 first") && !Contains("\n"));
  };
  refuses("add", [&] { return x + x; });
  refuses("mul", [&] { return x * 2.0; });
  refuses("neg", [&] { return -x; });
  refuses("logical_not", [&] { return logical_not(x); });
  refuses("sum", [&] { return sum(x); });
  refuses("max", [&] { return max(x); });
  refuses("matmul", [&] { return matmul(x, x); });
  refuses("arange", [&] { return Tensor::arange(256, u8, device); });
  const Tensor rows = Tensor::from(std::vector<std::int64_t>{1, 0}, {2}, device);
  refuses("index_add", [&] {
    raw::index_add_into(x, 0, rows, x);
    return x;
  });
  refuses("scatter_add", [&] {
    raw::scatter_add_into(x, 0, raw::reshape(raw::cat(std::vector{rows, rows}, 0), {2, 2}), x);
    return x;
  });
  CHECK_THROWS_WITH(Tensor(x).require_grad(), Contains("floating tensors of 16 bits and more"));
  CHECK_THROWS_WITH(Tensor::full({2}, 256, u8, device), Contains("the scalar 256 is beyond u8"));
  CHECK_THROWS_WITH(Tensor::full({2}, -1, u8, device), Contains("the scalar -1 is beyond u8"));
  CHECK_THROWS_WITH(randint(0, 257, {1}, 7, u8, device), Contains("beyond the range of u8"));
}
