#include "tools/train/metrics.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <span>
#include <string_view>
#include <utility>

#include "tessera/base/error.hpp"
#include "tessera/base/file.hpp"
#include "tessera/detail/base/json.hpp"
#include "tessera/detail/base/text.hpp"
#include "tessera/run/environment.hpp"
#include "tools/train/signals.hpp"

namespace tessera::train {
namespace {

constexpr double kGiB = 1024.0 * 1024.0 * 1024.0;

template <class... Arguments>
std::string format(const char* pattern, Arguments... arguments) {
  char text[400];  // the widest number, -DBL_MAX in fixed notation, has 310 characters
  std::snprintf(text, sizeof text, pattern, arguments...);
  return text;
}

// "nan" whatever its sign, which says nothing and differs between processors.
double plain(double value) {
  return value != value ? std::numeric_limits<double>::quiet_NaN() : value;
}

// torchtitan's colours, in its order.
class Painter {
 public:
  explicit Painter(bool colour) : colour_(colour) {}
  const char* operator()(const char* code) const { return colour_ ? code : ""; }

 private:
  bool colour_;
};
constexpr const char *kRed = "\033[31m", *kGreen = "\033[32m", *kYellow = "\033[33m",
                     *kBlue = "\033[34m", *kMagenta = "\033[35m", *kCyan = "\033[36m",
                     *kOrange = "\033[38;2;180;60;0m", *kTurquoise = "\033[38;2;54;234;195m",
                     *kReset = "\033[39m";

std::string memory_field(const StepMetrics& metrics, std::int64_t capacity_bytes) {
  if (!metrics.memory_reserved_bytes) return "N/A";
  const auto bytes = static_cast<double>(*metrics.memory_reserved_bytes);
  std::string field = format("%5.2fGiB", bytes / kGiB);
  if (capacity_bytes > 0)
    field += format("(%.2f%%)", 100 * bytes / static_cast<double>(capacity_bytes));
  return field;
}

std::string reason(int error) {
  return error == EWOULDBLOCK ? "another run is writing it" : std::strerror(error);
}

bool is_set(const char* variable) {
  const char* value = std::getenv(variable);
  return value && *value;
}

}  // namespace

std::string json_line(const StepMetrics& m) {
  return concat("{\"step\": ", m.step, ", \"loss\": ", json::number(m.loss),
                ", \"grad_norm\": ", json::number(m.grad_norm), ", \"lr\": ", json::number(m.lr),
                ", \"tokens_per_second\": ", json::number(m.tokens_per_second),
                ", \"mfu\": ", json::number(m.mfu),
                ", \"exposed_comm_ms\": ", json::number(m.exposed_comm_ms),
                ", \"host_ms\": ", json::number(m.host_ms),
                ", \"memory_peak_bytes\": ", json::number(m.memory_peak_bytes),
                ", \"memory_planned_bytes\": ", json::number(m.memory_planned_bytes),
                ", \"memory_reserved_bytes\": ", json::number(m.memory_reserved_bytes), "}");
}

std::string step_line(const StepMetrics& m, std::int64_t capacity_bytes, bool colour) {
  const Painter paint(colour);
  const std::string tflops = m.tflops ? with_commas(format("%.2f", *m.tflops)) : "N/A";
  const std::string mfu = m.mfu ? format("%.2f%%", 100 * *m.mfu) : "N/A";
  return concat(paint(kRed), format("step: %2lld  ", static_cast<long long>(m.step)), paint(kGreen),
                format("loss: %8.5f  ", plain(m.loss)), paint(kOrange),
                format("grad_norm: %7.4f  ", plain(m.grad_norm)), paint(kTurquoise),
                "memory: ", memory_field(m, capacity_bytes), "  ", paint(kBlue),
                "tps: ", with_commas(format("%.0f", m.tokens_per_second)), "  ", paint(kCyan),
                "tflops: ", tflops, "  ", paint(kMagenta), "mfu: ", mfu, paint(kReset));
}

std::string validation_line(std::int64_t step, double loss, bool colour) {
  const Painter paint(colour);
  return concat(paint(kYellow), format("validate step: %2lld  ", static_cast<long long>(step)),
                paint(kGreen), format("loss: %8.5f", plain(loss)), paint(kReset));
}

std::string progress_bar(std::int64_t step, std::int64_t steps, double loss, double seconds_left,
                         int width) {
  const auto seconds = static_cast<long long>(std::clamp(seconds_left, 0.0, 359999.0));
  const std::string left = seconds >= 3600 ? format("%lld:%02lld:%02lld", seconds / 3600,
                                                    seconds / 60 % 60, seconds % 60)
                                           : format("%lld:%02lld", seconds / 60, seconds % 60);
  const std::string text =
      concat(" ", step, "/", steps, "  loss ", format("%.4f", plain(loss)), "  ", left, " left");
  const int cells = std::min(40, width - static_cast<int>(text.size()) - 2);
  if (cells < 4) return text.substr(1, static_cast<std::size_t>(std::max(width, 0)));
  const double done = steps > 0 ? static_cast<double>(step) / static_cast<double>(steps) : 1;
  const auto full = static_cast<std::size_t>(std::clamp(done, 0.0, 1.0) * cells);
  std::string bar(full, '=');
  if (full < static_cast<std::size_t>(cells)) bar += '>';
  bar.resize(static_cast<std::size_t>(cells), ' ');
  return concat("[", bar, "]", text);
}

void JsonlWriter::open(int flags) {
  // Without O_NONBLOCK a named pipe that nobody reads would stop the run here for ever.
  const int descriptor = ::open(path_.c_str(), O_WRONLY | O_CLOEXEC | O_NONBLOCK | flags, 0666);
  if (descriptor < 0) return;
  ::fcntl(descriptor, F_SETFL, 0);
  file_.reset(::fdopen(descriptor, "w"));
  std::setvbuf(file_.get(), nullptr, _IONBF, 0);
  // Two runs in one file would mix their lines. Not every file system can tell.
  if (is_regular() && ::flock(descriptor, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
    file_.reset();
    errno = EWOULDBLOCK;
  }
}

bool JsonlWriter::is_regular() const {
  struct stat status{};
  return ::fstat(::fileno(file_.get()), &status) == 0 && S_ISREG(status.st_mode);
}

JsonlWriter::JsonlWriter(const std::string& path) : path_(path) {
  open(0);
  if (!file_ && errno == ENOENT)
    check_writable(path);
  else if (!file_)
    throw DataError(concat("'", path, "' cannot be written: ", reason(errno), "; check the path"));
}

void JsonlWriter::keep_until(std::int64_t step) {
  if (step == 0 || !file_ || !is_regular()) return;
  const OpenFile file(path_, "metrics.jsonl");
  std::string text(static_cast<std::size_t>(file.size_bytes()), '\0');
  text.resize(file.read_some(0, std::as_writable_bytes(std::span(text))));
  // Each whole line begins with its step, as json_line has it; what follows a later one goes. The
  // last may be cut, or zeros, where a machine has failed.
  constexpr std::string_view kBegin = "{\"step\": ";
  std::int64_t number = 0, of_line = 0;
  std::size_t kept = text.npos;
  for (std::size_t begin = 0, end; begin < text.size(); begin = end + 1) {
    end = std::min(text.find('\n', begin), text.size());
    const std::string_view line = std::string_view(text).substr(begin, end - begin);
    const bool is_cut = end == text.size();
    ++number;
    const bool is_step =
        line.starts_with(kBegin) &&
        std::from_chars(line.data() + kBegin.size(), line.data() + line.size(), of_line).ec ==
            std::errc();
    if (!is_step && !(is_cut && (kBegin.starts_with(line.substr(0, kBegin.size())) ||
                                 line.find_first_not_of('\0') == line.npos)))
      throw DataError(concat("line ", number, " of '", path_,
                             "' is not a step's, and a run that goes on would lose what is behind "
                             "it; name another file"));
    if (kept == text.npos && (is_cut || !is_step || of_line > step)) kept = begin;
  }
  kept_bytes_ = static_cast<std::int64_t>(std::min(kept, text.size()));
}

void JsonlWriter::write(const StepMetrics& metrics) {
  const auto fail = [&] {
    const std::string why = reason(errno);
    // No part of a line stays; nor is there a buffer that would be written later.
    if (file_ && is_regular() && ::ftruncate(::fileno(file_.get()), whole_bytes_) != 0) errno = 0;
    throw DeviceError(concat("metrics.jsonl: writing '", path_, "' failed: ", why));
  };
  if (!std::exchange(begun_, true)) {
    if (!file_) open(O_CREAT);
    if (!file_) fail();
    if (is_regular() && (::ftruncate(::fileno(file_.get()), kept_bytes_) != 0 ||
                         std::fseek(file_.get(), 0, SEEK_END) != 0))
      fail();
    whole_bytes_ = kept_bytes_;
  }
  const std::string line = json_line(metrics) + "\n";
  if (std::fwrite(line.data(), 1, line.size(), file_.get()) != line.size() ||
      std::fflush(file_.get()) != 0)
    fail();
  whole_bytes_ += static_cast<std::int64_t>(line.size());
}

Terminal Terminal::detect() {
  Terminal terminal;
  const char* kind = std::getenv("TERM");
  const bool dumb = !kind || std::string_view(kind) == "dumb";
  terminal.colour =
      ::isatty(STDOUT_FILENO) && !dumb && !is_set("NO_COLOR") &&
      !tessera::detect(std::getenv).several_processes();  // mpirun gives each a terminal
  terminal.bar = ::isatty(STDERR_FILENO) && !dumb;
  struct stat out{};
  const bool waits = (::fcntl(STDOUT_FILENO, F_GETFL) & O_ACCMODE) != O_RDONLY &&
                     ::fstat(STDOUT_FILENO, &out) == 0 &&
                     (S_ISFIFO(out.st_mode) || ::isatty(STDOUT_FILENO));
  const int own =
      waits ? ::open("/proc/self/fd/1", O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC) : -1;
  if (own >= 0) terminal.own.reset(::fdopen(own, "w"), ::fclose);
  if (terminal.own) terminal.out = terminal.own.get();
  winsize size{};
  if (terminal.bar && ::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0)
    terminal.width = size.ws_col;
  return terminal;
}

Console::Console(const Terminal& terminal, std::int64_t steps, std::int64_t log_freq,
                 std::int64_t capacity_bytes)
    : terminal_(terminal),
      steps_(steps),
      log_freq_(log_freq),
      capacity_bytes_(capacity_bytes),
      started_(std::chrono::steady_clock::now()) {
  TESSERA_EXPECT(log_freq > 0, "Console: log_freq=", log_freq, " must be positive");
}

Console::~Console() { clear_bar(); }

void Console::step(const StepMetrics& metrics) {
  if (first_step_ == 0) {  // the first step is slower than the rest: the estimate begins after it
    first_step_ = metrics.step;
    started_ = std::chrono::steady_clock::now();
  }
  last_step_ = metrics.step;
  last_loss_ = metrics.loss;
  if (metrics.step == 1 || metrics.step % log_freq_ == 0) {
    line(step_line(metrics, capacity_bytes_, terminal_.colour));
  } else {
    draw_bar();
  }
}

void Console::validation(std::int64_t step, double loss) {
  line(validation_line(step, loss, terminal_.colour));
}

void Console::line(const std::string& text) {
  clear_bar();
  put(text + "\n");
  if (last_step_ > 0 && last_step_ < steps_) draw_bar();
}

void Console::put(std::string_view text) {
  constexpr int kPatienceMs = 100;  // a signal may come to another thread, which wakes nobody here
  while (!text.empty()) {
    const ssize_t count = ::write(::fileno(terminal_.out), text.data(), text.size());
    if (count >= 0) {
      text.remove_prefix(static_cast<std::size_t>(count));
    } else if (errno == EAGAIN) {
      pollfd out{.fd = ::fileno(terminal_.out), .events = POLLOUT, .revents = 0};
      if (::poll(&out, 1, kPatienceMs) == 0 && requested_signal() != 0) return;
    } else if (errno != EINTR) {
      throw DeviceError(concat("writing to stdout failed: ", std::strerror(errno)));
    }
  }
}

void Console::clear_bar() {
  if (!bar_shown_) return;
  std::fputs("\r\033[K", terminal_.err);
  std::fflush(terminal_.err);
  bar_shown_ = false;
}

void Console::draw_bar() {
  if (!terminal_.bar) return;
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - started_;
  const auto done = static_cast<double>(last_step_ - first_step_);
  const double left =
      done > 0 ? elapsed.count() / done * static_cast<double>(steps_ - last_step_) : 0;
  // One column stays free: a character in the last one makes some terminals wrap.
  std::fprintf(terminal_.err, "\r\033[K%s",
               progress_bar(last_step_, steps_, last_loss_, left, terminal_.width - 1).c_str());
  std::fflush(terminal_.err);
  bar_shown_ = true;
}

}  // namespace tessera::train
