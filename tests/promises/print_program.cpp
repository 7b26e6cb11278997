// What a failing program is, in words.
#include <ostream>
#include <string>

#include "tessera/base/error.hpp"
#include "tests/promises/random_program.hpp"

namespace tessera::testing {
namespace {

const char* name(Gathered how) {
  return how == Gathered::plainly  ? ""
         : how == Gathered::in_two ? " gathered in two"
                                   : " gathered in e4m3";
}

void print(std::ostream& out, const Decision& d) {
  static constexpr const char* kNames[] = {"unshard",
                                           "reshard",
                                           "reshard after forward",
                                           "reshard after backward",
                                           "unshard in backward",
                                           "forward prefetch",
                                           "backward prefetch",
                                           "reductions in flight"};
  out << " (" << kNames[d.kind] << " of w" << d.part;
  if (d.kind == Decision::reshard_after_forward) out << ": " << d.way;
  if (d.kind == Decision::forward_prefetch || d.kind == Decision::backward_prefetch) {
    out << ":";
    for (const int i : d.list) out << " w" << i;
  }
  if (d.kind == Decision::reshard_after_backward || d.kind == Decision::unshard_in_backward ||
      d.kind == Decision::reductions_in_flight)
    out << ": " << d.value;
  out << (d.recurses ? ", and below)" : ")");
}

std::string blocks(int rows) { return rows > 0 ? concat(" in blocks of ", rows) : ""; }

void print(std::ostream& out, const PartPlan& part, int depth) {
  out << std::string(static_cast<std::size_t>(2 * depth), ' ') << (part.is_listed ? "listed " : "")
      << (part.is_unit ? concat("unit, pieces of ", part.piece_bytes, " bytes, reshard ",
                                part.reshard, ", prefetch ", part.prefetch, ", in flight ",
                                part.in_flight, part.slices_wait ? ", slices wait" : "")
                       : "part")
      << ", "
      << (part.table.is_outer    ? "outer"
          : part.table.is_frozen ? "frozen"
                                 : "its own")
      << " table of " << part.table.rows << " " << name(part.table.stored)
      << (part.table.is_streamed ? "" : " as a whole") << name(part.table.gathered)
      << (part.table.is_ignored ? " ignored" : "") << blocks(part.table.block_rows)
      << (part.table.by_columns ? " by columns" : "") << ", weight"
      << (part.is_added ? " added" : "") << name(part.gathered)
      << (part.is_ignored ? " ignored" : "") << blocks(part.block_rows) << ":";
  for (const Statement& s : part.body) {
    if (s.kind == Statement::own) out << " own";
    if (s.kind == Statement::outer) out << " outer";
    if (s.kind == Statement::backward) out << " backward" << (s.retains ? " twice" : "");
    if (s.kind == Statement::backward_apart)
      out << " backward apart of " << s.callee << (s.retains ? " retained" : "");
    if (s.kind == Statement::streamed) out << " streamed used " << s.used;
    if (s.kind == Statement::call || s.kind == Statement::call_elsewhere)
      out << (s.kind == Statement::call ? " " : " w") << s.callee
          << (s.recomputed ? " recomputed" : "") << (s.selectively ? " selectively" : "")
          << (s.captures     ? " with captured"
              : s.gets_input ? " with input"
                             : "")
          << (s.without_gradient ? " no_grad" : "") << " used " << (s.used);
    out << ",";
  }
  if (part.output != f32) out << " gives " << name(part.output) << ",";
  if (part.input != f32) out << " is given " << name(part.input) << ",";
  out << (part.casts_inputs ? " casts," : "") << (part.gets_more ? " gets more," : "")
      << (part.has_buffer ? " buffer," : "");
  if (part.has_hook) out << " hook on " << part.hooked << ",";
  if (part.is_doubled)
    out << " doubled" << (part.doubled_on ? concat(" on ", name(*part.doubled_on)) : "") << ",";
  for (const int i : part.read_later)
    out << " weight of " << i << " read on " << part.reads_later << ",";
  out << "\n";
  for (const PartPlan& child : part.children) print(out, child, depth + 1);
}

}  // namespace

void print(std::ostream& out, const Program& program) {
  out << "seed " << program.seed << ", " << program.ranks << " ranks, " << program.replicas
      << " replicas, slices of " << program.root.slice_bytes << " bytes, forwards ahead "
      << program.root.ahead << ", " << name(program.executor)
      << (program.is_poisoned ? ", poisoned" : "") << (program.is_planned ? ", planned" : "")
      << (program.scales_loss ? ", loss scaled" : "")
      << (program.offload == Offload::cpu ? ", offloaded" : "") << ", doubled from step "
      << program.doubled_from << (program.rule == Rule::sgd ? ", SGD" : ", AdamW");
  if (program.rule == Rule::muon)
    out << " and Muon of " << program.matrices << (program.is_in_bf16 ? " in bf16" : "")
        << (program.is_nesterov ? " with" : " without") << " nesterov, turns of "
        << program.turn_bytes << " bytes";
  if (program.max_norm > 0)
    out << ", clipped to " << program.max_norm << (program.clips_by_sum ? " by their sum" : "")
        << (program.clips_in_optimizer ? " in the step" : "");
  if (!program.mesh_ranks.empty()) out << ", a mesh of ranks";
  for (const int rank : program.mesh_ranks) out << " " << rank;
  if (program.fails)
    out << ", step " << program.fails->step << " fails at call " << program.fails->at
        << " of second runs on " << program.fails->ranks;
  out << "\n";
  print(out, program.root, 0);
  for (const Step& step : program.steps) {
    out << "step:";
    for (const auto& f : step.forwards) {
      for (const Decision& d : f.before) print(out, d);
      out << (f.is_evaluation ? " evaluation"
              : f.is_dropped  ? " dropped"
                              : " forward")
          << " in " << (f.in_loss) << ",";
      if (f.skipped) out << " without children " << f.skipped << ",";
    }
    for (const auto& b : step.backwards) {
      out << " backward of";
      for (const int i : b.forwards) out << " " << i;
      out << " on " << (b.runs) << (b.retains ? ", retained," : ",")
          << (b.skips_model ? " else skips the model," : "");
      if (b.says) out << " parted on " << b.says << ",";
      if (b.unreduced || b.in_replicas)
        out << " unreduced in " << b.unreduced << ", in replicas in " << b.in_replicas << ",";
    }
    if (step.ends_dropped) out << " dropped,";
    for (const int i : step.turned)
      out << " parameter " << i << " turned" << (step.is_turned_late ? " late," : ",");
    if (step.keeps_gradients) out << " gradients kept,";
    if (step.steps_before) out << " a step before,";
    if (step.steps_more > 0) out << " steps more: " << step.steps_more << ",";
    if (step.exchanges) out << " exchanges,";
    if (const auto& f = step.failure)
      out << " fails at " << f->forward << " on " << f->ranks << (f->on_device ? " in a body" : "")
          << ", then exchanges: " << f->exchanges;
    out << "\n";
  }
}

}  // namespace tessera::testing
