#include "bench/collectives/options.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <functional>
#include <string_view>
#include <utility>

#include "tessera/base/error.hpp"
#include "tessera/run/run.hpp"

namespace tessera::collectives {
namespace {

constexpr Operation kOperations[] = {
    {"all_gather", CollectiveKind::all_gather}, {"reduce_scatter", CollectiveKind::reduce_scatter},
    {"all_reduce", CollectiveKind::all_reduce}, {"broadcast", CollectiveKind::broadcast},
    {"reduce", CollectiveKind::reduce},         {"alltoall", CollectiveKind::all_to_all},
    {"sendrecv", CollectiveKind::send_recv}};
constexpr std::pair<const char*, DType> kDTypes[] = {{"float", f32},     {"half", f16},
                                                     {"bfloat16", bf16}, {"double", f64},
                                                     {"int32", i32},     {"int64", i64}};
constexpr std::pair<const char*, ReduceOp> kReductions[] = {{"sum", ReduceOp::sum},
                                                            {"max", ReduceOp::max}};

constexpr std::int64_t kMostBytes = std::int64_t{1} << 40;
constexpr int kMostCount = 1 << 20, kMostRanks = 4096;

struct Value {
  const std::string& option;  // as it was written
  const std::string& text;

  [[noreturn]] void refuse(const std::string& expected) const {
    throw DataError(concat(option, " ", text, ": expected ", expected));
  }
};

std::int64_t parse_bytes(const Value& value) {
  const char *const begin = value.text.data(), *const end = begin + value.text.size();
  double number = 0;
  const auto [read, error] = std::from_chars(begin, end, number);
  const std::string_view unit(read, static_cast<std::size_t>(end - read));
  const double scale = unit.empty()                 ? 1
                       : unit == "K" || unit == "k" ? 0x1p10
                       : unit == "M" || unit == "m" ? 0x1p20
                       : unit == "G" || unit == "g" ? 0x1p30
                                                    : 0;
  const double bytes = number * scale;
  if (error != std::errc() || !(bytes >= 1) || bytes > static_cast<double>(kMostBytes))
    value.refuse("bytes from 1 to 1024G, such as 8, 64K or 128M");
  return std::llround(bytes);
}

int parse_count(const Value& value, int least, int most) {
  const char *const begin = value.text.data(), *const end = begin + value.text.size();
  int number = 0;
  const auto [read, error] = std::from_chars(begin, end, number);
  if (error != std::errc() || read != end || number < least || number > most)
    value.refuse(concat("a whole number from ", least, " to ", most));
  return number;
}

// "all" is every one.
template <class T, std::size_t N>
std::vector<T> parse_names(const Value& value, const std::pair<const char*, T> (&table)[N]) {
  std::vector<T> found;
  std::string names;
  for (const auto& [name, means] : table) {
    if (value.text == name || value.text == "all") found.push_back(means);
    names += concat(name, ", ");
  }
  if (found.empty()) value.refuse(concat("one of ", names, "all"));
  return found;
}

struct Option {
  char letter;  // 0: none
  const char* name;
  const char* argument;  // null: a flag
  const char* help;
  std::function<void(Options&, const Value&)> take;
};

const std::vector<Option>& table() {
  static const std::vector<Option> rows = {
      {'t', "nthreads", "N", "ranks as threads of this process; without a launcher [1]",
       [](Options& o, const Value& v) {
         o.threads = o.threads.value_or(1) * parse_count(v, 1, kMostRanks);
       }},
      {'g', "ngpus", "N", "multiplies -t, as nccl-tests' GPUs of a thread do; a rank is a thread",
       [](Options& o, const Value& v) {
         o.threads = o.threads.value_or(1) * parse_count(v, 1, kMostRanks);
       }},
      {'b', "minbytes", "BYTES", "the first size [32M]",
       [](Options& o, const Value& v) { o.min_bytes = parse_bytes(v); }},
      {'e', "maxbytes", "BYTES", "the last size [32M]",
       [](Options& o, const Value& v) { o.max_bytes = parse_bytes(v); }},
      {'i', "stepbytes", "BYTES", "from size to size [1M]",
       [](Options& o, const Value& v) { o.step_bytes = parse_bytes(v); }},
      {'f', "stepfactor", "FACTOR", "multiplies size by size, in the place of -i",
       [](Options& o, const Value& v) { o.step_factor = parse_count(v, 2, 1 << 20); }},
      {'n', "iters", "N", "timed iterations [20]",
       [](Options& o, const Value& v) { o.iters = parse_count(v, 1, kMostCount); }},
      {'w', "warmup_iters", "N", "iterations before, not timed [5]",
       [](Options& o, const Value& v) { o.warmup = parse_count(v, 0, kMostCount); }},
      {'c', "check", "N", "iterations whose values are checked; 0: none [1]",
       [](Options& o, const Value& v) { o.checks = parse_count(v, 0, kMostCount); }},
      {'o', "op", "OP", "sum, max or all, for what reduces [sum]",
       [](Options& o, const Value& v) { o.reductions = parse_names(v, kReductions); }},
      {'d', "datatype", "TYPE", "float, half, bfloat16, double, int32, int64 or all [float]",
       [](Options& o, const Value& v) { o.dtypes = parse_names(v, kDTypes); }},
      {'r', "root", "RANK", "of broadcast and reduce, or all [0]",
       [](Options& o, const Value& v) {
         o.all_roots = v.text == "all";
         if (!o.all_roots) o.roots = {parse_count(v, 0, kMostRanks - 1)};
       }},
      {'a', "average", "0-3", "the time: rank 0's, the mean of all, the least, the most [1]",
       [](Options& o, const Value& v) { o.average = parse_count(v, 0, 3); }},
      {'h', "help", nullptr, "this page", [](Options& o, const Value&) { o.help = true; }},
      {0, "groups", "N", "the ranks are N groups, 0 1 | 2 3, which all run at once [1]",
       [](Options& o, const Value& v) { o.groups = parse_count(v, 1, kMostRanks); }},
      {0, "beside-compute", nullptr, "also measure beside matrix products on the compute stream",
       [](Options& o, const Value&) { o.beside_compute = true; }},
      {0, "emulate", "N", "one real rank of N: what calls cost without a wire; nothing is checked",
       [](Options& o, const Value& v) { o.emulate = parse_count(v, 1, 1 << 20); }},
      {0, "messages", nullptr, "MPI ranks of one host exchange by messages, as those of two do",
       [](Options& o, const Value&) { o.world.transport = Transport::messages; }},
      {0, "device", "NAME", "cpu, cuda or cuda:N [cpu]",
       [](Options& o, const Value& v) { o.world.device = parse_device(v.text); }},
      {0, "ordered-sums", nullptr, "ranks add in rank order what NCCL would sum",
       [](Options& o, const Value&) { o.world.nccl.ordered_sums = true; }},
      {0, "windows", nullptr, "NCCL has allocated the buffers, and moves them without a copy",
       [](Options& o, const Value&) { o.world.nccl.windows = true; }},
      {0, "zero-cta-gathers", nullptr, "NCCL gathers by copy engines where it can; with --windows",
       [](Options& o, const Value&) { o.world.nccl.gather_policy = GatherPolicy::zero; }},
      {0, "reduce-max-ctas", "N", "NCCL reduces with at most so many blocks of threads [its own]",
       [](Options& o, const Value& v) { o.world.nccl.reduce_max_ctas = parse_count(v, 1, 64); }},
      {0, "threads", "N", "of the CPU's kernels, for each rank [cores / ranks]",
       [](Options& o, const Value& v) { o.world.threads = parse_count(v, 1, kMostRanks); }},
  };
  return rows;
}

const Option* find(std::string_view written) {
  for (const Option& option : table()) {
    const bool is_letter = written.size() == 2 && written[0] == '-' && written[1] != '-' &&
                           option.letter == written[1];
    if (is_letter || (written.starts_with("--") && written.substr(2) == option.name))
      return &option;
  }
  return nullptr;
}

void check(Options& o) {
  if (o.operations.empty())
    throw DataError(
        "no operation; name one of all_gather, reduce_scatter, all_reduce, broadcast, "
        "reduce, alltoall, sendrecv, or all of them");
  if (o.max_bytes < o.min_bytes)
    throw DataError(
        concat("-e ", o.max_bytes, ": is below -b ", o.min_bytes, "; give a larger one"));
  if (o.emulate && (o.threads || o.groups > 1))
    throw DataError("--emulate: is one process and one group; leave -t, -g and --groups out");
  if (o.emulate) o.checks = 0;
  const NcclOptions& nccl = o.world.nccl;
  const bool is_zero = nccl.gather_policy == GatherPolicy::zero;
  if ((nccl.ordered_sums || nccl.windows || is_zero || nccl.reduce_max_ctas > 0) &&
      (o.world.device.kind == DeviceKind::cpu || o.threads || o.emulate))
    throw DataError(
        "--ordered-sums, --windows, --zero-cta-gathers, --reduce-max-ctas: are NCCL's; give "
        "--device=cuda and a launcher that starts processes, or leave them out");
  if (is_zero && !nccl.windows)
    throw DataError("--zero-cta-gathers: copy engines move windows alone; add --windows");
}

}  // namespace

Options parse(const std::vector<std::string>& arguments) {
  Options options;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    std::string written = arguments[i], text;
    if (!written.starts_with('-')) {
      const std::size_t before = options.operations.size();
      for (const Operation& operation : kOperations)
        if (written == operation.name || written == "all") options.operations.push_back(operation);
      if (options.operations.size() == before)
        throw DataError(concat(written,
                               ": is no operation; expected all_gather, reduce_scatter, "
                               "all_reduce, broadcast, reduce, alltoall, sendrecv or all"));
      continue;
    }
    // --name=value, -b8, or the value as the next argument
    const std::size_t equals = written.starts_with("--") ? written.find('=') : std::string::npos;
    const bool is_joined = equals != std::string::npos || (written[1] != '-' && written.size() > 2);
    if (is_joined) {
      const std::size_t name = equals != std::string::npos ? equals : 2;
      text = written.substr(equals != std::string::npos ? name + 1 : name);
      written.resize(name);
    }
    const Option* const option = find(written);
    if (!option)
      throw DataError(concat(written,
                             ": unknown option; --help lists those of nccl-tests that are "
                             "here, and ours"));
    if (!option->argument && is_joined) throw DataError(concat(written, ": takes no value"));
    if (option->argument && !is_joined) {
      if (++i == arguments.size())
        throw DataError(concat(written, ": lacks its value, ", option->argument));
      text = arguments[i];
    }
    option->take(options, {written, text});
    if (options.help) return options;
  }
  check(options);
  return options;
}

