// Where the host has no memory for the library's own books, an allocation has not happened.
#include <new>
#include <string>
#include <vector>

#include "tessera/base/log.hpp"
#include "tessera/device/device_context.hpp"
#include "tessera/memory/memory.hpp"
#include "tessera/tensor/tensor.hpp"
#include "tests/promises/allocations.hpp"
#include "tests/support/catch.hpp"

using namespace tessera;
using namespace tessera::testing;

TEST_CASE("a pool whose books find no memory has taken nothing, and gives all of it back",
          "[promises]") {
  std::vector<std::string> logged;
  set_log_sink([&](LogLevel, const std::string& message) { logged.push_back(message); });
  int refused = 0;
  for (std::int64_t from = 0; from < 60; ++from) {
    INFO("from allocation " << from << " on");
    {
      const Device device = Device::cpu({.executor = ExecutorKind::inlined});
      std::vector<Tensor> held;
      held.reserve(700);
      Memory::of(device.context());  // is there
      refuse_allocations(from);
      try {
        // Small and large ones, of several streams; more than the first blocks describe.
        for (int i = 0; i < 700; ++i) {
          const auto stream = static_cast<StreamId>(i % 3);
          held.push_back(Tensor::empty({i % 7 == 0 ? 300000 : 100 + i}, f32, device.on(stream)));
          if (i % 5 == 4) held[held.size() - 3] = {};
        }
      } catch (const std::bad_alloc&) {
        ++refused;
      }
      refuse_allocations(-1);
      held.push_back(Tensor::empty({1000}, f32, device));  // it goes on
    }
    CHECK(logged.empty());
    logged.clear();
  }
  CHECK((refused > 0) == (allocations().made > 0));  // sanitizers have their own operator new
  set_log_sink({});
}
