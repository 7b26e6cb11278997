// What a disk may hold after a loss of power in the midst of a save: each of these images loads the
// older checkpoint or the new one, and the new one once the save has returned. The images are made
// of the calls that a save makes; without some of them, or in another order, the same search finds
// images that do not load.
//
// The disk of this model keeps nothing that no fsync covers: bytes of a file until that file's, a
// name until its folder's, each for itself and in any order.
#include <sys/stat.h>

#include <algorithm>
#include <fstream>
#include <functional>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <utility>

#include "runtime/checkpoint/new_folder.hpp"
#include "tests/checkpoint/saved_steps.hpp"
#include "tests/checkpoint/system_calls.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/share.hpp"
#include "tests/support/temporary_folder.hpp"

using namespace tessera;
using namespace tessera::testing;
namespace fs = std::filesystem;

namespace {

constexpr int kWriters = 2;

// A file or folder of a disk, known by its number.
struct Node {
  bool is_folder = false;
  std::string bytes{};
  std::map<std::string, int> names{};
};
using Disk = std::vector<Node>;  // 0 is the root

// One step of a save, in terms of nodes.
struct Change {
  enum Kind { name, gone, moved, bytes, sync, returned } kind{};
  int of = 0;    // the node that it changes, whose fsync covers it
  int node = 0;  // that has the name
  bool is_folder = false;
  std::string from{}, to{};
  std::int64_t offset = 0;
  std::string text{};
};
using Changes = std::vector<Change>;

// What happens to a change that is not on the disk yet.
enum class Fate : std::uint8_t { kept, lost, zeroed, torn };

void apply(Disk& disk, const Change& change, Fate fate) {
  if (fate == Fate::lost) return;
  Node& of = disk[static_cast<std::size_t>(change.of)];
  switch (change.kind) {
    case Change::name:
      of.names[change.to] = change.node;
      break;
    case Change::gone:
      of.names.erase(change.from);
      break;
    case Change::moved:
      of.names.erase(change.from);
      of.names[change.to] = change.node;
      break;
    case Change::bytes: {
      std::string text = change.text;
      if (fate == Fate::torn) text.resize(text.size() / 2);
      if (fate == Fate::zeroed) text.assign(text.size(), '\0');
      const auto begin = static_cast<std::size_t>(change.offset);
      of.bytes.resize(std::max(of.bytes.size(), begin + text.size()), '\0');
      of.bytes.replace(begin, text.size(), text);
      break;
    }
    case Change::sync:
    case Change::returned:
      break;
  }
}

// A save as it was recorded: the disk before, and what was done to it.
struct SaveRecord {
  Disk before{{.is_folder = true}};
  int nodes = 1;
  std::map<std::string, int> live{};  // by path, at this point of the recording
  Changes changes{};

  void add_tree(const fs::path& path, int node) {
    live[path.string()] = node;
    for (const auto& entry : fs::directory_iterator(path)) {
      const int own = nodes++;
      before.push_back({.is_folder = entry.is_directory()});
      before[static_cast<std::size_t>(node)].names[entry.path().filename().string()] = own;
      if (entry.is_directory()) {
        add_tree(entry.path(), own);
      } else {
        live[entry.path().string()] = own;
        std::ifstream file(entry.path(), std::ios::binary);
        before[static_cast<std::size_t>(own)].bytes.assign(std::istreambuf_iterator<char>(file),
                                                           {});
      }
    }
  }
  int folder_of(const std::string& path) const {
    return live.at(fs::path(path).parent_path().string());
  }
  static std::string name_of(const std::string& path) { return fs::path(path).filename().string(); }

