// Where rows and bytes lie: ShardSpec and UnitLayout against what they mean, spelled out.
#include <numeric>
#include <set>

#include "tessera/detail/shard/layout.hpp"
#include "tests/shard/support.hpp"

using namespace tessera;
using namespace tessera::testing;

namespace {

// torch.chunk along dimension 0, row by row: chunks of ceil(rows / world), the last ones shorter or
// empty.
std::vector<std::vector<std::int64_t>> chunked(std::int64_t rows, int world) {
  std::vector<std::vector<std::int64_t>> owners(static_cast<std::size_t>(world));
  std::int64_t chunk = 0;
  while (chunk * world < rows) ++chunk;
  for (std::int64_t row = 0; row < rows; ++row)
    owners[static_cast<std::size_t>(row / chunk)].push_back(row);
  return owners;
}

struct Division {
  std::int64_t rows;
  int world;
  std::vector<std::int64_t> sizes;  // of the first ranks; the others own nothing
};

}  // namespace

TEST_CASE("rows are cut as FSDP2 cuts them, uneven and empty shards included") {
  const Division table[] = {{5, 4, {2, 2, 1}},
                            {9, 8, {2, 2, 2, 2, 1}},
                            {6, 4, {2, 2, 2}},
                            {10, 4, {3, 3, 3, 1}},
                            {3, 4, {1, 1, 1}},
                            {1, 4, {1}},
                            {17, 128, std::vector<std::int64_t>(17, 1)},
                            {513, 128, [] {
                               std::vector<std::int64_t> sizes(102, 5);
                               sizes.push_back(3);
                               return sizes;
                             }()}};
  for (const Division& c : table) {
    INFO(c.rows << " rows over " << c.world << " ranks");
    CHECK(std::accumulate(c.sizes.begin(), c.sizes.end(), std::int64_t{0}) == c.rows);
    for (int rank = 0; rank < c.world; ++rank) {
      const ShardSpec spec{{c.rows, 7}, c.world, rank};
      const auto at = static_cast<std::size_t>(rank);
      CHECK(spec.owned().size() == (at < c.sizes.size() ? c.sizes[at] : 0));
      CHECK(spec.local_shape() == Shape{spec.owned().size(), 7});
      CHECK(spec.chunk_numel() == c.sizes[0] * 7);
    }
  }
}

TEST_CASE("every row of a random shape has one owner, and a chunk holds what is owned") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  std::mt19937_64 engine(seed);
  for (int trial = 0; trial < 200; ++trial) {
    const auto rows = static_cast<std::int64_t>(engine() % 70);
    const int world = 1 + static_cast<int>(engine() % 12);
    const auto columns = static_cast<std::int64_t>(engine() % 5);
    const Shape shape = trial % 3 == 0 ? Shape{rows} : Shape{rows, columns};
    INFO("shape " << shape << " over " << world);
    const auto owners = chunked(rows, world);
    for (int rank = 0; rank < world; ++rank) {
      const ShardSpec spec{shape, world, rank};
      std::vector<std::int64_t> owned;
      for (std::int64_t row = spec.owned().begin; row < spec.owned().end; ++row)
        owned.push_back(row);
      CHECK(owned == owners[static_cast<std::size_t>(rank)]);
      CHECK(spec.owned().begin == std::min(rank * spec.chunk_rows(), rows));
      CHECK(static_cast<std::int64_t>(owned.size()) <= spec.chunk_rows());
      CHECK(spec.padded_numel() >= shape.numel());
      // No rank could own a row less: padding is shorter than a row for each rank.
      CHECK(spec.padded_numel() - shape.numel() <
            world * std::max<std::int64_t>(spec.row_numel(), 1));
    }
  }
}

TEST_CASE("a scalar is one row of one element") {
  const ShardSpec first{{}, 3, 0}, last{{}, 3, 2};
  CHECK(first.rows() == 1);
  CHECK(first.chunk_numel() == 1);
  CHECK(first.padded_numel() == 3);
  CHECK(first.owned() == RowRange{0, 1});
  CHECK(last.owned() == RowRange{1, 1});
}

namespace {

std::vector<std::int64_t> gathered(const std::vector<ShardSpec>& specs, DType dtype) {
  std::vector<std::int64_t> bytes;
  for (const ShardSpec& spec : specs) bytes.push_back(shard::UnitLayout::bytes_of(spec, dtype));
  return bytes;
}

}  // namespace

