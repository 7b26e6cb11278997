// What a step reports: one JSON line in a file, and one line and a progress bar on the terminal.
// Only the first rank makes these; every number is handed in, nothing here measures.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>

#include "tools/train/config.hpp"

namespace tessera::train {

// One step. Unset: it cannot be known.
struct StepMetrics {
  std::int64_t step = 0;  // from 1
  double loss = 0;        // nats a token over the global batch, before this step's update
  double grad_norm = 0;   // global L2 before clipping
  double lr = 0;
  double tokens_per_second = 0;  // of the whole world
  std::optional<double> tflops;  // of one rank; printed, not in the JSON line
  std::optional<double> mfu;     // tflops / peak, from 0 to 1
  std::optional<double>
      exposed_comm_ms;  // time the compute stream waited for gather or reduce, maximum over ranks
  // Time the host submitted, maximum over ranks; not that of blocking calls, but a GPU's full queue
  // counts.
  std::optional<double> host_ms;
  std::optional<std::int64_t> memory_peak_bytes, memory_planned_bytes,
      memory_reserved_bytes;  // of the largest rank
};

// The JSON object, without a line end. Numbers are the shortest that read back to the same double;
// NaN and infinity, which JSON lacks, are null.
std::string json_line(const StepMetrics& metrics);

// "step:  1  loss:  5.54518  grad_norm:  1.2345  memory:  0.05GiB(0.31%)  tps: 12,345  tflops: 0.12
// mfu: 1.23%": torchtitan's fields in its order. Memory is what is reserved, in per cent of
// `capacity_bytes` (0: not known); tps is the whole world's.
std::string step_line(const StepMetrics& metrics, std::int64_t capacity_bytes, bool colour);

// "validate step:  1  loss:  5.54518": the held-out loss.
std::string validation_line(std::int64_t step, double loss, bool colour);

// "[=======>            ]  12/50  loss 3.2145  0:31 left", `width` columns at most.
std::string progress_bar(std::int64_t step, std::int64_t steps, double loss, double seconds_left,
                         int width);

// The file behind metrics.jsonl: made or truncated by the first line, so that a run without a step
// leaves an older file alone; one flushed line a step.
class JsonlWriter {
 public:
  // Throws: DataError if the path cannot be written, and while another run writes it.
  explicit JsonlWriter(const std::string& path);
  // Of a run that goes on behind that step: its lines up to there stay, and the first one that is
  // written comes behind them. Throws: DataError if the file cannot be read, or has lines that no
  // run has written, which would be lost.
  void keep_until(std::int64_t step);
  // Throws: DeviceError if the system refuses.
  void write(const StepMetrics& metrics);

 private:
  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }  // every line is flushed already
  };
  void open(int flags);
  bool is_regular() const;

  std::string path_;
  bool begun_ = false;
  std::int64_t kept_bytes_ = 0;   // of lines that were there before
  std::int64_t whole_bytes_ = 0;  // of lines
  std::unique_ptr<std::FILE, Close> file_;
};

// What the streams of the process are, so that a test can say it.
struct Terminal {
  std::FILE* out = stdout;
  std::FILE* err = stderr;
  bool colour = false;                  // of `out`: a terminal, and NO_COLOR is not set
  bool bar = false;                     // on `err`: a terminal that can clear a line
  int width = 80;                       // of `err`
  std::shared_ptr<std::FILE> own = {};  // `out`, where detect() has opened it

  // Of this process's stdout and stderr. `out` is a description of its own that never blocks where
  // stdout is a pipe or a terminal: what others write to theirs stays as it was.
  static Terminal detect();
};

// Results on stdout, the bar on stderr; the bar gives way to every line.
class Console {
 public:
  // Expects `steps` steps and prints every log_freq-th and the first.
  Console(const Terminal& terminal, std::int64_t steps, std::int64_t log_freq,
          std::int64_t capacity_bytes);
  Console(const Console&) = delete;
  Console& operator=(const Console&) = delete;
  ~Console();

  void step(const StepMetrics& metrics);
  void validation(std::int64_t step, double loss);
  // A line of results, or a text with several lines.
  void line(const std::string& text);

 private:
  // Waits for a reader of a full pipe until a signal asks to stop: mpirun reads no more from ranks
  // that it ends. Then the rest is lost.
  void put(std::string_view text);
  void clear_bar();
  void draw_bar();

  Terminal terminal_;
  std::int64_t steps_, log_freq_, capacity_bytes_;
  std::int64_t first_step_ = 0, last_step_ = 0;
  double last_loss_ = 0;
  std::chrono::steady_clock::time_point started_;
  bool bar_shown_ = false;
};

}  // namespace tessera::train
