// The folder of checkpoints: one program's at a time, with steps that are there whole or not at
// all.
#include <cmath>
#include <filesystem>
#include <new>

#include "tests/checkpoint/resumable.hpp"
#include "tests/support/temporary_folder.hpp"
#include "tests/support/text.hpp"

using namespace tessera;
using namespace tessera::testing;

TEST_CASE("a folder is one program's as long as it holds the lock", "[checkpoint]") {
  const TemporaryFolder folder;
  const std::string at = folder.path().string();
  for (int again = 0; again < 2; ++again) {
    const auto heard = on_ranks(2, [&](World& world) {
      const checkpoint::FolderLock lock(at, world);
      std::string text;
      try {
        const checkpoint::FolderLock second(at + "/.", world);
      } catch (const DataError& error) {
        text = error.what();
      }
      world.barrier();
      return text;
    });
    for (const std::string& text : heard) CHECK(has(text, "is in use by another run"));
  }
  CHECK(folder.entries() == 0);
}

TEST_CASE("a step that is there stays, and every rank hears of it", "[checkpoint]") {
  const TemporaryFolder folder;
  const std::string at = (folder.path() / "runs" / "a").string();
  const auto heard = on_ranks(3, [&](World& world) {
    Resumable saved = made({}, world, 5);
    save_at(at, 1, saved, world);
    return thrown_by<Error>([&] { save_at(at, 1, saved, world); });
  });
  CHECK(has(heard[0], "step-1' exists already and is kept; name another folder"));
  CHECK(heard[1] == heard[0]);
  CHECK(heard[2] == heard[0]);
  CHECK(files_below(at).size() == 7);
  CHECK(std::distance(std::filesystem::directory_iterator(at), {}) == 1);

  // What a killed program has left goes with the next save.
  std::filesystem::create_directories(at + "/.unfinished-step-2-00/model");
  on_ranks(2, [&](World& world) {
    Resumable saved = made({}, world, 5);
    save_at(at, 2, saved, world);
    return 0;
  });
  CHECK(std::distance(std::filesystem::directory_iterator(at), {}) == 2);
}

TEST_CASE("a save that fails on one rank is the same error on all, and leaves nothing",
          "[checkpoint]") {
  const TemporaryFolder folder;
  const std::string at = folder.path().string();
  const auto heard = on_ranks(3, [&](World& world) {
    Resumable saved = made({}, world, 5);
    auto parts = std::vector{checkpoint::part(*saved.model, world)};
    if (world.rank() == 1) parts[0].tensors.push_back(parts[0].tensors[0]);
    const std::string doubled =
        thrown_by<Error>([&] { checkpoint::save(at, 1, parts, {}, world); });
    parts = {checkpoint::part(*saved.model, world)};
    saved.model->parameters()[0].edit([&](const Tensor& rows) {
      if (world.rank() == 2) raw::fill(rows, std::nan(""));
    });
    checkpoint::Part huge{.name = "huge"};
    if (world.rank() == 1) huge.refresh = [](checkpoint::Part&) { throw std::bad_alloc(); };
    return doubled + '\n' + thrown_by<Error>([&] {
             checkpoint::save(at, 1, parts, {}, world, {.must_be_finite = true});
           }) +
           '\n' + thrown_by<Error>([&] { checkpoint::save(at, 1, {huge}, {}, world); }) + '\n' +
           thrown_by<Error>([&] { checkpoint::save(at, 1, {}, {{"loss", std::nan("")}}, world); });
  });
  for (const std::string& said : heard) {
    CHECK(has(said,
              "checkpoint::save: two tensors of a part are called 'model.embed_tokens.weight'"));
    CHECK(has(said, "checkpoint::save: 'model.embed_tokens.weight' is not finite"));
    CHECK(has(said, "\ncheckpoint: this rank has no memory of the host left\n"));
    CHECK(has(said, "scalar 'loss' is nan"));
  }
  CHECK(files_below(at).empty());
  CHECK(std::filesystem::is_empty(at));
}

TEST_CASE("a folder of checkpoints may be a symbolic link", "[checkpoint]") {
  const TemporaryFolder folder;
  std::filesystem::create_directory(folder / "real");
  std::filesystem::create_directory_symlink("real", folder / "link");
  on_ranks(2, [&](World& world) {
    Resumable saved = made({}, world, 5);
    save_at(folder / "link", 1, saved, world);
    save_at(folder / "link/", 2, saved, world);
    if (world.rank() == 0) checkpoint::keep_newest(folder / "link", 1);
    return 0;
  });
  CHECK(checkpoint::steps_in(folder / "real") == std::vector<std::int64_t>{2});
  CHECK(load_complaint(folder / "link", 2).empty());
}
