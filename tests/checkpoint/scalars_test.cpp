// The numbers and texts beside a checkpoint's tensors.
#include <cmath>
#include <cstdint>
#include <filesystem>

#include "tessera/checkpoint/checkpoint.hpp"
#include "tests/shard/support.hpp"
#include "tests/support/share.hpp"
#include "tests/support/temporary_folder.hpp"
#include "tests/support/text.hpp"

using namespace tessera;
using namespace tessera::testing;
using checkpoint::Checkpoint;

TEST_CASE("a save whose files no load would take is refused", "[checkpoint]") {
  if (GridShare::stride() > 10) {
    WARN("skipped: a run that takes a small share does not write 100 MB of text");
    return;
  }
  const TemporaryFolder folder;
  const std::string at = folder.path().string();
  const auto heard = on_ranks(2, [&](World& world) {
    StateDict state;
    state["a"] = Tensor::from(std::vector<float>{1, 2, 3}, {3}, world.device());
    const auto own = checkpoint::part("own", state, world);
    const checkpoint::Scalars text{{"long", std::string(64 << 20, 'x')}};
    state.clear();
    state[std::string(40'000'000, 'x')] =
        Tensor::from(std::vector<float>{1, 2, 3}, {3}, world.device());
    const auto name = checkpoint::part("own", state, world);
    return thrown_by<ContractError>([&] { checkpoint::save(at, 1, {own}, text, world); }) + '\n' +
           thrown_by<ContractError>([&] { checkpoint::save(at, 1, {name}, {}, world); });
  });
  CHECK(heard[0] == heard[1]);
  CHECK(has(heard[0], "checkpoint: a manifest of 67"));
  CHECK(has(heard[0], "\na safetensors file of 1 tensors would have a header of 1"));
  CHECK(std::filesystem::is_empty(at));
}

TEST_CASE("scalars come back to the bit, and what no file can hold is refused", "[checkpoint]") {
  const TemporaryFolder folder;
  const std::string at = folder.path().string();
  const checkpoint::Scalars scalars = {
      {"least", INT64_MIN},
      {"most", INT64_MAX},
      {"zero", std::int64_t{0}},
      {"negative zero", -0.0},
      {"tiny", 4.9e-324},
      {"huge", 1.7976931348623157e308},
      {"third", 1.0 / 3},
      {"whole", 3.0},
      {"yes", true},
      {"no", false},
      {"", "an empty name"},
      {"empty", ""},
      {std::string("a\0\n\x1b\"\\\xc3\xa9", 8), std::string("\0\r\x7f\"\\\xf0\x9f\x98\x80", 9)}};
  const auto heard = on_ranks(2, [&](World& world) {
    StateDict state;
    state["a"] = Tensor::from(std::vector<float>{1, 2, 3}, {3}, world.device());
    const auto own = checkpoint::part("own", state, world);
    checkpoint::save(at, 1, {own}, scalars, world);
    std::string said;
    for (const checkpoint::Scalars& bad :
         {checkpoint::Scalars{{"text", "\xff"}}, checkpoint::Scalars{{"\xff", 1.0}}})
      said += thrown_by<ContractError>([&] { checkpoint::save(at, 2, {own}, bad, world); }) + '\n';
    for (const char* const name : {"\xff", "a/b", "..", ".a", ""})
      said += thrown_by<ContractError>([&] {
                checkpoint::save(at, 2, {checkpoint::part(name, state, world)}, {}, world);
              }) +
              '\n';
    said += thrown_by<DataError>([&] { checkpoint::save("", 2, {own}, {}, world); });
    return said;
  });
  const checkpoint::Scalars found = Checkpoint(at, 1).scalars();
  CHECK(found == scalars);
  CHECK(std::signbit(std::get<double>(found.at("negative zero"))));
  CHECK(Checkpoint(at, 1).number("zero") == 0);
  CHECK(Checkpoint(at, 1).number("whole") == 3);
  CHECK_THROWS_WITH(Checkpoint(at, 1).number("yes"), Catch::Contains("'yes' is no number"));
  CHECK(heard[0] == heard[1]);
  CHECK(has(heard[0], "checkpoint: scalar 'text' is "));
  CHECK(has(heard[0], "checkpoint: the name of scalar "));
  CHECK(has(heard[0], "part 'a/b' is no plain file name"));
  CHECK(std::ranges::count(heard[0], '\n') == 7);
  CHECK(heard[0].ends_with("\na folder of checkpoints has no name; give it one"));
  CHECK(std::distance(std::filesystem::directory_iterator(at), {}) == 1);
}
