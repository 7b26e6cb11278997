// Ranks that find no NCCL, or one of another version, over a double of it. Each is a process,
// forked from one that has opened none.
#include <filesystem>

#include "tests/comm/nccl_worlds.hpp"
#include "tests/support/catch.hpp"

using namespace tessera;
using namespace tessera::testing;
using Catch::Matchers::Contains;

TEST_CASE("nccl: ranks without NCCL, or with another version are named to all", "[comm]") {
  const auto nothing = [](World&) { return std::string("came"); };
  const auto no_library = nccl_processes(2, nothing, {}, [](int rank, WorldOptions& options) {
    if (rank == 1) options.nccl.library = "/nowhere/libnccl.so.2";
  });
  for (const std::string& said : no_library)
    CHECK_THAT(said, Contains("/nowhere/libnccl.so.2") && Contains("TESSERA_NCCL"));
  CHECK_THAT(no_library[0], Contains("rank 1: "));
  const auto set_version = [](int rank, WorldOptions&) {
    const auto set = double_call<bool(const char*, long long)>("tessera_nccl_double_set");
    set("version", rank == 1 ? 22705 : 22809);
  };
  for (const std::string& said : nccl_processes(2, nothing, {}, set_version))
    CHECK_THAT(said, Contains("rank 0 has NCCL 2.28.9") && Contains("rank 1 has 2.27.5"));
  const auto set_old = [](int, WorldOptions&) {
    const auto set = double_call<bool(const char*, long long)>("tessera_nccl_double_set");
    set("version", 22604);
  };
  for (const std::string& said : nccl_processes(2, nothing, {}, set_old))
    CHECK_THAT(said, Contains("is NCCL 2.26.4, which is too old"));
}

TEST_CASE("nccl: a gather policy that NCCL does not have yet is refused", "[comm]") {
  const auto set_version = [](int, WorldOptions&) {
    double_call<bool(const char*, long long)>("tessera_nccl_double_set")("version", 22705);
  };
  WorldOptions options;
  options.nccl.windows = true;
  options.nccl.gather_policy = GatherPolicy::zero;
  for (const std::string& said :
       nccl_processes(2, [](World&) { return std::string("came"); }, options, set_version))
    CHECK_THAT(said, Contains("gather_policy is zero, which NCCL can from 2.28 on") &&
                         Contains("is 2.27.5"));
}

TEST_CASE("nccl: another name of the library that the process has is taken for it", "[comm]") {
  const auto rename = [](int, WorldOptions& options) {
    double_call<long long(const char*)>("tessera_nccl_double_count");  // loads it by its first name
    const std::filesystem::path file = TESSERA_NCCL_DOUBLE;
    options.nccl.library = (file.parent_path() / "." / file.filename()).string();
  };
  for (const std::string& said :
       nccl_processes(2, [](World&) { return std::string("came"); }, {}, rename))
    CHECK(said == "came");
}

TEST_CASE("nccl: an all_to_all is one call from NCCL 2.28 on, and sends and receives before",
          "[comm]") {
  constexpr std::int64_t kCount = 20'000;  // of f32 for each rank, more than is staged
  const auto exchange = [](World& world) {
    const auto memory = world.allocate_symmetric(4 * kCount * 4);
    auto* const send = reinterpret_cast<float*>(memory->data());
    float* const recv = send + 2 * kCount;
    const auto value = [](int from, std::int64_t i) {
      return static_cast<float>(from * 10 * kCount + i);
    };
    for (std::int64_t i = 0; i < 2 * kCount; ++i) send[i] = value(world.rank(), i);
    LastUse use;
    const Access all[] = {{&use, send, recv + 2 * kCount, AccessMode::write}};
    const auto calls = [] { return double_count("calls"); };
    world.barrier();
    const long long before = calls();
    world.gather().submit(
        {.send = send, .recv = recv, .count = kCount, .kind = CollectiveKind::all_to_all}, "deal",
        all);
    world.device().synchronize();
    for (std::int64_t i = 0; i < 2 * kCount; ++i)
      if (recv[i] != value(static_cast<int>(i / kCount), world.rank() * kCount + i % kCount))
        return concat("wrong at ", i);
    return concat(calls() - before, " calls");
  };
  for (const long long version : {22705, 22809}) {
    const auto set_version = [&](int, WorldOptions&) {
      double_call<bool(const char*, long long)>("tessera_nccl_double_set")("version", version);
    };
    for (const std::string& said : nccl_processes(2, exchange, {}, set_version))
      CHECK(said == (version < 22800 ? "4 calls" : "1 calls"));
  }
}