std::string help() {
  std::string text =
      "usage: bench-collectives OPERATION... [OPTION...]\n\n"
      "Measures collectives between ranks as nccl-tests does: same options, same columns, same\n"
      "bandwidths. Ranks are threads (-t), or processes that mpirun, torchrun, srun or MPICH's\n"
      "mpiexec starts. OPERATION: all_gather, reduce_scatter, all_reduce, broadcast, reduce,\n"
      "alltoall, sendrecv, or all of them.\n\n";
  for (const Option& option : table()) {
    std::string names = option.letter ? concat("  -", option.letter, ", --") : "      --";
    names += option.name;
    if (option.argument) names += concat(' ', option.argument);
    names.resize(std::max<std::size_t>(names.size() + 1, 28), ' ');
    text += concat(names, option.help, '\n');
  }
  return text +
         "\nalgbw is size / time. busbw is algbw times 2 (n-1) / n for all_reduce, (n-1) / n for\n"
         "all_gather, reduce_scatter and alltoall, and 1 for the others. GB are 10^9 bytes. N/A: "
         "this\n"
         "can't be done in place, or nothing was checked.\n";
}

const char* nccl_name(DType dtype) {
  return std::ranges::find(kDTypes, dtype, [](const auto& row) { return row.second; })->first;
}

}  // namespace tessera::collectives
