// What Communicator::submit and World refuse or book, and worlds without peers.
#include <atomic>
#include <cmath>
#include <random>
#include <type_traits>

#include "tessera/comm/world.hpp"
#include "tessera/device/device_context.hpp"
#include "tessera/memory/memory.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/race_check.hpp"
#include "tests/support/seed.hpp"
#include "tests/support/thrown.hpp"

using namespace tessera;
using Catch::Matchers::Contains;
using tessera::testing::run_checked;
using tessera::testing::thrown_by;
using K = CollectiveKind;

// Units keep a world's address: one that moved would leave them with nothing.
static_assert(!std::is_move_constructible_v<World> && !std::is_move_assignable_v<World>);

namespace {

struct CostSeen final : Observer {
  void launched(StreamId s, Tick, const Op& op) override {
    stream = s;
    cost = op.cost;
    name = op.name;
    accesses = op.accesses.size();
  }
  StreamId stream = StreamId::transfer;
  Cost cost;
  std::string name;
  std::size_t accesses = 0;
};

}  // namespace

TEST_CASE("submit refuses what no rank can do, and forgets the attempt", "[comm]") {
  World world = World::emulated(1, 4, {.executor = ExecutorKind::inlined});
  Communicator& c = world.gather();
  alignas(8) float v[1024] = {};
  const auto submit = [&](const Collective& item) {
    return thrown_by([&] { c.submit(item, "unit 7", {}); });
  };
  const auto f = [&](K kind, std::int64_t count, const void* send, void* recv, int root = 0) {
    return submit({.send = send, .recv = recv, .count = count, .kind = kind, .root = root});
  };
  CHECK_THAT(f(K::all_gather, 4, nullptr, v), Contains("all_gather 'unit 7', item 0: send is 0"));
  CHECK_THAT(f(K::broadcast, 4, v, nullptr), Contains("broadcast") && Contains("recv is 0"));
  CHECK_THAT(f(K::all_reduce, -1, v, v), Contains("count is -1"));
  CHECK_THAT(f(K::broadcast, 4, v, v, 4), Contains("root is 4, expected 0 to 3"));
  CHECK_THAT(f(K::broadcast, 4, v, v, -1), Contains("root is -1"));
  CHECK_THAT(f(K::all_gather, 4, reinterpret_cast<char*>(v) + 2, v + 64),
             Contains("multiples of the 4 bytes of a f32"));
  for (const K kind : {K::all_reduce, K::reduce_scatter})
    CHECK_THAT(submit({.send = v, .recv = v + 64, .count = 4, .kind = kind, .dtype = e4m3}),
               Contains("nothing is computed in e4m3; cast to f32 or bf16 first"));
  CHECK_THAT(f(K::all_gather, 8, v, v), Contains("overlap"));      // rank 1's place is v + 8
  CHECK_THAT(f(K::reduce_scatter, 8, v, v), Contains("overlap"));  // likewise
  CHECK_THAT(f(K::reduce_scatter, 8, v, v + 31), Contains("overlap"));
  CHECK_THAT(f(K::all_reduce, 8, v, v + 7), Contains("overlap"));
  std::vector<float> large(kStagedBytes / 4 + 1);
  CHECK_THAT(f(K::all_reduce, static_cast<std::int64_t>(large.size()), large.data(), large.data()),
             Contains("do not fit the 65536 bytes") && Contains("split the group"));
  CHECK_THAT(f(K::all_gather, std::int64_t{1} << 61, v, v + 64), Contains("size overflow"));
  CHECK_THAT(f(K::all_to_all, 8, v, v + 31), Contains("overlap"));
  CHECK_THAT(f(K::all_to_all, kStagedBytes / 16 + 1, large.data(), large.data()),
             Contains("do not fit the 65536 bytes"));
  const auto pass = [&](int root, int target, const void* send, void* recv) {
    return submit({.send = send,
                   .recv = recv,
                   .count = 4,
                   .kind = K::send_recv,
                   .root = root,
                   .target = target});
  };
  CHECK_THAT(pass(0, 4, v, v),
             Contains("send_recv 'unit 7', item 0: target is 4, expected 0 to 3"));
  CHECK_THAT(pass(1, 2, nullptr, v), Contains("send is 0") && Contains("root gives a send"));
  CHECK_THAT(pass(2, 1, v, nullptr), Contains("recv is 0") && Contains("target a recv"));
  CHECK_THAT(pass(1, 1, v, v + 3), Contains("overlap"));
  CollectiveGroup many("tokens");
  for (int i = 0; i < kMostSendRecvs + 1; ++i)
    many.edit().push_back({.count = 1 << 20, .kind = K::send_recv, .root = 0, .target = 2});
  CHECK_THAT(thrown_by([&] { c.submit(many, {}); }),
             Contains("item 1024: a group has room for 1024") && Contains("split the group"));
  CHECK_THAT(thrown_by([&] { c.submit(CollectiveGroup("none"), {}); }), Contains("'none'"));
  CHECK(c.submitted() == 0);
  CHECK(world.device().context().launches() == 0);

  CHECK(f(K::all_gather, 8, v + 8, v).empty());
  CHECK(f(K::reduce_scatter, 8, v, v + 8).empty());
  CHECK(f(K::all_gather, 0, nullptr, nullptr).empty());
  CHECK(f(K::reduce_scatter, 8, v, v + 32).empty());
  CHECK(f(K::all_to_all, 8, v, v + 32).empty());
  CHECK(f(K::all_to_all, 8, v, v).empty());  // staged
  CHECK(pass(1, 2, v, nullptr).empty());
  CHECK(pass(2, 1, nullptr, v).empty());
  CHECK(pass(0, 3, nullptr, nullptr).empty());
  many.edit().pop_back();
  CHECK(thrown_by([&] { c.submit(many, {}); }).empty());
  CHECK(c.submitted() == 10);
}

