// Collectives on tensors between ranks that are threads, and those without peers.
#include "tessera/distributed/collectives.hpp"

#include <atomic>
#include <mutex>

#include "tessera/device/device_context.hpp"
#include "tessera/tensor/ops.hpp"
#include "tests/distributed/exchange.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/executors.hpp"
#include "tests/support/race_check.hpp"

using namespace tessera;
using namespace tessera::testing;
using Catch::Matchers::Contains;

namespace {

std::string message_of(int ranks, const std::function<void(World&)>& body) {
  try {
    run_local(ranks, {.threads = 1}, [&](World& world) {
      body(world);
      world.device().synchronize();
    });
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

}  // namespace

TEST_CASE("collectives on tensors give every rank what the ranks' tensors make", "[threads]") {
  const int ranks = GENERATE(1, 2, 3, 4);
  const ExecutorChoice executor = any_executor(7);
  INFO(ranks << " ranks, " << name(executor));
  std::mutex mutex;
  std::vector<std::string> errors;
  run_checked(ranks, {.executor = executor, .threads = 1}, [&](World& world) {
    const auto mine = exchange::errors(world);
    const std::lock_guard lock(mutex);
    errors.insert(errors.end(), mine.begin(), mine.end());
  });
  for (const std::string& error : errors) FAIL_CHECK(error);
}

TEST_CASE("what is larger than the workspace goes in pieces", "[threads]") {
  const int ranks = GENERATE(2, 3);
  std::mutex mutex;
  std::vector<std::string> errors;
  run_checked(ranks, {.threads = 1}, [&](World& world) {
    const auto mine = exchange::errors_of_pieces(world);
    const std::lock_guard lock(mutex);
    errors.insert(errors.end(), mine.begin(), mine.end());
  });
  for (const std::string& error : errors) FAIL_CHECK(error);
}

TEST_CASE("collectives on tensors run in groups, beside those of the world", "[threads]") {
  std::mutex mutex;
  std::vector<std::string> errors;
  run_checked(4, {.threads = 1}, [&](World& world) {
    const std::vector<int> ranks =
        world.rank() == 2 ? std::vector<int>{2} : std::vector<int>{3, 0, 1};
    // On a stream of its own, which takes edges.
    const RankGroup& group = *world.split("some", ranks, {.control = StreamId::transfer});
    const auto mine = exchange::errors(group), all = exchange::errors(world);
    const std::lock_guard lock(mutex);
    errors.insert(errors.end(), mine.begin(), mine.end());
    errors.insert(errors.end(), all.begin(), all.end());
  });
  for (const std::string& error : errors) FAIL_CHECK(error);
}

TEST_CASE("collectives on tensors do not block the host") {
  std::atomic<int> submitted = 0;
  run_local(2, {.threads = 1}, [&](World& world) {
    const Device& device = world.device();
    dist::all_reduce(Tensor::ones({1}, f32, device), world);  // makes the workspace
    device.synchronize();
    device.compute().launch({.name = "hold up"}, [&submitted](Exec&) {
      for (int n = submitted; n < 2; n = submitted) submitted.wait(n);
    });
    const Tensor sum = dist::all_reduce(Tensor::ones({1 << 21}, f32, device), world);
    ++submitted;  // reached while the device waits for it
    submitted.notify_all();
    if (sum.to_vector<float>().back() != 2) throw std::logic_error("the sum is wrong");
  });
  CHECK(submitted == 2);
}

TEST_CASE("ranks whose tensors differ hear of both in one line", "[threads]") {
  const auto shapes = message_of(2, [](World& world) {
    const Shape shape = world.rank() == 0 ? Shape{2, 3} : Shape{3, 2};
    dist::all_reduce(Tensor::ones(shape, f32, world.device()), world);
  });
  CHECK_THAT(shapes, Contains("all_reduce f32 [2, 3]") && Contains("all_reduce f32 [3, 2]"));
  CHECK(shapes.find('\n') == std::string::npos);
  const auto dtypes = message_of(2, [](World& world) {
    dist::all_gather(Tensor::ones({2}, world.rank() == 0 ? f32 : i32, world.device()), world);
  });
  CHECK_THAT(dtypes, Contains("f32 [2]") && Contains("i32 [2]"));
  const auto long_one = message_of(2, [](World& world) {
    const std::int64_t n = RankGroup::kWorkspaceBytes / 2;
    dist::broadcast(Tensor::ones({n + world.rank()}, f32, world.device()), 0, world);
  });
  CHECK_THAT(long_one, Contains("broadcast f32 [2097152]") && Contains("[2097153]"));
  const auto passed = message_of(3, [](World& world) {
    const int target = world.rank() == 1 ? 2 : 1;
    dist::send_recv(Tensor::ones({2}, f32, world.device()), 0, target, world);
  });
  CHECK_THAT(passed, Contains("to rank 1") && Contains("to rank 2"));
  CHECK(passed.find('\n') == std::string::npos);
}

// Each stage adds its number; what a rank does not have it cannot use by mistake.
TEST_CASE("a pipeline hands its activations from rank to rank", "[threads]") {
  run_checked(4, {.threads = 1}, [](World& world) {
    const Tensor alike = Tensor::empty({2, 3}, f32, Device::meta());
    Tensor h = world.rank() == 0 ? Tensor::zeros({2, 3}, f32, world.device()) : Tensor();
    for (int stage = 0; stage < 4; ++stage) {
      const bool is_mine = world.rank() == stage;
      if (is_mine) h = raw::add(h, Tensor::full({}, stage + 1, f32, world.device()));
      h = dist::send_recv(is_mine ? h : alike, stage, (stage + 1) % 4, world);
      if (h.defined() != (world.rank() == (stage + 1) % 4))
        throw std::logic_error("another rank has what was sent");
    }
    if (world.rank() == 0 && h.to_vector<float>() != std::vector<float>(6, 10))
      throw std::logic_error("the ring gives other values");
  });
}

TEST_CASE("what a collective cannot take is refused in one line") {
  World world = World::emulated(1, 4);
  const Tensor x = Tensor::ones({6}, f32, world.device());
  Tensor leaf = Tensor::ones({4}, f32, world.device());
  leaf.require_grad();
  CHECK_THROWS_WITH(dist::all_reduce(leaf, world), Contains("detach"));
  CHECK_THROWS_WITH(dist::reduce_scatter(x, world), Contains("[6]") && Contains("4 ranks"));
  CHECK_THROWS_WITH(dist::all_to_all(Tensor::ones({}, f32, world.device()), world),
                    Contains("all_to_all"));
  CHECK_THROWS_WITH(dist::broadcast(x, 4, world), Contains("root is 4"));
  CHECK_THROWS_WITH(dist::send_recv(x, -1, 0, world), Contains("root is -1, expected 0 to 3"));
  CHECK_THROWS_WITH(dist::send_recv(x, 0, 4, world), Contains("target is 4, expected 0 to 3"));
  CHECK_THROWS_WITH(dist::all_gather(Tensor::ones({2}, f32, Device::meta()), world),
                    Contains("meta"));
  // What this rank sends is read; what others send is not.
  const Tensor alike = Tensor::empty({2}, f32, Device::meta());
  CHECK_THROWS_WITH(dist::broadcast(alike, 1, world), Contains("meta"));
  CHECK_THROWS_WITH(dist::send_recv(alike, 1, 2, world), Contains("meta"));
  CHECK(dist::send_recv(alike, 2, 1, world).to_vector<float>() == std::vector<float>{0, 0});
  CHECK_THROWS_WITH(dist::all_gather(Tensor::ones({2}, f32, Device::cpu()), world),
                    Contains("another device"));
  CHECK(dist::all_gather(x, world).shape() == Shape{24});
}

TEST_CASE("a plan of collectives on tensors runs nothing and counts their memory") {
  World world = World::emulated(0, 4, {.executor = ExecutorKind::virtual_});
  const Tensor x = Tensor::ones({1024}, f32, world.device());
  const Ledger& ledger = Memory::of(world.device()).ledger();
  CHECK(ledger.live_bytes() == 4096);
  const Tensor all = dist::all_gather(x, world);
  CHECK(all.shape() == Shape{4096});
  CHECK(ledger.live_bytes() == 5 * 4096);
  const Tensor sent = dist::send_recv(x, 0, 1, world);
  CHECK(!sent.defined());
  CHECK(ledger.live_bytes() == 5 * 4096);
  const Tensor received = dist::send_recv(Tensor::empty({1024}, f32, Device::meta()), 1, 0, world);
  CHECK(received.shape() == Shape{1024});
  CHECK(ledger.live_bytes() == 6 * 4096);
}

TEST_CASE("collectives on tensors go on after a failure has ended", "[threads]") {
  std::atomic<int> right = 0;
  run_local(2, {.threads = 1}, [&right](World& world) {
    const Tensor x = Tensor::ones({3}, f32, world.device());
    dist::all_reduce(x, world);
    try {
      if (world.rank() == 1) throw std::runtime_error("of a user");
      dist::all_reduce(x, world);
      world.device().synchronize();
    } catch (const std::exception&) {
      world.recover();
    }
    right += dist::all_reduce(x, world).to_vector<float>() == std::vector<float>{2, 2, 2};
  });
  CHECK(right == 2);
}

TEST_CASE("a workspace that some ranks alone have made before a failure is made again",
          "[threads]") {
  const int fails = GENERATE(0, 1);
  std::atomic<int> right = 0;
  run_local(2, {.threads = 1, .timeout_seconds = 20}, [&](World& world) {
    const Tensor x = Tensor::ones({3}, f32, world.device());
    try {
      if (world.rank() == fails) throw std::runtime_error("of a user");
      dist::all_reduce(x, world);
      world.device().synchronize();
    } catch (const std::exception&) {
      world.recover();
    }
    for (int again = 0; again < 2; ++again) {
      const auto memory = world.allocate_symmetric(64);
      right += dist::all_reduce(x, world).to_vector<float>() == std::vector<float>{2, 2, 2};
    }
  });
  CHECK(right == 4);
}
