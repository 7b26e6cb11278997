// Ranks that are processes on several hosts, which one machine stands for: collectives in two
// levels. Run under mpirun; every rank runs all cases in the same order.
#include <mpi.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>

#include "tests/comm/battery.hpp"
#include "tests/comm/mpi_hosts.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/race_check.hpp"

using namespace tessera;
using tessera::testing::RaceCheck;
using K = CollectiveKind;

namespace {

// Bytes that this process has sent by messages, by the rank of the communicator that they go to.
std::array<std::int64_t, 64> sent{};

}  // namespace

// MPI's profiling interface: the library's calls come here.
extern "C" int MPI_Isend(const void* data, int count, MPI_Datatype type, int to, int tag,
                         MPI_Comm comm, MPI_Request* request) {
  sent.at(static_cast<std::size_t>(to)) += count;
  return PMPI_Isend(data, count, type, to, tag, comm, request);
}

namespace {

// A collective of a world, made and checked on values that add up exactly, in bf16 too: small
// integers, so that every order of a sum gives the same.
class Exact {
 public:
  Exact(World& world, K kind, DType dtype, std::int64_t count, bool in_place, int root)
      : world_(world), chunks_(world.size()) {
    const bool scatters = kind == K::reduce_scatter, gathers = kind == K::all_gather;
    sends_ = scatters ? chunks_ : 1;
    receives_ = gathers ? chunks_ : 1;
    const auto width = static_cast<std::int64_t>(size_bytes(dtype));
    const std::int64_t sent = sends_ * count * width, own = world.rank() * count * width;
    memory_ = world.allocate_symmetric(sent + receives_ * count * width);
    std::byte* const recv = memory_->data() + sent;
    item = {.send = memory_->data(),
            .recv = recv,
            .count = count,
            .kind = kind,
            .dtype = dtype,
            .root = root};
    if (in_place && gathers) item.send = recv + own;
    if (in_place && scatters) item.recv = memory_->data() + own;
    if (in_place && has_root(kind)) item.recv = memory_->data();
    auto* const send = static_cast<std::byte*>(const_cast<void*>(item.send));
    visit_floats([&](auto zero) {
      auto* const values = reinterpret_cast<decltype(zero)*>(send);
      for (std::int64_t i = 0; i < sends_ * count; ++i)
        values[i] = decltype(zero)(static_cast<float>(value(world.rank(), i)));
    });
  }

  // The first element that is wrong, or -1.
  std::int64_t find_wrong() const {
    std::int64_t wrong = -1;
    if (item.kind == K::reduce && item.root != world_.rank()) return wrong;
    visit_floats([&](auto zero) {
      const auto* const values = static_cast<const decltype(zero)*>(item.recv);
      for (std::int64_t i = receives_ * item.count - 1; i >= 0; --i)
        if (static_cast<float>(values[i]) != static_cast<float>(expected(i))) wrong = i;
    });
    return wrong;
  }

  Collective item;

 private:
  static int value(int rank, std::int64_t i) {
    return static_cast<int>((i * 7 + i / 1021 + 13 * rank) % 61);
  }
  int expected(std::int64_t i) const {
    if (item.kind == K::all_gather) return value(static_cast<int>(i / item.count), i % item.count);
    if (item.kind == K::broadcast) return value(item.root, i);
    if (item.kind == K::reduce_scatter) i += world_.rank() * item.count;
    int sum = 0;  // at most 4 * 60: exact in 8 bits
    for (int r = 0; r < chunks_; ++r) sum += value(r, i);
    return sum;
  }
  template <class F>
  void visit_floats(const F& f) const {
    item.dtype == bf16 ? f(BFloat16{}) : f(float{});
  }

  World& world_;
  std::int64_t chunks_, sends_ = 1, receives_ = 1;
  std::shared_ptr<SymmetricMemory> memory_;
};

}  // namespace

// The battery's bound on a sum is that of its additions in any order.
TEST_CASE("mpi hosts: every collective is right, wherever ranks lie", "[comm][mpi]") {
  const std::uint64_t seed = agreed_seed();
  INFO("seed " << seed);
  const auto rank = static_cast<std::size_t>(keeper().rank());
  const std::vector<std::uint64_t> threads = battery::hashes_of_threads(keeper().size(), seed);
  std::mt19937_64 draw(seed);
  std::vector<Hosts> all = placements();
  const Hosts more = all[draw() % all.size()];
  std::erase_if(all, [](const Hosts& hosts) { return std::ranges::max(hosts) > 1; });
  all.push_back(more);
  for (const Hosts& hosts : all) {
    INFO(to_string(hosts));
    const PretendedHosts pretended(hosts);
    const RaceCheck check;
    World world = World::mpi(check({.threads = 1}));
    CHECK(world.sums_are_ordered() == is_flat(hosts));
    const battery::Result result = battery::run(world, seed);
    for (const std::string& error : result.errors) FAIL_CHECK(error);
    if (world.sums_are_ordered()) CHECK(result.hash == threads[rank]);
  }
}

