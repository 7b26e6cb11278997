// The double of NCCL names the rule that a call breaks.
#include <array>
#include <atomic>
#include <cstring>

#include "tests/comm/nccl_ranks.hpp"

using namespace tessera;
using namespace tessera::testing;

namespace {

// What a call came to, and what NCCL's last error says of it.
void check_named(ncclResult_t result, ncclResult_t expected, const std::string& rule) {
  const std::string line = ncclGetLastError(nullptr);
  expect(result == expected && line.find(rule) != std::string::npos,
         std::to_string(result) + " '" + line + "', expected " + std::to_string(expected) + " '" +
             rule + "'");
}

// Ranks of one communicator that has failed, each with the same line or none.
void check_failed(Rank& me, const std::string& first, const std::string& second) {
  const std::string line = me.failure();
  expect(me.async() == ncclInvalidUsage, "invalid usage");
  std::atomic<bool> has_ended{false};
  driver().call_host([](void* flag) { *static_cast<std::atomic<bool>*>(flag) = true; }, &has_ended,
                     me.native);
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  expect(!has_ended, "the kernel stays until the abort");
  expect(line.find(first) != std::string::npos && line.find(second) != std::string::npos,
         "'" + line + "' names '" + first + "' and '" + second + "'");
  check_named(ncclAllReduce(nullptr, nullptr, 1, ncclInt, ncclSum, me.comm, me.stream()),
              ncclInvalidUsage, "has failed");
  check_named(ncclCommDestroy(me.comm), ncclInvalidUsage, "abort it");
  me.abort();
  me.block();
  expect(has_ended, "and no longer");
}

}  // namespace

TEST_CASE("the double reports the version that it is told") {
  int version = 0;
  CHECK(ncclGetVersion(&version) == ncclSuccess);
  CHECK(version == NCCL_VERSION_CODE);
  for (const int told : {22604, 22705, 22809}) {
    const Setting setting("version", told, NCCL_VERSION_CODE);
    CHECK(ncclGetVersion(&version) == ncclSuccess);
    CHECK(version == told);
  }
  CHECK_FALSE(tessera_nccl_double_set("no such name", 1));
  check_named(ncclGetVersion(nullptr), ncclInvalidArgument, "version is null");
}

TEST_CASE("a wrong argument of a collective is named") {
  const Gpus gpus(2, false);
  Rank me(0, 1, fresh_id());
  REQUIRE(me.made == ncclSuccess);
  std::array<float, 8> a{}, b{};
  const auto all_reduce = [&](const void* from, void* to, std::size_t count, ncclDataType_t dtype,
                              ncclRedOp_t op = ncclSum) {
    return ncclAllReduce(from, to, count, dtype, op, me.comm, me.stream());
  };
  const ncclResult_t invalid = ncclInvalidArgument;
  check_named(all_reduce(nullptr, b.data(), 8, ncclFloat), invalid, "sendbuff is null");
  check_named(all_reduce(a.data(), nullptr, 8, ncclFloat), invalid, "recvbuff is null");
  check_named(all_reduce(a.data(), b.data(), 8, ncclNumTypes), invalid, "invalid type 12");
  check_named(all_reduce(a.data(), b.data(), 8, ncclFloat, ncclNumOps), invalid,
              "invalid reduction operation 5");
  check_named(all_reduce(a.data(), b.data(), 8, ncclFloat8e4m3), invalid, "reduces no float8e4m3");
  check_named(all_reduce(a.data(), b.data(), ~std::size_t{0}, ncclFloat), invalid, "no room");
  check_named(all_reduce(a.data(), a.data() + 1, 4, ncclFloat), invalid, "not in place");
  check_named(ncclAlltoAll(a.data(), a.data(), 4, ncclFloat, me.comm, me.stream()), invalid,
              "not in place");
  check_named(ncclAllGather(a.data() + 1, a.data(), 2, ncclFloat, me.comm, me.stream()), invalid,
              "not in place");
  check_named(
      ncclReduceScatter(a.data(), a.data() + 1, 2, ncclFloat, ncclSum, me.comm, me.stream()),
      invalid, "not in place");
  check_named(ncclBroadcast(a.data(), b.data(), 8, ncclFloat, 1, me.comm, me.stream()), invalid,
              "invalid rank 1");
  check_named(ncclSend(a.data(), 8, ncclFloat, -1, me.comm, me.stream()), invalid,
              "invalid rank -1");
  check_named(ncclRecv(a.data(), 8, ncclFloat, 1, me.comm, me.stream()), invalid, "invalid rank 1");
  check_named(ncclAllReduce(a.data(), b.data(), 8, ncclFloat, ncclSum, me.comm, nullptr), invalid,
              "stream is null");
  check_named(ncclAllReduce(a.data(), b.data(), 8, ncclFloat, ncclSum, nullptr, me.stream()),
              invalid, "communicator is null");
  void* other = nullptr;
  void* memory = nullptr;
  driver().use(1);
  driver().make_stream(0, &other);
  driver().allocate(256, &memory);
  driver().use(0);
  check_named(ncclAllReduce(a.data(), b.data(), 8, ncclFloat, ncclSum, me.comm,
                            static_cast<cudaStream_t>(other)),
              invalid, "the stream is on GPU 1, and the communicator on GPU 0");
  check_named(all_reduce(memory, b.data(), 8, ncclFloat), invalid, "sendbuff lies on GPU 1");
  check_named(all_reduce(a.data(), memory, 8, ncclFloat), invalid, "recvbuff lies on GPU 1");
  driver().release(memory);
  driver().end_stream(other);
  {
    const Setting setting("version", 22705, NCCL_VERSION_CODE);
    check_named(ncclAlltoAll(a.data(), b.data(), 8, ncclFloat, me.comm, me.stream()),
                ncclInvalidUsage, "from 2.28 on");
  }
  CHECK(all_reduce(a.data(), a.data(), 8, ncclFloat) == ncclSuccess);
  me.block();
}

