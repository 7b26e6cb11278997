#include "runtime/comm/nccl/nccl_ways.hpp"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>

#include "kernels/kernel_table.hpp"
#include "runtime/comm/nccl/nccl_footprint.hpp"
#include "runtime/comm/nccl/nccl_group.hpp"
#include "runtime/comm/nccl/nccl_library.hpp"
#include "tessera/base/log.hpp"
#include "tessera/detail/base/checked.hpp"
#include "tessera/device/device_context.hpp"
#include "tessera/memory/memory.hpp"

namespace tessera::comm {
namespace {

constexpr int kWarmUps = 2, kTimes = 7;          // an odd number has a median
constexpr int kSample = 4, kMostProducts = 256;  // how many products last as long as the call
constexpr int kZeroCtasOnCuda = 12050;

// Of a call of `bytes`, at least a line of memory.
std::int64_t chunk_of(std::int64_t bytes, int ranks) {
  return std::max(round_up(ceil_div(bytes, ranks), kAlignmentBytes), kAlignmentBytes);
}

// An event that says when the device has come to it.
class Timer {
 public:
  explicit Timer(const Driver& driver) : driver_(driver) { expect(driver.make_timer(&event_)); }
  ~Timer() { driver_.end_event(event_); }
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;

  void record(Stream on) {
    on.launch({.name = "time"},
              [this](Exec& exec) { expect(driver_.record(event_, exec.native_stream)); });
  }
  double seconds_since(const Timer& begin) const {
    double seconds = 0;
    expect(driver_.elapsed(begin.event_, event_, &seconds));
    return seconds;
  }

 private:
  static void expect(DriverError error) {
    if (error) throw DeviceError(concat("World::nccl: ways can't be timed: ", error));
  }

  const Driver& driver_;
  void* event_ = nullptr;
};

// Square products of bf16, each of so many tiles that all multiprocessors have one.
class Products {
 public:
  Products(const Device& device, int multiprocessors)
      : device_(device),
        side_(kTile * static_cast<int>(std::ceil(std::sqrt(2.0 * multiprocessors)))),
        memory_(plain_memory(device.context(), 3 * bytes())) {
    std::byte* const data = memory_.get();
    device.compute().launch({.name = "fill"}, [data, all = 3 * bytes()](Exec& exec) {
      exec.driver->fill(data, kFinite, all, exec.native_stream);
    });
    args_.c = data;
    args_.a = data + bytes();
    args_.b = data + 2 * bytes();
    args_.alpha = 1;
    args_.batch = 1;
    args_.m = args_.n = args_.k = args_.lda = args_.ldb = args_.ldc = side_;
    args_.dtype = args_.c_dtype = DType::bf16;
  }

  void launch(int times) const {
    const auto gemm = kernels::kernels_of(device_.context().driver()).gemm;
    for (int i = 0; i < times; ++i)
      device_.compute().launch({.name = "product"}, kernels::Call<kernels::GemmArgs>{gemm, args_});
  }
  int side() const { return side_; }

  static constexpr std::uint8_t kFinite = 0x3c;  // as each byte of a bf16 or f32: 0.01

 private:
  static constexpr int kTile = 128;
  std::int64_t bytes() const { return std::int64_t{2} * side_ * side_; }

