// How fast are our collectives?
//
//   bench-collectives all_gather reduce_scatter -b 1M -e 128M -f 2 -t 2      two threads
//   mpirun -n 2 bench-collectives all_reduce -b 8 -e 64K -f 2                two processes
//   bench-collectives all -t 8 --groups 2 --beside-compute
//
// Options, columns and definitions are those of nccl-tests (its doc/PERFORMANCE.md), so that its
// tables and ours stand side by side, and what reads its output reads ours.
//
//   a row    fill, one call, check   ┐ out of place, then in place, where it can be
//            warm up, barrier, iters ┘ the time is the host's, until the stream is done
//            memcpy of as many bytes as busbw counts, by all ranks at once: its floor, on the CPU
//
// Each iteration moves to other bytes of the buffers, which are of the largest size.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "bench/collectives/table.hpp"
#include "tessera/base/error.hpp"
#include "tessera/base/log.hpp"
#include "tessera/detail/base/checked.hpp"
#include "tessera/run/run.hpp"
#include "tessera/tensor/ops.hpp"

namespace tessera::collectives {
namespace {

constexpr std::int64_t kAlign = 256;  // of what an iteration begins with

using Seconds = std::chrono::duration<double>;

template <class F>
double seconds(const F& f) {
  const auto begin = std::chrono::steady_clock::now();
  f();
  return Seconds(std::chrono::steady_clock::now() - begin).count();
}

const RankGroup& my_group(World& world, int groups) {
  if (groups == 1) return world;
  if (world.size() % groups != 0)
    throw DataError(concat("--groups ", groups, ": does not divide ", world.size(), " ranks"));
  const int size = world.size() / groups;
  std::vector<int> ranks(static_cast<std::size_t>(size));
  std::iota(ranks.begin(), ranks.end(), world.rank() / size * size);
  return *world.split("bench", ranks);
}

class Bench {
 public:
  Bench(World& world, const Options& options)
      : world_(world),
        options_(options),
        group_(my_group(world, options.groups)),
        device_(group_.device()),
        capacity_(round_up(options.max_bytes, kAlign)),
        send_(group_.allocate_symmetric(capacity_, "bench-collectives' sends")),
        recv_(group_.allocate_symmetric(capacity_, "bench-collectives' recvs")) {}

  // What is queued still uses the buffers, also where a row has thrown.
  ~Bench() {
    try {
      device_.synchronize();
    } catch (const std::exception& error) {
      log(LogLevel::info, error.what());
    }
  }
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;

  // Returns how many values were wrong.
  std::int64_t run() {
    say(head(world_, options_));
    for (const Operation& operation : options_.operations) {
      say(concat("#\n# ", operation.name, "\n#\n", columns()));
      for (std::int64_t bytes = options_.min_bytes; bytes <= options_.max_bytes;
           bytes = options_.step_factor > 1 ? static_cast<std::int64_t>(static_cast<double>(bytes) *
                                                                        options_.step_factor)
                                            : bytes + options_.step_bytes)
        for (const DType dtype : options_.dtypes)
          rows({operation, dtype, bytes, group_.rank(), group_.size()});
    }
    say(totals(wrong_, figures_ == 0 ? 0 : bus_sum_ / figures_));
    return wrong_;
  }

 private:
  // For each root and reduction.
  void rows(Row row) {
    std::vector<int> roots = options_.roots;
    if (options_.all_roots) {
      roots.resize(static_cast<std::size_t>(group_.size()));
      std::iota(roots.begin(), roots.end(), 0);
    }
    if (!row.has_root()) roots = {-1};
    for (const int root : roots) {
      if (root >= group_.size())
        throw DataError(concat("-r ", root, ": is none of ", group_.size(), " ranks"));
      row.root = root;
      for (const ReduceOp reduction : options_.reductions) {
        row.reduction = reduction;
        print(row);
        if (!row.reduces()) break;
      }
    }
  }

  void print(const Row& row) {
    std::optional<Figures> apart = measure(row, false), in_place;
    if (row.can_be_in_place()) in_place = measure(row, true);
    say(begin(row) + side(apart) + side(in_place) + "\n");
    const bool has_peers = row.bytes() > 0 && group_.size() > 1 && !options_.emulate;
    if (has_peers && device_.kind() == DeviceKind::cpu) say(floor(row, *apart, in_place));
    if (row.bytes() > 0 && options_.beside_compute) say(beside(row, apart->seconds));
  }

