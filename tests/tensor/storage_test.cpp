// The dtypes of storage: 8-bit floats are made, moved, cast and printed, and nothing is computed in
// them. Which value a float becomes: tests/base/dtype_test, tests/parity/fp8_golden_test.
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
