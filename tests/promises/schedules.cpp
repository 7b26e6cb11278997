// Tries seeds of the `shuffled` executor on a tiny training, with freed memory poisoned, and holds
// losses, norms and all parameters against the bits of the same training in program order.
//
//   schedules --count 20000 [--first N]     seeds N.. over all configurations, in two processes
//   schedules --config always-2 --seed 7    one of them again: what a failure prints
//   ... --drop-wait 12                      rank 0 loses its 12th wait: must fail
//   schedules --config always-2 --drop-wait 12 --ask checker
//                                           ... what the race checker says of it, from one training
//                                           on threads in no particular order: fails when it
//                                           reports
//   schedules --config always-2 --drop-wait 12 --ask path
//                                           ... which edges that stay imply it: fails when none do
//
// `tools/schedules` calls it for CI and for the soak. A seed that fails is appended to the file of
// kept seeds, which is replayed first. Exit code 0: all bits equal.
#include <algorithm>
#include <chrono>
#include <fstream>
#include <iostream>
#include <map>
#include <set>
#include <sstream>

#include "tessera/base/error.hpp"
#include "tessera/base/philox.hpp"
#include "tessera/device/observe/race_checker.hpp"
#include "tests/promises/edges.hpp"
#include "tests/promises/seeds.hpp"
#include "tests/promises/tiny_step.hpp"
#include "tests/schedules/shuffled.hpp"

using namespace tessera;
using namespace tessera::testing;

namespace {

constexpr std::uint64_t kSeedsPerModel = 4096;  // seeds with the same initial values and data
constexpr int kMostFailures = 10;               // of a process, after which it stops

// The training in program order, once for each configuration and model, under the race checker: the
// order of the host's calls alone decides what that reports, and it is the same for every seed.
// Throws: ContractError for a race.
class References {
 public:
  const TinyRun& of(const TinyConfig& config, std::uint64_t data_seed) {
    Entry& entry = entries_[config.name];
    if (entry.run.bits.empty() || entry.data_seed != data_seed) {
      const auto checker = RaceChecker::make();
      TinyRun run =
          train(config, {.executor = ExecutorKind::inlined, .threads = 1, .race_checker = checker},
                data_seed);
      if (checker->race_count() > 0) throw ContractError(checker->races()[0].to_string());
      entry = {data_seed, std::move(run)};
    }
    return entry.run;
  }

 private:
  struct Entry {
    std::uint64_t data_seed = 0;
    TinyRun run;
  };
  std::map<std::string, Entry> entries_;
};

// What is wrong with a seed, empty for nothing. Every 64th runs twice, for the same trace.
std::string fault_of(const TinyConfig& config, std::uint64_t seed, const Mutation& mutation,
                     References& references, std::set<std::uint64_t>& traces) {
  const std::uint64_t data_seed = seed / kSeedsPerModel;
  std::uint64_t first = 0, second = 0;
  const auto options = [seed](std::uint64_t* trace) {
    return WorldOptions{.executor = shuffled(seed, trace), .threads = 1};
  };
  try {
    const TinyRun& expected = references.of(config, data_seed);
    const TinyRun got = train(config, options(&first), data_seed, mutation);
    traces.insert(fnv1a(config.name, first));
    if (std::string what = difference(expected, got); !what.empty()) return what;
    if (seed % 64 != 0) return "";
    train(config, options(&second), data_seed, mutation);
    return second == first ? "" : "a second run has another trace";
  } catch (const std::exception& error) {
    return error.what();
  }
}

// ---- What is asked

struct Case {
  const TinyConfig* config = nullptr;
  std::uint64_t seed = 0;
};

struct Request {
  std::string program;
  std::vector<Case> cases;  // given one by one; without any, `count` seeds from `first` on
  std::uint64_t first = 0, count = 0;
  const TinyConfig* config = nullptr;  // the only one, if any
  int jobs = 2;
  Mutation mutation;  // for the checks of these checks
  std::string keep;   // the file that failures are appended to
  std::string asks;   // the checker, or for a path; nobody

  std::uint64_t size() const { return cases.empty() ? count : cases.size(); }
  Case at(std::uint64_t i) const {
    if (!cases.empty()) return cases[i];
    return {config ? config : &kTinyConfigs[(first + i) % std::size(kTinyConfigs)], first + i};
  }
};

constexpr const char* kUsage =
    "usage: schedules [--config NAME] [--first N] --count N [--jobs N] [--keep FILE]\n"
    "       schedules --config NAME --seed N\n"
    "       schedules --config NAME [--drop-wait N] --ask checker\n"
    "       schedules --config NAME --drop-wait N --ask path\n"
    "       schedules --replay FILE\n";

[[noreturn]] void refuse(const std::string& what) { throw ContractError(what); }

const TinyConfig& config_named(const std::string& name) {
  std::string known;
  for (const TinyConfig& config : kTinyConfigs) {
    if (config.name == name) return config;
    known += concat(' ', config.name);
  }
  refuse(concat("there is no configuration '", name, "'; there are:", known));
}

std::uint64_t number(const std::string& text) {
  std::size_t end = 0;
  try {
    const std::uint64_t value = std::stoull(text, &end);
    if (end == text.size()) return value;
  } catch (const std::logic_error&) {
    end = 0;
  }
  refuse(concat("'", text, "' is no number"));
}

// Lines `configuration seed`, and comments.
std::vector<Case> kept_cases(const std::string& path) {
  std::ifstream file(path);
  if (!file) refuse(concat("cannot read ", path));
  std::vector<Case> cases;
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string name, seed;
    if (line.starts_with('#') || !(words >> name >> seed)) continue;
    cases.push_back({&config_named(name), number(seed)});
  }
  return cases;
}

