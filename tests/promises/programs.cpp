// Random programs on several ranks against the same program on one, without units, under the race
// checker: trees of modules, units at random, some of them lists, hooks, calls whose results some
// ranks do not use, calls without gradients, recomputed calls, tables that several modules use
// slice by slice, several forwards, and backwards in any order that some ranks leave out, as a
// whole or one output of several, and that may retain their graphs, parameters that are frozen and
// thawed between steps, backwards that leave reductions to later ones, parameters that travel in
// another form, are stored in fewer bits or left alone by units, hooks of reductions, units told
// otherwise between forwards, inputs in vectors and optionals, inputs and outputs in 16 bits,
// buffers that calls move, losses inside of calls, some apart from what goes backward later,
// several roots, micro-batches that call different units, captured tensors, attempts that fail in
// the second run of a recomputed function, losses that are scaled, first steps that are planned,
// meshes with and without replicas, and by hand, clipping by the largest gradient or by their sum,
// and steps of SGD, of AdamW and of Muon with some tables as its matrices, also without gradients,
// collectives of the program's own, and steps that fail on some ranks, in the host or in a body,
// are reset and made again. Ranks and streams run in an order that the seed chooses, or as threads,
// or each rank in program order, some with freed memory poisoned.
//
//   programs --count 10000 [--first N]     seeds N.., in two processes
//   programs --seed 7                      one of them, and what it is: what a failure prints
//
// `tools/programs` calls it for CI and for the soak. Exit code 0: every program ran to its end on
// every rank, without a race, and left the bits of the parameters that one rank has.
//
// Bits can be asked for because sums of gradients are exact, in whatever order and parts the ranks
// make them: see Note [Exact sums] in exact_sums.hpp. So dtypes of compute and of reductions are
// not drawn: a sum in 16 bits is rounded.
#include <iostream>
#include <memory>

#include "tessera/device/observe/race_checker.hpp"
#include "tests/promises/run_program.hpp"
#include "tests/promises/seeds.hpp"

using namespace tessera;
using namespace tessera::testing;

namespace {

// Empty where all is well.
std::string complaint(Program program) {
  const auto checker = RaceChecker::make();
  Values expected, found;
  try {
    expected = on_one_rank(program);
    run_local(program.ranks, {.executor = program.executor, .threads = 1, .race_checker = checker},
              [&](World& world) {
                Values own = on_rank(program, world);
                if (world.rank() == 0) found = std::move(own);
              });
  } catch (const std::exception& error) {
    return error.what();
  }
  if (checker->race_count() > 0) return checker->races()[0].to_string();
  return difference(expected, found);
}

}  // namespace

int main(int count, char** arguments) {
  return tessera::testing::try_asked(
      "programs", {arguments, arguments + count},
      [](std::uint64_t seed) { print(std::cout, make_program(seed)); },
      [](std::uint64_t seed) { return complaint(make_program(seed)); });
}
