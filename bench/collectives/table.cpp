#include "bench/collectives/table.hpp"

#include <unistd.h>

#include <cstdarg>
#include <cstdio>

#include "tessera/base/error.hpp"

namespace tessera::collectives {
namespace {

const char* describe(const World& world, const Options& options) {
  switch (world.kind()) {
    case WorldKind::mpi:
      return options.world.transport == Transport::messages ? "processes, MPI's messages"
                                                            : "processes, MPI";
    case WorldKind::processes:
      return "processes, shared memory";
    case WorldKind::nccl:
      return "processes, NCCL";
    case WorldKind::emulated:
      return "emulated: one is real, no peers, no wire";
    default:
      return "threads";
  }
}

}  // namespace

std::string format(const char* text, ...) {
  char line[400];
  va_list arguments;
  va_start(arguments, text);
  std::vsnprintf(line, sizeof line, text, arguments);
  va_end(arguments);
  return line;
}

std::string head(const World& world, const Options& o) {
  const std::string step =
      o.step_factor > 1 ? concat(o.step_factor, "(factor)") : concat(o.step_bytes, "(bytes)");
  char host[256] = "?";
  ::gethostname(host, sizeof host - 1);
  return concat("# minBytes ", o.min_bytes, " maxBytes ", o.max_bytes, " step: ", step,
                " warmup iters: ", o.warmup, " iters: ", o.iters, " validation: ", o.checks,
                "\n#\n# ", world.size(), " ranks (", describe(world, o), ") in ", o.groups,
                o.groups == 1 ? " group" : " groups", ", rank 0 on host ", host, ", device ",
                world.device().kind() == DeviceKind::cpu ? "cpu" : "cuda", ", ", world.threads(),
                " threads a rank\n");
}

std::string columns() {
  constexpr const char* kUnits =
      "# %10s  %12s  %8s  %6s  %6s  %7s  %6s  %6s  %5s  %7s  %6s  %6s  %5s\n";
  return format(
             "# %10s  %12s  %8s  %6s  %6s           out-of-place                       in-place"
             "          \n",
             "", "", "", "", "") +
         format("# %10s  %12s  %8s  %6s  %6s  %7s  %6s  %6s %6s  %7s  %6s  %6s %6s\n", "size",
                "count", "type", "redop", "root", "time", "algbw", "busbw", "#wrong", "time",
                "algbw", "busbw", "#wrong") +
         format(kUnits, "(B)", "(elements)", "", "", "", "(us)", "(GB/s)", "(GB/s)", "", "(us)",
                "(GB/s)", "(GB/s)", "");
}

std::string begin(const Row& row) {
  return format("%12lld  %12lld  %8s  %6s  %6d", static_cast<long long>(row.bytes()),
                static_cast<long long>(row.count), nccl_name(row.dtype),
                row.reduces() ? name(row.reduction) : "none", row.root);
}

// As many digits behind the point as nccl-tests has.
std::string side(const std::optional<Figures>& figures) {
  if (!figures) return format("  %7s  %6s  %6s  %5s", "N/A", "N/A", "N/A", "N/A");
  const double us = figures->seconds * 1e6;
  const int digits = us >= 10000 ? 0 : us >= 100 ? 1 : 2;
  return format("  %7.*f  %6.2f  %6.2f  %5s", digits, us, figures->algbw, figures->busbw,
                figures->wrong ? concat(*figures->wrong).c_str() : "N/A");
}

std::string totals(std::int64_t wrong, double mean_busbw) {
  return concat("# Out of bounds values : ", wrong, wrong == 0 ? " OK\n" : " FAILED\n") +
         format("# Avg bus bandwidth    : %g\n#\n", mean_busbw);
}

}  // namespace tessera::collectives