Request parse(int argc, char** argv) {
  Request request;
  request.program = argv[0];
  std::string replay;
  for (int i = 1; i < argc; i += 2) {
    const std::string name = argv[i];
    if (i + 1 == argc) refuse(concat(name, " needs a value"));
    const std::string value = argv[i + 1];
    if (name == "--first") {
      request.first = number(value);
    } else if (name == "--count") {
      request.count = number(value);
    } else if (name == "--jobs") {
      request.jobs = static_cast<int>(number(value));
    } else if (name == "--drop-wait") {
      request.mutation = {.kind = Mutation::Kind::drop_wait, .at = number(value)};
    } else if (name == "--keep") {
      request.keep = value;
    } else if (name == "--config") {
      request.config = &config_named(value);
    } else if (name == "--seed") {
      request.first = number(value), request.count = 1;
    } else if (name == "--ask") {
      if (value != "checker" && value != "path")
        refuse(concat("nobody is named '", value, "'; ask the checker, or for a path"));
      request.asks = value, request.count = 1;
    } else if (name == "--replay") {
      replay = value;
    } else {
      refuse(concat("there is no option ", name));
    }
  }
  if (!replay.empty()) {
    request.cases = kept_cases(replay);
    request.count = 0;
  } else if (request.count == 0) {
    refuse("how many seeds?");
  }
  if (!request.asks.empty() && request.config == nullptr) refuse("which configuration?");
  if (request.asks == "path" && request.mutation.at == 0) refuse("the path around which wait?");
  request.jobs =
      std::clamp(request.jobs, 1,
                 static_cast<int>(std::clamp<std::uint64_t>(request.size(), 1, kMostProcesses)));
  return request;
}

// ---- The race checker

int ask_checker(const Request& request) {
  const auto checker = RaceChecker::make();
  train(*request.config, {.executor = ExecutorKind::inlined, .threads = 1, .race_checker = checker},
        0, request.mutation);
  for (const Race& race : checker->races()) std::cout << race.to_string() << '\n';
  std::cout << checker->summary() << '\n';
  return checker->race_count() == 0 ? 0 : 1;
}

// ---- The path

// What rank 0 asks for, in program order: of a run as the seeds have it, with poison.
std::vector<TraceEntry> trace_of(const TinyConfig& config, const Mutation& mutation) {
  ExecutorTrace trace;
  train(config, {.executor = shuffled(1), .threads = 1}, 0, mutation, &trace);
  return std::move(trace.entries);
}

int ask_path(const Request& request) {
  const auto base = trace_of(*request.config, {}),
             mutant = trace_of(*request.config, request.mutation);
  std::uint64_t waits = 0;
  std::size_t edge = 0;
  while (edge < base.size() &&
         (base[edge].kind != TraceEntry::Kind::wait || ++waits < request.mutation.at))
    ++edge;
  if (edge == base.size()) refuse(concat("there are ", waits, " waits only"));
  const TraceEntry& wait = base[edge];
  const auto way = implied(base, edge, mutant);
  std::cout << "wait " << request.mutation.at << ", of " << name(wait.stream) << " for "
            << name(wait.event.stream) << '@' << wait.event.tick << ": "
            << way.value_or("no other edges lead there") << '\n';
  return way ? 0 : 1;
}

void report(const Request& request, const Case& c, const std::string& what) {
  std::ostringstream text;
  text << "FAILED " << c.config->name << " seed " << c.seed << ": " << what
       << "\n  again: " << request.program << " --config " << c.config->name << " --seed "
       << c.seed;
  if (request.mutation.at > 0) text << " --drop-wait " << request.mutation.at;
  text << '\n';
  if (!request.keep.empty()) {
    std::ofstream(request.keep, std::ios::app) << c.config->name << ' ' << c.seed << '\n';
    text << "  kept in " << request.keep << '\n';
  }
  std::cout << text.str() << std::flush;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const Request request = parse(argc, argv);
    if (request.asks == "checker") return ask_checker(request);
    if (request.asks == "path") return ask_path(request);
    const auto start = std::chrono::steady_clock::now();
    References references;
    std::set<std::uint64_t> traces;
    const SeedBoard* const board = try_seeds(
        request.size(), request.jobs, request.mutation.at > 0 ? 1 : kMostFailures,
        [&](std::uint64_t i) {
          const Case c = request.at(i);
          return fault_of(*c.config, c.seed, request.mutation, references, traces);
        },
        [&](std::uint64_t i, const std::string& what) { report(request, request.at(i), what); },
        [&](SeedBoard& b) { b.seen += traces.size(); });
    if (!board) return 0;
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
    const std::uint64_t tried = std::min<std::uint64_t>(board->next, request.size());
    std::cout << "schedules: seeds=" << tried << " configurations=" << std::size(kTinyConfigs)
              << " traces=" << board->seen << " failures=" << board->failures;
    if (request.cases.empty()) std::cout << " first=" << request.first;
    std::cout << " seconds=" << taken.count() << '\n';
    return board->failures == 0 && tried == request.size() ? 0 : 1;
  } catch (const ContractError& error) {
    std::cerr << "schedules: " << error.what() << '\n' << kUsage;
    return 2;
  }
}