TEST_CASE("a group's small items in place fit the staging memory together or are refused",
          "[comm]") {
  World world = World::emulated(0, 2, {.executor = ExecutorKind::inlined});
  std::vector<float> v(kStagedBytes / 4 + 1);
  const auto half = static_cast<std::int64_t>(v.size()) / 2;
  const auto in_place = [&](std::int64_t at, std::int64_t count) {
    return Collective{.send = &v[static_cast<std::size_t>(at)],
                      .recv = &v[static_cast<std::size_t>(at)],
                      .count = count,
                      .kind = K::all_reduce};
  };
  CollectiveGroup group("two", {in_place(0, half), in_place(half, half)});
  CHECK(thrown_by([&] { world.reduce().submit(group, {}); }).empty());
  group.edit().push_back(in_place(2 * half, 1));
  CHECK_THAT(thrown_by([&] { world.reduce().submit(group, {}); }), Contains("item 2"));
}

TEST_CASE("a group that has moved or was edited is refused as a new one would be", "[comm]") {
  World world = World::emulated(0, 2, {.executor = ExecutorKind::inlined});
  Communicator& c = world.gather();
  std::vector<float> v(64);
  float* const at = v.data();
  // Two gathers, each of 2 x 4 elements behind 4 that it sends.
  const Collective first{.send = at, .recv = at + 8, .count = 4, .kind = K::all_gather};
  Collective second = first;
  second.send = at + 4;
  second.recv = at + 16;
  CollectiveGroup group("moving", {first, second});
  const auto refused = [&] { return thrown_by([&] { c.submit(group, {}); }); };
  const auto moved = [&](std::ptrdiff_t send, std::ptrdiff_t recv) {
    group.place(at + send, at + recv);
    return refused();
  };
  CHECK(refused().empty());
  CHECK(moved(16, 24).empty());  // all by 16
  CHECK(group.items()[1].send == at + 20);
  CHECK(group.items()[1].recv == at + 32);
  CHECK(moved(40, 24).empty());  // the sends alone
  CHECK_THAT(moved(34, 24), Contains("'moving', item 1: ") && Contains("not as in place"));
  CHECK_THAT(moved(24, 24), Contains("'moving': items 0 and 1 overlap"));
  CHECK(moved(0, 8).empty());
  auto* const bytes = reinterpret_cast<std::byte*>(at);
  group.place(bytes + 2, bytes + 34);  // all by 2 bytes
  CHECK_THAT(refused(), Contains("item 0") && Contains("multiples of the 4 bytes"));
  CHECK(moved(0, 8).empty());
  group.edit()[1].count = 8;
  CHECK_THAT(refused(), Contains("overlap"));
  group.edit()[1].count = -1;
  CHECK_THAT(refused(), Contains("item 1: count is -1"));
}

