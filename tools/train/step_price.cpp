#include "tools/train/step_price.hpp"

#include <algorithm>
#include <cstdio>
#include <string_view>

#include "tessera/base/error.hpp"
#include "tessera/detail/base/text.hpp"
#include "tessera/device/device_context.hpp"

namespace tessera::train {
namespace {

constexpr std::size_t kMostOperations = 5;
constexpr std::size_t kBounds = 7;

std::string fixed(double value, int digits) {
  char text[64];
  std::snprintf(text, sizeof text, "%.*f", digits, value);
  return with_commas(text);
}

std::string milliseconds(double seconds) { return fixed(1e3 * seconds, 2) + " ms"; }

// "all_gather" of "all_gather model.layers.3".
std::string_view kind_of(std::string_view name) { return name.substr(0, name.find(' ')); }

}  // namespace

class StepPricer::Watch final : public Observer {
 public:
  Watch(const Executor& executor, const Machine& machine)
      : executor_(executor), machine_(machine) {}

  void begin() {
    kinds_.clear();
    launches_ = kernels_ = 0;
    wire_ = wire_of_compute_ = idle_ = copies_ = updates_ = 0;
    reached_ = begin_ = executor_.seconds(StreamId::compute);
    waited_ = waited_at_begin_ = executor_.waited_seconds(StreamId::compute);
  }

  StepPrice end() const {
    StepPrice step;
    step.seconds = executor_.seconds(StreamId::compute) - begin_;
    step.exposed_seconds =
        executor_.waited_seconds(StreamId::compute) - waited_at_begin_ + wire_of_compute_;
    step.wire_seconds = wire_;
    step.idle_seconds = idle_;
    step.copy_seconds = copies_;
    step.host_seconds = updates_;
    step.launches = launches_;
    step.kernels = kernels_;
    for (const auto& [name, kind] : kinds_) {
      const auto longest = std::max_element(kind.of_bound.begin(), kind.of_bound.end());
      step.operations.push_back(
          {std::string(name), kind.count, kind.seconds,
           static_cast<Bound>(static_cast<std::size_t>(longest - kind.of_bound.begin()))});
    }
    std::stable_sort(step.operations.begin(), step.operations.end(),
                     [](const auto& a, const auto& b) { return a.seconds > b.seconds; });
    return step;
  }

  // `virtual` tells all three of an operation before the next one, and launches at the host's time.
  void launched(StreamId stream, Tick, const Op& op) override {
    current_ = price(machine_, op.cost, stream);
    ++launches_;
    launched_ = executor_.seconds(stream);
    if (stream != StreamId::compute) return;
    kernels_ += op.cost.kernels;
    const double waited = executor_.waited_seconds(StreamId::compute),
                 late = executor_.seconds(stream) - reached_ - (waited - waited_);
    waited_ = waited;
    idle_ += std::max(0.0, late);
    // A kernel that is through before the host has said the next one waits for the host.
    if (late > 0 && current_.bound != Bound::wire && late > current_.seconds)
      current_.bound = Bound::host;
  }
  void started(StreamId stream, Tick, const char*) override {
    started_ = executor_.seconds(stream);
    if (stream == StreamId::compute) wire_of_compute_ += started_ - launched_;  // others' turn
  }
  void finished(StreamId stream, Tick, const char* name) override {
    const double end = executor_.seconds(stream), seconds = end - started_;
    Kind& kind = kinds_[kind_of(name)];
    ++kind.count;
    kind.seconds += seconds;
    kind.of_bound[static_cast<std::size_t>(current_.bound)] += seconds;
    if (current_.bound == Bound::wire) wire_ += seconds;
    if (stream == StreamId::transfer) copies_ += seconds;
    if (stream == StreamId::offload) updates_ += seconds;
    if (stream != StreamId::compute) return;
    if (current_.bound == Bound::wire) wire_of_compute_ += seconds;
    reached_ = end;
  }

 private:
  struct Kind {
    std::int64_t count = 0;
    double seconds = 0;
    std::array<double, kBounds> of_bound{};
  };

  const Executor& executor_;
  const Machine machine_;
  std::map<std::string_view, Kind, std::less<>> kinds_;  // of names that live as long as the device
  std::int64_t launches_ = 0, kernels_ = 0;
  Price current_;
  double begin_ = 0, reached_ = 0, launched_ = 0, started_ = 0;
  double waited_ = 0, waited_at_begin_ = 0;
  double wire_ = 0, wire_of_compute_ = 0, idle_ = 0, copies_ = 0, updates_ = 0;
};

StepPricer::StepPricer(const World& world, const Machine& machine)
    : device_(world.device().context()),
      watch_(std::make_unique<Watch>(device_.executor(), machine)) {
  device_.add_observer(*watch_);
}

StepPricer::~StepPricer() { device_.remove_observer(*watch_); }

void StepPricer::begin() { watch_->begin(); }
StepPrice StepPricer::end() const { return watch_->end(); }

std::string describe(const StepPrice& price, const PricedStep& step) {
  const Machine& machine = *step.machine;
  const double tokens_per_second = step.tokens / price.seconds,
               mfu = tokens_per_second * step.flops_per_token / machine.peak_flops_per_second;
  const auto machines = ceil_div(step.ranks, machine.gpus);
  const auto share = [&](double seconds) {
    return concat(fixed(100 * seconds / price.seconds, 1), " %");
  };
  std::string upper(machine.name);
  for (char& c : upper) c = static_cast<char>(c >= 'a' && c <= 'z' ? c - 'a' + 'A' : c);
  std::string text =
      concat("predicted, not measured, for ", step.ranks, ' ', upper, " in ", machines,
             machines == 1 ? " machine" : " machines",
             machines == 1                              ? ""
             : machine.wire == WireAlgorithm::two_level ? ", two-level collectives"
                                                        : ", collectives in a ring",
             ", at ", fixed(100 * machine.efficiency, 1), " % of the rates of its table:\n");
  text +=
      concat("  step ", milliseconds(price.seconds), ", ", fixed(tokens_per_second, 0),
             " tokens/s a rank, MFU ", fixed(100 * mfu, 1), " % (6 N + 12 L d T flops a token, of ",
             fixed(machine.peak_flops_per_second * 1e-12, 1), " TFLOP/s)\n");
  text +=
      concat("  exposed communication ", milliseconds(price.exposed_seconds), ", ",
             share(price.exposed_seconds), " of the step, of ", milliseconds(price.wire_seconds),
             " of collectives; compute waits for the host ", milliseconds(price.idle_seconds), "; ",
             price.launches, " operations, ", price.kernels, " kernels on the compute stream\n");
  if (price.host_seconds > 0)
    text +=
        concat("  offload: ", milliseconds(price.copy_seconds), " of copies, ",
               milliseconds(price.host_seconds),
               " of the host's casts, sums and update; what compute waits for of them counts as "
               "exposed communication\n");
  char line[128];
  std::snprintf(line, sizeof line, "  %-26s %8s %14s %8s  %s\n", "most expensive operations",
                "times", "on its stream", "of step", "bound by");
  text += line;
  for (std::size_t i = 0; i < std::min(kMostOperations, price.operations.size()); ++i) {
    const StepPrice::Operation& o = price.operations[i];
    std::snprintf(line, sizeof line, "  %-26s %8lld %14s %8s  %s\n", o.name.c_str(),
                  static_cast<long long>(o.count), milliseconds(o.seconds).c_str(),
                  share(o.seconds).c_str(), std::string(name(o.bound)).c_str());
    text += line;
  }
  return text;
}

}  // namespace tessera::train
