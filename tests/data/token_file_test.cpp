// Token files, the order of samples, and batches, against closed forms.
#include "tessera/data/token_file.hpp"

#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <numeric>
#include <random>
#include <set>
#include <vector>

#include "tessera/base/error.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/seed.hpp"
#include "tests/support/temporary_folder.hpp"
#include "tests/support/thrown.hpp"

using namespace tessera;
using namespace tessera::data;
using tessera::testing::TemporaryFolder;
using tessera::testing::thrown_by;

namespace {

// Little-endian, whatever this machine is.
std::string wide_tokens(const std::vector<int>& tokens) {
  std::string bytes;
  for (const int token : tokens) {
    bytes += static_cast<char>(token & 0xff);
    bytes += static_cast<char>(token >> 8);
  }
  return bytes;
}

// A file whose token i is i, so that every sample shows where it comes from.
TokenFile counting_file(const TemporaryFolder& folder, int tokens) {
  std::vector<int> values(static_cast<std::size_t>(tokens));
  std::iota(values.begin(), values.end(), 0);
  return TokenFile(folder.write("count.bin", wide_tokens(values)), 65536);
}

struct HostBatch {
  std::vector<std::int32_t> inputs, targets;
  explicit HostBatch(std::int64_t count)
      : inputs(static_cast<std::size_t>(count)), targets(static_cast<std::size_t>(count)) {}
};

}  // namespace

TEST_CASE("a file of bytes gives its bytes, a .bin file its 16-bit words") {
  const unsigned seed = testing::fresh_seed();
  INFO("seed " << seed);
  std::mt19937 random(seed);
  const TemporaryFolder folder;
  std::vector<int> expected(257);
  for (int& token : expected) token = static_cast<int>(random() & 0xffffu);

  const TokenFile wide(folder.write("a.bin", wide_tokens(expected)), 65536);
  REQUIRE(wide.size() == 257);
  std::vector<std::int32_t> tokens(257);
  wide.read(0, tokens);
  CHECK(std::equal(tokens.begin(), tokens.end(), expected.begin()));
  wide.read(256, std::span(tokens).first(1));
  CHECK(tokens[0] == expected[256]);

  const TokenFile bytes(folder.write("a.txt", wide_tokens(expected)), 256);
  REQUIRE(bytes.size() == 514);
  bytes.read(512, std::span(tokens).first(2));
  CHECK((tokens[0] | tokens[1] << 8) == expected[256]);
  CHECK_THROWS_AS(bytes.read(513, std::span(tokens).first(2)), ContractError);
  CHECK_THROWS_AS(bytes.read(-1, std::span(tokens).first(1)), ContractError);
}

TEST_CASE("a bad token file is named with its fault") {
  const TemporaryFolder folder;
  const auto fault = [](const std::string& path, std::int64_t vocab_size) {
    return thrown_by<DataError>([&] { const TokenFile file(path, vocab_size); });
  };
  const std::string missing = folder / "missing.txt";
  CHECK(fault(missing, 256) == concat("token file '", missing, "' does not exist; check the path"));
  CHECK(fault(folder.path().string(), 256).find("is a folder") != std::string::npos);
  CHECK(fault(folder.write("odd.bin", "abc"), 65536).find("has 3 bytes, an odd number") !=
        std::string::npos);
  CHECK(fault(folder.write("high.bin", wide_tokens({1, 999, 1000, 5})), 1000)
            .find("has id 1000 at position 2, beyond the vocabulary of 1000") != std::string::npos);
  CHECK(fault(folder.write("high.txt", "abz"), 'b' + 1).find("has id 122 at position 2") !=
        std::string::npos);
  CHECK(fault(folder.write("fits.bin", wide_tokens({1, 999})), 1000).empty());
  CHECK(fault("/dev/zero", 256).find("is not a regular file") != std::string::npos);

  const std::string pipe = folder / "pipe";
  REQUIRE(::mkfifo(pipe.c_str(), 0600) == 0);
  CHECK(fault(pipe, 256).find("is not a regular file") != std::string::npos);
}

