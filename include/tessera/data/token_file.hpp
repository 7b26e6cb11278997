// Token data: a file seen as tokens, the order in which training takes its samples, and the loader
// that puts both together. Everything is a pure function of (options, step, rank, world), and a
// loader has no position. So a run resumed at step k, or on another number of ranks, takes the same
// samples.
//
//   tokens   t0 t1 t2 t3 t4 t5 t6 t7 t8 ...           T = 4
//   sample 0 |--- inputs ---|                         inputs t0..t3, targets t1..t4
//   sample 1             |--- inputs ---|             inputs t4..t7, targets t5..t8
//
// Sample i is the T + 1 tokens from i T on.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "tessera/base/file.hpp"

namespace tessera::data {

// Whether opening a file looks at every token once. Then a bad id is reported before training, and
// not in it. `later` is for ranks that share this work by find_bad.
enum class Scan : std::uint8_t { now, later };

// A file of tokens. `*.bin` is little-endian uint16 without a header; any other file is bytes.
class TokenFile {
 public:
  // Throws: DataError if the file cannot be read (see OpenFile), if a `*.bin` has an odd number of
  // bytes, or if an id is not below `vocab_size`; the message names the position of the first such
  // id. ContractError if `vocab_size` is not positive.
  TokenFile(std::string path, std::int64_t vocab_size, Scan scan = Scan::now);

  const std::string& path() const noexcept { return file_.path(); }
  // The number of tokens.
  std::int64_t size() const noexcept { return size_; }
  // Reads the tokens from `first` on. Throws: ContractError if they are not all in the file. If the
  // file has changed since: DeviceError if they are no longer there, and DataError if an id is too
  // high.
  void read(std::int64_t first, std::span<std::int32_t> tokens) const;
  // The position of the first id in [begin, end) that is too high for `read`, or `end`. `progress`
  // hears every MiB or so how many tokens have been looked at, and may throw.
  // Throws: as read.
  std::int64_t find_bad(std::int64_t begin, std::int64_t end,
                        const std::function<void(std::int64_t)>& progress = {}) const;

 private:
  void expect_inside(const char* function, std::int64_t first, std::int64_t count) const;

  OpenFile file_;
  std::int64_t vocab_size_;
  std::int64_t token_bytes_;
  std::int64_t size_;
};

enum class SampleOrder : std::uint8_t { shuffled, sequential };

// A permutation of 0..size-1 that is computed, not stored. It is a Feistel network over the
// smallest power of four that holds `size`, keyed by (seed, epoch). It is walked until it lands
// inside, on average in fewer than 4 steps. The round function is Philox.
// Source: Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002.
class Permutation {
 public:
  // Requires: size > 0.
  Permutation(std::int64_t size, std::uint64_t seed, std::int64_t epoch);
  // The index at `position`.  Requires: 0 <= position < size.
  std::int64_t operator[](std::int64_t position) const;

 private:
  std::int64_t size_;
  std::uint64_t key_;
  int half_bits_;
};

// The sample that training takes at `position` (step * global batch + row) of a set of `samples`.
// sequential wraps around. shuffled takes a new permutation each time around.
// Requires: position >= 0, samples > 0.
std::int64_t sample_at(std::int64_t position, std::int64_t samples, SampleOrder order,
                       std::uint64_t seed);

struct LoaderOptions {
  std::int64_t seq_len = 0;       // T
  std::int64_t global_batch = 1;  // B, samples a step over all ranks
  SampleOrder order = SampleOrder::shuffled;
  std::uint64_t seed = 0;
  double heldout = 0;  // the fraction of the tokens, at the end, that is never trained on
};

// The most held-out samples that are evaluated. Their mean is steady enough, and costs little
// beside an interval of training.
inline constexpr std::int64_t kMaxHeldoutSamples = 64;

// Batches of samples, as contiguous rows.
// Threads: all calls are const and may come from many ranks at once, so ranks of one process share
// one loader.
class TokenLoader {
 public:
  // Throws: DataError if the training part, or a held-out part that was asked for, is too short for
  // one sample. ContractError for options out of range.
  TokenLoader(TokenFile file, const LoaderOptions& options);

  const TokenFile& file() const noexcept { return file_; }
  const LoaderOptions& options() const noexcept { return options_; }
  std::int64_t samples() const noexcept { return samples_; }                  // to train on
  std::int64_t heldout_samples() const noexcept { return heldout_samples_; }  // min(all, 64)

  // Rows first_row .. first_row + R - 1 of rank's part of step's global batch, where R =
  // inputs.size() / T. Steps count from 0. The part is the rank-th contiguous B/world rows. A
  // micro-batch is such a range of rows.
  //   inputs, targets: [R, T]
  // Requires: world divides B; the rows lie in the rank's part.
  void batch(std::int64_t step, int rank, int world, std::int64_t first_row,
             std::span<std::int32_t> inputs, std::span<std::int32_t> targets) const;

  // The same for the global batch that begins with sample `first` of the order in which training
  // takes them. It is for a run that goes on with another global batch.
  void batch_from(std::int64_t first, int rank, int world, std::int64_t first_row,
                  std::span<std::int32_t> inputs, std::span<std::int32_t> targets) const;

  // Held-out samples first .. first + R - 1.
  //   inputs, targets: [R, T]
  void heldout(std::int64_t first, std::span<std::int32_t> inputs,
               std::span<std::int32_t> targets) const;

 private:
  std::int64_t rows_of(std::span<std::int32_t> inputs, std::span<std::int32_t> targets) const;
  void read_sample(std::int64_t first_token, std::int64_t row, std::span<std::int32_t> inputs,
                   std::span<std::int32_t> targets) const;

  TokenFile file_;
  LoaderOptions options_;
  std::int64_t samples_ = 0;
  std::int64_t heldout_begin_ = 0;  // the first held-out token
  std::int64_t heldout_samples_ = 0;
};

// How many samples of seq_len + 1 tokens, seq_len apart, fit into `tokens`.
constexpr std::int64_t samples_in(std::int64_t tokens, std::int64_t seq_len) {
  return tokens > 0 ? (tokens - 1) / seq_len : 0;
}
static_assert(samples_in(9, 4) == 2 && samples_in(8, 4) == 1 && samples_in(4, 4) == 0);

}  // namespace tessera::data
