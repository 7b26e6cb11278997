// tessera-checkpoint: looks into checkpoints. Every outcome is an exit code and at most one line on
// stderr, beside progress.
#include <charconv>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "runtime/device/cpu_check.hpp"
#include "tessera/base/error.hpp"
#include "tessera/base/log.hpp"
#include "tessera/detail/base/text.hpp"
#include "tessera/detail/base/utf8.hpp"
#include "tessera/run/run.hpp"
#include "tools/checkpoint/command.hpp"

namespace {

using namespace tessera;
using namespace tessera::checkpoint_tool;

constexpr const char* kHelp = R"(tessera-checkpoint: reads checkpoints and changes none.

usage
  tessera-checkpoint inspect STEP     print step, ranks, values, and the tensors of each part
  tessera-checkpoint verify STEP      read all bytes on all cores, and say which are not as saved
  tessera-checkpoint diff A B         list tensors and values whose bits differ, and by how much
  tessera-checkpoint export A DIR     write the weights whole: safetensors files and their index

STEP is the folder of a checkpoint, as checkpoint/step-100. A and B are checkpoints or weights:
a file, an index, or a folder as Hugging Face or PyTorch shards it. DIR is a new folder.

options
  --json                  print one JSON object on stdout, not text
  --dtype TYPE            for export: write floats of 32 and 16 bits as float32, bfloat16 or float16
  --max-shard-size SIZE   for export: most bytes of tensors in a file, as 500MB or 2GiB (5GB); a
                          larger tensor has a file of its own
  --help                  print this

A command that takes longer than two seconds prints its progress on stderr.

Exit codes: 0 done; 1 verify or diff found something, or the system refused; 2 bad input, in one
line on stderr.
)";

struct Verb {
  std::string_view name;
  std::size_t paths;
  Answer (*answer)(const Command&);
};
constexpr Verb kVerbs[] = {{"inspect", 1, inspect},
                           {"verify", 1, verify},
                           {"diff", 2, diff},
                           {"export", 2, export_weights}};

void report(const std::string& message) {
  std::fprintf(stderr, "tessera-checkpoint: %s\n", printable(message).c_str());
}

const Verb& verb_of(std::string_view name) {
  std::string all;
  for (const Verb& verb : kVerbs) {
    if (verb.name == name) return verb;
    all += concat(all.empty() ? "" : ", ", verb.name);
  }
  throw DataError(concat(shown(name), " is not a command; expected one of ", all, ", or --help"));
}

DType dtype_of_option(std::string_view value) {
  if (value == "float32") return f32;
  if (value == "bfloat16") return bf16;
  if (value == "float16") return f16;
  throw DataError(concat("--dtype=", shortened(value), ": expected float32, bfloat16 or float16"));
}

std::int64_t bytes_of_option(std::string_view value) {
  constexpr std::pair<std::string_view, std::int64_t> kUnits[] = {
      {"", 1},          {"B", 1},         {"KB", 1'000},   {"MB", 1'000'000}, {"GB", 1'000'000'000},
      {"KiB", 1 << 10}, {"MiB", 1 << 20}, {"GiB", 1 << 30}};
  std::int64_t count = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), count);
  if (error == std::errc() && count > 0)
    for (const auto& [unit, bytes] : kUnits)
      if (value.substr(static_cast<std::size_t>(end - value.data())) == unit &&
          count <= INT64_MAX / bytes)
        return count * bytes;
  throw DataError(
      concat("--max-shard-size=", shortened(value), ": expected bytes, as 500MB, 5GB or 2GiB"));
}

// Sets what an option of export says.  Returns whether `name` is one.
bool set_option(Command& command, std::string_view name, std::string_view value) {
  if (name == "--dtype")
    command.dtype = dtype_of_option(value);
  else if (name == "--max-shard-size")
    command.max_shard_bytes = bytes_of_option(value);
  else
    return false;
  return true;
}

Answer answer(const std::vector<std::string>& arguments) {
  for (const std::string& argument : arguments)
    if (argument == "--help" || argument == "-h") return {kHelp};
  const Verb* verb = nullptr;
  Command command;
  std::string of_export;  // an option that only export takes
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const std::string& argument = arguments[i];
    const std::string name = argument.substr(0, argument.find('='));
    if (argument == "--json") {
      command.json = true;
    } else if (argument.starts_with('-')) {
      const bool is_joined = name.size() < argument.size();
      const std::string value = is_joined                  ? argument.substr(name.size() + 1)
                                : i + 1 < arguments.size() ? arguments[i + 1]
                                                           : "";
      if (!set_option(command, name, value))
        throw DataError(concat("unknown option ", shown(argument), "; try --help"));
      of_export = name;
      if (!is_joined) ++i;
    } else if (!verb) {
      verb = &verb_of(argument);
    } else {
      command.paths.push_back(argument);
    }
  }
  if (!verb) throw DataError("no command is given; try --help");
  if (command.paths.size() != verb->paths)
    throw DataError(concat(verb->name, " takes ", verb->paths,
                           verb->paths == 1 ? " path, but got " : " paths, but got ",
                           command.paths.size(), "; try --help"));
  if (!of_export.empty() && verb->answer != export_weights)
    throw DataError(concat(verb->name, " takes no ", of_export, "; only export does"));
  return verb->answer(command);
}

}  // namespace

int main(int argc, char** argv) {
  if (const std::string missing = missing_cpu_feature(kernel_arch()); !missing.empty()) {
    report(concat("this processor lacks ", missing, ", which the kernels of this build need (",
                  kernel_arch(), "); configure with -Dkernel_arch= and build again"));
    return 1;
  }
  std::signal(SIGPIPE, SIG_IGN);  // a write that fails is reported
  set_log_sink([](LogLevel, const std::string& message) { report(message); });
  try {
    const Answer given = answer({argv + 1, argv + argc});
    if (std::fputs(given.text.c_str(), stdout) < 0 || std::fflush(stdout) != 0)
      throw DeviceError("writing to stdout failed");
    return given.exit_code;
  } catch (...) {
    report(describe_exception());
    return exit_code();
  }
}