TEST_CASE("a token file that changes while it is open is named with its fault") {
  const TemporaryFolder folder;
  const std::string path = folder.write("a.txt", std::string(100, 'a'));
  const TokenFile file(path, 'a' + 1);
  std::vector<std::int32_t> tokens(20);
  const auto read = [&](std::int64_t first) { file.read(first, tokens); };
  CHECK(thrown_by<DataError>([&] { read(80); }).empty());
  folder.write("a.txt", std::string(90, 'a') + std::string(10, 'b'));  // in place
  CHECK(thrown_by<DataError>([&] {
          read(75);
        }).find("has id 98 at position 90, beyond the vocabulary of") != std::string::npos);
  std::filesystem::resize_file(path, 95);
  CHECK(thrown_by<DataError>([&] { read(0); }).empty());
  CHECK_THROWS_AS(read(80), DeviceError);
}

TEST_CASE("a permutation visits every index once, and differs between seeds and epochs") {
  for (std::int64_t size = 1; size <= 300; ++size) {
    const Permutation permutation(size, 7, size % 5);
    std::vector<bool> seen(static_cast<std::size_t>(size));
    for (std::int64_t i = 0; i < size; ++i) seen[static_cast<std::size_t>(permutation[i])] = true;
    INFO("size " << size);
    CHECK(std::count(seen.begin(), seen.end(), true) == size);
  }
  const auto order = [](std::uint64_t seed, std::int64_t epoch) {
    const Permutation permutation(1000, seed, epoch);
    std::vector<std::int64_t> indices;
    for (std::int64_t i = 0; i < 1000; ++i) indices.push_back(permutation[i]);
    return indices;
  };
  std::set<std::vector<std::int64_t>> orders;
  for (std::uint64_t seed = 0; seed < 4; ++seed) {
    for (std::int64_t epoch = 0; epoch < 4; ++epoch) orders.insert(order(seed, epoch));
  }
  CHECK(orders.size() == 16);
  CHECK(order(3, 1) == order(3, 1));
}

TEST_CASE("a permutation of a huge set stays inside it") {
  const std::int64_t size = (std::int64_t{1} << 40) + 12345;
  const Permutation permutation(size, 1, 2);
  std::set<std::int64_t> seen;
  for (std::int64_t i = 0; i < 1000; ++i) seen.insert(permutation[size - 1 - i]);
  CHECK(seen.size() == 1000);
  CHECK(*seen.begin() >= 0);
  CHECK(*seen.rbegin() < size);
}

TEST_CASE("shuffling leaves no trace of the order") {
  // The first of 10 samples over 10,000 seeds: each count is binomial(10000, 0.1) with standard
  // deviation 30. Six of them (180) are exceeded by one honest count in 5e8; a permutation that
  // favours an index by a fifth is caught.
  std::vector<int> first(10), neighbours(10);
  for (std::uint64_t seed = 0; seed < 10000; ++seed) {
    const Permutation permutation(10, seed, 0);
    ++first[static_cast<std::size_t>(permutation[0])];
    ++neighbours[static_cast<std::size_t>((permutation[5] - permutation[4] + 10) % 10)];
  }
  for (const int count : first) CHECK(std::abs(count - 1000) < 180);
  // Differences 1..9 modulo 10 share 10,000 draws equally (mean 1111, deviation 31.4; six of them
  // are 189).
  CHECK(neighbours[0] == 0);
  for (std::size_t d = 1; d < 10; ++d) CHECK(std::abs(neighbours[d] - 1111) < 189);
}

TEST_CASE("sequential order takes samples modulo their number") {
  for (std::int64_t position = 0; position < 50; ++position) {
    CHECK(sample_at(position, 7, SampleOrder::sequential, 99) == position % 7);
  }
}

