// Who has which rows, in numbers that one can count by hand.
#include "tessera/param/shard_spec.hpp"

#include "tests/support/catch.hpp"

using namespace tessera;

TEST_CASE("chunks are those of FSDP2: the last ranks have less, or nothing", "[param]") {
  CHECK(ShardSpec{.shape = {10}, .world = 4, .rank = 3}.owned() == RowRange{9, 10});
  CHECK(ShardSpec{.shape = {3, 2}, .world = 4, .rank = 3}.owned() == RowRange{3, 3});
  CHECK(ShardSpec{.shape = {3, 2}, .world = 4}.chunk_numel() == 2);
  CHECK(ShardSpec{.shape = {17}, .world = 128, .rank = 16}.owned() == RowRange{16, 17});
  CHECK(ShardSpec{.shape = {17}, .world = 128, .rank = 17}.owned().size() == 0);
}

TEST_CASE("ragged ranks have whole blocks, and those left over from a rank on", "[param]") {
  const ShardSpec first{.shape = {10}, .world = 4, .block_rows = 2, .extra_from = 3};
  CHECK(first.owned() == RowRange{0, 2});
  CHECK(first.owned(3) == RowRange{6, 10});
}

TEST_CASE("along another dimension memory has that dimension outermost", "[param]") {
  const ShardSpec matrix{.shape = {2, 4}, .world = 2, .rank = 1, .dim = 1};
  CHECK(matrix.local_shape() == Shape{2, 2});
  const ShardSpec middle{.shape = {2, 4, 3}, .world = 2, .rank = 1, .dim = 1};
  CHECK(middle.strides({2, 4, 3}) == Shape{3, 6, 1});
  const ShardSpec last{.shape = {2, 4, 3}, .dim = 2};
  CHECK(last.strides({2, 4, 3}) == Shape{4, 1, 8});
}