TEST_CASE("an operation carries its name, stream, accesses and wire bytes", "[comm]") {
  World world = World::emulated(1, 4, {.executor = ExecutorKind::inlined});
  CostSeen seen;
  world.device().context().add_observer(seen);
  float v[256] = {};
  LastUse use;
  const Access accesses[] = {{&use, v, v + 256, AccessMode::write},
                             {&use, v, v + 256, AccessMode::read}};
  const auto wire = [&](Communicator& c, K kind) {
    world.device().synchronize();  // the last one ran on another stream
    c.submit({.send = v, .recv = v + 128, .count = 8, .kind = kind}, name(kind), accesses);
    CHECK(seen.stream == c.stream());
    CHECK(seen.name == name(kind));
    CHECK(seen.accesses == 2);
    return seen.cost.wire_bytes;
  };
  // Of 32 bytes each: 3 peers' chunks come and as many of ours go; all_reduce is both, a quarter a
  // rank; a broadcast and a reduce are a quarter of what four with each root once are.
  CHECK(wire(world.gather(), K::all_gather) == 192);
  CHECK(wire(world.reduce(), K::reduce_scatter) == 192);
  CHECK(wire(world.control(), K::all_reduce) == 96);
  CHECK(wire(world.control(), K::broadcast) == 48);
  CHECK(wire(world.control(), K::reduce) == 48);
  CHECK(wire(world.control(), K::barrier) == 0);
  CHECK(wire(world.gather(), K::all_to_all) == 192);
  CHECK(wire(world.reduce(), K::send_recv) == 0);  // from rank 0 to itself
  const auto pass = [&](int root, int target) {
    world.device().synchronize();
    world.control().submit({.send = v,
                            .recv = v + 128,
                            .count = 8,
                            .kind = K::send_recv,
                            .root = root,
                            .target = target},
                           "pass", accesses);
    return seen.cost.wire_bytes;
  };
  CHECK(pass(1, 2) == 32);  // out
  CHECK(pass(3, 1) == 32);  // in
  CHECK(pass(0, 2) == 0);   // by
  CHECK(use.touched[StreamId::gather] == 2);
  CHECK(use.touched[StreamId::compute] == 7);
  world.device().context().remove_observer(seen);
}

TEST_CASE("one rank submits nothing in place and copies otherwise", "[comm]") {
  World world = World::single({.executor = ExecutorKind::inlined});
  CHECK(world.kind() == WorldKind::single);
  CHECK(world.size() == 1);
  float v[8] = {1, 2, 3, 4};
  constexpr K kKinds[] = {K::all_gather, K::reduce_scatter, K::all_reduce, K::reduce,
                          K::broadcast,  K::all_to_all,     K::send_recv};
  for (const K kind : kKinds)
    world.gather().submit({.send = v, .recv = v, .count = 4, .kind = kind}, "in place", {});
  world.barrier();
  CHECK(world.device().context().launches() == 0);
  for (const K kind : kKinds) {
    std::fill_n(v + 4, 4, 0.f);
    world.gather().submit({.send = v, .recv = v + 4, .count = 4, .kind = kind}, "copy", {});
    CHECK(std::equal(v, v + 4, v + 4));
  }
  CHECK(world.device().context().launches() == 7);
  CHECK(world.gather().submitted() == 0);
  CHECK(world.sum(2.5) == 2.5);
  CHECK(world.max(-2.5) == -2.5);
}

TEST_CASE("an emulated rank gets its own values in the places of its peers", "[comm]") {
  const std::uint64_t seed = testing::fresh_seed();
  INFO("seed " << seed);
  std::mt19937 draw(static_cast<unsigned>(seed));
  World world = World::emulated(2, 5, {.executor = ExecutorKind::inlined});
  constexpr int kCount = 6;
  std::vector<float> send(5 * kCount), recv(5 * kCount);
  for (float& x : send) x = std::uniform_real_distribution<float>(-1, 1)(draw);
  world.gather().submit(
      {.send = send.data(), .recv = recv.data(), .count = kCount, .kind = K::all_gather}, "ag", {});
  for (int peer = 0; peer < 5; ++peer) {
    const float* chunk = recv.data() + peer * kCount;
    if (peer == 2)
      CHECK(std::equal(chunk, chunk + kCount, send.begin()));
    else
      CHECK_FALSE(std::equal(chunk, chunk + kCount, send.begin()));
    CHECK(std::is_permutation(chunk, chunk + kCount, send.begin()));
  }
  world.reduce().submit(
      {.send = send.data(), .recv = recv.data(), .count = kCount, .kind = K::reduce_scatter}, "rs",
      {});
  for (int i = 0; i < kCount; ++i) CHECK(recv[i] == send[2 * kCount + i] * 5);
  std::int32_t wrap[2] = {1 << 30, -3};
  world.reduce().submit(
      {.send = wrap, .recv = wrap, .count = 2, .kind = K::all_reduce, .dtype = i32}, "ar", {});
  CHECK(wrap[0] == (1 << 30));  // 5 * 2^30 modulo 2^32
  CHECK(wrap[1] == -15);
  world.control().submit(
      {.send = send.data(), .recv = recv.data(), .count = kCount, .kind = K::broadcast}, "bc", {});
  CHECK(std::equal(send.begin(), send.begin() + kCount, recv.begin()));
  world.control().submit(
      {.send = send.data(), .recv = recv.data(), .count = kCount, .kind = K::all_to_all}, "aa", {});
  CHECK(recv == send);  // each peer sends what it gets
  world.control().submit(
      {.recv = recv.data(), .count = kCount, .kind = K::send_recv, .root = 4, .target = 2}, "sr",
      {});
  CHECK(std::all_of(recv.begin(), recv.begin() + kCount, [](float x) { return x == 0; }));
  CHECK(std::equal(recv.begin() + kCount, recv.end(), send.begin() + kCount));
  CHECK(world.sum(1.5) == 7.5);
  CHECK(world.max(1.5) == 1.5);
  CHECK_THAT(thrown_by([] { World::emulated(5, 5); }), Contains("rank 5 of 5 ranks"));
}

