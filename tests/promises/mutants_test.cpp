// The race checker has teeth: every edge of the engine is removed in turn, and each time it says
// so.
//
// The program is a training of three steps on one rank of a world, on the executor that runs no
// bodies: the host program, and with it what the checker sees, is that of a real run. Edges of the
// first two steps are removed, so that what relies on them comes later. A mutant is
//
//   flagged     the checker reports a race
//   refused     a collective is not submitted, with an error that names the missing wait
//   healed      it reports none, because a gate has waited instead: that wait is named
//   redundant   it reports none, because other edges lead from the operation before the edge to
//               the first one behind it that touches the same bytes: that path is named. Or no
//               bytes are touched on both sides: a new gradient on the host may lie where one lay
//               before, for which its first writer waits; the very first one lies nowhere
//   no edge     a record or the event of a free that nobody waits for: not counted as a mutant
//
// The host sleeps nowhere in these steps: what it has slept for is no edge any more. Two further
// programs let it sleep after each step, and lose only that: it reads the norm; or it reads
// nothing, and the next batch goes into staging that is used again.
//
// What is healed follows from the run itself: the mutated program runs to its end, with its clocks,
// its gates and its waits.
#include <cstdio>
#include <map>

#include "runtime/device/testing.hpp"
#include "tests/promises/edges.hpp"
#include "tests/promises/support.hpp"
#include "tests/support/share.hpp"

using namespace tessera;
using namespace tessera::testing;

namespace {

using Kind = TraceEntry::Kind;
constexpr std::uint64_t kSeed = 7;  // of values that nobody computes

struct Run {
  std::uint64_t races = 0, edges = 0;
  std::string first_race, refusal;
  std::vector<TraceEntry> entries;
};

enum class Host { runs_ahead, reads, sleeps };  // after each step
struct Program {
  Mutation::Kind kind;
  const char* what;
  Host host = Host::runs_ahead;
};

Run run(const Cell& cell, int rank, int ranks, const Program& program, std::uint64_t at) {
  Run run;
  const auto checker = RaceChecker::make();
  ExecutorTrace trace;
  {
    const World world = World::emulated(
        rank, ranks, {.executor = ExecutorKind::virtual_, .threads = 1, .race_checker = checker});
    DeviceContext& context = world.device().context();
    Trainee trainee(world, cell, kSeed);
    context.add_observer(trace);
    const bool all = program.host == Host::runs_ahead;
    if (all) Mutator::install(context, {program.kind, at});
    try {
      for (std::uint64_t step = 0; step < 3; ++step) {
        const Trainee::Scalars scalars = trainee.step(static_cast<int>(step));
        if (!all) Mutator::install(context, {program.kind, at == step + 1 ? 1U : 0U});
        if (program.host == Host::reads) scalars.norm.item(0.0);
        if (program.host == Host::sleeps) context.block(context.record(StreamId::compute));
        if (step == 1 || (step == 0 && !all)) run.edges += Mutator::edges_seen(context);
      }
    } catch (const ContractError& error) {
      run.refusal = error.what();
    }
    context.remove_observer(trace);
  }
  run.races = checker->race_count();
  if (run.races > 0) run.first_race = checker->races()[0].to_string();
  run.entries = std::move(trace.entries);
  return run;
}

// What a stream or the host waited for, and at which gate. Equal for equal orders.
struct Wait {
  std::size_t at;  // in the entries
  std::string text, gate;
};
std::vector<Wait> waits_of(const std::vector<TraceEntry>& entries) {
  std::vector<Wait> waits;
  std::string gate;
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const TraceEntry& e = entries[i];
    if (e.kind == Kind::memory && e.memory == MemoryEvent::Kind::claimed) gate = e.name;
    if (e.kind == Kind::memory && e.memory == MemoryEvent::Kind::handed_out) gate.clear();
    if (e.kind != Kind::wait && e.kind != Kind::block) continue;
    std::string text = concat(e.kind == Kind::block ? "the host" : name(e.stream), " waits for ",
                              name(e.event.stream), "@", e.event.tick, ", after");
    for (const Tick tick : e.event.clock.ticks) text += concat(' ', tick);
    waits.push_back({i, std::move(text), gate});
  }
  return waits;
}

