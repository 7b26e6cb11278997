#include "tessera/data/token_file.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>
#include <vector>

#include "tessera/base/error.hpp"
#include "tessera/base/philox.hpp"
#include "tessera/detail/base/checked.hpp"

namespace tessera::data {
namespace {

// Four make a strong permutation (Luby, Rackoff); two more for tiny sizes.
constexpr int kFeistelRounds = 6;

constexpr std::size_t kPartTokens = 4096;  // read at once: a part fits the first cache
constexpr std::size_t kScanBytes = 1 << 20;

std::string plural(std::int64_t count, const char* noun) {
  return concat(count, " ", noun, count == 1 ? "" : "s");
}

}  // namespace

TokenFile::TokenFile(std::string path, std::int64_t vocab_size, Scan scan)
    : file_(std::move(path), "token file"),
      vocab_size_(vocab_size),
      token_bytes_(file_.path().ends_with(".bin") ? 2 : 1),
      size_(file_.size_bytes() / token_bytes_) {
  TESSERA_EXPECT(vocab_size > 0, "TokenFile: vocab_size=", vocab_size, " must be positive");
  if (file_.size_bytes() % token_bytes_ != 0) {
    throw DataError(concat("token file '", file_.path(), "' has ", file_.size_bytes(),
                           " bytes, an odd number; a *.bin file holds tokens of 16 bits"));
  }
  const std::int64_t bad = scan == Scan::now ? find_bad(0, size_) : size_;
  std::int32_t id = 0;
  if (bad < size_) read(bad, {&id, 1});  // throws
}

void TokenFile::expect_inside(const char* function, std::int64_t first, std::int64_t count) const {
  TESSERA_EXPECT(first >= 0 && first <= size_ && count >= 0 && count <= size_ - first,
                 "TokenFile::", function, ": ", count, " tokens from ", first, " are not in the ",
                 size_, " of '", path(), "'");
}

std::int64_t TokenFile::find_bad(std::int64_t begin, std::int64_t end,
                                 const std::function<void(std::int64_t)>& progress) const {
  expect_inside("find_bad", begin, end - begin);
  if (vocab_size_ >> (8 * token_bytes_) > 0) return end;  // no token can be out of range
  const auto width = static_cast<std::size_t>(token_bytes_);
  std::vector<std::byte> bytes(kScanBytes);
  const auto id = [&](std::size_t k) {
    const auto low = std::to_integer<std::uint32_t>(bytes[k * width]);
    return width == 1 ? low : low | std::to_integer<std::uint32_t>(bytes[2 * k + 1]) << 8;
  };
  for (std::int64_t at = begin; at < end;) {
    const std::size_t count = std::min(kScanBytes / width, static_cast<std::size_t>(end - at));
    file_.read(at * token_bytes_, std::span(bytes).first(count * width));
    std::uint32_t highest = 0;  // without a branch for each token
    for (std::size_t k = 0; k < count; ++k) highest = std::max(highest, id(k));
    for (std::size_t k = 0; highest >= vocab_size_; ++k)
      if (id(k) >= vocab_size_) return at + static_cast<std::int64_t>(k);
    at += static_cast<std::int64_t>(count);
    if (progress) progress(at - begin);
  }
  return end;
}

void TokenFile::read(std::int64_t first, std::span<std::int32_t> tokens) const {
  const auto count = static_cast<std::int64_t>(tokens.size());
  expect_inside("read", first, count);
  const auto width = static_cast<std::size_t>(token_bytes_);
  std::array<std::byte, 2 * kPartTokens> bytes;
  for (std::int64_t i = 0; i < count; i += kPartTokens) {
    const std::span<std::int32_t> part = tokens.subspan(
        static_cast<std::size_t>(i), std::min(kPartTokens, static_cast<std::size_t>(count - i)));
    file_.read((first + i) * token_bytes_, std::span(bytes).first(part.size() * width));
    for (std::size_t k = 0; k < part.size(); ++k) {
      part[k] = std::to_integer<std::int32_t>(bytes[k * width]);
      if (width == 2) part[k] |= std::to_integer<std::int32_t>(bytes[2 * k + 1]) << 8;
    }
    // Also of a file that was good when it was opened: a training on other ids ends in NaN.
    const auto bad = std::ranges::find_if(part, [&](std::int32_t id) { return id >= vocab_size_; });
    if (bad == part.end()) continue;
    throw DataError(concat("token file '", path(), "' has id ", *bad, " at position ",
                           first + i + (bad - part.begin()), ", beyond the vocabulary of ",
                           vocab_size_, "; raise model.vocab_size or tokenize again"));
  }
}

Permutation::Permutation(std::int64_t size, std::uint64_t seed, std::int64_t epoch)
    : size_(size), half_bits_(1) {
  TESSERA_EXPECT(size > 0, "Permutation: size=", size, " must be positive");
  while (half_bits_ < 31 && (std::int64_t{1} << (2 * half_bits_)) < size) ++half_bits_;
  TESSERA_EXPECT((std::int64_t{1} << (2 * half_bits_)) >= size, "Permutation: size=", size,
                 " exceeds 2^62");
  key_ = fnv1a(static_cast<std::uint64_t>(epoch), fnv1a(seed, fnv1a("samples")));
}

std::int64_t Permutation::operator[](std::int64_t position) const {
  TESSERA_EXPECT(position >= 0 && position < size_, "Permutation: position=", position,
                 " is not below ", size_);
  const std::uint64_t mask = (std::uint64_t{1} << half_bits_) - 1;
  auto value = static_cast<std::uint64_t>(position);
  do {
    std::uint64_t left = value >> half_bits_, right = value & mask;
    for (int round = 0; round < kFeistelRounds; ++round) {
      const std::uint64_t mixed = philox(key_, right, static_cast<std::uint64_t>(round))[0] & mask;
      left = std::exchange(right, left ^ mixed);
    }
    value = left << half_bits_ | right;
  } while (value >= static_cast<std::uint64_t>(size_));
  return static_cast<std::int64_t>(value);
}

std::int64_t sample_at(std::int64_t position, std::int64_t samples, SampleOrder order,
                       std::uint64_t seed) {
  TESSERA_EXPECT(position >= 0 && samples > 0, "sample_at: position=", position,
                 ", samples=", samples, "; expected at least 0 and at least 1");
  const std::int64_t within = position % samples;
  if (order == SampleOrder::sequential) return within;
  return Permutation(samples, seed, position / samples)[within];
}

TokenLoader::TokenLoader(TokenFile file, const LoaderOptions& options)
    : file_(std::move(file)), options_(options) {
  TESSERA_EXPECT(options.seq_len > 0 && options.global_batch > 0,
                 "TokenLoader: seq_len=", options.seq_len,
                 " and global_batch=", options.global_batch, " must be positive");
  TESSERA_EXPECT(options.heldout >= 0 && options.heldout < 1,
                 "TokenLoader: heldout=", options.heldout, " must be at least 0 and below 1");
  const std::int64_t tokens = file_.size();
  const auto heldout =
      static_cast<std::int64_t>(std::floor(options.heldout * static_cast<double>(tokens)));
  heldout_begin_ = tokens - heldout;
  samples_ = samples_in(heldout_begin_, options.seq_len);
  heldout_samples_ = std::min(samples_in(heldout, options.seq_len), kMaxHeldoutSamples);
  const auto too_short = [&](std::int64_t part, const char* use, const char* remedy) {
    throw DataError(concat("token file '", file_.path(), "' has ", plural(part, "token"), use,
                           ", too short for one sample of training.seq_len + 1 = ",
                           checked_add(options.seq_len, 1), remedy));
  };
  if (samples_ == 0) {
    too_short(heldout_begin_, heldout > 0 ? " left to train on" : "",
              "; use more data or a smaller training.seq_len");
  }
  if (options.heldout > 0 && heldout_samples_ == 0) {
    too_short(heldout, " held out", "; raise data.heldout or use a smaller training.seq_len");
  }
}

std::int64_t TokenLoader::rows_of(std::span<std::int32_t> inputs,
                                  std::span<std::int32_t> targets) const {
  const auto length = static_cast<std::size_t>(options_.seq_len);
  TESSERA_EXPECT(inputs.size() == targets.size() && inputs.size() % length == 0,
                 "TokenLoader: ", inputs.size(), " inputs and ", targets.size(),
                 " targets are not the same whole number of rows of ", length);
  return static_cast<std::int64_t>(inputs.size() / length);
}

void TokenLoader::read_sample(std::int64_t first_token, std::int64_t row,
                              std::span<std::int32_t> inputs,
                              std::span<std::int32_t> targets) const {
  const auto length = static_cast<std::size_t>(options_.seq_len);
  const std::size_t begin = static_cast<std::size_t>(row) * length;
  file_.read(first_token, inputs.subspan(begin, length));
  file_.read(first_token + 1, targets.subspan(begin, length));
}

void TokenLoader::batch(std::int64_t step, int rank, int world, std::int64_t first_row,
                        std::span<std::int32_t> inputs, std::span<std::int32_t> targets) const {
  TESSERA_EXPECT(step >= 0, "TokenLoader::batch: step ", step, "; count them from 0");
  batch_from(checked_mul(step, options_.global_batch), rank, world, first_row, inputs, targets);
}

void TokenLoader::batch_from(std::int64_t first, int rank, int world, std::int64_t first_row,
                             std::span<std::int32_t> inputs,
                             std::span<std::int32_t> targets) const {
  const std::int64_t rows = rows_of(inputs, targets);
  TESSERA_EXPECT(world > 0 && rank >= 0 && rank < world && options_.global_batch % world == 0,
                 "TokenLoader::batch: rank ", rank, " of ", world, " and a global batch of ",
                 options_.global_batch, "; the world must divide the batch");
  const std::int64_t part = options_.global_batch / world;
  TESSERA_EXPECT(first >= 0 && first_row >= 0 && rows <= part && first_row <= part - rows,
                 "TokenLoader::batch: sample ", first, ", rows ", first_row, " to ",
                 first_row + rows, " are not in a rank's part of ", part, " rows");
  const std::int64_t begin = checked_add(first, rank * part + first_row);
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::int64_t sample =
        sample_at(checked_add(begin, row), samples_, options_.order, options_.seed);
    read_sample(sample * options_.seq_len, row, inputs, targets);
  }
}

void TokenLoader::heldout(std::int64_t first, std::span<std::int32_t> inputs,
                          std::span<std::int32_t> targets) const {
  const std::int64_t rows = rows_of(inputs, targets);
  TESSERA_EXPECT(first >= 0 && rows <= heldout_samples_ && first <= heldout_samples_ - rows,
                 "TokenLoader::heldout: samples ", first, " to ", first + rows,
                 " are not in the held-out ", heldout_samples_);
  for (std::int64_t row = 0; row < rows; ++row) {
    read_sample(heldout_begin_ + (first + row) * options_.seq_len, row, inputs, targets);
  }
}

}  // namespace tessera::data