  void add(const SystemCall& call) {
    switch (call.kind) {
      case CallKind::create:
      case CallKind::mkdir:
        live[call.path] = nodes;
        changes.push_back({.kind = Change::name,
                           .of = folder_of(call.path),
                           .node = nodes++,
                           .is_folder = call.kind == CallKind::mkdir,
                           .to = name_of(call.path)});
        break;
      case CallKind::write:
        changes.push_back({.kind = Change::bytes,
                           .of = live.at(call.path),
                           .offset = call.offset,
                           .text = call.bytes});
        break;
      case CallKind::sync:
        changes.push_back({.kind = Change::sync, .of = live.at(call.path)});
        break;
      case CallKind::rename: {
        changes.push_back({.kind = Change::moved,
                           .of = folder_of(call.path),
                           .node = live.at(call.path),
                           .from = name_of(call.path),
                           .to = name_of(call.to)});
        std::map<std::string, int> moved;
        for (const auto& [path, node] : live)
          moved[path == call.path || path.starts_with(call.path + '/')
                    ? call.to + path.substr(call.path.size())
                    : path] = node;
        live = std::move(moved);
        break;
      }
      case CallKind::remove:
        changes.push_back(
            {.kind = Change::gone, .of = folder_of(call.path), .from = name_of(call.path)});
        live.erase(call.path);
        break;
      case CallKind::open:
      case CallKind::close:
      case CallKind::lock:
        break;
    }
  }

  Disk empty_nodes() const {
    Disk disk = before;
    disk.resize(static_cast<std::size_t>(nodes));
    for (const Change& change : changes)
      if (change.kind == Change::name)
        disk[static_cast<std::size_t>(change.node)].is_folder = change.is_folder;
    return disk;
  }
};

void save_watched(const std::string& folder, std::int64_t step) {
  run_local(kWriters, {.threads = 1}, [&](World& world) {
    CallWatch::set_rank(world.rank());
    save_step(folder, step, world);
  });
}

// Saves step 2 into root/`inner`; with an older step there, which is then taken away.
SaveRecord recorded(const TemporaryFolder& root, const std::string& inner, bool has_older) {
  const std::string folder = inner.empty() ? root.path().string() : root / inner;
  const auto save = [&](std::int64_t step) { save_watched(folder, step); };
  if (has_older) save(1);
  SaveRecord record;
  record.add_tree(root.path(), 0);
  const CallWatch watch(root.path().string());
  save(2);
  const std::size_t returned = watch.calls().size();
  CallWatch::set_rank(0);
  if (has_older) checkpoint::keep_newest(folder, 1);
  CallWatch::set_rank(-1);
  for (std::size_t i = 0; i < watch.calls().size(); ++i) {
    if (i == returned) record.changes.push_back({.kind = Change::returned});
    record.add(watch.calls()[i]);
  }
  if (returned == watch.calls().size()) record.changes.push_back({.kind = Change::returned});
  return record;
}

// Tries images of disks.
class Images {
 public:
  Images(const SaveRecord& record, std::string inner, bool has_older)
      : start_(record.empty_nodes()), inner_(std::move(inner)), has_older_(has_older) {}

  // What is wrong with the first image that does not load, of every prefix of the changes with
  // every loss of one or two; empty where all load.
  std::string first_torn(const Changes& changes) {
    for (std::size_t end = 0; end <= changes.size(); ++end) {
      const auto open = not_synced(changes, end);
      std::vector<std::pair<std::size_t, Fate>> losses;
      for (const std::size_t i : open) {
        losses.emplace_back(i, Fate::lost);
        if (changes[i].kind == Change::bytes) losses.emplace_back(i, Fate::zeroed);
      }
      std::map<std::size_t, Fate> fates;
      if (const std::string text = fault(changes, end, fates); !text.empty()) return text;
      for (std::size_t a = 0; a < losses.size(); ++a)
        for (std::size_t b = a; b < losses.size(); ++b) {
          fates = {losses[a], losses[b]};
          if (const std::string text = fault(changes, end, fates); !text.empty()) return text;
        }
    }
    return "";
  }
  // The same of images with any number of losses.
  std::string first_torn_of(std::size_t count, const Changes& changes, std::uint64_t seed) {
    std::mt19937_64 draw(seed);
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t end = draw() % (changes.size() + 1), one_in = 2 + draw() % 6;
      std::map<std::size_t, Fate> fates;
      for (const std::size_t at : not_synced(changes, end)) {
        if (draw() % one_in != 0) continue;
        fates[at] =
            changes[at].kind == Change::bytes ? static_cast<Fate>(1 + draw() % 3) : Fate::lost;
      }
      if (const std::string text = fault(changes, end, fates); !text.empty()) return text;
    }
    return "";
  }
  std::size_t tried() const { return tried_; }
  std::size_t unlike() const { return known_.size(); }