  const Device device_;
  const int side_;
  const std::shared_ptr<std::byte> memory_;
  kernels::GemmArgs args_{};
};

class Measurement {
 public:
  Measurement(NcclGroup& group, const RankGroup& ranks, const RankGroup::Sizes& sizes,
              int multiprocessors)
      : group_(group),
        ranks_(ranks),
        memory_(ranks.allocate_symmetric(
            std::max(chunk_of(sizes.gathered_bytes, ranks.size()) * ranks.size(),
                     chunk_of(sizes.reduced_bytes, ranks.size()) * (ranks.size() + 1)),
            "ways of NCCL")),
        products_(ranks.device(), multiprocessors),
        begin_(*ranks.device().context().driver()),
        end_(*ranks.device().context().driver()) {
    std::byte* const data = memory_->data();
    const std::int64_t chunk = chunk_of(sizes.gathered_bytes, ranks.size()),
                       part = chunk_of(sizes.reduced_bytes, ranks.size());
    ranks.device().compute().launch(
        {.name = "fill", .accesses = all_}, [data, bytes = memory_->bytes()](Exec& exec) {
          exec.driver->fill(data, Products::kFinite, bytes, exec.native_stream);
        });
    gather_ = {.send = data + ranks.rank() * chunk,
               .recv = data,
               .count = chunk,
               .kind = CollectiveKind::all_gather,
               .dtype = DType::u8};
    reduce_ = {.send = data,
               .recv = data + part * ranks.size(),
               .count = part / static_cast<std::int64_t>(size_bytes(sizes.reduced_as)),
               .kind = CollectiveKind::reduce_scatter,
               .dtype = sizes.reduced_as};
  }
  ~Measurement() = default;
  Measurement(const Measurement&) = delete;
  Measurement& operator=(const Measurement&) = delete;

  struct Found {
    double products = 0, alone = 0, standard = 0, other = 0;  // seconds, but for the first
  };
  // Rank 0's. Of gathers, or of reductions, as they are and as `other` has them; null: only as they
  // are.
  Found compare(bool gathers, const NcclWays* other) {
    const NcclWays standard = group_.ways();
    Found found;
    found.alone = median(gathers, 0);
    found.products = agreed_products(found.alone);
    found.standard = median(gathers, static_cast<int>(found.products));
    if (other) {
      change(*other);
      found.other = median(gathers, static_cast<int>(found.products));
      change(standard);
    }
    std::array<double, 4> all{found.products, found.alone, found.standard, found.other};
    if (ranks_.rank() != 0) all = {};
    ranks_.sum(all, "what rank 0 has measured");
    return {all[0], all[1], all[2], all[3]};
  }
  void change(const NcclWays& ways) {
    ranks_.device().synchronize();
    ranks_.barrier();
    const NcclFootprint footprint(ranks_.device().context());
    group_.set_ways(ways);
  }
  int side() const { return products_.side(); }

 private:
  double agreed_products(double seconds) {
    products_.launch(kSample);  // the first ones load what they need
    begin_.record(compute());
    products_.launch(kSample);
    end_.record(compute());
    ranks_.device().block(compute().record());
    const double each = std::max(end_.seconds_since(begin_) / kSample, 1e-9);
    return ranks_.max(std::clamp(std::ceil(seconds / each), 1.0, double{kMostProducts}));
  }

  double median(bool gathers, int products) {
    std::array<double, kWarmUps + kTimes> seconds{};
    for (double& one : seconds) one = time(gathers, products);
    const auto times = std::span(seconds).subspan(kWarmUps);
    std::ranges::nth_element(times, times.begin() + kTimes / 2);
    return times[kTimes / 2];
  }

  // From when both may begin until both are done.
  double time(bool gathers, int products) {
    Communicator& wire = gathers ? ranks_.gather() : ranks_.reduce();
    Stream stream = ranks_.device().stream(wire.stream());
    begin_.record(compute());
    stream.wait(compute().record());
    wire.submit(gathers ? gather_ : reduce_, gathers ? "gather, timed" : "reduction, timed", all_);
    products_.launch(products);
    compute().wait(stream.record());
    end_.record(compute());
    ranks_.device().block(compute().record());
    return end_.seconds_since(begin_);
  }
  Stream compute() const { return ranks_.device().compute(); }

