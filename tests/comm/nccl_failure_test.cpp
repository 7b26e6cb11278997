// The double of NCCL while things go wrong or take their time: polls, faults, aborts, graphs, ranks
// that are processes.
#include <csignal>
#include <cstdlib>
#include <filesystem>

#include "tests/comm/nccl_ranks.hpp"
#include "tests/support/forked.hpp"
#include "tests/support/seed.hpp"

using namespace tessera;
using namespace tessera::testing;

namespace {

bool says(const std::string& rule) {
  return std::string(ncclGetLastError(nullptr)).find(rule) != std::string::npos;
}

ncclResult_t sum(Rank& me, float* data, ncclComm_t comm = nullptr) {
  return ncclAllReduce(data, data, 1, ncclFloat, ncclSum, comm ? comm : me.comm, me.stream());
}

}  // namespace

TEST_CASE("a communicator that does not block does its work at the poll that it is told",
          "[threads]") {
  const Setting setting("polls", 3, 1);
  on_threads(
      2,
      [](Rank& me) {
        expect(me.made == ncclInProgress, "init");
        float value = 1;
        expect(sum(me, &value) == ncclInvalidArgument && says("in progress"), "not ready");
        for (int poll = 0; poll < 3; ++poll) expect(me.async() == ncclInProgress, "a poll");
        expect(me.settled() == ncclSuccess, "made");
        expect(sum(me, &value) == ncclInProgress, "a launch");
        expect(sum(me, &value) == ncclInvalidArgument && says("in progress"), "not launched");
        me.block();
        expect(value == 1, "nothing is queued before the last poll");
        for (int poll = 0; poll < 3; ++poll) expect(me.async() == ncclInProgress, "a poll");
        expect(me.async() == ncclSuccess, "launched");
        me.block();
        expect(value == 2, "the sum");
        ncclComm_t child = nullptr;
        ncclConfig_t config = polled();
        expect(ncclCommSplit(me.comm, 0, me.rank, &child, &config) == ncclInProgress, "split");
        expect(!child, "no child before it is made");
        expect(me.settled() == ncclSuccess && child, "a child");
        expect(ncclCommDestroy(child) == ncclSuccess, "it ends");
        expect(ncclCommFinalize(me.comm) == ncclInProgress, "finalize");
        expect(me.settled() == ncclSuccess, "finalized");
      },
      polled());
}

TEST_CASE("settings come from the environment") {
  if (std::getenv("TESSERA_NCCL_DOUBLE")) {  // in the process that the other part starts
    int version = 0;
    CHECK(ncclGetVersion(&version) == ncclSuccess);
    CHECK(version == 22705);
    Rank me(0, 1, fresh_id());
    float value = 1;
    CHECK(sum(me, &value) == ncclSuccess);
    CHECK(me.failure() == "an asynchronous error that a test asked for");
    return me.abort();
  }
  const std::string program = std::filesystem::read_symlink("/proc/self/exe");
  CHECK(std::system(("TESSERA_NCCL_DOUBLE=version=22705,break=0:0:6 " + program +
                     " 'settings come from the environment' > /dev/null")
                        .c_str()) == 0);
}

TEST_CASE("a call that a test refuses fails once") {
  tessera_nccl_double_refuse("ncclCommInitRankConfig", ncclSystemError);
  const Rank refused(0, 1, fresh_id());
  CHECK(refused.made == ncclSystemError);
  CHECK(says("refused by the test"));
  CHECK(Rank(0, 1, fresh_id()).made == ncclSuccess);
}

TEST_CASE("a stalled rank holds its peers until all abort", "[threads]") {
  on_threads(2, [](Rank& me) {
    float value = 1;
    sum(me, &value);
    me.block();
    if (me.rank == 1) tessera_nccl_double_break(1, 1, ncclSuccess);
    sum(me, &value);  // of rank 1 the last before the fault
    me.block();
    sum(me, &value);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    expect(value == 4 && me.async() == ncclSuccess, "stalled, and no error");
    me.abort();
    me.block();
    if (me.rank == 1) tessera_nccl_double_break(1, -1, ncclSuccess);
  });
}

TEST_CASE("an asynchronous error is one rank's, and its peers only wait", "[threads]") {
  tessera_nccl_double_break(0, 0, ncclRemoteError);
  on_threads(2, [](Rank& me) {
    float value = 1;
    sum(me, &value);
    if (me.rank == 0) {
      expect(!me.failure().empty() && me.async() == ncclRemoteError, "rank 0 is told");
      expect(sum(me, &value) == ncclRemoteError, "and does no more");
      expect(ncclCommDestroy(me.comm) == ncclRemoteError && says("abort it"), "nor ends so");
    } else {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      expect(me.async() == ncclSuccess, "rank 1 is not");
    }
    me.abort();
  });
  tessera_nccl_double_break(0, -1, ncclSuccess);
}