TEST_CASE("a group that can't be one kernel is named, and none of it is queued") {
  Rank me(0, 1, fresh_id());
  std::array<float, 8> a{}, b{};
  const long long before = tessera_nccl_double_count("kernels");
  check_named(ncclGroupEnd(), ncclInvalidUsage, "no group has been started");

  ncclGroupStart();
  ncclAllReduce(a.data(), b.data(), 8, ncclFloat, ncclSum, me.comm, me.stream());
  ncclAllReduce(b.data() + 4, a.data(), 4, ncclFloat, ncclSum, me.comm, me.stream());
  check_named(ncclGroupEnd(), ncclInvalidArgument, "of the same group reads");

  ncclGroupStart();
  ncclAllReduce(a.data(), a.data(), 8, ncclFloat, ncclSum, me.comm, me.stream());
  ncclAllReduce(b.data(), a.data(), 8, ncclFloat, ncclSum, me.comm, me.stream());
  check_named(ncclGroupEnd(), ncclInvalidArgument, "of the same group writes");

  void* other = nullptr;
  driver().make_stream(0, &other);
  ncclGroupStart();
  ncclAllReduce(a.data(), a.data(), 8, ncclFloat, ncclSum, me.comm, me.stream());
  check_named(ncclAllReduce(b.data(), b.data(), 8, ncclFloat, ncclSum, me.comm,
                            static_cast<cudaStream_t>(other)),
              ncclInvalidUsage, "one communicator on two streams");
  CHECK(ncclGroupEnd() == ncclInvalidUsage);
  driver().end_stream(other);

  ncclComm_t child = nullptr;
  ncclGroupStart();
  ncclAllReduce(a.data(), a.data(), 8, ncclFloat, ncclSum, me.comm, me.stream());
  ncclCommSplit(me.comm, 0, 0, &child, nullptr);
  check_named(ncclGroupEnd(), ncclInvalidUsage, "not both");

  ncclConfig_t config = polled();
  REQUIRE(ncclCommSplit(me.comm, 0, 0, &child, &config) == ncclSuccess);
  ncclGroupStart();
  ncclAllReduce(a.data(), a.data(), 8, ncclFloat, ncclSum, me.comm, me.stream());
  ncclAllReduce(b.data(), b.data(), 8, ncclFloat, ncclSum, child, me.stream());
  check_named(ncclGroupEnd(), ncclInvalidArgument, "blocking and non-blocking");
  CHECK(ncclCommDestroy(child) == ncclSuccess);
  CHECK(tessera_nccl_double_count("kernels") == before);
}

