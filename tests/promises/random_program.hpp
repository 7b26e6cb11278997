// A random program of tools/programs: what its modules do, what its steps do, and what runs its
// ranks, drawn from a seed.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <optional>
#include <vector>

#include "tessera/shard/fully_shard.hpp"

namespace tessera::testing {

// A set of ranks, a bit each.
using Ranks = unsigned;
constexpr int kMostRanks = 4;
constexpr Ranks kAllRanks = (1U << kMostRanks) - 1;
constexpr bool has(Ranks ranks, int rank) { return ((ranks >> rank) & 1U) != 0; }

struct Statement {
  // h changes by this module's weight, by the outer one's, by this module's table, slice by slice,
  // or by a call, of a child or of a unit elsewhere in the tree; or a loss of it goes backward, or
  // of a child's call with a leaf made of h, which leaves what comes before to a later pass.
  enum Kind { own, outer, streamed, call, call_elsewhere, backward, backward_apart };
  Kind kind = own;
  int callee = 0;  // the number of the child; of the part, counted from the root
  bool recomputed = false, without_gradient = false;
  bool gets_input = false;   // recomputed with what this module was given as a second input
  bool selectively = false;  // recomputed between two products, which the ranks keep
  bool captures = false;     // recomputed with that second input captured instead
  bool retains = false;      // goes backward twice
  Ranks used = kAllRanks;    // the ranks that use the result
};

// How a unit gathers a parameter: see gathered_values.hpp.
enum class Gathered : std::uint8_t { plainly, in_two, in_e4m3 };

// What a program decides about a unit between calls of the model; see runtime_control.hpp.
struct Decision {
  enum Kind : std::uint8_t {
    unshard,
    reshard,
    reshard_after_forward,
    reshard_after_backward,
    unshard_in_backward,
    forward_prefetch,
    backward_prefetch,
    reductions_in_flight
  };
  Kind kind = unshard;
  int part = 0;  // the unit, counted from the root
  Reshard way = Reshard::automatic;
  int value = 0;            // how many; whether
  bool recurses = false;    // for units below, too, where such a decision can
  std::vector<int> list{};  // the units to prefetch
};

struct PartPlan {
  std::vector<PartPlan> children;
  std::vector<Statement> body;
  // Of the root: children that stay open, whose weights it reads behind their calls, and who does.
  std::vector<int> read_later;
  Ranks reads_later = kAllRanks;
  bool is_unit = false;
  bool is_listed = false;  // it is one unit together with the listed parts beside it
  // A forward hook changes what its calls give by its weight, where a rank has one that acts.
  bool has_hook = false;
  Ranks hooked = kAllRanks;
  bool is_added = false;                  // the weight, which backward then does not read
  Gathered gathered = Gathered::plainly;  // the weight
  bool is_ignored = false;                // the weight, by all units
  int block_rows = 0;                     // of the weight, where its shards are ragged
  bool deals_blocks = false;              // of the root: some are, so nothing keeps even parts
  // In the end a hook doubles what its reductions leave, of gradients that are divided by twice as
  // much.
  bool is_doubled = false;
  std::optional<StreamId> doubled_on{};  // without replicas
  DType output = f32;                    // of a unit's calls; a list has one
  // What its callers give it, beside others in a vector and an optional; a unit that casts sees
  // f32.
  DType input = f32;
  bool casts_inputs = false, gets_more = false;
  bool has_buffer = false;  // each call moves one, and adds it to what it is given
  Reshard reshard = Reshard::automatic;
  int prefetch = 1, in_flight = 1, ahead = 1;
  bool slices_wait = false;
  std::int64_t slice_bytes = 0;  // of the root counts
  std::int64_t piece_bytes = 1;
  // Without a throw of the dice for it: seeds stay what they were.
  std::int64_t packed_bytes() const { return piece_bytes % 2 == 0 ? 4096 : 0; }
  // The part's table, or the outer part's where one unit has both.
  struct Table {
    int rows = 7;
    bool is_frozen = false, is_outer = false, is_streamed = true, is_ignored = false;
    DType stored = f32;  // where it is frozen
    Gathered gathered = Gathered::plainly;
    int block_rows = 0;
    bool by_columns = false;  // sharded, where the ranks divide them
  };
  Table table;
};

struct Step {
  struct Forward {
    bool is_evaluation = false, is_dropped = false;
    unsigned skipped = 0;       // children of the root, a bit each, that it does not call
    Ranks in_loss = kAllRanks;  // the ranks whose loss it is in, if it is not dropped
    std::vector<Decision> before;
  };
  // A backward of the sum of some forwards; the ranks that leave it out skip it. Where the graph is
  // retained, more backwards of the same forwards follow.
  struct Backward {
    std::vector<int> forwards;
    Ranks runs = kAllRanks;
    bool retains = false;
    bool skips_model = false;  // who leaves it out skips all that the model has, not this loss
    // The ranks that keep what is not in their loss, and say so of each such forward in its turn.
    Ranks says = 0;
    // Parts, a bit each, whose gradients it does not reduce, or not over replicas. The last
    // backward of a step reduces all.
    unsigned unreduced = 0, in_replicas = 0;
  };
  std::vector<Forward> forwards;
  std::vector<Backward> backwards;
  bool ends_dropped = false;    // with one more forward, whose parts of backward come a step later
  std::vector<int> turned;      // parameters that are frozen or thawed behind backward, counted
  bool is_turned_late = false;  // behind the update
  bool keeps_gradients = false;
  bool steps_before = false;  // the optimizer, before the first forward
  int steps_more = 0;         // and behind the update, so often: without gradients, or once more
  // A first attempt fails, which all ranks reset.
  struct Failure {
    std::size_t forward = 0;  // before which it fails; behind the last: behind the backwards
    Ranks ranks = kAllRanks;  // those that throw; a rank that they do not hold hears of it
    bool on_device = false;   // from a body on compute; else from the host
    int exchanges = 0;        // of all ranks, between the attempts
  };
  std::optional<Failure> failure{};
  bool exchanges = false;  // the ranks, behind the forwards
};

// Which optimizer takes the steps.
enum class Rule : std::uint8_t { sgd, adamw, muon };

struct Program {
  int ranks = 2;                  // 1, 2 or 4,
  int replicas = 1;               // in so many replicas
  std::vector<int> mesh_ranks{};  // by hand, in this order; empty for the world's own
  ExecutorChoice executor{};      // what runs the ranks
  bool is_poisoned = false;       // freed memory is filled with NaN
  bool is_planned = false;        // the first step is planned before it runs
  bool scales_loss = false;       // where no gradients are kept, which have no scale any more
  Offload offload = Offload::none;
  Rule rule = Rule::sgd;
  unsigned matrices = 1;  // of Muon: tables, a bit each; the first is one
  bool is_in_bf16 = false, is_nesterov = true;
  std::int64_t turn_bytes = 32 << 20;
  double max_norm = 0;        // to which gradients are clipped; 0: not
  bool clips_by_sum = false;  // of magnitudes; else by the largest
  bool clips_in_optimizer = false;
  std::size_t doubled_from = 0;  // the step from which hooks double what is reduced
  // An attempt at a step that fails: on these ranks, at a part's call within the second run of a
  // recomputed function, counted from 1, if it comes so far.
  struct Failure {
    std::size_t step = 0;
    Ranks ranks = kAllRanks;
    int at = 0;
  };
  std::optional<Failure> fails{};
  PartPlan root;
  std::vector<Step> steps;
  std::uint64_t seed = 0;
};

Program make_program(std::uint64_t seed);
// What a failure prints.
void print(std::ostream& out, const Program& program);

}  // namespace tessera::testing
