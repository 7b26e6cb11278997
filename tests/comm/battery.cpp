#include "tests/comm/battery.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <random>

#include "tessera/base/philox.hpp"
#include "tessera/detail/base/checked.hpp"
#include "tessera/tensor/ops.hpp"
#include "tests/support/share.hpp"

using namespace tessera;

namespace battery {
namespace {

struct Case {
  CollectiveKind kind;
  DType dtype;
  std::int64_t count;
  bool in_place;
  int root, target = 0;
};

// What rank `rank` sends at element `i` of case `id`: a value that the dtype holds exactly, so that
// the reference starts from the same numbers.
template <class T>
T value(std::uint64_t seed, std::uint64_t id, int rank, std::int64_t i) {
  const auto draw =
      philox(seed, static_cast<std::uint64_t>(i), (id << 8) | static_cast<std::uint64_t>(rank))[0];
  if constexpr (std::is_same_v<T, bool>)
    return draw % 4 == 0;
  else if constexpr (std::is_integral_v<T>)
    return static_cast<T>(static_cast<std::int64_t>(draw) - (std::int64_t{1} << 31));
  else
    return T(static_cast<float>(static_cast<std::int32_t>(draw)) * 0x1p-31f);  // [-1, 1]
}

// Unit roundoff: half the distance from 1 to the next number.
template <class T>
constexpr long double kRoundoff = std::is_same_v<T, double>     ? 0x1p-53L
                                  : std::is_same_v<T, float>    ? 0x1p-24L
                                  : std::is_same_v<T, BFloat16> ? 0x1p-8L
                                                                : 0x1p-11L;

struct Sum {
  long double exact = 0;
  long double magnitude = 0;
};

// n - 1 additions in the accumulator's precision, each off by at most its roundoff of a partial sum
// that no sum of magnitudes exceeds; 1.01 covers the products of roundoffs. 16-bit types round once
// more, to half a step of the result or of the smallest subnormal of binary16.
template <class T>
bool close(T got, const Sum& sum, int n) {
  if constexpr (std::is_floating_point_v<T> || sizeof(T) == 2) {
    const long double u = std::is_same_v<T, double> ? 0x1p-53L : 0x1p-24L;
    const long double added = 1.01L * (n - 1) * u * sum.magnitude;
    const long double rounded =
        sizeof(T) == 2 ? kRoundoff<T> * (std::abs(sum.exact) + added) + 0x1p-25L : 0;
    return std::abs(static_cast<long double>(static_cast<double>(got)) - sum.exact) <=
           added + rounded;
  } else {
    return static_cast<long double>(got) == sum.exact;
  }
}

// The sum of element `i` over all ranks; integers wrap, boolean is "or".
template <class T>
Sum reference_sum(std::uint64_t seed, std::uint64_t id, int size, std::int64_t i) {
  Sum sum;
  if constexpr (std::is_same_v<T, bool>) {
    for (int r = 0; r < size; ++r) sum.exact = sum.exact != 0 || value<T>(seed, id, r, i);
  } else if constexpr (std::is_integral_v<T>) {
    std::make_unsigned_t<T> total = 0;
    for (int r = 0; r < size; ++r)
      total = static_cast<decltype(total)>(total +
                                           static_cast<decltype(total)>(value<T>(seed, id, r, i)));
    sum.exact = static_cast<T>(total);
  } else {
    for (int r = 0; r < size; ++r) {
      const auto x = static_cast<long double>(static_cast<double>(value<T>(seed, id, r, i)));
      sum.exact += x;
      sum.magnitude += std::abs(x);
    }
  }
  return sum;
}

// One case with its buffers, cut from symmetric memory at an offset that all ranks share. The host
// may not touch that memory: values come from its own copy and go to it.
struct Placed {
  Case c;
  std::uint64_t id;
  std::byte *send, *recv;
  std::int64_t send_count, recv_count;

  Collective item() const {
    return {.send = send,
            .recv = recv,
            .count = c.count,
            .kind = c.kind,
            .dtype = c.dtype,
            .root = c.root,
            .target = c.target};
  }
};

class Runner {
 public:
  Runner(const RankGroup& group, std::uint64_t seed)
      : group_(group), seed_(seed), arena_(group.allocate_symmetric(kArenaBytes)) {}

