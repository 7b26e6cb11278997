// What tessera-train prints about its options, all of it from the schema; see config.hpp.
#include <algorithm>
#include <string_view>

#include "tessera/base/error.hpp"
#include "tessera/detail/base/json.hpp"
#include "tessera/detail/base/utf8.hpp"
#include "tools/train/config.hpp"
#include "tools/train/schema.hpp"

namespace tessera::train {
namespace {

constexpr std::size_t kHelpColumn = 50;
constexpr std::size_t kScreenWidth = 80;

constexpr std::string_view kFirstHead =
    R"(Trains a language model, sharded over any number of ranks.

  tessera-train [FILE.toml] [--section.key=value ...] [flags]   later ones win
  tessera-train --dry-run ...     plan a run: units, memory, collectives, times
  tessera-train --where           what this machine and a launcher give a job
  mpirun -n N tessera-train ...   ranks as processes

)";

// What people use first.
constexpr std::string_view kFirst[] = {
    "data.path",    "model.dim", "model.n_layers", "training.steps", "training.global_batch_size",
    "optimizer.lr", "ranks",     "device",         "load",           "save"};

constexpr std::string_view kFirstTail =
    R"(--print-config prints the values in force as TOML.
Exit codes: 0 done; 2 bad input; 1 anything else; 128 + signal that ended it.
)";

constexpr std::string_view kHead =
    R"(Trains a language model, sharded over any number of ranks.

  tessera-train [FILE.toml] [--section.key=value ...] [flags]      later ones win
  mpirun -n N tessera-train ...                                    ranks as processes
  torchrun --no_python --nproc_per_node N tessera-train ...        the same on one machine, without MPI

Examples
  tessera-train --data.path=book.txt --training.steps=200 --sample "In the beginning"
  tessera-train --ranks 2 --data.path=book.txt --metrics.jsonl=out.jsonl --save=model.safetensors
  tessera-train --training.steps=0 --load=model.safetensors --sample "In the beginning"
  tessera-train --dry-run --ranks 512 --model.dim=4096 --model.n_layers=32 --model.n_heads=32
  tessera-train --print-config > run.toml
  tessera-train --help=training                                    the options of a section

Exit codes: 0 done; 2 bad input; 1 anything else; 128 + signal after SIGINT or SIGTERM. The first signal ends training after
the step; a second one, or one outside of training, ends the program at once. SIGUSR2 writes the flight record.
Errors are one line on stderr. Results go to stdout, in colour on a terminal, unless NO_COLOR is set or mpirun started the program.
)";

constexpr std::string_view kTail =
    R"(
A JSON line (metrics.jsonl) has step, loss (nats per token over the global batch, before the update), grad_norm (before
clipping), lr, tokens_per_second (whole world), mfu (from 0 to 1), exposed_comm_ms, host_ms, memory_peak_bytes,
memory_planned_bytes and memory_reserved_bytes (the largest rank's). null stands for what is not known.
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

bool is_plain_flag(const Key& key) { return key.section.empty() && key.type == ValueType::boolean; }

// "  --section.key=ARGUMENT", up to where its help begins.
std::string beginning_of(const Key& key, std::size_t column) {
  std::string line = concat("  --", key.full_name());
  if (!is_plain_flag(key)) line += concat(key.section.empty() ? " " : "=", argument_of(key));
  line.resize(std::max(line.size() + 2, column), ' ');
  return line;
}

// " [its default]"; empty where there is none.
std::string default_of(const Key& key) {
  const std::string standard =
      key.unset.empty() ? shown_value(key, key.get(Config{})) : std::string(key.unset);
  return is_plain_flag(key) || standard.empty() ? "" : concat(" [", standard, "]");
}

std::string help_line(const Key& key) {
  std::string line = concat(beginning_of(key, kHelpColumn), key.help);
  if (!key.only_if.empty()) line += concat("; only if ", key.only_if);
  return line + default_of(key) + "\n";
}

// The first clause of its help, and its default where there is room.
std::string first_line(const Key& key) {
  constexpr std::size_t kColumn = 34;
  const std::string_view clause = key.help.substr(0, key.help.find_first_of(";:("));
  std::string line =
      concat(beginning_of(key, kColumn), clause.substr(0, clause.find_last_not_of(' ') + 1));
  if (const std::string standard = default_of(key); line.size() + standard.size() <= kScreenWidth)
    line += standard;
  return line + "\n";
}

std::string first_help() {
  std::string out(kFirstHead);
  for (const std::string_view name : kFirst) out += first_line(*find_key(name));
  std::string line = "\n--help=all lists every option, --help=SECTION those of one: flags";
  for (const std::string_view section : sections()) {
    const std::size_t begin = line.rfind('\n') + 1;
    const bool fits = line.size() - begin + section.size() + 3 <= kScreenWidth;
    line += concat(fits ? ", " : ",\n", section);
  }
  return concat(out, line, ".\n", kFirstTail);
}

std::string section_help(std::string_view of) {
  std::string out;
  for (const Key& key : schema())
    if (key.section == (of == "flags" ? "" : of)) out += help_line(key);
  return concat(of, "\n", out);
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

std::string help_text(std::string_view of) {
  if (of.empty()) return first_help();
  if (of != "all") return section_help(of);
  std::string out = concat(kHead, "\n", section_help("flags"));
  for (const std::string_view section : sections()) out += concat("\n", section_help(section));
  return concat(out, kTail);
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
