// Metrics as JSON, as torchtitan's line and as a progress bar; and the signals that end a run.
#include "tools/train/metrics.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <regex>
#include <string>

#include "runtime/base/machine.hpp"
#include "tessera/base/error.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/seed.hpp"
#include "tests/support/temporary_folder.hpp"
#include "tools/train/signals.hpp"

using namespace tessera;
using namespace tessera::train;
using tessera::testing::TemporaryFolder;

namespace {

StepMetrics example() {
  StepMetrics m;
  m.step = 1;
  m.loss = 5.545177;
  m.grad_norm = 1.25;
  m.lr = 1e-3;
  m.tokens_per_second = 12345.6;
  return m;
}

std::string field(const std::string& json, const std::string& name) {
  const std::size_t at = json.find("\"" + name + "\": ");
  REQUIRE(at != std::string::npos);
  const std::size_t begin = at + name.size() + 4;
  return json.substr(begin, json.find_first_of(",}", begin) - begin);
}

std::string contents(std::FILE* file) {
  std::string text;
  std::rewind(file);
  for (int c; (c = std::fgetc(file)) != EOF;) text += static_cast<char>(c);
  return text;
}

// How a child that does `f` ends: its exit code, or minus the signal that ended it (SIGKILL where f
// returned).
template <class F>
int end_of_child(F&& f) {
  const pid_t child = ::fork();
  if (child == 0) {
    f();
    ::raise(SIGKILL);  // a copy of the test program must not go on
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
}

}  // namespace

TEST_CASE("a JSON line has every field, and null for what is not known") {
  CHECK(json_line(example()) ==
        "{\"step\": 1, \"loss\": 5.545177, \"grad_norm\": 1.25, \"lr\": 0.001, "
        "\"tokens_per_second\": 12345.6, "
        "\"mfu\": null, \"exposed_comm_ms\": null, \"host_ms\": null, \"memory_peak_bytes\": null, "
        "\"memory_planned_bytes\": null, \"memory_reserved_bytes\": null}");
  StepMetrics m = example();
  m.mfu = 0.5;
  m.exposed_comm_ms = 0;
  m.host_ms = 1.5;
  m.memory_peak_bytes = 9007199254740993;  // 2^53 + 1: not through a double
  m.memory_planned_bytes = 2;
  m.memory_reserved_bytes = 3;
  m.loss = std::numeric_limits<double>::quiet_NaN();
  m.grad_norm = std::numeric_limits<double>::infinity();
  const std::string json = json_line(m);
  CHECK(field(json, "mfu") == "0.5");
  CHECK(field(json, "exposed_comm_ms") == "0");
  CHECK(field(json, "memory_peak_bytes") == "9007199254740993");
  CHECK(field(json, "memory_reserved_bytes") == "3");
  CHECK(field(json, "loss") == "null");
  CHECK(field(json, "grad_norm") == "null");
}

TEST_CASE("numbers in JSON read back to the same bits") {
  const unsigned seed = testing::fresh_seed();
  INFO("seed " << seed);
  std::mt19937_64 random(seed);
  for (int trial = 0; trial < 2000; ++trial) {
    StepMetrics m = example();
    const std::uint64_t bits = random();
    std::memcpy(&m.loss, &bits, sizeof bits);
    if (m.loss - m.loss != 0) continue;  // NaN or infinity
    const float single = static_cast<float>(trial) / 7.0f;
    m.grad_norm = single;
    const std::string json = json_line(m);
    INFO(json);
    CHECK(std::strtod(field(json, "loss").c_str(), nullptr) == m.loss);
    CHECK(std::strtof(field(json, "grad_norm").c_str(), nullptr) == single);
  }
}

TEST_CASE("a step line has torchtitan's fields in its order") {
  StepMetrics m = example();
  m.tokens_per_second = 1234567.6;
  m.tflops = 1234.567;
  m.mfu = 0.4567;
  m.memory_reserved_bytes = std::int64_t{3} << 29;
  CHECK(step_line(m, std::int64_t{8} << 30, false) ==
        "step:  1  loss:  5.54518  grad_norm:  1.2500  memory:  1.50GiB(18.75%)  tps: 1,234,568  "
        "tflops: 1,234.57  "
        "mfu: 45.67%");
  CHECK(step_line(example(), 0, false) ==
        "step:  1  loss:  5.54518  grad_norm:  1.2500  memory: N/A  tps: 12,346  tflops: N/A  mfu: "
        "N/A");
  m.tokens_per_second = 999;
  CHECK(step_line(m, 0, false).find("tps: 999  ") != std::string::npos);
  m.tokens_per_second = 1000;
  CHECK(step_line(m, 0, false).find("tps: 1,000  ") != std::string::npos);
  m.loss = std::numeric_limits<double>::quiet_NaN();
  const std::string lost = step_line(m, 0, false);
  CHECK(lost.find("nan") != std::string::npos);
  m.loss = -m.loss;
  CHECK(step_line(m, 0, false) == lost);

  const std::string coloured = step_line(m, 0, true);
  CHECK(std::regex_replace(coloured, std::regex("\033\\[[0-9;]*m"), "") == step_line(m, 0, false));
  CHECK(coloured != step_line(m, 0, false));
  CHECK(validation_line(20, 1.5, false) == "validate step: 20  loss:  1.50000");
}

TEST_CASE("a progress bar fills up and never exceeds its width") {
  CHECK(progress_bar(12, 50, 3.2145, 31, 80) ==
        "[=========>                              ] 12/50  loss 3.2145  0:31 left");
  CHECK(progress_bar(50, 50, 1, 0, 80).starts_with("[" + std::string(40, '=') + "] 50/50"));
  CHECK(progress_bar(1, 2, 1, 3725, 80).find("1:02:05 left") != std::string::npos);
  for (int width = 0; width < 120; ++width) {
    for (const std::int64_t step : {1, 500, 1000}) {
      CHECK(progress_bar(step, 1000, 2.5, 100, width).size() <= static_cast<std::size_t>(width));
    }
  }
}

TEST_CASE("the first line truncates the JSON file, and each is there as soon as it is written") {
  const TemporaryFolder folder;
  const std::string path = folder.write("out.jsonl", "old\nold\n");
  JsonlWriter writer(path), fresh(folder / "fresh.jsonl");
  CHECK(folder.read("out.jsonl") == "old\nold\n");
  CHECK(folder.entries() == 1);
  fresh.write(example());
  CHECK(folder.read("fresh.jsonl") == json_line(example()) + "\n");
  writer.write(example());
  CHECK(folder.read("out.jsonl") == json_line(example()) + "\n");
  writer.write(example());
  CHECK(folder.read("out.jsonl") == json_line(example()) + "\n" + json_line(example()) + "\n");
  CHECK_THROWS_AS(JsonlWriter(folder / "none/out.jsonl"), DataError);
  CHECK_THROWS_AS(JsonlWriter(folder.path().string()), DataError);
  JsonlWriter full("/dev/full");
  CHECK_THROWS_AS(full.write(example()), DeviceError);
}

TEST_CASE("the console prints every log_freq-th step, and its bar gives way to lines") {
  std::FILE *out = std::tmpfile(), *err = std::tmpfile();
  REQUIRE((out && err));
  {
    Console console({.out = out, .err = err, .colour = false, .bar = true, .width = 80}, 6, 3, 0);
    console.line("planned");
    for (std::int64_t step = 1; step <= 6; ++step) {
      StepMetrics m = example();
      m.step = step;
      console.step(m);
    }
  }
  std::string lines;
  for (const std::int64_t step : {1, 3, 6}) {
    StepMetrics m = example();
    m.step = step;
    lines += step_line(m, 0, false) + "\n";
  }
  CHECK(contents(out) == "planned\n" + lines);
  const std::string bars = contents(err);
  CHECK(bars.find(" 2/6 ") != std::string::npos);
  CHECK(bars.find(" 5/6 ") != std::string::npos);
  CHECK(bars.ends_with("\r\033[K"));
  CHECK(bars.find('\n') == std::string::npos);
  std::fclose(out);
  std::fclose(err);
}

TEST_CASE("without a terminal there is no bar and no colour") {
  std::FILE *out = std::tmpfile(), *err = std::tmpfile();
  REQUIRE((out && err));
  Console console({.out = out, .err = err}, 3, 1, 0);
  console.step(example());
  console.validation(1, 2.0);
  CHECK(contents(out) ==
        step_line(example(), 0, false) + "\n" + validation_line(1, 2.0, false) + "\n");
  CHECK(contents(err).empty());
  std::fclose(out);
  std::fclose(err);
}

TEST_CASE("the first signal is remembered, the second ends the process with 128 + its number") {
  for (const int signal : {SIGINT, SIGTERM}) {
    CHECK(end_of_child([&] {
            install_signal_handlers();
            if (requested_signal() != 0) return;
            ::raise(signal);
            if (requested_signal() == signal) ::raise(SIGUSR1);
          }) == -SIGUSR1);
    CHECK(end_of_child([&] {
            install_signal_handlers();
            ::raise(SIGINT);
            ::raise(signal);
          }) == 128 + signal);
    CHECK(end_of_child([&] {
            install_signal_handlers();
            restore_signal_handlers();
            ::raise(signal);
          }) == -signal);
  }
}

TEST_CASE("the machine says how much memory it has") { CHECK(physical_memory_bytes() > (1 << 20)); }
