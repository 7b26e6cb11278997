#include "tessera/param/load_state.hpp"

#include <algorithm>
#include <utility>

#include "tessera/base/error.hpp"
#include "tessera/tensor/ops.hpp"

namespace tessera {
namespace {

const std::string kStateDict = "the state dict";

std::string text_of(const std::vector<std::int64_t>& shape) {
  std::string out = "[";
  for (const std::int64_t size : shape) out += concat(out.size() > 1 ? ", " : "", size);
  return out + ']';
}

// "'a'", "'a' and 3 more".
std::string first_of(const std::vector<std::string>& names) {
  if (names.size() == 1) return concat('\'', names[0], '\'');
  return concat('\'', names[0], "' and ", names.size() - 1, " more");
}

std::vector<std::byte> bytes_of(const Tensor& t) {
  std::vector<std::byte> out(static_cast<std::size_t>(t.numel()) * size_bytes(t.dtype()));
  t.device().runs_bodies() ? t.to_bytes(out) : t.plan_to_bytes();
  return out;
}

}  // namespace

// --- the match ---

StateMatching::StateMatching(const std::vector<StateTarget>& targets, const StateSource& source,
                             const StateHolder& holder, const LoadOptions& options, bool is_whole)
    : source_(source), holder_(holder), is_whole_(is_whole) {
  find_prefix();
  for (const StateTarget& target : targets) match(target);
  find_unexpected();
  if (!options.strict) return;
  const std::string kind = concat("is it ", holder.article, ' ', holder.what, " of this kind");
  if (!report.missing.empty())
    source.refuse(concat(source.what(), " has no tensor ", first_of(report.missing), "; ", kind,
                         " and size?"));
  if (!report.unexpected.empty())
    source.refuse(concat(source.what(), " holds ", first_of(report.unexpected), ", which the ",
                         holder.what, " does not have; ", kind, " and size?"));
}

// Either all of a file's names have the beginning that they may lack, or none.
void StateMatching::find_prefix() {
  if (!source_.is_file()) return;
  const std::string_view prefix = holder_.optional_prefix;
  const auto names = source_.names();
  if (std::none_of(names.begin(), names.end(),
                   [&](const std::string& name) { return name.starts_with(prefix); }))
    prefix_ = prefix;
}

std::string StateMatching::name_in_source(const std::string& name) const {
  return name.starts_with(prefix_) ? name.substr(prefix_.size()) : name;
}

void StateMatching::match(const StateTarget& target) {
  std::vector<std::string> found = find(target);
  if (found.empty()) found = find_parts(target);
  if (found.empty())
    report.missing.push_back(target.names[0]);
  else
    matches.push_back({&target, std::move(found)});
}

std::vector<std::string> StateMatching::find(const StateTarget& target) {
  std::vector<std::string> found;
  for (const std::string& own : target.names) {
    const std::string name = name_in_source(own);
    if (!source_.has(name)) continue;
    known_.push_back(name);
    if (found.empty())
      found = {name};
    else if (!source_.is_same(found[0], name))
      differs_.push_back(name);
  }
  if (!found.empty()) check(target, found[0], target.spec.shape);
  return found;
}

// All of them or none.
std::vector<std::string> StateMatching::find_parts(const StateTarget& target) {
  std::vector<std::string> found;
  std::string missing;
  if (!source_.is_file()) return found;
  for (const RowPart& part : target.parts_in_files) {
    const std::string name = name_in_source(part.name);
    if (!source_.has(name)) {
      missing = name;
      continue;
    }
    known_.push_back(name);
    check(target, name, target.spec.shape.with(0, part.rows));
    found.push_back(name);
  }
  if (!found.empty() && !missing.empty())
    source_.refuse(concat(source_.what(), " holds '", found[0], "' but not '", missing,
                          "', and the ", holder_.what, " joins both in '", target.names[0],
                          "'; give a file of both"));
  return found;
}

void StateMatching::check(const StateTarget& target, const std::string& name,
                          const Shape& own_shape) const {
  const auto [shape, dtype, foreign] = source_.entry(name);
  const auto refuse = [&](const auto&... parts) {
    source_.refuse(concat("tensor '", name, "' in ", source_.what(), " is ", parts...));
  };
  const bool fits = foreign.empty() &&
                    (target.dtype == dtype || (is_floating(target.dtype) && is_floating(dtype)));
  const std::string own = foreign.empty() ? concat(dtype) : foreign;
  if (!fits && target.kind == "parameter")
    refuse("of ", own, ", but weights are floating; convert it when the file is written");
  if (!fits)
    refuse("of ", own, ", the ", target.kind, " is of ", target.dtype, "; convert it first");
  std::vector<std::int64_t> expected(own_shape.begin(), own_shape.end());
  if (source_.is_file() && target.is_transposed_in_files) std::swap(expected.at(0), expected.at(1));
  if (shape != expected)
    refuse(text_of(shape), " of ", own, ", the ", holder_.what, " has ", text_of(expected),
           "; give the sizes that it was saved with");
  const ShardSpec spec = is_whole_ ? ShardSpec{target.spec.shape, 1, 0} : target.spec;
  if (const std::string fault = source_.fault(name, spec); !fault.empty()) refuse(fault);
}

// A tied parameter may stand under each of its names, with the same bytes.
void StateMatching::find_unexpected() {
  std::sort(known_.begin(), known_.end());
  for (const std::string& name : source_.names()) {
    if (std::binary_search(known_.begin(), known_.end(), name)) continue;
    if (source_.is_file() && holder_.is_left_in_files && holder_.is_left_in_files(name)) continue;
    report.unexpected.push_back(name);
  }
  if (!differs_.empty())
    source_.refuse(concat(source_.what(), " holds '", differs_[0], "', which the ", holder_.what,
                          " ties to another tensor of other values; is it ", holder_.article, ' ',
                          holder_.what, " of this kind?"));
}

LoadReport load_own_state(const std::vector<StateTarget>& targets, const StateSource& source,
                          const StateHolder& holder, const LoadOptions& options) {
  const StateMatching matching(targets, source, holder, options);
  for (const auto& [target, names] : matching.matches) target->held();  // before one is written
  for (const auto& [target, names] : matching.matches)
    target->change([&](const Tensor& rows) {
      source.read(rows, names, target->spec, source.is_file() && target->is_transposed_in_files);
    });
  return matching.report;
}

StateTarget number_target(std::vector<std::string> names, DType dtype, const Tensor& beside,
                          const std::function<void(const Tensor& value)>& f) {
  return {.names = std::move(names),
          .kind = "number",
          .spec = {Shape{}, 1, 0},
          .dtype = dtype,
          .held = [beside] { return beside; },
          .change =
              [=](const FillRows& fill) {
                const Tensor value = Tensor::empty({}, dtype, beside.device());
                fill(value);
                f(value);
              }};
}

Tensor StateSource::rows(std::span<const std::string> names, const ShardSpec& spec, bool transposed,
                         DType dtype, const Device& device) const {
  const Tensor rows = Tensor::empty(spec.local_shape(), dtype, device);
  read(rows, names, spec, transposed);
  return rows;
}

// --- a dict ---

DictSource::DictSource(const StateDict& state) : state_(state) {
  for (const auto& [name, entry] : state)
    TESSERA_EXPECT(entry.values.defined(), "load: the state dict holds '", name,
                   "' without a tensor; give its values");
}

const std::string& DictSource::what() const noexcept { return kStateDict; }

std::vector<std::string> DictSource::names() const {
  std::vector<std::string> names;
  for (const auto& [name, entry] : state_) names.push_back(name);
  return names;
}

StateSource::Entry DictSource::entry(std::string_view name) const {
  const StateTensor& t = at(name);
  return {{t.spec.shape.begin(), t.spec.shape.end()}, t.values.dtype()};
}

bool DictSource::is_same(std::string_view a, std::string_view b) const {
  const Tensor &x = at(a).values, &y = at(b).values;
  if (x.dtype() != y.dtype() || x.shape() != y.shape()) return false;
  return bytes_of(x) == bytes_of(y);
}

std::string DictSource::fault(std::string_view name, const ShardSpec& spec) const {
  const auto& [values, own, mesh, steps] = at(name);
  (void)values.data();  // it may have been lent, or a unit's that is closed
  if (values.device().is_meta()) return "on meta, without values; load tensors that have memory";
  if (!own.has_dim())
    return concat("with a spec along dimension ", own.dim, " of ", own.shape,
                  "; give that of a state_dict, or {shape, 1, 0}");
  if (own.world < 1 || own.rank < 0 || own.rank >= own.world ||
      (!own.is_ragged() && own.chunk_rows() != ceil_div(own.rows(), std::int64_t{own.world})))
    return concat("with a spec of rank ", own.rank, " of ", own.world, " and chunks of ",
                  own.rows_of_chunk, " rows; give that of a state_dict, or {shape, 1, 0}");
  if (values.shape() != own.local_shape())
    return concat("of ", values.shape(), " as rows ", own.owned().begin, " to ", own.owned().end,
                  own.dim > 0 ? concat(" of dimension ", own.dim) : "", " of ", own.shape,
                  "; give the rows that its spec says");
  if (own.world == 1) return "";
  if (own.dim != spec.dim)
    return concat("cut along dimension ", own.dim, ", the model's along ", spec.dim,
                  "; load whole tensors, or a file, to cut another");
  if (own.world == spec.world && own.rank == spec.rank) {
    if (own.block_rows == spec.block_rows && own.extra_from == spec.extra_from) return "";
    return concat("cut by blocks of ", own.block_rows, " rows, the model's by ", spec.block_rows,
                  " (0 means evenly), or dealt from another rank on; load whole tensors or a file "
                  "into other blocks");
  }
  return concat("the rows of rank ", own.rank, " of ", own.world, ", but this is rank ", spec.rank,
                " of ", spec.world, "; load whole tensors, or a file, on another number of ranks");
}

void DictSource::read(const Tensor& to, std::span<const std::string> names, const ShardSpec& spec,
                      bool) const {
  const auto& [values, own, mesh, steps] = at(names[0]);
  Tensor rows = values.detach();
  if (own.world == 1) rows = rows_of(rows, spec);
  if (rows.device() != to.device()) {
    // Several ranks may load one dict at once, so no kernel runs on its device: columns are cut on
    // a device of this call's own.
    if (!rows.is_contiguous())
      rows = rows_of(Tensor::from_bytes(bytes_of(values), values.shape(), values.dtype(),
                                        Device::cpu({.executor = ExecutorKind::inlined})),
                     spec);
    rows = Tensor::from_bytes(bytes_of(rows), rows.shape(), rows.dtype(), to.device());
  }
  raw::copy_into(to, rows);
}

void DictSource::refuse(const std::string& message) const {
  throw ContractError("load: " + message);
}

}  // namespace tessera