  Figures measure(const Row& row, bool in_place) {
    Figures figures;
    for (int check = 0; check < options_.checks; ++check)
      figures.wrong = figures.wrong.value_or(0) + wrong(row, in_place);
    wrong_ += figures.wrong.value_or(0);
    const std::vector<CollectiveGroup> calls = prepare(row, in_place, places(row.bytes()));
    submit(row, calls, options_.warmup);
    finish(row);
    world_.barrier();
    const double all = over_ranks(seconds([&] {
      submit(row, calls, options_.iters);
      finish(row);
    }));
    figures.seconds = all / options_.iters;
    figures.algbw = static_cast<double>(row.bytes()) * 1e-9 / figures.seconds;
    figures.busbw = figures.algbw * row.bus_factor;
    bus_sum_ += figures.busbw;
    ++figures_;
    return figures;
  }

  double over_ranks(double own) const {
    switch (options_.average) {
      case 0:
        return world_.sum(world_.rank() == 0 ? own : 0);
      case 1:
        return world_.sum(own) / world_.size();
      case 2:
        return -world_.max(-own);
      default:
        return world_.max(own);
    }
  }

  // --- calls ---

  // How many places the buffers have for so many bytes; one an iteration does.
  std::int64_t places(std::int64_t bytes) const {
    const std::int64_t step = std::max(round_up(bytes, kAlign), kAlign);
    return std::clamp<std::int64_t>(capacity_ / step, 1, options_.iters);
  }

  // Of all places, one behind the other.
  std::vector<CollectiveGroup> prepare(const Row& row, bool in_place, std::int64_t places) const {
    std::vector<CollectiveGroup> groups;
    for (std::int64_t i = 0; i < places; ++i) {
      const std::int64_t at = i * round_up(row.bytes(), kAlign);
      for (const auto& items : row.calls(send_->data() + at, recv_->data() + at, in_place))
        groups.emplace_back(row.operation.name, items);
    }
    return groups;
  }

  // On other streams than compute.
  Communicator& communicator(const Row& row) const {
    return row.reduces() ? group_.reduce() : group_.gather();
  }
  Stream stream(const Row& row) const { return device_.stream(communicator(row).stream()); }

  std::array<Access, 2> accesses() const {
    return {{{&use_, send_->data(), send_->data() + capacity_, AccessMode::write},
             {&use_, recv_->data(), recv_->data() + capacity_, AccessMode::write}}};
  }
  // Each time at the next place.
  void submit(const Row& row, const std::vector<CollectiveGroup>& calls, int times) const {
    const auto all = accesses();
    const std::size_t a_time = row.calls(nullptr, nullptr, false).size();
    for (std::size_t i = 0; i < static_cast<std::size_t>(times) * a_time; ++i)
      communicator(row).submit(calls[i % calls.size()], all);
  }
  void finish(const Row& row) const { device_.block(stream(row).record()); }

  // --- values ---

  std::int64_t wrong(const Row& row, bool in_place) const {
    const std::vector<float> expected = row.expected();
    if (row.bytes() > 0) {
      const std::vector<CollectiveGroup> calls = prepare(row, in_place, 1);
      // Nobody sends -1, so a value that did not come is seen.
      const Tensor all = view(recv_->data(), row.dtype, row.elements());
      raw::fill(all, -1);
      std::byte* const own = in_place ? recv_->data() + row.own_values_at(true) : send_->data();
      raw::copy_into(view(own, row.dtype, row.send_count),
                     Tensor::from(row.sent(), {row.send_count}, device_));
      stream(row).wait(device_.compute().record());
      submit(row, calls, 1);
      finish(row);
      device_.compute().wait(stream(row).record());
    }
    std::int64_t wrong = 0;
    if (!expected.empty()) {
      const Tensor results =
          view(recv_->data() + row.results_at(in_place), row.dtype, row.recv_count);
      const std::vector<float> got = raw::cast(results, f32).to_vector<float>();
      for (std::size_t i = 0; i < got.size(); ++i) wrong += got[i] != expected[i];
    }
    return static_cast<std::int64_t>(world_.sum(static_cast<double>(wrong)));
  }

  Tensor view(std::byte* at, DType dtype, std::int64_t count) const {
    const auto bytes = count * static_cast<std::int64_t>(size_bytes(dtype));
    return Tensor::wrap(Storage::borrowed(device_, at, bytes, use_), {count}, dtype);
  }

  // --- what a row stands beside ---