 private:
  static std::vector<std::size_t> not_synced(const Changes& changes, std::size_t end) {
    std::vector<std::size_t> open;
    std::set<int> synced;
    for (std::size_t i = end; i-- > 0;) {
      if (changes[i].kind == Change::sync)
        synced.insert(changes[i].of);
      else if (changes[i].kind != Change::returned && !synced.contains(changes[i].of))
        open.push_back(i);
    }
    return open;
  }

  std::string fault(const Changes& changes, std::size_t end,
                    const std::map<std::size_t, Fate>& fates) {
    ++tried_;
    Disk disk = start_;
    bool has_returned = false;
    for (std::size_t i = 0; i < end; ++i) {
      const auto fate = fates.find(i);
      apply(disk, changes[i], fate == fates.end() ? Fate::kept : fate->second);
      has_returned = has_returned || changes[i].kind == Change::returned;
    }
    std::string key;
    describe(disk, 0, key);
    const auto [known, is_new] = known_.try_emplace(key);
    if (is_new) known->second = verdict(disk);
    const auto& [torn, newest] = known->second;
    std::string text = torn;
    if (text.empty() && has_returned && newest != 2) text = "the new one is lost";
    if (text.empty() && has_older_ && newest < 1) text = "none is there";
    return text.empty() ? text : concat("after ", end, " of ", changes.size(), " steps: ", text);
  }

  static void describe(const Disk& disk, int node, std::string& into) {
    const Node& own = disk[static_cast<std::size_t>(node)];
    into += concat(own.is_folder ? "{" : "[", own.bytes.size(), ' ');
    into += own.bytes;
    for (const auto& [name, under] : own.names) {
      into += name + ' ';
      describe(disk, under, into);
    }
    into += '}';
  }
  static void write(const Disk& disk, int node, const fs::path& path) {
    const Node& own = disk[static_cast<std::size_t>(node)];
    if (!own.is_folder) {
      std::ofstream(path, std::ios::binary) << own.bytes;
      return;
    }
    fs::create_directory(path);
    for (const auto& [name, under] : own.names) write(disk, under, path / name);
  }
  // What is wrong with what loads, and the newest step; -1 for none.
  std::pair<std::string, std::int64_t> verdict(const Disk& disk) const {
    const TemporaryFolder place;
    write(disk, 0, place.path() / "disk");
    const std::string folder = (place.path() / "disk" / inner_).string();
    const auto steps = checkpoint::steps_in(folder);
    return {complaint(folder), steps.empty() ? -1 : steps.back()};
  }

  Disk start_;
  std::string inner_;
  bool has_older_;
  std::map<std::string, std::pair<std::string, std::int64_t>> known_{};
  std::size_t tried_ = 0;
};

// The changes without some.
Changes without(Changes changes, const std::function<bool(const Change&)>& is_left_out) {
  std::erase_if(changes, is_left_out);
  return changes;
}
// With some of them, in their order, before all others from `at` on.
Changes with_first(const Changes& changes, std::size_t at,
                   const std::function<bool(const Change&)>& is_first) {
  Changes moved = changes;
  std::stable_partition(moved.begin() + static_cast<std::ptrdiff_t>(at), moved.end(), is_first);
  return moved;
}

}  // namespace