  // Submits the cases as one group, or one by one, and checks what came.
  void run(Communicator& communicator, const std::vector<Case>& cases, bool as_group) {
    used_ = 0;
    std::vector<Placed> placed;
    for (const Case& c : cases) placed.push_back(place(c));
    CollectiveGroup group("battery");
    for (const Placed& p : placed) group.edit().push_back(p.item());
    const Device& device = group_.device();
    const Stream stream = device.stream(communicator.stream());
    if (used_ > 0) raw::copy_into(used(), Tensor::from(host_words(), {words()}, device));
    stream.wait(device.compute().record());
    const Access access{&use_, arena_->data(), arena_->data() + used_, AccessMode::write};
    if (as_group)
      communicator.submit(group, {&access, 1});
    else
      for (const Collective& c : group.items()) communicator.submit(c, "battery", {&access, 1});
    device.compute().wait(stream.record());
    device.block(device.compute().record());
    if (used_ > 0) std::ranges::copy(used().to_vector<std::int64_t>(), host_.begin());
    for (const Placed& p : placed) check(p, &communicator == &group_.control());
  }

  Result result;

 private:
  static constexpr std::int64_t kArenaBytes = 8 << 20;
  static constexpr int kUntouched = 1;  // a boolean, too

  std::int64_t words() const { return used_ / static_cast<std::int64_t>(sizeof host_[0]); }
  std::span<const std::int64_t> host_words() const {
    return {host_.data(), static_cast<std::size_t>(words())};
  }
  Tensor used() {
    return Tensor::wrap(Storage::borrowed(group_.device(), arena_->data(), used_, use_), {words()},
                        i64);
  }
  std::byte* on_host(const std::byte* data) {
    return reinterpret_cast<std::byte*>(host_.data()) + (data - arena_->data());
  }

  std::byte* cut(std::int64_t bytes) {
    std::byte* data = arena_->data() + used_;
    used_ += round_up(bytes, 64);
    if (used_ > kArenaBytes) throw ContractError("battery: the arena is too small");
    return data;
  }

  Placed place(const Case& c) {
    Placed p{.c = c,
             .id = ++cases_,
             .send = nullptr,
             .recv = nullptr,
             .send_count = c.count,
             .recv_count = c.count};
    const int n = group_.size(), rank = group_.rank();
    const bool is_exchange = c.kind == CollectiveKind::all_to_all;
    if (c.kind == CollectiveKind::reduce_scatter || is_exchange) p.send_count *= n;
    if (c.kind == CollectiveKind::all_gather || is_exchange) p.recv_count *= n;
    const auto width = static_cast<std::int64_t>(size_bytes(c.dtype));
    const std::int64_t mine = c.count * width * rank;
    if (!c.in_place) {
      p.send = cut(p.send_count * width);
      p.recv = cut(p.recv_count * width);
      std::memset(on_host(p.recv), kUntouched, static_cast<std::size_t>(p.recv_count * width));
    } else if (c.kind == CollectiveKind::all_gather) {
      p.recv = cut(p.recv_count * width);
      p.send = p.recv + mine;
    } else {
      p.send = cut(p.send_count * width);
      p.recv = c.kind == CollectiveKind::reduce_scatter ? p.send + mine : p.send;
    }
    visit(c.dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      for (std::int64_t i = 0; i < p.send_count; ++i)
        reinterpret_cast<T*>(on_host(p.send))[i] = value<T>(seed_, p.id, rank, i);
    });
    return p;
  }

  void check(const Placed& p, bool is_control) {
    const auto width = static_cast<std::int64_t>(size_bytes(p.c.dtype));
    const std::byte* const recv = on_host(p.recv);
    const std::string_view bytes(reinterpret_cast<const char*>(recv),
                                 static_cast<std::size_t>(p.recv_count * width));
    result.hash = fnv1a(bytes, result.hash);
    if (is_control) result.control = fnv1a(bytes, result.control);
    visit(p.c.dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      for (std::int64_t i = 0; i < p.recv_count; ++i)
        if (!is_right<T>(p, i, reinterpret_cast<const T*>(recv)[i])) return report(p, i);
    });
  }

  template <class T>
  bool is_right(const Placed& p, std::int64_t i, T got) const {
    const int n = group_.size(), rank = group_.rank();
    using Bytes = std::array<std::byte, sizeof(T)>;
    Bytes pattern;
    pattern.fill(std::byte{kUntouched});
    const T untouched = std::bit_cast<T>(pattern);
    const auto same = [](T x, T y) { return std::bit_cast<Bytes>(x) == std::bit_cast<Bytes>(y); };
    switch (p.c.kind) {
      case CollectiveKind::all_gather:
        return same(got, value<T>(seed_, p.id, static_cast<int>(i / p.c.count), i % p.c.count));
      case CollectiveKind::reduce_scatter:
        return close(got, reference_sum<T>(seed_, p.id, n, rank * p.c.count + i), n);
      case CollectiveKind::all_reduce:
        return close(got, reference_sum<T>(seed_, p.id, n, i), n);
      case CollectiveKind::reduce:  // on others than its root nothing is written
        if (rank == p.c.root) return close(got, reference_sum<T>(seed_, p.id, n, i), n);
        return same(got, p.c.in_place ? value<T>(seed_, p.id, rank, i) : untouched);
      case CollectiveKind::broadcast:
        return same(got, value<T>(seed_, p.id, p.c.root, i));
      case CollectiveKind::all_to_all:
        return same(got, value<T>(seed_, p.id, static_cast<int>(i / p.c.count),
                                  rank * p.c.count + i % p.c.count));
      case CollectiveKind::send_recv:  // on others than its target nothing is written
        if (rank == p.c.target) return same(got, value<T>(seed_, p.id, p.c.root, i));
        if (p.c.in_place) return same(got, value<T>(seed_, p.id, rank, i));
        return same(got, untouched);
      case CollectiveKind::barrier:
        break;
    }
    return true;
  }