  // All ranks copy at once what busbw counts, on the stream of the collective.
  std::string floor(const Row& row, const Figures& apart, const std::optional<Figures>& in_place) {
    const std::int64_t bytes = row.bytes(), step = round_up(bytes, kAlign);
    const auto counted = static_cast<std::int64_t>(static_cast<double>(bytes) * row.bus_factor);
    const auto copy = [&](int times) {
      for (int i = 0; i < times; ++i) {
        const std::byte* const from = send_->data() + i % places(bytes) * step;
        std::byte* const to = recv_->data() + i % places(bytes) * step;
        stream(row).launch({.name = "memcpy", .accesses = accesses()}, [=](Exec&) {
          for (std::int64_t done = 0; done < counted; done += bytes)
            std::memcpy(to, from, static_cast<std::size_t>(std::min(bytes, counted - done)));
        });
      }
      finish(row);
    };
    copy(options_.warmup);
    world_.barrier();
    const double taken = over_ranks(seconds([&] { copy(options_.iters); })) / options_.iters;
    const double rate = static_cast<double>(counted) * 1e-9 / taken;
    return format(
               "# memcpy of %lld B by each of %d ranks at once: %.2f GB/s; busbw is %.2f of it out "
               "of place",
               static_cast<long long>(counted), world_.size(), rate, apart.busbw / rate) +
           (in_place ? format(", %.2f in place\n", in_place->busbw / rate) : "\n");
  }

  // About as many products as take as long as the collectives alone.
  std::string beside(const Row& row, double call_seconds) const {
    const bool is_cpu = device_.kind() == DeviceKind::cpu;
    const Shape shape = is_cpu ? Shape{256, 256} : Shape{4096, 4096};
    const Tensor a = Tensor::full(shape, 0.5, is_cpu ? f32 : bf16, device_),
                 out = Tensor::empty(shape, a.dtype(), device_);
    const auto products = [&](int times) {
      for (int i = 0; i < times; ++i)
        raw::matmul_into(out, a, a, raw::Transpose::no, raw::Transpose::no, 1, 0);
    };
    const auto block = [&] { device_.block(device_.compute().record()); };
    const auto mean = [&](double own) { return world_.sum(own) / world_.size(); };
    const auto alone = [&](int times) {
      world_.barrier();
      return mean(seconds([&] { products(times), block(); }));
    };
    constexpr int kSample = 8, kMost = 100'000;
    alone(kSample);
    const double calls = call_seconds * options_.iters;
    const int times =
        std::clamp(static_cast<int>(std::ceil(calls * kSample / alone(kSample))), 1, kMost);
    const double compute = alone(times);
    const std::vector<CollectiveGroup> prepared = prepare(row, false, places(row.bytes()));
    world_.barrier();
    double communicates = 0;
    const double both = mean(seconds([&] {
      communicates = seconds([&] {
        products(times);
        submit(row, prepared, options_.iters);
        finish(row);
      });
      block();
    }));
    communicates = mean(communicates);
    return format(
        "# beside %d products: an operation takes %.2f us, %.2f of its time alone, and "
        "%.2f of the communication is hidden\n",
        times, communicates / options_.iters * 1e6, communicates / calls,
        std::clamp((compute + calls - both) / calls, 0.0, 1.0));
  }

  void say(const std::string& text) const {
    if (world_.rank() != 0) return;
    std::fputs(text.c_str(), stdout);
    std::fflush(stdout);
  }

  const World& world_;
  const Options& options_;
  const RankGroup& group_;
  const Device device_;
  const std::int64_t capacity_;
  const std::shared_ptr<SymmetricMemory> send_, recv_;
  mutable LastUse use_;
  std::int64_t wrong_ = 0;
  double bus_sum_ = 0;
  int figures_ = 0;
};

int run_all(const std::vector<std::string>& arguments) {
  const Options options = parse(arguments);
  if (options.help) return std::fputs(help().c_str(), stdout) < 0 ? 1 : 0;
  std::atomic<bool> is_wrong = false;
  const auto body = [&](World& world) {
    if (Bench(world, options).run() > 0) is_wrong = true;
  };
  int code = 0;
  if (options.emulate) {
    World world = World::emulated(0, *options.emulate, options.world);
    body(world);
  } else {
    code = run({.program = "bench-collectives", .ranks = options.threads, .world = options.world},
               body);
  }
  return code == 0 && is_wrong ? 1 : code;
}

}  // namespace
}  // namespace tessera::collectives

int main(int argc, char** argv) {
  try {
    return tessera::collectives::run_all({argv + 1, argv + argc});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench-collectives: %s\n", error.what());
    return tessera::exit_code();
  }
}
