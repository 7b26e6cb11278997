// A checkpoint whose files and folders are links, pipes, devices or elsewhere.
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <functional>

#include "tests/checkpoint/saved_files.hpp"

using namespace tessera;
using namespace tessera::testing;

TEST_CASE("links and names that lead elsewhere are refused, or lead to what was saved") {
  struct Layout {
    const char* name;
    const char* said;  // empty: it is loaded
    std::function<void(const Saved&)> lay;
  };
  const auto instead = [](const fs::path& path, const fs::path& kept) {
    fs::rename(path, kept);
    fs::create_symlink(kept, path);
  };
  const auto pipe = [](const fs::path& path) { REQUIRE(::mkfifo(path.c_str(), 0600) == 0); };
  const auto socket = [](const fs::path& path) {
    // Of a short name: addresses have 108 bytes.
    const int made = ::socket(AF_UNIX, SOCK_STREAM, 0);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    const fs::path back = fs::current_path();
    fs::current_path(path.parent_path());
    path.filename().string().copy(address.sun_path, sizeof address.sun_path - 1);
    REQUIRE(::bind(made, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0);
    fs::current_path(back);
    ::close(made);
  };
  const Layout layouts[] = {
      {"as saved", "", [](const Saved&) {}},
      {"the step is a link", "",
       [&](const Saved& s) { instead(s.step(), s.root().path() / "kept"); }},
      {"the step is a loop", "cannot be looked into: Too many levels of symbolic links",
       [](const Saved& s) {
         fs::remove_all(s.step());
         fs::create_symlink("step-1", s.step());
       }},
      {"the step is a file", "is no folder",
       [](const Saved& s) {
         fs::remove_all(s.step());
         write_to(s.step(), "no folder");
       }},
      {"the step is empty", "has no manifest.json",
       [](const Saved& s) {
         fs::remove_all(s.step());
         fs::create_directory(s.step());
       }},
      {"no manifest", "has no manifest.json", [](const Saved& s) { fs::remove(s.manifest()); }},
      {"the manifest is a link", "has a manifest.json that is no file",
       [&](const Saved& s) { instead(s.manifest(), s.root().path() / "kept"); }},
      {"the manifest is a link beside", "has a manifest.json that is no file",
       [&](const Saved& s) { instead(s.manifest(), s.step() / "kept.json"); }},
      {"the manifest hangs", "has a manifest.json that is no file",
       [](const Saved& s) {
         fs::remove(s.manifest());
         fs::create_symlink("none", s.manifest());
       }},
      {"the manifest is a folder", "has a manifest.json that is no file",
       [](const Saved& s) {
         fs::remove(s.manifest());
         fs::create_directory(s.manifest());
       }},
      {"the manifest is a pipe", "has a manifest.json that is no file",
       [&](const Saved& s) {
         fs::remove(s.manifest());
         pipe(s.manifest());
       }},
      {"the manifest is a socket", "has a manifest.json that is no file",
       [&](const Saved& s) {
         fs::remove(s.manifest());
         socket(s.manifest());
       }},
      {"the manifest is a device", "has a manifest.json that is no file",
       [](const Saved& s) {
         fs::remove(s.manifest());
         fs::create_symlink("/dev/zero", s.manifest());
       }},
      {"the manifest has a second name", "",
       [](const Saved& s) { fs::create_hard_link(s.manifest(), s.root() / "second"); }},
      {"the manifest is empty", "has changed since it was written",
       [](const Saved& s) { write_to(s.manifest(), ""); }},
      {"the manifest is huge", "the most is 67108864",
       [](const Saved& s) { fs::resize_file(s.manifest(), std::uintmax_t{1} << 40); }},
      {"no part", "does not exist", [](const Saved& s) { fs::remove_all(s.step() / "model"); }},
      {"a part is a link", "symbolic link",
       [&](const Saved& s) { instead(s.step() / "model", s.root() / "kept"); }},
      {"a part is a link beside", "symbolic link",
       [&](const Saved& s) { instead(s.step() / "model", s.step() / "kept"); }},
      {"a part is a link to the other", "symbolic link",
       [](const Saved& s) {
         fs::remove_all(s.step() / "model");
         fs::create_symlink("optimizer", s.step() / "model");
       }},
      {"a part is a loop", "symbolic link",
       [](const Saved& s) {
         fs::remove_all(s.step() / "model");
         fs::create_symlink("model", s.step() / "model");
       }},
      {"a part is a file", "cannot be opened",
       [](const Saved& s) {
         fs::remove_all(s.step() / "model");
         write_to(s.step() / "model", "no folder");
       }},
      {"a part is a pipe", "cannot be opened",
       [&](const Saved& s) {
         fs::remove_all(s.step() / "model");
         pipe(s.step() / "model");
       }},
      {"a part that nobody names", "",
       [](const Saved& s) { fs::copy(s.step() / "model", s.step() / "more"); }},
      {"no file", "does not exist", [](const Saved& s) { fs::remove(s.shard(1)); }},
      {"a file is a link", "symbolic link",
       [&](const Saved& s) { instead(s.shard(1), s.root() / "kept"); }},
      {"a file is a link beside", "symbolic link",
       [&](const Saved& s) { instead(s.shard(1), s.step() / "model/kept"); }},
      {"a file is a link to another", "symbolic link",
       [](const Saved& s) {
         fs::remove(s.shard(1));
         fs::create_symlink(s.shard(0).filename(), s.shard(1));
       }},
      {"a file hangs", "symbolic link",
       [](const Saved& s) {
         fs::remove(s.shard(1));
         fs::create_symlink("none", s.shard(1));
       }},
      {"a file is a loop", "symbolic link",
       [](const Saved& s) {
         fs::remove(s.shard(1));
         fs::create_symlink(s.shard(1).filename(), s.shard(1));
       }},
      {"a file is a folder", "is a folder",
       [](const Saved& s) {
         fs::remove(s.shard(1));
         fs::create_directory(s.shard(1));
       }},
      {"a file is a pipe", "is not a regular file",
       [&](const Saved& s) {
         fs::remove(s.shard(1));
         pipe(s.shard(1));
       }},
      {"a file is a socket", "cannot be opened",
       [&](const Saved& s) {
         fs::remove(s.shard(1));
         socket(s.shard(1));
       }},
      {"a file has a second name", "",
       [](const Saved& s) { fs::create_hard_link(s.shard(1), s.root() / "second"); }},
      {"two files are one", "take another checkpoint",
       [](const Saved& s) {
         fs::remove(s.shard(1));
         fs::create_hard_link(s.shard(0), s.shard(1));
       }},
      {"a file too many", "has file 'more.safetensors'",
       [](const Saved& s) { write_to(s.step() / "model/more.safetensors", "no"); }},
      {"a link too many", "has file 'more.safetensors'",
       [](const Saved& s) { fs::create_symlink(s.shard(0), s.step() / "model/more.safetensors"); }},
      {"a folder too many", "has file 'more.safetensors'",
       [](const Saved& s) { fs::create_directory(s.step() / "model/more.safetensors"); }},
      {"a hidden one too many", "has file '.more.safetensors'",
       [](const Saved& s) { write_to(s.step() / "model/.more.safetensors", "no"); }},
      {"a name of another colour", "has file 'a?[31mb.safetensors'",
       [](const Saved& s) { write_to(s.step() / "model/a\x1b[31mb.safetensors", "no"); }},
      {"a name that is no text", ".safetensors'",
       [](const Saved& s) { write_to(s.step() / "model/\xff\xfe.safetensors", "no"); }},
      {"a name of two lines", "has file 'a?b.safetensors'",
       [](const Saved& s) { write_to(s.step() / "model/a\nb.safetensors", "no"); }},
      {"notes beside", "",
       [](const Saved& s) {
         write_to(s.step() / "model/README", "mine");
         write_to(s.step() / "notes.txt", "mine");
       }},
      {"other steps' names", "",
       [](const Saved& s) {
         for (const char* const name : {"step-01", "step--1", "step-", "step-1x", "Step-2",
                                        "step-99999999999999999999", ".unfinished-step-3-00"})
           fs::copy(s.step(), s.root().path() / name, fs::copy_options::recursive);
       }},
  };
  CHECK(std::size(layouts) >= 40);
  for (const Layout& layout : layouts) {
    INFO(layout.name);
    const Saved saved;
    layout.lay(saved);
    const std::string said = complaint(saved.folder(), 1);
    INFO(said);
    CHECK(said.empty() == (*layout.said == '\0'));
    CHECK(has(said, layout.said));
    if (!said.empty()) CHECK(is_one_line(said));
    for (const std::int64_t step : checkpoint::steps_in(saved.folder())) CHECK(step == 1);
  }
}
