#include "tools/train/recompute_choices.hpp"

#include <cstdio>
#include <optional>

#include "tessera/base/error.hpp"
#include "tessera/detail/base/text.hpp"
#include "tools/train/memory_plan.hpp"

namespace tessera::train {
namespace {

using Choice = Config::ActivationCheckpoint;

std::string name_of(const Choice& choice) {
  if (choice.mode == RecomputeMode::none) return "none";
  return choice.mode == RecomputeMode::full ? "full"
                                            : concat("selective, ", choice.selective_ac_option);
}

std::string in_millions(double count) {
  char text[64];
  std::snprintf(text, sizeof text, "%.1f", 1e-6 * count);
  return with_commas(text);
}

}  // namespace

std::string compare_recompute(const Config& config, int ranks, const MemoryPlan& own) {
  const Choice& given = config.activation_checkpoint;
  const std::string blocks = given.selective_ac_option.ends_with("op")
                                 ? Choice().selective_ac_option
                                 : given.selective_ac_option;
  const Choice choices[] = {{RecomputeMode::none},
                            {RecomputeMode::selective, "every_op"},
                            {RecomputeMode::selective, "op"},
                            {RecomputeMode::selective, blocks},
                            {RecomputeMode::full}};
  char line[256];
  std::snprintf(line, sizeof line, "%-24s %17s %18s %9s %15s%s\n", "activation_checkpoint",
                "bytes at the peak", "MFLOP made again", "of a step", "MB moved again",
                config.flags.machine == MachineName::none ? "" : "  predicted step");
  std::string text = line;
  std::optional<MemoryPlan> none;
  for (const Choice& choice : choices) {
    const nn::Recompute recompute = choice.recompute();
    if (recompute.every > config.model.n_layers) continue;  // no block, as in `none`
    Config changed = config;
    changed.activation_checkpoint = choice;
    const bool is_own = recompute == given.recompute();
    const MemoryPlan plan = is_own ? own : plan_memory(changed, 0, ranks);
    if (!none) none = plan;
    std::snprintf(line, sizeof line, "  %-22s %17s %18s %7.1f %% %15s", name_of(choice).c_str(),
                  with_commas(std::to_string(plan.steps.back().peak_bytes)).c_str(),
                  in_millions(plan.flops - none->flops).c_str(),
                  100 * (plan.flops / none->flops - 1),
                  in_millions(plan.moved_bytes - none->moved_bytes).c_str());
    text += line;
    if (config.flags.machine != MachineName::none) {
      std::snprintf(line, sizeof line, " %12.2f ms", 1e3 * plan.price.seconds);
      text += line;
    }
    text += is_own ? "  (this run)\n" : "\n";
  }
  return text;
}

}  // namespace tessera::train