TEST_CASE("a sample is T inputs and the T targets one token later") {
  const TemporaryFolder folder;
  const std::int64_t length = 4, batch = 6;
  const TokenLoader loader(
      counting_file(folder, 42),
      {.seq_len = length, .global_batch = batch, .order = SampleOrder::sequential});
  REQUIRE(loader.samples() == 10);  // (42 - 1) / 4
  for (const int world : {1, 2, 3, 6}) {
    for (std::int64_t step = 0; step < 5; ++step) {
      for (int rank = 0; rank < world; ++rank) {
        const std::int64_t part = batch / world;
        HostBatch b(part * length);
        loader.batch(step, rank, world, 0, b.inputs, b.targets);
        for (std::int64_t i = 0; i < part * length; ++i) {
          const std::int64_t sample = (step * batch + rank * part + i / length) % 10;
          const std::int64_t token = sample * length + i % length;
          INFO("world " << world << " rank " << rank << " step " << step << " element " << i);
          CHECK(b.inputs[static_cast<std::size_t>(i)] == token);
          CHECK(b.targets[static_cast<std::size_t>(i)] == token + 1);
        }
      }
    }
  }
}

TEST_CASE("the samples of a step are the same for every world and every micro-batch") {
  const unsigned seed = testing::fresh_seed();
  INFO("seed " << seed);
  const TemporaryFolder folder;
  const std::int64_t length = 3, batch = 12;
  const TokenLoader loader(counting_file(folder, 500),
                           {.seq_len = length, .global_batch = batch, .seed = seed});
  for (std::int64_t step = 0; step < 40; ++step) {
    HostBatch whole(batch * length);
    loader.batch(step, 0, 1, 0, whole.inputs, whole.targets);
    for (const int world : {2, 3, 4, 12}) {
      for (const std::int64_t rows : {std::int64_t{1}, batch / world}) {
        HostBatch joined(0);
        for (int rank = 0; rank < world; ++rank) {
          for (std::int64_t row = 0; row < batch / world; row += rows) {
            HostBatch part(rows * length);
            loader.batch(step, rank, world, row, part.inputs, part.targets);
            joined.inputs.insert(joined.inputs.end(), part.inputs.begin(), part.inputs.end());
            joined.targets.insert(joined.targets.end(), part.targets.begin(), part.targets.end());
          }
        }
        CHECK(joined.inputs == whole.inputs);
        CHECK(joined.targets == whole.targets);
      }
    }
  }
}

TEST_CASE("a shuffled epoch shows each sample once, the next one in another order") {
  const TemporaryFolder folder;
  const TokenLoader loader(counting_file(folder, 61), {.seq_len = 3, .global_batch = 5, .seed = 4});
  REQUIRE(loader.samples() == 20);
  std::vector<std::vector<std::int32_t>> epochs(3);
  for (std::int64_t step = 0; step < 12; ++step) {  // 4 steps an epoch
    HostBatch b(15);
    loader.batch(step, 0, 1, 0, b.inputs, b.targets);
    for (std::size_t row = 0; row < 5; ++row) {
      epochs[static_cast<std::size_t>(step / 4)].push_back(b.inputs[row * 3] / 3);
    }
  }
  CHECK(epochs[0] != epochs[1]);
  CHECK(epochs[1] != epochs[2]);
  for (auto& epoch : epochs) {
    std::sort(epoch.begin(), epoch.end());
    for (std::int32_t i = 0; i < 20; ++i) CHECK(epoch[static_cast<std::size_t>(i)] == i);
  }
}

TEST_CASE("held-out tokens are the last fraction, and training never sees one") {
  const TemporaryFolder folder;
  const TokenLoader loader(counting_file(folder, 101),
                           {.seq_len = 5, .global_batch = 4, .heldout = 0.25});
  CHECK(loader.samples() == 15);           // 76 tokens: (76 - 1) / 5
  REQUIRE(loader.heldout_samples() == 4);  // floor(25.25) = 25 tokens: (25 - 1) / 5
  HostBatch held(20);
  loader.heldout(0, held.inputs, held.targets);
  for (std::size_t i = 0; i < 20; ++i) {
    CHECK(held.inputs[i] == 76 + static_cast<std::int32_t>(i));
    CHECK(held.targets[i] == 77 + static_cast<std::int32_t>(i));
  }
  CHECK_THROWS_AS(loader.heldout(1, held.inputs, held.targets), ContractError);
  HostBatch b(20);
  for (std::int64_t step = 0; step < 50; ++step) {
    loader.batch(step, 0, 1, 0, b.inputs, b.targets);
    CHECK(*std::max_element(b.targets.begin(), b.targets.end()) < 76);
  }
}