TEST_CASE("calls that differ between ranks are named on both", "[threads]") {
  struct Case {
    std::function<void(Rank&, float*)> call;
    const char *of_0, *of_1;
  };
  const auto reduce = [](Rank& me, float* data, std::size_t count, ncclDataType_t dtype,
                         ncclRedOp_t op) {
    ncclAllReduce(data, data, count, dtype, op, me.comm, me.stream());
  };
  const Case cases[] = {
      {[&](Rank& me, float* data) {
         if (me.rank == 0) return reduce(me, data, 4, ncclFloat, ncclSum);
         ncclBroadcast(data, data, 4, ncclFloat, 0, me.comm, me.stream());
       },
       "ncclAllReduce of 4 float32, sum", "ncclBroadcast of 4 float32 from root 0"},
      {[&](Rank& me, float* data) { reduce(me, data, me.rank == 0 ? 4 : 5, ncclFloat, ncclSum); },
       "of 4 float32", "of 5 float32"},
      {[&](Rank& me, float* data) {
         reduce(me, data, 4, me.rank == 0 ? ncclFloat : ncclInt, ncclSum);
       },
       "of 4 float32", "of 4 int32"},
      {[&](Rank& me, float* data) {
         reduce(me, data, 4, ncclFloat, me.rank == 0 ? ncclSum : ncclMax);
       },
       "float32, sum", "float32, max"},
      {[&](Rank& me, float* data) {
         ncclBroadcast(data, data, 4, ncclFloat, me.rank, me.comm, me.stream());
       },
       "from root 0", "from root 1"},
      {[&](Rank& me, float* data) {
         ncclGroupStart();
         reduce(me, data, 4, ncclFloat, ncclSum);
         if (me.rank == 0) reduce(me, data + 4, 2, ncclFloat, ncclSum);
         ncclGroupEnd();
       },
       "of 2 float32", "none"},
      {[&](Rank& me, float* data) {
         ncclGroupStart();
         ncclSend(data, 4, ncclFloat, 1 - me.rank, me.comm, me.stream());
         ncclRecv(data + 4, me.rank == 0 ? 4 : 3, ncclFloat, 1 - me.rank, me.comm, me.stream());
         ncclGroupEnd();
       },
       "ncclRecv of 3 float32", "ncclSend of 4 float32"},
  };
  for (const Case& c : cases)
    on_threads(2, [&](Rank& me) {
      std::array<float, 8> data{};
      c.call(me, data.data());
      if (std::strstr(c.of_0, "ncclRecv")) {  // what rank 0 gets is right
        if (me.rank == 1) return check_failed(me, c.of_0, c.of_1);
        me.block();
        return me.abort();
      }
      check_failed(me, c.of_0, c.of_1);
    });
}

TEST_CASE("launches on two communicators in different orders are named", "[threads]") {
  on_threads(2, [](Rank& me) {
    ncclComm_t second = nullptr;
    void* other = nullptr;
    ncclCommSplit(me.comm, 0, me.rank, &second, nullptr);
    driver().make_stream(0, &other);
    std::array<float, 2> data{};
    for (int turn = 0; turn < 2; ++turn)
      if (turn == me.rank)
        ncclAllReduce(&data[0], &data[0], 1, ncclFloat, ncclSum, me.comm, me.stream());
      else
        ncclAllReduce(&data[1], &data[1], 1, ncclFloat, ncclSum, second,
                      static_cast<cudaStream_t>(other));
    const std::string line = me.failure();
    expect(line.find("different orders") != std::string::npos, line);
    ncclGroupStart();
    ncclCommAbort(me.comm);
    ncclCommAbort(second);
    ncclGroupEnd();
    me.comm = nullptr;
    driver().end_stream(other);
  });
}

