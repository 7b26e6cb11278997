// What a machine with GPUs has to say about NCCL and about ranks over it. Prints a line of JSON for
// each rank, and ends with 1 where a value is wrong.
//
//   gpu-check-nccl one DRIVER_MODULE DEVICE     one rank on one GPU, without a World: NCCL itself
//   gpu-check-nccl battery SEED [OPTION...]     every collective (tests/comm/battery.hpp), twice,
//                                               with a failure in between that the ranks end
//
// Options are --ranks=N, which are threads of this process, --cpu, --ordered-sums and --windows.
// Without --ranks a launcher's variables say which rank this is.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "kernels/kernel_table.hpp"
#include "runtime/comm/nccl/nccl_library.hpp"
#include "runtime/device/open_driver.hpp"
#include "tessera/base/error.hpp"
#include "tessera/run/run.hpp"
#include "tests/comm/battery.hpp"

namespace tessera {
namespace {

void say(const std::string& line) { std::puts(line.c_str()); }

// ---- NCCL itself

class One {
 public:
  One(const std::string& module, int device)
      : driver_(open_driver(module, kernels::kKernelsLayout, device)), nccl_(open()) {}

  // The parts by name, with their milliseconds.
  void run() {
    kernels::NcclId id{};
    void *whole = nullptr, *part = nullptr, *window = nullptr;
    time("init", [&] {
      expect(nccl_.make_id(&id));
      expect(nccl_.join(&id, 1, 0, &whole));
      settle(whole);
    });
    time("split", [&] {
      const kernels::NcclShape any{};
      expect(nccl_.split(whole, 0, 0, &any, &part));
      settle(whole);
      settle(part);
    });
    expect(nccl_.allocate(2 * kBytes, &memory_));
    time("window", [&] {
      expect(nccl_.make_window(part, memory_, 2 * kBytes, &window));
      settle(part);
    });
    expect(driver_.make_stream(0, &stream_));
    expect(driver_.make_event(&event_));
    expect(driver_.allocate_host(kBytes, &host_));
    void* graph = nullptr;
    time("capture", [&] {
      expect(driver_.begin_capture(stream_));
      gather(part);
      expect(driver_.end_capture(stream_, &graph));
      for (const std::uint8_t value : {3, 5}) {
        expect(driver_.fill(memory_, value, kBytes, stream_));
        expect(driver_.launch_graph(graph, stream_));
        expect_received(value);
      }
      expect(driver_.end_graph(graph));  // an abort waits for graphs
    });
    time("abort", [&] {
      expect(driver_.fill(memory_, 7, kBytes, stream_));
      gather(part);
      void* const both[] = {whole, part};
      expect(nccl_.abort(both, 2));
      block();
    });
    time("init again", [&] {
      expect(nccl_.make_id(&id));
      expect(nccl_.join(&id, 1, 0, &whole));
      settle(whole);
      expect(driver_.fill(memory_, 9, kBytes, stream_));
      gather(whole);
      expect_received(9);
      expect(nccl_.finalize(whole));
      settle(whole);
      expect(nccl_.destroy(whole));
    });
    say(concat("{\"nccl\": \"", comm::nccl_version(library_.version), "\", \"file\": \"",
               library_.file, "\", \"window\": ", window ? "true" : "false", times_, "}"));
  }

 private:
  static constexpr std::int64_t kBytes = 1 << 20;
  static constexpr int kPatienceSeconds = 60;

  const kernels::NcclDriver& open() {
    NcclOptions options;
    if (const char* const file = std::getenv("TESSERA_NCCL")) options.library = file;
    return comm::open_nccl(options, library_);
  }

  static void expect(const char* error) {
    if (error) throw CommError(error);
  }

  void time(const std::string& what, const std::function<void()>& body) {
    const auto begin = std::chrono::steady_clock::now();
    try {
      body();
    } catch (const Error& error) {
      throw CommError(concat(what, ": ", error.what()));
    }
    const std::chrono::duration<double, std::milli> taken =
        std::chrono::steady_clock::now() - begin;
    times_ += concat(", \"", what, " ms\": ", taken.count());
  }