TEST_CASE("a loss of power at any point of a save leaves a checkpoint that loads") {
  const bool has_older = GENERATE(true, false);
  const std::string inner = has_older ? "" : "a/b";
  const TemporaryFolder root;
  const SaveRecord record = recorded(root, inner, has_older);
  Images images(record, inner, has_older);
  CHECK(images.first_torn(record.changes) == "");
  CHECK(images.tried() > 500);
  const std::uint64_t seed = fresh_seed();
  INFO("seed " << seed);
  CHECK(images.first_torn_of(10000 / GridShare::stride(), record.changes, seed) == "");
  CHECK(images.unlike() > 100);

  // Nor is any fsync one too many.
  std::size_t syncs = 0;
  for (std::size_t i = 0; i < record.changes.size(); ++i) {
    if (record.changes[i].kind != Change::sync) continue;
    ++syncs;
    Changes some = record.changes;
    some.erase(some.begin() + static_cast<std::ptrdiff_t>(i));
    INFO("without step " << i << ", of node " << record.changes[i].of);
    CHECK(images.first_torn(some) != "");
  }
  // 4 files, the folders of 2 parts, the manifest, its folder, and the one around that; then where
  // the older one loses its name, or a and b get theirs.
  CHECK(syncs == (has_older ? 10u : 11u));
}

TEST_CASE("a loss of power behind the save of a run that found a folder of a killed one") {
  // Whose names were made, and never written to the disk.
  const std::string made = GENERATE(as<std::string>{}, "a", "a/b");
  const TemporaryFolder root;
  SaveRecord record;
  record.add_tree(root.path(), 0);
  {
    const CallWatch watch(root.path().string());
    CallWatch::set_rank(0);
    for (const char* const name : {"a", "a/b"})
      if (std::string_view(name) <= made) REQUIRE(::mkdir((root / name).c_str(), 0777) == 0);
    // A program makes nothing below a name that is not on the disk.
    if (made == "a/b") checkpoint::sync_folder(root.path().string());
    CallWatch::set_rank(-1);
    save_watched(root / "a/b", 2);
    for (const SystemCall& call : watch.calls()) record.add(call);
  }
  record.changes.push_back({.kind = Change::returned});
  CHECK(Images(record, "a/b", false).first_torn(record.changes) == "");
}

TEST_CASE("what a save must not leave out is found by losses of power") {
  const TemporaryFolder root;
  const SaveRecord record = recorded(root, "", true);
  const Changes& all = record.changes;
  const Disk nodes = record.empty_nodes();
  Images images(record, "", true);
  const auto is_folder = [&](int node) { return nodes[static_cast<std::size_t>(node)].is_folder; };
  const auto at = [&](const auto& f) {
    return static_cast<std::size_t>(std::ranges::find_if(all, f) - all.begin());
  };
  const std::size_t manifest =
      at([](const Change& c) { return c.kind == Change::name && c.to == "manifest.json"; });
  const std::size_t commit =
      at([](const Change& c) { return c.kind == Change::moved && c.to == "step-2"; });
  const std::size_t file =
      at([&](const Change& c) { return c.kind == Change::name && !c.is_folder; });
  REQUIRE(file < manifest);
  REQUIRE(manifest < commit);
  REQUIRE(commit < all.size());

  // An fsync of files.
  CHECK(images.first_torn(without(all, [&](const Change& c) {
    return c.kind == Change::sync && !is_folder(c.of);
  })) != "");
  // An fsync of folders.
  CHECK(images.first_torn(without(all, [&](const Change& c) {
    return c.kind == Change::sync && is_folder(c.of);
  })) != "");
  // The manifest behind the files, and the name behind both.
  const int node = all[manifest].node;
  const auto is_manifest = [&](const Change& c) {
    return c.of == node || (c.kind == Change::name && c.node == node);
  };
  const auto is_commit = [&](const Change& c) {
    return c.kind == Change::moved && c.to == "step-2";
  };
  CHECK(images.first_torn(with_first(
            all, file, [&](const Change& c) { return is_manifest(c) || is_commit(c); })) != "");
  // The name alone, ahead of the manifest's fsync.
  CHECK(images.first_torn(with_first(
            all, at([&](const Change& c) { return c.kind == Change::sync && c.of == node; }),
            is_commit)) != "");
  // The older one until the new one is there.
  const int older = record.before[0].names.at("step-1");
  CHECK(images.first_torn(with_first(all, file, [&](const Change& c) {
    return c.kind == Change::gone || (c.kind == Change::moved && c.node == older);
  })) != "");
}
