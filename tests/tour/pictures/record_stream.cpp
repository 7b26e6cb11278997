// Two ways to free a buffer that another stream still reads, and the slots that avoid the question.
// The program is the same: for each layer, `gather` fills a buffer, `compute` reads it, and the
// host frees it and goes on. It runs on the clock of a cost model, so the times are exact.
#include <cmath>
#include <functional>
#include <map>
#include <vector>

#include "tessera/base/error.hpp"
#include "tessera/device/device_context.hpp"
#include "tessera/memory/arena.hpp"
#include "tessera/memory/memory.hpp"
#include "tests/tour/pictures/pictures.hpp"

namespace tessera::pictures {
namespace {

constexpr int kLayers = 5;
constexpr std::int64_t kMiB = 1 << 20, kBytes = 4 * kMiB;
constexpr double kGatherTime = 2, kComputeTime = 3, kFastHost = 0, kSlowHost = 2;
constexpr double kColumnsPerTime = 3;

// When each operation ran, in units of time.
class Timeline final : public Observer {
 public:
  explicit Timeline(DeviceContext& context) : context_(context) {}
  void started(StreamId stream, Tick, const char*) override {
    begun_ = context_.executor().seconds(stream);
  }
  void finished(StreamId stream, Tick, const char* name) override {
    end_ = std::max(end_, context_.executor().seconds(stream));
    std::string& lane = lanes_[stream];
    const auto columns = [](double time) {
      return static_cast<std::size_t>(std::lround(time * kColumnsPerTime));
    };
    const std::size_t begin = columns(begun_), end = columns(context_.executor().seconds(stream));
    lane.resize(std::max(lane.size(), end + 1), ' ');
    lane.replace(begin, end - begin + 1, std::string(end - begin + 1, ' '));
    lane[begin] = lane[end] = '|';
    lane.replace(begin + 1, std::char_traits<char>::length(name), name);
  }
  std::string lane(StreamId stream) { return lanes_[stream]; }
  double end() const { return end_; }

 private:
  DeviceContext& context_;
  double begun_ = 0, end_ = 0;
  std::map<StreamId, std::string> lanes_;
};

// A buffer while a layer has it. `letter` names its address.
struct Lent {
  const std::byte* data = nullptr;
  LastUse* use = nullptr;
  std::function<void()> give_back;
};

// Where buffers come from.
class Source {
 public:
  virtual ~Source() = default;
  virtual Lent take() = 0;
  virtual std::int64_t peak_bytes() const = 0;
};

// PyTorch's policy: a freed block is idle until the host finds that its event is done, which it
// looks for when it allocates next. Source: CUDACachingAllocator, process_events.
class RecordStream final : public Source {
 public:
  explicit RecordStream(const Device& device) : device_(device) {}
  Lent take() override {
    Executor& executor = device_.context().executor();
    std::size_t found = 0;
    while (found < blocks_.size() && blocks_[found]->busy_until > executor.host_seconds()) ++found;
    if (found == blocks_.size())
      blocks_.push_back(
          std::make_unique<Block>(Memory::of(device_).allocate(kBytes, StreamId::gather)));
    Block& block = *blocks_[found];
    return {block.buffer.data(), &block.buffer.use(), [&block, &executor] {
              block.busy_until = executor.seconds(StreamId::compute);  // an event there
            }};
  }
  std::int64_t peak_bytes() const override {
    return static_cast<std::int64_t>(blocks_.size()) * kBytes;
  }

 private:
  struct Block {
    explicit Block(Buffer b) : buffer(std::move(b)) {}
    Buffer buffer;
    double busy_until = 0;
  };
  Device device_;
  std::vector<std::unique_ptr<Block>> blocks_;
};

// The pool as it is.
class Gates final : public Source {
 public:
  explicit Gates(const Device& device) : memory_(Memory::of(device)) {}
  Lent take() override {
    buffer_ = memory_.allocate(kBytes, StreamId::gather);
    return {buffer_.data(), &buffer_.use(), [this] { buffer_ = {}; }};
  }
  std::int64_t peak_bytes() const override { return memory_.ledger().peak_bytes(); }

