#include "tessera/checkpoint/saver.hpp"

#include <algorithm>
#include <chrono>
#include <exception>
#include <utility>

#include "runtime/checkpoint/piece_queue.hpp"
#include "runtime/checkpoint/row_major.hpp"
#include "runtime/checkpoint/saving.hpp"
#include "runtime/checkpoint/staging.hpp"
#include "runtime/checkpoint/together.hpp"
#include "runtime/checkpoint/writer.hpp"
#include "tessera/base/error.hpp"
#include "tessera/base/log.hpp"
#include "tessera/tensor/ops.hpp"

namespace tessera::checkpoint {
struct Saver::State {
  using Clock = std::chrono::steady_clock;
  class Waiting;
  enum class Phase { idle, staged, writing, committing };

  State(std::string in, const World& over, const CheckpointOptions& with)
      : folder(std::move(in)), world(over), options(with), staging(over.device()) {}

  void begin(std::int64_t step, const std::vector<Part>& parts, const Scalars& scalars);
  void write(const ReadPiece& read);
  // Reads the values for a writer that has no copy of them.
  void serve(Waiting& waiting);
  // Begins the next phase, which every rank does with the same poll.
  void go_on();
  [[noreturn]] void fail();
  void give_up();  // what this rank is at
  void name_slowest(double seconds);

  const std::string folder;
  const World& world;
  const CheckpointOptions options;
  Staging staging;
  Phase phase = Phase::idle;
  bool is_asked = false;  // by `term`, since the save in flight began
  std::optional<std::int64_t> saved;
  std::optional<Saving> saving;
  WriteProgress progress;
  std::optional<PieceQueue> pieces;  // where values are not staged
  Writer writer;
};

// The polls of a rank that does nothing else. All ranks make as many of them.
class Saver::State::Waiting {
 public:
  explicit Waiting(Saver& saver) : saver_(saver), state_(*saver.state_) {}

  // Sleeps until the writer has ended, the disk stands still or it is time to poll.
  void sleep() {
    Writer& writer = state_.writer;
    writer.wait_for(pause_);
    pause_ = std::min<Clock::duration>(2 * pause_, kBeat);
    // A rank that does not poll is late, and peers that wait for it too long say so.
    while (!writer.is_done() && stands_still()) writer.wait_for(kBeat);
  }
  bool is_due() const { return Clock::now() - polled_ >= kBeat; }
  void poll() {
    const Clock::duration waited = Clock::now() - begin_;
    double sums[] = {saver_.term(),
                     state_.world.rank() == 0 && waited >= (told_ + 1) * kPatience ? 1. : 0.};
    state_.world.sum(sums, "checkpoint_wait");
    if (sums[1] > 0) {
      ++told_;
      state_.name_slowest(std::chrono::duration<double>(waited).count());
    }
    polled_ = Clock::now();
    saver_.poll(sums[0]);
  }

  static constexpr std::chrono::milliseconds kBeat{200};

 private:
  static constexpr std::chrono::seconds kPatience{10};

  bool stands_still() {
    if (const std::int64_t moves = state_.progress.moves(); std::exchange(moves_, moves) != moves)
      grown_ = Clock::now();
    return Clock::now() - grown_ >= kPatience;
  }

