// Finding, loading and refusing a driver module: each refusal is one line that says what to do.
#include <dlfcn.h>

#include <fstream>
#include <future>
#include <iterator>
#include <string>
#include <vector>

#include "kernels/kernel_table.hpp"
#include "tessera/device/device_context.hpp"
#include "tessera/tensor/ops.hpp"
#include "tests/cuda/support.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/temporary_folder.hpp"

using namespace tessera;
using tessera::testing::queued_gpu;

namespace {

std::string refusal(const CudaOptions& options) {
  try {
    const Device device = Device::cuda(options);
  } catch (const DeviceError& error) {
    return error.what();
  }
  return "";
}

void check_cpu() {
  const Tensor one = Tensor::ones({2}, f32, Device::cpu());
  CHECK(raw::add(one, one).to_vector<float>() == std::vector<float>{2, 2});
}

}  // namespace

TEST_CASE("a module is loaded and its table used") {
  const Device device = tessera::testing::queued_gpu(2);
  CHECK(device.kind() == DeviceKind::cuda);
  CHECK(device.rank() == 2);
  CHECK(device.runs_bodies());
  REQUIRE(device.context().driver() != nullptr);
  CHECK(&kernels::kernels_of(device.context().driver()) == device.context().driver()->kernels);
  CHECK(Device::cpu().context().driver() == nullptr);
}

TEST_CASE("a driver says whether a stream has come to an event, and names each GPU") {
  const Device device = queued_gpu();
  const Driver& driver = device.context().acting_driver();
  void *stream = nullptr, *event = nullptr;
  REQUIRE(!driver.make_stream(0, &stream));
  REQUIRE(!driver.make_event(&event));
  bool is_reached = false;
  CHECK(!driver.query(event, &is_reached));
  CHECK(is_reached);  // it was never recorded
  std::promise<void> go_on;
  const auto wait = [](void* promise) {
    static_cast<std::promise<void>*>(promise)->get_future().wait();
  };
  REQUIRE(!driver.call_host(wait, &go_on, stream));
  REQUIRE(!driver.record(event, stream));
  CHECK(!driver.query(event, &is_reached));
  CHECK(!is_reached);
  go_on.set_value();
  REQUIRE(!driver.block(event));
  CHECK(!driver.query(event, &is_reached));
  CHECK(is_reached);
  CHECK(!driver.end_event(event));
  CHECK(!driver.end_stream(stream));
  const tessera::testing::Gpus gpus(2);
  DriverDevice first{}, second{};
  REQUIRE(!driver.describe(0, &first));
  REQUIRE(!driver.describe(1, &second));
  CHECK(std::string(first.uuid).starts_with("GPU-"));
  CHECK(first.uuid != std::string(second.uuid));
}

TEST_CASE("a module that is absent, no library, or no driver is refused in one line") {
  const std::string absent = refusal({.module = "/nowhere/libtessera-cuda.so"});
  CHECK_THAT(absent,
             Catch::Contains("/nowhere/libtessera-cuda.so") && Catch::Contains("--device=cpu"));
  const std::string text = refusal({.module = "/proc/self/exe"});
  CHECK_THAT(text, Catch::Contains("cannot be loaded"));
  const std::string other = refusal({.module = "libm.so.6"});
  CHECK_THAT(other, Catch::Contains("no symbol 'tessera_driver'"));
  for (const std::string& line : {absent, text, other}) CHECK(line.find('\n') == std::string::npos);
}

TEST_CASE("a module whose libraries are missing is refused in one line that names them") {
  std::ifstream in(TESSERA_QUEUED_MODULE, std::ios::binary);
  std::string bytes{std::istreambuf_iterator<char>(in), {}};
  // A name of the same length, so that all else in the file stays where it is.
  const std::string linked("\0libstdc++.so.6", 15), missing("\0libcublasLt.99", 15);
  const std::size_t at = bytes.find(linked);
  REQUIRE(at != std::string::npos);
  bytes.replace(at, missing.size(), missing);
  const tessera::testing::TemporaryFolder folder;
  const std::string line = refusal({.module = folder.write("libtessera-cuda.so", bytes)});
  CHECK_THAT(line, Catch::Contains("libcublasLt.99") && Catch::Contains("install what it names") &&
                       Catch::Contains("--device=cpu"));
  CHECK(line.find('\n') == std::string::npos);
  check_cpu();
}

TEST_CASE("what a module says of its devices is the refusal, and the CPU works after it") {
  void* const module = dlopen(TESSERA_REFUSING_MODULE, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  REQUIRE(module);
  const auto refuse = reinterpret_cast<void (*)(const char* count, const char* describe)>(
      dlsym(module, "tessera_refuse"));
  REQUIRE(refuse);
  const char* const too_old = "cudaGetDeviceCount: the NVIDIA driver knows CUDA up to 12.2";
  const char* const no_kernels =
      "GPU has compute capability 7.5, the CUDA module was built for "
      "sm_90, PTX; build it with -Dgpu_archs=sm_75";
  for (const bool counted : {false, true}) {
    refuse(counted ? nullptr : too_old, counted ? no_kernels : nullptr);
    CHECK(refusal({.module = TESSERA_REFUSING_MODULE}) ==
          concat("Device::cuda: ", counted ? no_kernels : too_old,
                 ", or stay on the CPU (--device=cpu)"));
    check_cpu();
  }
}

TEST_CASE("an index beyond the last device is refused, a negative one too") {
  CHECK_THAT(refusal({.index = 1, .module = TESSERA_QUEUED_MODULE}),
             Catch::Contains("index 1") && Catch::Contains("cuda:0"));
  CHECK_THROWS_AS(Device::cuda({.index = -1}), ContractError);
  CHECK_THROWS_AS(Device::cuda({.executor = ExecutorKind::threaded}), ContractError);
}

TEST_CASE("a plan needs neither module nor device") {
  const Device device =
      Device::cuda({.executor = ExecutorKind::virtual_, .module = "/nowhere/libtessera-cuda.so"});
  CHECK(device.kind() == DeviceKind::cuda);
  CHECK_FALSE(device.runs_bodies());
  CHECK(device.context().driver() == nullptr);
}

TEST_CASE("an event that is recorded again leaves those who wait for its last record waiting") {
  const Device device = queued_gpu();
  const Driver& driver = *device.context().driver();
  void *late = nullptr, *other = nullptr, *waiter = nullptr, *event = nullptr, *end = nullptr;
  for (void** stream : {&late, &other, &waiter}) REQUIRE(driver.make_stream(0, stream) == nullptr);
  for (void** e : {&event, &end}) REQUIRE(driver.make_event(e) == nullptr);
  const int one = 1;
  int written = 0, seen = 0;
  driver.delay(20'000'000, late);
  driver.copy(&written, &one, sizeof one, late);
  driver.record(event, late);
  driver.wait(waiter, event);
  driver.record(event, other);  // reached at once
  driver.copy(&seen, &written, sizeof seen, waiter);
  driver.record(end, waiter);
  driver.block(end);
  CHECK(seen == 1);
  for (void* stream : {late, other, waiter}) driver.end_stream(stream);
  for (void* e : {event, end}) driver.end_event(e);
}