 private:
  Memory& memory_;
  Buffer buffer_;
};

// What the sharding engine does: two slots lie apart, because the plan has them alive at a time.
class Slots final : public Source {
 public:
  explicit Slots(const Device& device)
      : memory_(Memory::of(device)),
        buffer_(memory_.allocate(2 * kBytes, StreamId::gather)),
        arena_(device.context(), buffer_.data(), 2 * kBytes) {}
  Lent take() override {
    const Slot slot = arena_.take(kBytes * (uses_++ % 2), kBytes, kActivations);
    arena_.begin_use(slot, StreamId::gather);
    return {slot.data, slot.use, [this, slot] { arena_.give_back(slot); }};
  }
  std::int64_t peak_bytes() const override { return 2 * kBytes; }

 private:
  Memory& memory_;
  Buffer buffer_;
  Arena arena_;
  int uses_ = 0;
};

struct Result {
  std::string gather, compute;
  double end = 0;
  std::int64_t peak_bytes = 0;
};

void use(const Stream& stream, const char* name, const Lent& buffer, AccessMode mode,
         const Cost& cost) {
  const Access access{buffer.use, buffer.data, buffer.data + kBytes, mode};
  stream.launch({.name = name, .cost = cost, .accesses = {&access, 1}}, [](Exec&) {});
}

template <class Policy>
Result run(double host_seconds) {
  const Device device = Device::cpu(
      {.executor = ExecutorKind::virtual_,
       .cost = {.flops_per_second = 1, .wire_bytes_per_second = 1, .host_seconds = host_seconds}});
  Timeline timeline(device.context());
  Result result;
  {
    Policy source(device);
    device.context().add_observer(timeline);
    std::map<const std::byte*, char> letters;
    for (int layer = 0; layer < kLayers; ++layer) {
      const Lent buffer = source.take();
      const char letter =
          letters.try_emplace(buffer.data, static_cast<char>('A' + letters.size())).first->second;
      const std::string label = concat(layer, ' ', letter);
      use(device.gather(), device.context().intern("g" + label), buffer, AccessMode::write,
          {.wire_bytes = kGatherTime});
      device.compute().wait(device.gather().record());
      use(device.compute(), device.context().intern("f" + label), buffer, AccessMode::read,
          {.flops = kComputeTime});
      buffer.give_back();
    }
    device.context().remove_observer(timeline);
    result.peak_bytes = source.peak_bytes();
  }
  result.gather = timeline.lane(StreamId::gather);
  result.compute = timeline.lane(StreamId::compute);
  result.end = timeline.end();
  return result;
}

std::string draw(const char* title, const Result& r) {
  return concat(padded(title, 54), "peak ", r.peak_bytes / kMiB, " MiB, done at ", r.end,
                "\n  gather   ", r.gather, "\n  compute  ", r.compute, "\n\n");
}

}  // namespace

std::string record_stream_and_gate() {
  const Result marked = run<RecordStream>(kFastHost), slow = run<RecordStream>(kSlowHost);
  const Result gated = run<Gates>(kFastHost), gated_slow = run<Gates>(kSlowHost);
  const Result slots = run<Slots>(kFastHost), slots_slow = run<Slots>(kSlowHost);
  std::string text = concat(
      "Each of ", kLayers, " layers gathers into a buffer of ", kBytes / kMiB, " MiB (",
      kGatherTime, " units of time) and computes from it (", kComputeTime,
      ").\nThe host frees the buffer as soon as it has queued that, and goes on. A, B, ... are "
      "addresses.\n\n");
  text += draw("record_stream: a freed block is idle until polled", marked);
  text += draw("the same, when a launch takes the host 2 units", slow);
  text += draw("gate: the same block, behind a wait on the device", gated);
  text += draw("two slots: the wait is for the layer before last", slots);
  const auto row = [](const char* name, const Result& fast, const Result& late) {
    return concat(
        padded(name, 16), padded(concat(fast.peak_bytes / kMiB, " MiB"), 12),
        padded(concat(late.peak_bytes / kMiB, " MiB"), 12),
        fast.peak_bytes == late.peak_bytes ? "the program decides" : "the host's speed decides",
        '\n');
  };
  text += concat(padded("peak", 16), padded("fast host", 12), "slow host\n");
  text += row("record_stream", marked, slow) + row("gate", gated, gated_slow) +
          row("two slots", slots, slots_slow);
  return text;
}

}  // namespace tessera::pictures