// The first wait that only one of the two runs made.
std::size_t first_difference(const std::vector<Wait>& a, const std::vector<Wait>& b) {
  std::size_t i = 0;
  while (i < a.size() && i < b.size() && a[i].text == b[i].text) ++i;
  return i;
}

// A wait at a gate that the run without mutation did not make.
const Wait* new_gate(const std::vector<Wait>& before, const std::vector<Wait>& after) {
  for (const Wait& wait : after)
    if (!wait.gate.empty() && std::none_of(before.begin(), before.end(),
                                           [&](const Wait& w) { return w.text == wait.text; }))
      return &wait;
  return nullptr;
}

struct Tally {
  int flagged = 0, refused = 0, healed = 0, redundant = 0, no_edge = 0;
  std::map<std::string, int> explanations;
  int mutants() const { return flagged + refused + healed + redundant; }
};

void judge(const Run& base, const Run& mutant, const Program& program, std::uint64_t at,
           Tally& tally) {
  if (mutant.races > 0) {
    ++tally.flagged;
    return;
  }
  if (!mutant.refusal.empty()) {
    CHECK_THAT(mutant.refusal, Catch::Matchers::Contains("make it wait: stream.wait("));
    ++tally.refused;
    return;
  }
  const auto before = waits_of(base.entries), after = waits_of(mutant.entries);
  std::size_t i = first_difference(before, after);
  if (program.host == Host::runs_ahead &&
      (program.kind == Mutation::Kind::forget_wait || program.kind == Mutation::Kind::drop_wait)) {
    i = at - 1;
  } else if (i == before.size() && i == after.size()) {
    ++tally.no_edge;
    return;
  }
  REQUIRE(i < before.size());
  if (const Wait* gate = new_gate(before, after)) {
    ++tally.healed;
    ++tally.explanations[concat("healed by the gate of '", gate->gate, "': ", gate->text)];
    return;
  }
  const auto way = implied(base.entries, before[i].at, mutant.entries);
  INFO("nothing is reported without: " << before[i].text << " " << before[i].gate);
  CHECK(way);
  ++tally.redundant;
  if (way) ++tally.explanations[concat("redundant: ", *way)];
}

}  // namespace

TEST_CASE("each edge of the engine that is removed is missed by the race checker",
          "[promises][mutants]") {
  constexpr Program kPrograms[] = {
      {Mutation::Kind::forget_wait, "forgotten waits"},
      {Mutation::Kind::drop_wait, "dropped waits"},
      {Mutation::Kind::forget_wait, "forgotten waits of a host that reads", Host::reads},
      {Mutation::Kind::drop_wait, "dropped waits of a host that writes to staging", Host::sleeps},
      {Mutation::Kind::early_record, "early records"},
      {Mutation::Kind::early_free, "early frees"}};
  std::map<std::string, Tally> tallies;
  GridShare share;
  std::vector<Cell> all = all_cells();
  all.push_back({.orthogonalises = true});
  for (const Cell& cell : all)
    for (const int ranks : worlds_of(cell))
      for (const Program& program : kPrograms) {
        if (!share.takes()) continue;
        INFO(ranks << " ranks, " << cell << ", " << program.what);
        const Run base = run(cell, ranks - 1, ranks, program, 0);
        INFO(base.first_race);
        CHECK(base.races == 0);
        CHECK(base.refusal.empty());
        for (std::uint64_t at = first_place(base.edges); at <= base.edges; at += stride()) {
          INFO("number " << at);
          judge(base, run(cell, ranks - 1, ranks, program, at), program, at, tallies[program.what]);
        }
      }
  int mutants = 0, redundant = 0;
  for (const auto& [what, tally] : tallies) {
    std::printf("%s: %d flagged, %d refused, %d healed, %d redundant; %d are no edge\n",
                what.c_str(), tally.flagged, tally.refused, tally.healed, tally.redundant,
                tally.no_edge);
    for (const auto& [why, times] : tally.explanations)
      std::printf("  %3d x %s\n", times, why.c_str());
    CHECK((tally.flagged > 0 || GridShare::stride() > 1));
    mutants += tally.mutants();
    redundant += tally.redundant;
  }
  std::printf("mutants=%d redundant=%d\n", mutants, redundant);
  CHECK(mutants >= static_cast<int>(at_least(1000)));
  CHECK((20 * redundant <= mutants || stride() > 1));  // a share is one of all
}