TEST_CASE("mpi hosts: a group of any ranks is right, and in rank order where it is on one host",
          "[comm][mpi]") {
  const std::uint64_t seed = agreed_seed();
  INFO("seed " << seed);
  const int size = keeper().size() - 1;
  const std::vector<std::uint64_t> threads = battery::hashes_of_threads(size, seed);
  std::mt19937_64 draw(seed);
  for (int trial = 0; trial < 3; ++trial) {
    const Hosts hosts = draw_hosts(draw);
    INFO(to_string(hosts));
    const PretendedHosts pretended(hosts);
    const RaceCheck check;
    World world = World::mpi(check({.threads = 1}));
    const RankGroup& group = *world.split("others", others(world));
    const Hosts theirs(hosts.begin() + 1, hosts.end());
    const bool is_on_one = std::ranges::count(theirs, theirs[0]) == std::ssize(theirs);
    if (world.rank() > 0) CHECK(group.sums_are_ordered() == (is_on_one || is_flat(theirs)));
    const battery::Result first = battery::run(group, seed), second = battery::run(group, seed);
    for (const std::string& error : first.errors) FAIL_CHECK(error);
    CHECK(first.hash == second.hash);
    if (world.rank() > 0 && group.sums_are_ordered())
      CHECK(first.hash == threads[static_cast<std::size_t>(group.rank())]);
    world.barrier();
  }
}

// A block on its way is 4 MiB at most, divided among those whom a rank serves.
TEST_CASE("mpi hosts: groups of items that go in many blocks", "[comm][mpi]") {
  const std::uint64_t seed = agreed_seed();
  INFO("seed " << seed);
  std::mt19937_64 draw(seed);
  for (int trial = 0; trial < 3; ++trial) {
    const Hosts hosts = draw_hosts(draw);
    const PretendedHosts pretended(hosts);
    const RaceCheck check;
    World world = World::mpi(check({.threads = 1}));
    std::vector<Exact> items;
    CollectiveGroup group("large");
    for (const K kind : {K::all_gather, K::reduce_scatter, K::all_reduce, K::reduce, K::broadcast})
      for (const DType dtype : {f32, bf16}) {
        const auto count = static_cast<std::int64_t>(draw() % 1'500'000);
        const bool in_place = kind != K::all_reduce && draw() % 2 == 0;
        const int root = static_cast<int>(draw() % hosts.size());
        items.emplace_back(world, kind, dtype, count, in_place, root);
      }
    for (const Exact& e : items) group.edit().push_back(e.item);
    std::ranges::shuffle(group.edit(), draw);
    world.reduce().submit(group, {});
    world.device().synchronize();
    for (const Exact& e : items) {
      INFO(to_string(hosts) << ": " << name(e.item.kind) << " of " << e.item.count << " x "
                            << e.item.dtype);
      CHECK(e.find_wrong() == -1);
    }
    world.barrier();  // before the items' memory goes
  }
}

TEST_CASE("mpi hosts: a sum adds the ranks of each host, then the hosts, and rounds once",
          "[comm][mpi]") {
  const std::uint64_t seed = agreed_seed();
  INFO("seed " << seed);
  constexpr std::size_t kCount = 500;
  const auto ranks = static_cast<std::size_t>(keeper().size());
  std::vector<std::vector<float>> terms(ranks);  // of each rank
  std::mt19937_64 draw(seed);
  for (auto& of_rank : terms)
    for (std::size_t i = 0; i < kCount; ++i)
      of_rank.push_back(static_cast<float>(static_cast<double>(draw()) * 0x1p-64 - 0.5));
  for (const Hosts& hosts : placements()) {
    INFO(to_string(hosts));
    const PretendedHosts pretended(hosts);
    const RaceCheck check;
    World world = World::mpi(check({.threads = 1}));
    std::vector<float> wide = terms[static_cast<std::size_t>(world.rank())];
    std::vector<BFloat16> narrow(wide.begin(), wide.end());
    CollectiveGroup group("sums");
    for (const DType dtype : {bf16, f32}) {
      void* const values = dtype == bf16 ? static_cast<void*>(narrow.data()) : wide.data();
      group.edit().push_back(
          {.send = values, .recv = values, .count = kCount, .kind = K::all_reduce, .dtype = dtype});
    }
    world.reduce().submit(group, {});
    world.device().synchronize();
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < kCount; ++i) {
      std::array<float, 4> of_host{}, of_host_narrow{};  // numbered by their first ranks
      for (std::size_t r = 0; r < ranks; ++r) {
        const auto host = static_cast<std::size_t>(hosts[r]);
        of_host[host] += terms[r][i];
        of_host_narrow[host] += static_cast<float>(BFloat16(terms[r][i]));
      }
      const auto sum = [](const auto& all) { return std::accumulate(all.begin(), all.end(), 0.f); };
      wrong += wide[i] != sum(of_host) ||
               static_cast<float>(narrow[i]) != static_cast<float>(BFloat16(sum(of_host_narrow)));
    }
    CHECK(wrong == 0);
  }
}