  void report(const Placed& p, std::int64_t i) {
    result.errors.push_back(concat("rank ", group_.rank(), " of ", group_.size(), ": ",
                                   name(p.c.kind), " of ", p.c.count, " x ", p.c.dtype,
                                   p.c.in_place ? " in place" : "", " is wrong at ", i));
  }

  const RankGroup& group_;
  std::uint64_t seed_;
  std::shared_ptr<SymmetricMemory> arena_;
  std::vector<std::int64_t> host_ = std::vector<std::int64_t>(kArenaBytes / sizeof(std::int64_t));
  LastUse use_;
  std::int64_t used_ = 0;
  std::uint64_t cases_ = 0;
};

}  // namespace

Result run(const RankGroup& group, std::uint64_t seed) {
  Runner runner(group, seed);
  std::mt19937_64 draw(seed);  // the same sequence on every rank
  const auto root = [&] { return static_cast<int>(draw() % static_cast<unsigned>(group.size())); };
  constexpr CollectiveKind kKinds[] = {CollectiveKind::all_gather, CollectiveKind::reduce_scatter,
                                       CollectiveKind::all_reduce, CollectiveKind::broadcast,
                                       CollectiveKind::all_to_all, CollectiveKind::send_recv,
                                       CollectiveKind::reduce};
  Communicator* const by_kind[] = {&group.gather(),  &group.reduce(), &group.control(),
                                   &group.control(), &group.gather(), &group.reduce(),
                                   &group.reduce()};
  std::vector<Case> all;
  for (const DType dtype : {f32, bf16, f16, f64, i32, i64, boolean})
    for (const std::int64_t count : {0, 1, 5, 64, static_cast<int>(65 + draw() % 300)})
      for (const bool in_place : {false, true})
        for (std::size_t k = 0; k < std::size(kKinds); ++k) {
          all.push_back({kKinds[k], dtype, count, in_place, root(), root()});
          if (draw() % tessera::testing::GridShare::stride() == 0)
            runner.run(*by_kind[k], {all.back()}, false);
        }
  // Groups of all kinds that share one staging area: at most 5 items of 4 times 2944 bytes, the
  // most that one stages, so all fit.
  for (int g = 0; g < 48; ++g) {
    std::vector<Case> cases;
    for (std::uint64_t n = 1 + draw() % 5; n > 0; --n) cases.push_back(all[draw() % all.size()]);
    runner.run(*by_kind[draw() % 3], cases, g % 2 == 0);
  }
  // What is too large to be staged, beside what is not.
  for (const DType dtype : {f32, bf16, i64}) {
    const auto large = kStagedBytes / static_cast<std::int64_t>(size_bytes(dtype)) + 3;
    runner.run(group.reduce(),
               {{CollectiveKind::all_reduce, dtype, large, false, 0},
                {CollectiveKind::all_reduce, dtype, 7, true, 0},
                {CollectiveKind::reduce, dtype, large, true, root()},
                {CollectiveKind::reduce, dtype, large, false, root()},
                {CollectiveKind::broadcast, dtype, large, true, root()},
                {CollectiveKind::broadcast, dtype, large, false, root()}},
               true);
    runner.run(group.control(),
               {{CollectiveKind::all_to_all, dtype, large, false, 0},
                {CollectiveKind::all_to_all, dtype, 9, true, 0},
                {CollectiveKind::send_recv, dtype, large, true, root(), root()},
                {CollectiveKind::send_recv, dtype, large, false, root(), root()},
                {CollectiveKind::send_recv, dtype, large, false, root(), root()}},
               true);
    runner.run(group.gather(),
               {{CollectiveKind::all_gather, dtype, large, true, 0},
                {CollectiveKind::reduce_scatter, dtype, large, false, 0}},
               true);
  }
  group.device().synchronize();
  return std::move(runner.result);
}

}  // namespace battery