TEST_CASE("who can't be a rank of a communicator is named", "[threads]") {
  const Gpus gpus(2);
  emulator();
  driver().use(0);
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  ncclComm_t comm = nullptr;
  const ncclUniqueId id = fresh_id();
  check_named(ncclCommInitRankConfig(nullptr, 1, id, 0, &config), ncclInvalidArgument, "null");
  check_named(ncclCommInitRankConfig(&comm, 1, id, 1, &config), ncclInvalidArgument, "rank 1 of 1");
  check_named(ncclCommInitRankConfig(&comm, 1, {}, 0, &config), ncclInvalidArgument,
              "not one of ncclGetUniqueId");
  config.magic = 0;
  check_named(ncclCommInitRankConfig(&comm, 1, id, 0, &config), ncclInvalidArgument,
              "NCCL_CONFIG_INITIALIZER");
  config = NCCL_CONFIG_INITIALIZER;
  config.minCTAs = 4;
  config.maxCTAs = 1;
  check_named(ncclCommInitRankConfig(&comm, 1, id, 0, &config), ncclInvalidArgument, "maxCTAs");
  config = polled();

  // Polled, so that one thread can be several ranks.
  const auto ranks_fail = [&](int first, int ranks_of_first, int second, int gpu_of_second,
                              const std::string& rule) {
    const ncclUniqueId fresh = fresh_id();
    Rank a(first, ranks_of_first, fresh, config, 0), b(second, 2, fresh, config, gpu_of_second);
    if (b.comm) {
      CHECK(b.settled() == ncclInvalidUsage);
      check_named(ncclInvalidUsage, ncclInvalidUsage, rule);
      b.abort();
    } else {
      check_named(b.made, ncclInvalidUsage, rule);
    }
    a.abort();
  };
  ranks_fail(0, 2, 0, 1, "rank 0 of this id has been taken before");
  ranks_fail(0, 3, 1, 1, "all ranks give the same number");
  ranks_fail(0, 2, 1, 0, "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 0");
  {
    const Setting setting("one_gpu", 1, 0);
    const ncclUniqueId fresh = fresh_id();
    Rank a(0, 2, fresh, config, 0), b(1, 2, fresh, config, 0);
    CHECK(a.settled() == ncclSuccess);
    CHECK(b.settled() == ncclSuccess);
  }
  const ncclUniqueId used = fresh_id();
  {
    const Rank once(0, 1, used);
  }
  check_named(ncclCommInitRank(&comm, 1, used, 0), ncclInvalidUsage,
              "every attempt has its own id");
  CHECK(comm == nullptr);
}

TEST_CASE("a communicator that has ended is named") {
  ncclComm_t gone = nullptr;
  {
    Rank me(0, 1, fresh_id());
    gone = me.comm;
    CHECK(ncclCommFinalize(me.comm) == ncclSuccess);
    check_named(ncclCommFinalize(me.comm), ncclInvalidArgument, "has been finalized");
  }
  ncclResult_t result = ncclSuccess;
  check_named(ncclCommGetAsyncError(gone, &result), ncclInvalidArgument, "has been destroyed");
  check_named(ncclCommDestroy(gone), ncclInvalidArgument, "has been destroyed");
  check_named(ncclCommAbort(gone), ncclInvalidArgument, "has been destroyed");
  CHECK(ncclCommDestroy(nullptr) == ncclSuccess);
}