TEST_CASE("at most 64 held-out samples are looked at") {
  const TemporaryFolder folder;
  const TokenLoader loader(counting_file(folder, 2000), {.seq_len = 5, .heldout = 0.5});
  CHECK(loader.heldout_samples() == 64);
}

TEST_CASE("data too short for a sample says how long it is and what it needs") {
  const TemporaryFolder folder;
  const auto fault = [&](int tokens, std::int64_t length, double heldout) {
    return thrown_by<DataError>([&] {
      const TokenLoader loader(counting_file(folder, tokens),
                               {.seq_len = length, .heldout = heldout});
    });
  };
  CHECK(fault(9, 8, 0).empty());
  CHECK(fault(8, 8, 0).find("has 8 tokens, too short for one sample of training.seq_len + 1 = 9") !=
        std::string::npos);
  CHECK(fault(0, 8, 0).find("has 0 tokens,") != std::string::npos);
  CHECK(fault(10, 8, 0.5).find("has 5 tokens left to train on,") != std::string::npos);
  CHECK(fault(100, 8, 0.05).find("has 5 tokens held out,") != std::string::npos);
}

TEST_CASE("a batch that does not fit its rank is refused") {
  const TemporaryFolder folder;
  const TokenLoader loader(counting_file(folder, 100), {.seq_len = 4, .global_batch = 6});
  HostBatch b(8);
  CHECK_THROWS_AS(loader.batch(0, 0, 4, 0, b.inputs, b.targets),
                  ContractError);  // 4 does not divide 6
  CHECK_THROWS_AS(loader.batch(0, 3, 3, 0, b.inputs, b.targets), ContractError);
  CHECK_THROWS_AS(loader.batch(0, 0, 3, 1, b.inputs, b.targets), ContractError);  // rows 1..2 of 2
  CHECK_THROWS_AS(loader.batch(-1, 0, 3, 0, b.inputs, b.targets), ContractError);
  CHECK_THROWS_AS(loader.batch(0, 0, 3, 0, std::span(b.inputs).first(7), b.targets), ContractError);
  CHECK_NOTHROW(loader.batch(0, 2, 3, 0, b.inputs, b.targets));
}

TEST_CASE("ranks that share a look at a file find the first bad token between them") {
  const TemporaryFolder folder;
  constexpr std::int64_t kTokens = 3'000'000;  // 6 MB: several of the parts that are read at once
  for (const bool is_wide : {true, false})
    for (const std::int64_t place :
         {std::int64_t{0}, std::int64_t{1'999'999}, kTokens - 1, kTokens}) {
      const std::size_t width = is_wide ? 2 : 1;
      std::string bytes(static_cast<std::size_t>(kTokens) * width, '\x01');
      if (place < kTokens) bytes[static_cast<std::size_t>(place) * width + (width - 1)] = '\x7f';
      const std::string path = folder.write(is_wide ? "t.bin" : "t.txt", bytes);
      const std::int64_t vocabulary = is_wide ? 0x102 : 0x7f;
      const TokenFile file(path, vocabulary, Scan::later);
      INFO(path << ", position " << place);
      std::int64_t first = kTokens, seen = 0, calls = 0;
      for (std::int64_t rank = 0; rank < 3; ++rank) {
        const std::int64_t begin = kTokens * rank / 3, end = kTokens * (rank + 1) / 3;
        std::int64_t last = 0;
        const std::int64_t bad = file.find_bad(begin, end, [&](std::int64_t done) {
          CHECK(done > last);
          last = done, ++calls;
        });
        if (bad < end) first = std::min(first, bad);
        if (bad == end) seen += last;
      }
      CHECK(first == place);
      if (place == kTokens) {
        CHECK(seen == kTokens);
        CHECK(calls >= 3);
        CHECK_NOTHROW(TokenFile(path, vocabulary));
        continue;
      }
      const std::string says = "at position " + std::to_string(place) + ", beyond the vocabulary";
      CHECK(thrown_by<DataError>([&] { TokenFile(path, vocabulary); }).find(says) !=
            std::string::npos);
      std::int32_t id = 0;
      CHECK(thrown_by<DataError>([&] { file.read(place, {&id, 1}); }).find(says) !=
            std::string::npos);
    }
}