  NcclGroup& group_;
  const RankGroup& ranks_;
  LastUse use_;
  const std::shared_ptr<SymmetricMemory> memory_;
  const std::array<Access, 1> all_{
      {{&use_, memory_->data(), memory_->data() + memory_->bytes(), AccessMode::write}}};
  Collective gather_, reduce_;
  Products products_;
  Timer begin_, end_;
};

// Why no rank may gather by copy engines; empty: all may.
std::string why_no_zero_ctas(const NcclGroup& group, const DriverDevice& gpu) {
  std::array<char, 256> host{};
  gethostname(host.data(), host.size() - 1);
  const std::vector<std::string> all =
      group.tell_all("drivers and hosts", concat(gpu.cuda_version, ' ', host.data()),
                     group.world().init_timeout());
  if (!group.has_windows()) return "there are no windows";
  const int nccl = group.world().version();
  if (nccl < kZeroCtasFrom) return concat("NCCL ", nccl_version(nccl), " is older than 2.28");
  const auto host_of = [](const std::string& said) { return said.substr(said.find(' ')); };
  for (const std::string& said : all) {
    if (std::stoi(said) < kZeroCtasOnCuda) return "a driver is older than that of CUDA 12.5";
    if (host_of(said) != host_of(all[0])) return "the ranks are on several nodes";
  }
  return "";
}

std::string us(double seconds) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.1f us", seconds * 1e6);
  return text.data();
}

// One kind of call, in words: "gathers of 64 bytes beside 2 products of 256 take 9.0 us, by copy
// engines 8.0 us, alone 5.0 us".
std::string describe(const char* calls, std::int64_t bytes, const Measurement::Found& found,
                     int side, const char* other, const std::string& refused) {
  return concat(calls, " of ", bytes, " bytes beside ", static_cast<int>(found.products),
                " products of ", side, " take ", us(found.standard), ", ", other, ' ',
                refused.empty() ? us(found.other) : concat("not measured, as ", refused),
                ", alone ", us(found.alone));
}

}  // namespace

kernels::NcclShape NcclWays::shape_of(std::string_view role) const {
  NcclOptions options;
  options.reduce_max_ctas = reduce_ctas;
  return {.most_blocks = most_ctas(role, options),
          .has_zero_ctas = role == "gather" && has_zero_ctas};
}

NcclWays given_ways(const NcclOptions& options) {
  return {.has_zero_ctas = options.gather_policy == GatherPolicy::zero,
          .reduce_ctas = std::max(options.reduce_max_ctas, 0)};
}

void measure_ways(NcclGroup& group, const RankGroup& ranks, const RankGroup::Sizes& sizes) {
  const WorldOptions& options = group.world().options();
  const bool gathers =
                 options.nccl.gather_policy == GatherPolicy::measured && sizes.gathered_bytes > 0,
             reduces = options.nccl.reduce_max_ctas == NcclOptions::kMeasuredCtas &&
                       sizes.reduced_bytes > 0;
  if (!gathers && !reduces) return;
  DriverDevice gpu{};
  const Driver& driver = ranks.device().context().acting_driver();
  if (const DriverError error = driver.describe(*options.device.index, &gpu))
    throw DeviceError(concat("World::nccl: ", error));
  const std::string refused = gathers ? why_no_zero_ctas(group, gpu) : "";
  NcclWays chosen = group.ways(), zero = chosen, few = chosen;
  zero.has_zero_ctas = true;
  few.reduce_ctas = NcclOptions::kFewCtas;
  Measurement measurement(group, ranks, sizes, gpu.multiprocessors);
  std::array<Measurement::Found, 2> found{};
  if (gathers) found[0] = measurement.compare(true, refused.empty() ? &zero : nullptr);
  if (reduces) found[1] = measurement.compare(false, &few);
  if (gathers && refused.empty() && found[0].other < found[0].standard) chosen.has_zero_ctas = true;
  if (reduces && found[1].other < found[1].standard) chosen.reduce_ctas = few.reduce_ctas;
  measurement.change(chosen);
  if (ranks.rank() != 0) return;
  std::string line = concat("NCCL, medians of ", kTimes, " on rank ", ranks.ranks()[0], ": ");
  if (gathers)
    line += describe("gathers", sizes.gathered_bytes, found[0], measurement.side(),
                     "by copy engines", refused) +
            (chosen.has_zero_ctas ? ": by copy engines" : ": as NCCL wants");
  if (gathers && reduces) line += "; ";
  if (reduces)
    line += describe("reductions", sizes.reduced_bytes, found[1], measurement.side(),
                     concat("with at most ", few.reduce_ctas, " CTAs").c_str(), "") +
            (chosen.reduce_ctas > 0 ? concat(": with ", chosen.reduce_ctas) : ": as NCCL wants");
  log(LogLevel::info, line);
}

}  // namespace tessera::comm