TEST_CASE("a virtual world counts and touches nothing", "[comm]") {
  World world = World::emulated(3, 512, {.executor = ExecutorKind::virtual_});
  const auto arena = world.allocate_symmetric(std::int64_t{1} << 40);
  CHECK(Memory::of(world.device()).reserved_bytes() == std::int64_t{1} << 40);
  auto* data = arena->data();
  for (int i = 0; i < 3; ++i)
    world.gather().submit(
        {.send = data + 3 * 4096, .recv = data, .count = 1024, .kind = K::all_gather}, "unit", {});
  world.barrier();
  CHECK(world.sum(2.0) == 1024.0);
  CHECK(world.max(2.0) == 2.0);
  CHECK(world.gather().submitted() == 3);
  CHECK(world.device().context().launches() == 6);
}

TEST_CASE("symmetric memory is booked while it lives, the same on every rank", "[comm][threads]") {
  std::atomic<std::int64_t> before{-1}, during{-1}, after{-1};
  run_checked(2, {}, [&](World& world) {
    Memory& memory = Memory::of(world.device());
    if (world.rank() == 0) before = memory.reserved_bytes();
    {
      const auto arena = world.allocate_symmetric(10'000);
      if (world.rank() == 0)
        during = arena->bytes() == memory.reserved_bytes() ? arena->bytes() : 0;
      std::fill_n(arena->data(), 10'000, std::byte{1});
    }
    if (world.rank() == 0) after = memory.reserved_bytes();
  });
  CHECK(before == 0);
  CHECK(during == 12'288);  // whole pages
  CHECK(after == 0);
  CHECK_THAT(thrown_by([] {
               run_checked(2, {}, [](World& world) {
                 world.allocate_symmetric(4096 * (1 + world.rank()));
               });
             }),
             Contains("every rank must ask for the same"));
  CHECK_THAT(thrown_by([] { World::single().allocate_symmetric(0); }), Contains("at least 1"));
}

TEST_CASE("worlds refuse options that would have no effect", "[comm]") {
  CHECK_THAT(thrown_by([] { World::single({.transport = Transport::messages}); }),
             Contains("sends no messages"));
  CHECK_THAT(thrown_by([] { run_checked(2, {.transport = Transport::messages}, [](World&) {}); }),
             Contains("sends no messages"));
  CHECK_THAT(thrown_by([] { World::single({.threads = -1}); }), Contains("threads is -1"));
  for (const double seconds : {0.0, -1.0, std::nan("")}) {
    CHECK_THAT(thrown_by([&] { World::single({.timeout_seconds = seconds}); }),
               Contains("timeout_seconds is"));
    if (seconds != 0)
      CHECK_THAT(thrown_by([&] { World::single({.heartbeat_timeout_seconds = seconds}); }),
                 Contains("heartbeat_timeout_seconds"));
  }
  CHECK_THAT(thrown_by([] { run_checked(2, {.timeout_seconds = -1}, [](World&) {}); }),
             Contains("timeout_seconds is -1"));
  CHECK_THAT(thrown_by([] { run_checked(0, {}, [](World&) {}); }), Contains("at least 1"));
}