TEST_CASE("communicators of one GPU that are aborted one by one wait for each other's kernels",
          "[threads]") {
  tessera_nccl_double_break(1, 0, ncclSuccess);
  std::atomic<int> tried{0};
  on_threads(2, [&](Rank& me) {
    ncclComm_t second = nullptr;
    ncclCommSplit(me.comm, 0, me.rank, &second, nullptr);
    void* other = nullptr;
    driver().make_stream(0, &other);
    float a = 1, b = 1;
    sum(me, &a);
    ncclAllReduce(&b, &b, 1, ncclFloat, ncclSum, second, static_cast<cudaStream_t>(other));
    {
      tessera_nccl_double_set("host_ms", 50);
      expect(ncclCommAbort(me.comm) == ncclSystemError && says("within 50 ms"), "one by one");
      ++tried;
      while (tried < 2) std::this_thread::yield();
      tessera_nccl_double_set("host_ms", 0);
    }
    ncclGroupStart();
    ncclCommAbort(me.comm);
    ncclCommAbort(second);
    expect(ncclGroupEnd() == ncclSuccess, "in one group");
    me.comm = nullptr;
    driver().end_stream(other);
  });
  tessera_nccl_double_break(1, -1, ncclSuccess);
  CHECK(tessera_nccl_double_count("communicators") == 0);
}

TEST_CASE("an abort waits until its peers' kernels have ended", "[threads]") {
  std::atomic<bool> has_aborted{false};
  std::atomic<int> running{0};
  on_threads(2, [&](Rank& me) {
    tessera_nccl_double_break(0, 0, ncclSuccess);
    float value = 1;
    sum(me, &value);
    ++running;
    while (running < 2) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // both kernels run
    if (me.rank == 0) {
      me.abort();
      has_aborted = true;
    } else {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      expect(!has_aborted, "rank 0 waits for rank 1's kernel");
      me.abort();
    }
  });
  tessera_nccl_double_break(0, -1, ncclSuccess);
}

TEST_CASE("an abort by another thread ends a call that waits for peers", "[threads]") {
  on_threads(2, [](Rank& me) {
    if (me.rank == 1) return me.abort();
    auto* const comm = me.comm;
    std::thread aborts([comm] {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      expect(ncclCommAbort(comm) == ncclSuccess, "abort");
    });
    ncclComm_t child = nullptr;
    expect(ncclCommSplit(comm, 0, 0, &child, nullptr) == ncclInvalidUsage && says("meanwhile"),
           "a split that rank 1 never comes to");
    aborts.join();
    me.comm = nullptr;
  });
}

TEST_CASE("a captured kernel runs at each launch, and holds its communicator", "[threads]") {
  on_threads(2, [](Rank& me) {
    float value = 1;
    void* graph = nullptr;
    driver().begin_capture(me.native);
    expect(sum(me, &value) == ncclSuccess, "captured");
    driver().end_capture(me.native, &graph);
    expect(value == 1, "kept, not run");
    for (int turn = 0; turn < 3; ++turn) {
      driver().launch_graph(graph, me.native);
      sum(me, &value);  // between the graph's
    }
    me.block();
    expect(value == 64, "six sums");
    expect(ncclCommDestroy(me.comm) == ncclInvalidUsage && says("graphs hold 1 kernels"), "held");
    std::atomic<bool> has_ended{false};
    std::thread ends([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      has_ended = true;
      driver().end_graph(graph);
    });
    me.abort();
    expect(has_ended, "an abort waits for the graph");
    ends.join();
  });
  CHECK(tessera_nccl_double_count("graphs") == 0);
}

TEST_CASE("ranks of the double that are processes sum, and abort when one is killed") {
  emulator();
  const ncclUniqueId id = fresh_id();
  const std::vector<Ended> ended = run_forked(3, [&](int rank) -> std::string {
    Rank me(rank, 3, id, NCCL_CONFIG_INITIALIZER, 0);
    std::vector<float> values(100'000, static_cast<float>(rank + 1));
    ncclAllReduce(values.data(), values.data(), values.size(), ncclFloat, ncclSum, me.comm,
                  me.stream());
    me.block();
    std::string said = std::to_string(values.front() + values.back());
    if (rank == 2) {  // one of its kernels runs when it is killed
      tessera_nccl_double_break(2, 0, ncclSuccess);
      sum(me, values.data());
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      raise(SIGKILL);
    }
    sum(me, values.data());
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    const ncclResult_t result = ncclCommAbort(me.comm);
    me.comm = nullptr;
    return said + (result == ncclSuccess ? " aborted" : " not aborted");
  });
  CHECK(ended[0].said == "12.000000 aborted");
  CHECK(ended[1].said == "12.000000 aborted");
  CHECK(ended[2].said.empty());
}
