// What tessera-train prints about its options, all of it from the schema; see config.hpp.
#include <algorithm>
#include <string_view>

#include "tessera/base/error.hpp"
#include "tessera/base/json.hpp"
#include "tessera/base/utf8.hpp"
#include "tools/train/config.hpp"
#include "tools/train/schema.hpp"

namespace tessera::train {
namespace {

constexpr std::size_t kHelpColumn = 50;

constexpr std::string_view kHead =
    R"(Trains a language model, sharded over any number of ranks.

  tessera-train [FILE.toml] [--section.key=value ...] [flags]      what comes later wins
  mpirun -n N tessera-train ...                                    ranks as processes

Examples
  tessera-train --data.path=book.txt --training.steps=200 --sample "In the beginning"
  tessera-train --ranks 2 --data.path=book.txt --metrics.jsonl=out.jsonl --save=model.safetensors
  tessera-train --training.steps=0 --load=model.safetensors --sample "In the beginning"
  tessera-train --dry-run --ranks 512 --model.dim=4096 --model.n_layers=32 --model.n_heads=32
  tessera-train --print-config > run.toml

Exit codes: 0 done; 2 bad input; 1 anything else; 128 + signal after SIGINT or SIGTERM, at the end of the step (at once
after a second one, and before and after training). SIGUSR2 writes the flight record. Errors are one line on stderr, results go to stdout,
in colour on a terminal unless NO_COLOR is set or mpirun, whose pipes look like one, has started it.
)";

constexpr std::string_view kTail =
    R"(
A JSON line (metrics.jsonl) has step, loss (nats per token over the global batch, before the update), grad_norm (before
clipping), lr, tokens_per_second (whole world), mfu (from 0 to 1), exposed_comm_ms, host_ms, memory_peak_bytes,
memory_planned_bytes and memory_reserved_bytes (the largest rank's); null is what cannot be known.
)";

std::string argument_of(const Key& key) {
  if (!key.argument.empty()) return std::string(key.argument);
  switch (key.type) {
    case ValueType::boolean:
      return "true|false";
    case ValueType::integer:
      return "N";
    case ValueType::real:
      return "X";
    case ValueType::text:
      return "TEXT";
    case ValueType::choice:
      break;
  }
  std::string all;
  for (const std::string_view choice : key.choices) all += concat(all.empty() ? "" : "|", choice);
  if (key.has_number()) all += "|N";
  return all;
}

std::string help_line(const Key& key) {
  const bool plain_flag = key.section.empty() && key.type == ValueType::boolean;
  std::string line = concat("  --", key.full_name());
  if (!plain_flag) line += concat(key.section.empty() ? " " : "=", argument_of(key));
  line.resize(std::max(line.size() + 2, kHelpColumn), ' ');
  line += key.help;
  if (!key.only_if.empty()) line += concat("; only if ", key.only_if);
  const std::string standard = shown_value(key, key.get(Config{}));
  if (!key.unset.empty())
    line += concat(" [", key.unset, "]");
  else if (!plain_flag && !standard.empty())
    line += concat(" [", standard, "]");
  return line + "\n";
}

// A basic string of TOML 1.0.
std::string toml_string(std::string_view text) {
  if (!is_utf8(text)) {
    throw DataError(concat("--print-config: '", printable(text),
                           "' is not UTF-8 and cannot stand in TOML; rename the file"));
  }
  return json::quote(text);
}

std::string toml_value(const Key& key, const Value& value) {
  const std::string shown = shown_value(key, value);
  if (key.type == ValueType::text || key.type == ValueType::choice) return toml_string(shown);
  // TOML tells reals from whole numbers by their look.
  const bool whole = shown.find_first_of(".e") == std::string::npos;
  return key.type == ValueType::real && whole ? shown + ".0" : shown;
}

}  // namespace

std::string help_text() {
  std::string out(kHead);
  std::string_view section = "none";
  for (const Key& key : schema()) {
    if (key.section != section)
      out += concat("\n", key.section.empty() ? "flags" : key.section, "\n");
    section = key.section;
    out += help_line(key);
  }
  return out + std::string(kTail);
}

std::string print_config(const Config& config) {
  std::string out;
  std::string_view section;
  for (const Key& key : schema()) {
    if (key.section.empty() || !applies(key, config)) continue;
    if (key.section != section) out += concat(out.empty() ? "" : "\n", "[", key.section, "]\n");
    section = key.section;
    const Value value = key.get(config);
    if (std::holds_alternative<std::monostate>(value)) {
      out += concat("# ", key.name, ": ", key.unset.empty() ? "not set" : key.unset, "\n");
    } else if (is_left_to_strategy(key.full_name(), config)) {
      out += concat("# ", key.name, ": what parallelism.strategy stands for\n");
    } else {
      out += concat(key.name, " = ", toml_value(key, value), "\n");
    }
  }
  return out;
}

}  // namespace tessera::train