TEST_CASE("windows are registered by all ranks in one order, over memory of the double",
          "[threads]") {
  constexpr std::size_t kGranule = std::size_t{2} << 20;
  on_threads(2, [&](Rank& me) {
    void* memory = nullptr;
    ncclWindow_t window = nullptr;
    const std::int64_t before = emulator().used(me.rank);
    const auto taken = [&] { return emulator().used(me.rank) - before; };
    expect(ncclMemAlloc(&memory, kGranule + 1) == ncclSuccess, "memory");
    expect(taken() == 2 * static_cast<std::int64_t>(kGranule), "whole granules");
    const auto add = [&](void* at, std::size_t bytes) {
      return ncclCommWindowRegister(me.comm, at, bytes, &window, NCCL_WIN_COLL_SYMMETRIC);
    };
    char* const bytes = static_cast<char*>(memory);
    check_named(add(nullptr, 4096), ncclInvalidArgument, "null");
    check_named(add(bytes + 8, 4096), ncclInvalidArgument, "aligned to 4096");
    check_named(add(bytes + kGranule, kGranule + 1), ncclInvalidArgument, "of one ncclMemAlloc");
    expect(add(memory, kGranule) == ncclSuccess && window, "a window");
    check_named(ncclMemFree(memory), ncclInvalidUsage, "still registered");
    check_named(ncclMemFree(bytes + 8), ncclInvalidArgument, "not the begin");
    expect(ncclCommWindowDeregister(me.comm, window) == ncclSuccess, "it goes");
    check_named(ncclCommWindowDeregister(me.comm, window), ncclInvalidArgument, "no window");
    check_named(add(memory, me.rank == 0 ? 4096 : 8192), ncclInvalidUsage, "in one order");
    expect(add(memory, 4096) == ncclSuccess && window, "another window");
    const ncclWindow_t second = window;
    if (me.rank == 0) ncclCommWindowDeregister(me.comm, second);
    check_named(add(memory, 4096), ncclInvalidUsage, "ended different ones");
    if (me.rank == 1) ncclCommWindowDeregister(me.comm, second);
    ncclComm_t child = nullptr;
    if (me.rank == 0)
      check_named(add(memory, 4096), ncclInvalidUsage, "rank 1 ncclCommSplit");
    else
      check_named(ncclCommSplit(me.comm, 0, 0, &child, nullptr), ncclInvalidUsage,
                  "rank 0 ncclCommWindowRegister");
    tessera_nccl_double_set("null_windows", 1);
    expect(add(memory, 4096) == ncclSuccess && !window, "success, and no window");
    expect(ncclMemFree(memory) == ncclSuccess && taken() == 0, "freed");
  });
  tessera_nccl_double_set("null_windows", 0);
  CHECK(tessera_nccl_double_count("windows") == 0);
  CHECK(tessera_nccl_double_count("bytes") == 0);
}

TEST_CASE("sums lie at one place in windows on all ranks, or in none", "[threads]") {
  constexpr std::size_t kBytes = 1 << 20, kCount = 1024;
  for (const bool in_one : {true, false})
    on_threads(2, [&](Rank& me) {
      void* memory = nullptr;
      ncclWindow_t window = nullptr;
      expect(ncclMemAlloc(&memory, kBytes) == ncclSuccess, "memory");
      expect(ncclCommWindowRegister(me.comm, memory, kBytes, &window, NCCL_WIN_COLL_SYMMETRIC) ==
                 ncclSuccess,
             "a window");
      auto* const data = static_cast<float*>(memory);
      std::array<float, kCount> other{};
      const long long before = tessera_nccl_double_count("windowed_sums");
      float* const to = in_one || me.rank == 0 ? data + 2 * kCount : other.data();
      expect(
          ncclAllReduce(data, to, kCount, ncclFloat, ncclSum, me.comm, me.stream()) == ncclSuccess,
          "a sum");
      if (!in_one) {
        const std::string line = me.failure();
        expect(line.find("elsewhere in windows") != std::string::npos, line);
        me.abort();
      }
      me.block();
      if (in_one) expect(tessera_nccl_double_count("windowed_sums") > before, "is counted");
      if (in_one) ncclCommWindowDeregister(me.comm, window);
      expect(ncclMemFree(memory) == ncclSuccess, "freed");
    });
}

TEST_CASE("a communicator takes memory of its GPU for each of its CTAs, and gives it back",
          "[threads]") {
  on_threads(2, [](Rank& me) {
    const std::int64_t of_all = emulator().used(me.rank);
    ncclComm_t child = nullptr;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.maxCTAs = 1;
    expect(ncclCommSplit(me.comm, 0, me.rank, &child, &config) == ncclSuccess, "split");
    expect(of_all > 0 && emulator().used(me.rank) == of_all + of_all / 8, "an eighth more");
    expect(ncclCommDestroy(child) == ncclSuccess, "destroy");
    expect(emulator().used(me.rank) == of_all, "given back");
  });
  CHECK(tessera_nccl_double_count("held") == 0);
}
