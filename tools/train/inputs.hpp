// Everything outside the program that a run touches, opened and checked before the first step, so
// that bad input ends the run before any work is done and before any file is changed.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "tessera/base/error.hpp"
#include "tessera/checkpoint/model.hpp"
#include "tessera/data/token_file.hpp"
#include "tools/train/config.hpp"
#include "tools/train/metrics.hpp"

namespace tessera::train {

struct Inputs {
  std::optional<data::TokenLoader> loader;      // where data.path is set
  std::optional<checkpoint::WeightFiles> load;  // where --load is
  std::optional<JsonlWriter> jsonl;             // where metrics.jsonl is, on the rank that writes
};

// Runs f and puts the option's name before its complaint.
template <class F>
auto named(std::string_view option, F&& f) {
  try {
    return f();
  } catch (const DataError& error) {
    throw detail::with_rank(DataError(concat(option, ": ", error.what()), error.where()),
                            error.rank());
  }
}

// Where a rank's flight record goes: its number before the extension of `path`.
std::string flight_record_path(const std::string& path, int rank);

// Opens what is read, without a look at the tokens (see agreement.hpp), then checks that what is
// written is none of it, nor two outputs one file, stdout and stderr among them; that --save,
// --trace and a comm.flight_record that was given can be written, and metrics.jsonl, whose first
// line truncates it. A --dry-run opens nothing, and checks --trace. `rank` is this process's first:
// of a job, 0 writes all but the flight records of others. One set serves all ranks of a process.
// Throws: DataError that begins with the option's name.
Inputs open_inputs(const Config& config, int world_size, int rank);

}  // namespace tessera::train