TEST_CASE("mpi hosts: a maximum is NaN where any value is", "[comm][mpi]") {
  for (const Hosts& hosts : placements()) {
    INFO(to_string(hosts));
    const PretendedHosts pretended(hosts);
    const RaceCheck check;
    World world = World::mpi(check({.threads = 1}));
    const int n = world.size();
    const auto memory = world.allocate_symmetric(4096);
    auto* const values = reinterpret_cast<BFloat16*>(memory->data());
    // Element r is largest on rank r, element n + r is NaN there.
    for (int i = 0; i < 2 * n; ++i)
      values[i] = BFloat16(i % n != world.rank() ? -1.f
                           : i < n               ? static_cast<float>(i)
                                                 : std::numeric_limits<float>::quiet_NaN());
    world.control().submit({.send = values,
                            .recv = values,
                            .count = 2 * n,
                            .kind = K::all_reduce,
                            .dtype = bf16,
                            .reduce = ReduceOp::max},
                           "max", {});
    world.device().synchronize();
    for (int i = 0; i < n; ++i) CHECK(static_cast<float>(values[i]) == static_cast<float>(i));
    for (int i = n; i < 2 * n; ++i) CHECK(std::isnan(static_cast<float>(values[i])));
  }
}

TEST_CASE("mpi hosts: each part goes once from a host to another", "[comm][mpi]") {
  constexpr std::int64_t kCount = 12 * 3'000;  // parts of an all_reduce are alike on 2 to 4 ranks
  for (const Hosts& hosts : placements()) {
    const PretendedHosts pretended(hosts);
    World world = World::mpi({.threads = 1});
    const int n = world.size();
    // Bytes from each rank to each host that a collective has sent, beyond what all agree with.
    const auto count_bytes = [&](const Collective& c) {
      sent = {};
      world.control().submit(c, "counted", {});
      world.device().synchronize();
      std::array<double, 4> bytes{};
      for (int r = 0; r < n; ++r)
        bytes[static_cast<std::size_t>(hosts[static_cast<std::size_t>(r)])] +=
            static_cast<double>(sent[static_cast<std::size_t>(r)]);
      return bytes;
    };
    const auto agreed = count_bytes({.kind = K::barrier});
    const auto ranks_on = [&](int host) { return std::ranges::count(hosts, host); };
    for (const K kind : {K::all_gather, K::reduce_scatter, K::all_reduce, K::reduce, K::broadcast})
      for (const DType dtype : {f32, bf16}) {
        const Exact exact(world, kind, dtype, kCount, false, n - 1);
        const auto bytes = count_bytes(exact.item);
        const std::int64_t item = kCount * static_cast<std::int64_t>(size_bytes(dtype));
        const bool widens = dtype == bf16 && !is_flat(hosts);  // partial sums are f32
        const std::int64_t sum = widens ? 2 * item : item;
        for (int from = 0; from < n; ++from)
          for (int to = 0; to < n; ++to) {
            const auto at = static_cast<std::size_t>(to);
            const bool is_mine = hosts[static_cast<std::size_t>(world.rank())] == from;
            const double moved = keeper().sum(is_mine ? bytes[at] - agreed[at] : 0);
            if (from == to || ranks_on(from) == 0 || ranks_on(to) == 0) continue;
            INFO(to_string(hosts) << ": " << name(kind) << " of " << dtype << " from host " << from
                                  << " to " << to);
            if (kind == K::all_gather) CHECK(moved == ranks_on(from) * item);
            if (kind == K::reduce_scatter) CHECK(moved == ranks_on(to) * sum);
            if (kind == K::all_reduce)
              CHECK(moved == (ranks_on(from) * item + ranks_on(to) * sum) / n);
            if (kind == K::reduce) CHECK(moved == (hosts.back() == to ? sum : 0));
            if (kind == K::broadcast) CHECK((moved == 0 || moved == item));
          }
        if (kind == K::broadcast) {  // each other host gets it once
          double all = 0;
          for (int to = 0; to < n; ++to) {
            const auto at = static_cast<std::size_t>(to);
            const bool crosses = hosts[static_cast<std::size_t>(world.rank())] != to;
            all += keeper().sum(crosses ? bytes[at] - agreed[at] : 0);
          }
          CHECK(all == (std::ranges::max(hosts) * item));
        }
        CHECK(exact.find_wrong() == -1);
        world.barrier();
      }
  }
}