  void settle(void* comm) const {
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(kPatienceSeconds);
    for (bool is_busy = true;;) {
      expect(nccl_.poll(comm, &is_busy));
      if (!is_busy) return;
      if (std::chrono::steady_clock::now() > until)
        throw CommError(concat("NCCL is busy for ", kPatienceSeconds, " s"));
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  }

  // Of one rank: a copy from the first half of the memory to the second.
  void gather(void* comm) const {
    expect(nccl_.begin());
    expect(nccl_.all_gather(memory_, second_half(), kBytes, comm, stream_));
    expect(nccl_.end());
    settle(comm);
  }

  void* second_half() const { return static_cast<char*>(memory_) + kBytes; }

  void block() const {
    expect(driver_.record(event_, stream_));
    expect(driver_.block(event_));
  }

  void expect_received(std::uint8_t value) const {
    expect(driver_.copy(host_, second_half(), kBytes, stream_));
    block();
    const auto* const bytes = static_cast<const std::uint8_t*>(host_);
    for (std::int64_t i = 0; i < kBytes; ++i)
      if (bytes[i] != value)
        throw CommError(concat("byte ", i, " is ", int{bytes[i]}, " and was sent as ", int{value}));
  }

  const Driver& driver_;
  kernels::NcclLibrary library_{};
  const kernels::NcclDriver& nccl_;
  void *memory_ = nullptr, *host_ = nullptr, *stream_ = nullptr, *event_ = nullptr;
  std::string times_;
};

int run_one(const std::vector<std::string>& words) {
  if (words.size() != 2) throw DataError("one: write a driver module and a device");
  One(words[0], std::atoi(words[1].c_str())).run();
  return 0;
}

// ---- ranks

void fail_and_recover(World& world) {
  world.barrier();  // all are behind the first time
  try {
    if (world.rank() == 0) throw CommError("gpu-check asks for it");
    for (;;) world.barrier();  // until that is heard
  } catch (const CommError&) {
    static_cast<void>(world.recover());
  }
}

// Where ranks are threads their lines come one at a time.
void run_battery(World& world, std::uint64_t seed) {
  std::vector<battery::Result> both;
  for (int time = 0; time < 2; ++time) {
    if (time > 0) fail_and_recover(world);
    both.push_back(battery::run(world, seed));
  }
  std::string errors;
  for (const battery::Result& result : both)
    if (!result.errors.empty()) errors += concat(errors.empty() ? "" : "; ", result.errors[0]);
  std::string line = concat("{\"rank\": ", world.rank(), ", \"ranks\": ", world.size(),
                            ", \"world\": \"", name(world.kind()), "\", \"hash\": \"", both[0].hash,
                            "\", \"control\": \"", both[0].control, "\", \"again\": \"",
                            both[1].hash, "\", \"errors\": \"", errors, "\"}");
  for (int rank = 0; rank < world.size(); ++rank) {
    if (rank == world.rank()) say(line);
    world.barrier();
  }
  if (!errors.empty()) throw CommError(errors);
}

int run_battery(const std::vector<std::string>& words) {
  RunOptions options{.program = "gpu-check-nccl"};
  options.world.device = parse_device("cuda");
  options.world.threads = 1;
  if (words.empty()) throw DataError("battery: write a seed");
  for (std::size_t i = 1; i < words.size(); ++i) {
    const std::string& word = words[i];
    if (word == "--cpu")
      options.world.device = {};
    else if (word == "--ordered-sums")
      options.world.nccl.ordered_sums = true;
    else if (word == "--windows")
      options.world.nccl.windows = true;
    else if (word.starts_with("--ranks="))
      options.ranks = std::atoi(word.c_str() + std::strlen("--ranks="));
    else
      throw DataError(concat(word, ": unknown option"));
  }
  const std::uint64_t seed = std::strtoull(words[0].c_str(), nullptr, 10);
  return run(options, [seed](World& world) { run_battery(world, seed); });
}

int run_words(const std::vector<std::string>& words) {
  const std::string what = words.empty() ? "" : words[0];
  const std::vector<std::string> rest(words.begin() + (words.empty() ? 0 : 1), words.end());
  if (what == "one") return run_one(rest);
  if (what == "battery") return run_battery(rest);
  throw DataError("write `one` or `battery`");
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  try {
    std::setvbuf(stdout, nullptr, _IOLBF, 0);
    return tessera::run_words({argv + 1, argv + argc});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "gpu-check-nccl: %s\n", error.what());
    return tessera::exit_code();
  }
}