  Saver& saver_;
  State& state_;
  const Clock::time_point begin_ = Clock::now();
  Clock::time_point polled_ = begin_, grown_ = begin_;
  Clock::duration pause_ = std::chrono::milliseconds(1);
  std::int64_t moves_ = 0;
  int told_ = 0;
};

void Saver::State::begin(std::int64_t step, const std::vector<Part>& parts,
                         const Scalars& scalars) {
  saving.emplace(folder, step, parts, scalars, world, options);
  progress.bytes = progress.syncs = 0;
  progress.is_cancelled = false;
  is_asked = false;
}

void Saver::State::write(const ReadPiece& read) {
  phase = Phase::writing;
  writer.begin([this, read] {
    try {
      saving->write(read, progress);
    } catch (...) {
      if (pieces) pieces->close();
      throw;
    }
  });
}

void Saver::State::serve(Waiting& waiting) {
  for (const RankFile& file : saving->files())
    for (const OwnBox& box : file.boxes) {
      Tensor values;
      const auto bytes = static_cast<std::int64_t>(size_bytes(box.entry.dtype));
      for (std::int64_t begin = 0; begin < box.entry.size_bytes; begin += kPieceBytes) {
        const std::int64_t end = std::min(begin + kPieceBytes, box.entry.size_bytes);
        std::vector<std::byte>* piece = nullptr;
        while (!(piece = pieces->to_fill(Waiting::kBeat))) {
          if (pieces->is_closed()) return;
          waiting.sleep();
          waiting.poll();
        }
        try {
          if (!values.defined()) values = box.values();
          piece->resize(static_cast<std::size_t>(end - begin));
          copy_row_major(*piece, values, begin / bytes);
        } catch (const CommError&) {
          throw;
        } catch (...) {
          return pieces->fail(std::current_exception());
        }
        pieces->fill();
        if (waiting.is_due()) waiting.poll();
      }
    }
}

void Saver::State::go_on() {
  switch (phase) {
    case Phase::idle:
      return;
    case Phase::staged:
      staging.block();
      return write([](const OwnBox& box, std::int64_t begin, std::int64_t size) {
        return std::span(box.staged + begin, static_cast<std::size_t>(size));
      });
    case Phase::writing:
      writer.end();
      saving->exchange();
      phase = Phase::committing;
      if (world.rank() == 0) writer.begin([this] { saving->commit(progress); });
      return;
    case Phase::committing:
      writer.end();
      saved = saving->step();
      saving.reset();
      phase = Phase::idle;
  }
}

void Saver::State::give_up() {
  progress.is_cancelled = true;
  if (pieces) pieces->close();
}

void Saver::State::fail() {
  give_up();
  const std::exception_ptr failure = writer.end();
  phase = Phase::idle;
  try {
    on_all(world, [&] {
      if (failure) std::rethrow_exception(failure);
    });
    throw CommError("checkpoint::Saver: a save has failed, and no rank says why");
  } catch (...) {
    saving.reset();  // all writers have ended, or their world has
    throw;
  }
}

void Saver::State::name_slowest(double seconds) {
  const double own = writer.is_done() ? -1 : static_cast<double>(saving->left_bytes(progress)),
               most = world.max(own), rank = world.max(own == most ? world.rank() : -1);
  if (world.rank() != 0 || most < 0) return;
  log(LogLevel::warning,
      concat("checkpoint: step ", saving->step(), " takes longer than ",
             static_cast<std::int64_t>(seconds), " s; rank ", rank, " is the slowest, with ",
             static_cast<std::int64_t>(most) >> 20, " MiB left to write"));
}

Saver::Saver(std::string folder, const World& world, const CheckpointOptions& options)
    : state_(std::make_unique<State>(std::move(folder), world, options)) {
  expect_keeps(options);
}

Saver::~Saver() {
  if (!state_->saving) return;
  state_->give_up();
  state_->writer.end();
  log(LogLevel::warning,
      concat("checkpoint: step ", state_->saving->step(), " was being saved, and is given up"));
}

void Saver::prepare(const std::vector<Part>& parts) {
  TESSERA_EXPECT(!state_->saving, "Saver::prepare: a save is in flight; wait for it");
  std::vector<RankFile> files;
  for (const Part& part : parts) files.push_back(RankFile::of(part));
  state_->staging.copy(files);
}

void Saver::save(std::int64_t step, const std::vector<Part>& parts, const Scalars& scalars) {
  State& s = *state_;
  if (s.saving) {
    on_all(s.world, [&] {
      TESSERA_EXPECT(step != s.saving->step(), "Saver::save: step ", step,
                     " is being saved already; save another step");
    });
    if (s.world.rank() == 0)
      log(LogLevel::warning,
          concat("checkpoint: step ", step, " waits until step ", s.saving->step(), " is saved"));
    wait();
  }
  s.begin(step, parts, scalars);
  try {
    on_all(s.world, [&] { s.staging.copy(s.saving->files()); });
  } catch (...) {
    s.saving.reset();
    throw;
  }
  s.phase = State::Phase::staged;
}

double Saver::term() {
  State& s = *state_;
  s.is_asked = true;
  if (s.phase == State::Phase::idle) return 0;
  if (s.phase == State::Phase::staged || !s.writer.is_done()) return 1;
  // More than all ranks that are not done: such sums are told apart in f32, too.
  return s.writer.has_failed() ? s.world.size() + 1 : 0;
}

void Saver::poll(double sum) {
  State& s = *state_;
  if (!std::exchange(s.is_asked, false)) return;  // of terms from before the save
  if (sum > s.world.size()) s.fail();
  if (sum == 0 || s.phase == State::Phase::staged) s.go_on();
}

void Saver::poll() {
  double sum[] = {term()};
  state_->world.sum(sum, "checkpoint_poll");
  poll(sum[0]);
}

void Saver::wait() {
  State::Waiting waiting(*this);
  while (state_->saving) {
    waiting.sleep();
    waiting.poll();
  }
}

std::optional<std::int64_t> Saver::in_flight() const {
  return state_->saving ? std::optional(state_->saving->step()) : std::nullopt;
}
std::optional<std::int64_t> Saver::saved() const { return state_->saved; }

// The same stages, without a copy: this thread reads what its writer writes.
void save(const std::string& folder, std::int64_t step, const std::vector<Part>& parts,
          const Scalars& scalars, const World& world, const CheckpointOptions& options) {
  Saver saver(folder, world, options);
  Saver::State& s = *saver.state_;
  s.begin(step, parts, scalars);
  s.pieces.emplace();
  s.write([&s](const OwnBox&, std::int64_t, std::int64_t) { return s.pieces->take(); });
  Saver::State::Waiting waiting(saver);
  s.serve(waiting);
  while (s.saving) {
    waiting.sleep();
    waiting.poll();
  }
}

}  // namespace tessera::checkpoint