TEST_CASE("a unit's layout places every byte once, at multiples of 256, on every rank alike") {
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  std::mt19937_64 engine(seed);
  const DType dtypes[][2] = {{f32, f32}, {bf16, f32}, {bf16, bf16}, {f16, f32}};
  for (int trial = 0; trial < 100; ++trial) {
    const int world = 1 + static_cast<int>(engine() % 9);
    const auto [param, reduce] = std::pair(dtypes[trial % 4][0], dtypes[trial % 4][1]);
    std::vector<ShardSpec> specs, other;
    std::vector<bool> trainable;
    const auto count = 1 + engine() % 100;  // more than the 64 of one word of arrivals too
    // The first ones have small chunks, of which some travel so in the gather.
    const auto few = world > 1 ? engine() % (count + 1) : 0;
    shard::SmallChunks small{.gathered = {}, .reduced = {}, .dtype = param};
    for (std::size_t i = 0; i < count; ++i) {
      const bool is_small = i < few;
      small.reduced.push_back(is_small);
      small.gathered.push_back(is_small && engine() % 4 != 0);
      const Shape shape{static_cast<std::int64_t>(is_small + engine() % 40),
                        static_cast<std::int64_t>(is_small + engine() % 40)};
      specs.push_back({shape, world, 0});
      other.push_back({shape, world, world - 1});
      trainable.push_back(engine() % 4 != 0);
    }
    const auto piece_bytes = static_cast<std::int64_t>(1 + engine() % 40'000);
    const auto layout = shard::UnitLayout::make(specs, trainable, gathered(specs, param), reduce,
                                                piece_bytes, small);
    const auto same = shard::UnitLayout::make(other, trainable, gathered(other, param), reduce,
                                              piece_bytes, small);
    CHECK(layout.gather_offset_bytes == same.gather_offset_bytes);
    CHECK(layout.gather_bytes == same.gather_bytes);
    CHECK(layout.gradient_buffer_bytes == same.gradient_buffer_bytes);

    std::int64_t gather_end = 0;
    std::vector<std::int64_t> gradients;  // of the trainable ones, bytes
    for (std::size_t i = 0; i < count; ++i) {
      const std::int64_t padded = specs[i].padded_numel();
      CHECK(layout.gather_offset_bytes[i] == gather_end);
      CHECK(gather_end % 256 == 0);
      gather_end += (padded * static_cast<std::int64_t>(size_bytes(param)) + 255) / 256 * 256;
      if (trainable[i])
        gradients.push_back((padded * static_cast<std::int64_t>(size_bytes(reduce)) + 255) / 256 *
                            256);
    }
    // Behind them what travels packed: of each rank the chunks, one behind the other.
    const auto check_packed = [&](const shard::PackedLayout& packed, std::int64_t& end,
                                  const std::vector<std::size_t>& of, std::int64_t aligned,
                                  DType dtype, std::int64_t unit_bytes) {
      std::vector<std::int64_t> at{0};
      for (const std::size_t i : of)
        at.push_back(at.back() + (specs[i].chunk_numel() + aligned - 1) / aligned * aligned);
      const std::int64_t bytes =
          (world * at.back() * static_cast<std::int64_t>(size_bytes(dtype)) + 255) / 256 * 256;
      REQUIRE(packed.is_empty() == (of.size() < 2 || 2 * bytes > unit_bytes));
      if (packed.is_empty()) return;
      REQUIRE(packed.entries.size() == of.size());
      CHECK(packed.numel == at.back());
      at.pop_back();
      CHECK(packed.at == at);
      CHECK(packed.offset_bytes == end);
      end += bytes;
    };
    std::vector<std::size_t> gathered_so, reduced_so;
    std::vector<std::size_t> trained;  // of the trainable ones, which parameter
    for (std::size_t i = 0; i < count; ++i) {
      if (small.gathered[i]) gathered_so.push_back(i);
      if (trainable[i]) trained.push_back(i);
    }
    check_packed(layout.packed, gather_end, gathered_so, 1, param, gather_end);
    if (!layout.packed.is_empty()) CHECK(layout.packed.entries == gathered_so);
    CHECK(layout.gather_bytes == gather_end);
    // Pieces cover the trainable parameters from the last on, each until it is large enough.
    std::int64_t all = 0;
    std::size_t left = gradients.size();
    for (const shard::PieceLayout& piece : layout.pieces) {
      REQUIRE(piece.end == left);
      REQUIRE(piece.first < piece.end);
      REQUIRE(piece.offset_bytes.size() == piece.end - piece.first);
      std::int64_t end = 0;
      for (std::size_t at = piece.first; at < piece.end; ++at) {
        CHECK(piece.offset_bytes[at - piece.first] == end);
        end += gradients[at];
      }
      CHECK((layout.pieces.size() == 1 || end >= piece_bytes));
      CHECK((piece.first == 0 || end - gradients[piece.first] < piece_bytes));
      reduced_so.clear();
      for (std::size_t at = piece.first; at < piece.end; ++at)
        if (small.reduced[trained[at]]) reduced_so.push_back(trained[at]);
      check_packed(piece.packed, end, reduced_so, 64, reduce,
                   std::accumulate(gradients.begin(), gradients.end(), std::int64_t{0}));
      // Behind the gradients: an arrival count per parameter, one copy for each rank.
      CHECK(piece.counts_offset_bytes == end);
      CHECK(piece.bytes >= end + world * static_cast<std::int64_t>((piece.end - piece.first) *
                                                                   size_bytes(reduce)));
      CHECK(piece.bytes % 256 == 0);
      all += piece.bytes;
      left = piece.first;
    }
    CHECK(left == 0);
    CHECK(layout.gradient_buffer_bytes == all);
  }
}

TEST_CASE("sizes that overflow are refused, not wrapped") {
  const std::int64_t huge = std::int64_t{1} << 40;
  for (const Shape& shape : {Shape{huge, huge}, Shape{huge, huge / 1024 / 256}}) {
    const std::vector<ShardSpec> specs{{shape, 2, 0}};
    CHECK_THROWS_AS(gathered(specs, f32), ContractError);
    CHECK_THROWS_AS(shard::UnitLayout::make(specs, {true}, {0}, f32, 1, {{false}, {false}}),
                    ContractError);
  }
}
