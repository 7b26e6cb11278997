// Tensors of the host beside a device: operations there, and copies between both in the order of
// the program, on any executor, under the race checker.
#include "tessera/comm/world.hpp"
#include "tessera/memory/memory.hpp"
#include "tessera/tensor/ops.hpp"
#include "tests/support/executors.hpp"
#include "tests/support/race_check.hpp"

using namespace tessera;
using namespace tessera::testing;
using Catch::Matchers::Contains;

TEST_CASE("a host's side is another device of the same rank") {
  const Device device = Device::cpu({.executor = ExecutorKind::inlined}), host = device.host();
  CHECK(host != device);
  CHECK(host.is_beside(device));
  CHECK(host.is_host());
  CHECK_FALSE(device.is_host());
  CHECK(host.main() == device);
  CHECK(host.host() == host);
  CHECK(host.kind() == DeviceKind::cpu);
  CHECK(host.compute().id() == StreamId::offload);
  CHECK(host.stream(StreamId::compute).id() == StreamId::compute);
  const Device other = Device::cpu({.executor = ExecutorKind::inlined});
  CHECK_FALSE(other.is_beside(host));
  const Tensor a = Tensor::ones({2}, f32, device), b = Tensor::ones({2}, f32, host),
               c = Tensor::ones({2}, f32, other);
  CHECK_THROWS_WITH(raw::add(a, b), Contains("different devices"));
  CHECK_THROWS_WITH(raw::moved(c, host), Contains("another rank's device"));
  CHECK_THROWS_AS(raw::copy_into(b, c), ContractError);
}

TEST_CASE("values go to the host and back, cast and strided, and later writes come after",
          "[threads]") {
  const WorldOptions options{.executor = any_executor(5), .threads = 1};
  std::vector<std::vector<float>> found;
  run_checked(1, options, [&](World& world) {
    const Device device = world.device(), host = device.host();
    const Tensor x = raw::reshape(Tensor::arange(6, f32, device), {2, 3});
    const Tensor there = raw::moved(x, host);
    raw::fill(x, -1);  // behind the copy
    const Tensor doubled = raw::mul(there, 2);
    const Tensor back = Tensor::zeros({3, 2}, bf16, device);
    raw::copy_into(raw::transpose(back, 0, 1), doubled);  // strided, of another dtype
    raw::fill(doubled, -2);
    found = {there.to_vector<float>(), raw::cast(back, f32).to_vector<float>(),
             x.to_vector<float>(), doubled.to_vector<float>()};
    CHECK(raw::moved(there, host).storage() == there.storage());
    CHECK(raw::moved(Tensor::empty({0}, f32, device), host).numel() == 0);
  });
  CHECK(found[0] == std::vector<float>{0, 1, 2, 3, 4, 5});
  CHECK(found[1] == std::vector<float>{0, 6, 2, 8, 4, 10});
  CHECK(found[2] == std::vector<float>(6, -1));
  CHECK(found[3] == std::vector<float>(6, -2));
}
