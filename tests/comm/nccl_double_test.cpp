// The double of NCCL does what NCCL does: values, the bits of its sums, groups, graphs, processes.
#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "tests/comm/nccl_ranks.hpp"
#include "tests/support/forked.hpp"
#include "tests/support/seed.hpp"

using namespace tessera;
using namespace tessera::testing;

namespace {

std::uint16_t to_bf16(float value) {  // to nearest, ties to even; no NaN comes here
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
float from_bf16(std::uint16_t value) {
  const std::uint32_t bits = static_cast<std::uint32_t>(value) << 16;
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}

// Element i of rank r, for counts.
float element(int rank, std::size_t i) {
  return static_cast<float>(rank * 1000) + static_cast<float>(i);
}
std::vector<float> elements(int rank, std::size_t count) {
  std::vector<float> all(count);
  for (std::size_t i = 0; i < count; ++i) all[i] = element(rank, i);
  return all;
}

std::size_t at(int rank) { return static_cast<std::size_t>(rank); }

// Every kind of call, out of place; the first line that is wrong.
std::string wrong_values(const Rank& me) {
  constexpr std::size_t kCount = 5;
  const std::size_t n = at(me.ranks);
  const std::vector<float> one = elements(me.rank, kCount), all = elements(me.rank, n * kCount);
  std::vector<float> gathered(n * kCount), exchanged(n * kCount), scattered(kCount), sum(kCount),
      root(kCount), received(kCount);
  ncclGroupStart();
  ncclAllGather(one.data(), gathered.data(), kCount, ncclFloat, me.comm, me.stream());
  ncclAlltoAll(all.data(), exchanged.data(), kCount, ncclFloat, me.comm, me.stream());
  ncclReduceScatter(all.data(), scattered.data(), kCount, ncclFloat, ncclSum, me.comm, me.stream());
  ncclAllReduce(one.data(), sum.data(), kCount, ncclFloat, ncclSum, me.comm, me.stream());
  ncclBroadcast(one.data(), root.data(), kCount, ncclFloat, me.ranks - 1, me.comm, me.stream());
  ncclSend(one.data(), kCount, ncclFloat, (me.rank + 1) % me.ranks, me.comm, me.stream());
  const int from = (me.rank + me.ranks - 1) % me.ranks;
  ncclRecv(received.data(), kCount, ncclFloat, from, me.comm, me.stream());
  if (ncclGroupEnd() != ncclSuccess) return ncclGetLastError(me.comm);
  me.block();
  for (std::size_t i = 0; i < kCount; ++i) {
    float total = 0, part = 0;
    for (int r = 0; r < me.ranks; ++r) {
      total += element(r, i);
      part += element(r, at(me.rank) * kCount + i);
      if (gathered[at(r) * kCount + i] != element(r, i)) return "ncclAllGather";
      if (exchanged[at(r) * kCount + i] != element(r, at(me.rank) * kCount + i))
        return "ncclAlltoAll";
    }
    if (scattered[i] != part) return "ncclReduceScatter";
    if (sum[i] != total) return "ncclAllReduce";
    if (root[i] != element(me.ranks - 1, i)) return "ncclBroadcast";
    if (received[i] != element(from, i)) return "ncclRecv";
  }
  return {};
}

}  // namespace

TEST_CASE("ranks of the double that are threads get every kind of call's values", "[threads]") {
  for (const int ranks : {1, 2, 3, 4}) {
    const Delays delays(fresh_seed());
    on_threads(ranks, [](Rank& me) {
      for (int turn = 0; turn < 3; ++turn) expect(wrong_values(me).empty(), wrong_values(me));
    });
  }
  CHECK(tessera_nccl_double_count("communicators") == 0);
}

TEST_CASE("a sum of the double begins after the rank it ends on, and is rounded at every hop",
          "[threads]") {
  constexpr int kRanks = 3;
  constexpr std::size_t kCount = 256;  // of each rank's block
  std::mt19937_64 random(fresh_seed());
  std::uniform_real_distribution<float> draw(-2, 2);
  std::vector<std::vector<std::uint16_t>> sent(kRanks);
  for (auto& one : sent)
    for (std::size_t i = 0; i < kRanks * kCount; ++i) one.push_back(to_bf16(draw(random)));
  const auto hops = [&](int first, std::size_t i) {
    std::uint16_t sum = sent[at(first)][i];
    for (int hop = 1; hop < kRanks; ++hop)
      sum = to_bf16(from_bf16(sum) + from_bf16(sent[at((first + hop) % kRanks)][i]));
    return sum;
  };
  std::vector<std::uint16_t> expected, by_rank, by_threads;
  for (std::size_t i = 0; i < kRanks * kCount; ++i) {
    expected.push_back(hops((static_cast<int>(i / kCount) + 1) % kRanks, i));
    by_rank.push_back(hops(0, i));
    by_threads.push_back(
        to_bf16(from_bf16(sent[0][i]) + from_bf16(sent[1][i]) + from_bf16(sent[2][i])));
  }
  CHECK(expected != by_rank);
  CHECK(expected != by_threads);  // whose sums are in f32, and rounded once
  on_threads(kRanks, [&](Rank& me) {
    std::vector<std::uint16_t> scattered(kCount), reduced(kRanks * kCount);
    const std::uint16_t* const mine = sent[at(me.rank)].data();
    ncclReduceScatter(mine, scattered.data(), kCount, ncclBfloat16, ncclSum, me.comm, me.stream());
    ncclAllReduce(mine, reduced.data(), kRanks * kCount, ncclBfloat16, ncclSum, me.comm,
                  me.stream());
    me.block();
    expect(reduced == expected, "all_reduce");
    expect(std::equal(scattered.begin(), scattered.end(),
                      expected.begin() + static_cast<std::ptrdiff_t>(at(me.rank) * kCount)),
           "reduce_scatter");
  });
}

TEST_CASE("a maximum of the double loses a NaN that meets a number", "[threads]") {
  on_threads(2, [](Rank& me) {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    float values[2] = {me.rank == 0 ? nan : 1.0f, nan};
    ncclAllReduce(values, values, 2, ncclFloat, ncclMax, me.comm, me.stream());
    me.block();
    expect(values[0] == 1.0f && std::isnan(values[1]), "a number, and NaN only where all are");
  });
}

TEST_CASE("a group of the double is one kernel, and an empty collective none", "[threads]") {
  const auto kernels = [] { return tessera_nccl_double_count("kernels"); };
  const auto calls = [] { return tessera_nccl_double_count("calls"); };
  const long long kernels_before = kernels(), calls_before = calls();
  on_threads(2, [](Rank& me) {
    std::vector<float> a(4, 1), b(4, 2);
    ncclGroupStart();
    ncclGroupStart();
    ncclAllReduce(a.data(), a.data(), 4, ncclFloat, ncclSum, me.comm, me.stream());
    ncclAllReduce(a.data(), a.data(), 0, ncclFloat, ncclSum, me.comm, me.stream());
    ncclGroupEnd();
    ncclAllReduce(b.data(), b.data(), 4, ncclFloat, ncclProd, me.comm, me.stream());
    ncclGroupEnd();
    me.block();
    expect(a[3] == 2 && b[3] == 4, "values");
  });
  CHECK(kernels() == kernels_before + 2);
  CHECK(calls() == calls_before + 4);
}

TEST_CASE("calls of the double in place are those of NCCL", "[threads]") {
  on_threads(3, [](Rank& me) {
    const std::size_t own = at(me.rank) * 2;
    std::vector<float> gathered(6), summed = elements(me.rank, 6), root = elements(me.rank, 2);
    gathered[own] = element(me.rank, 0);
    gathered[own + 1] = element(me.rank, 1);
    ncclGroupStart();
    ncclAllGather(&gathered[own], gathered.data(), 2, ncclFloat, me.comm, me.stream());
    ncclReduceScatter(summed.data(), &summed[own], 2, ncclFloat, ncclSum, me.comm, me.stream());
    ncclBroadcast(root.data(), root.data(), 2, ncclFloat, 1, me.comm, me.stream());
    expect(ncclGroupEnd() == ncclSuccess, "in place");
    me.block();
    for (int r = 0; r < 3; ++r)
      for (std::size_t i = 0; i < 2; ++i)
        expect(gathered[at(r) * 2 + i] == element(r, i), "all_gather");
    for (std::size_t i = 0; i < 2; ++i) {
      const std::size_t k = own + i;
      expect(summed[k] == element(0, k) + element(1, k) + element(2, k), "reduce_scatter");
      expect(root[i] == element(1, i), "broadcast");
    }
  });
}

TEST_CASE("ranks split into communicators in the order of their keys", "[threads]") {
  on_threads(4, [](Rank& me) {
    ncclComm_t half = nullptr, none = nullptr;
    expect(ncclCommSplit(me.comm, me.rank % 2, -me.rank, &half, nullptr) == ncclSuccess, "split");
    expect(ncclCommSplit(me.comm, NCCL_SPLIT_NOCOLOR, 0, &none, nullptr) == ncclSuccess, "none");
    int rank = -1, ranks = -1;
    ncclCommUserRank(half, &rank);
    ncclCommCount(half, &ranks);
    expect(!none && ranks == 2 && rank == (me.rank < 2 ? 1 : 0), "ranks of the half");
    float sum = element(me.rank, 0);
    ncclAllReduce(&sum, &sum, 1, ncclFloat, ncclSum, half, me.stream());
    me.block();
    expect(sum == element(0, 0) + element(2, 0) + (me.rank % 2 ? 2000.0f : 0.0f), "its sum");
    expect(ncclCommDestroy(half) == ncclSuccess, "destroy");
  });
}

TEST_CASE("the double does not block the host, and keeps a communicator's order on two streams",
          "[threads]") {
  on_threads(2, [](Rank& me) {
    void* other = nullptr;
    driver().make_stream(0, &other);
    std::vector<float> values(64, 1);
    if (me.rank == 0) driver().delay(50'000'000, me.native);  // the first kernel begins late
    for (int i = 0; i < 6; ++i)
      ncclAllReduce(&values[0], &values[0], 64, ncclFloat, ncclSum, me.comm,
                    static_cast<cudaStream_t>(i % 2 ? other : me.native));
    driver().end_stream(other);
    me.block();
    expect(values[63] == 64, "each doubles");
  });
}
