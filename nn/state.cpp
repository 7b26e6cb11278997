#include "tessera/nn/state.hpp"

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "tessera/memory/memory.hpp"
#include "tessera/nn/module.hpp"
#include "tessera/tensor/ops.hpp"

namespace tessera::nn {
namespace {

// A parameter or a buffer of a model, under each of its names.
struct Target {
  std::vector<std::string> names;
  ShardSpec spec;
  DType dtype = f32;
  Parameter parameter;  // one of the two is defined
  Buffer buffer;
};

std::vector<Target> targets_of(const Module& model) {
  std::vector<Target> targets;
  std::map<const void*, std::size_t> known;
  const auto target = [&](const void* state, const std::string& name) -> Target& {
    const auto [at, is_new] = known.try_emplace(state, targets.size());
    if (is_new) targets.emplace_back();
    targets[at->second].names.push_back(name);
    return targets[at->second];
  };
  for (const auto& [name, parameter] : model.named_parameters(Tied::every_name)) {
    Target& t = target(parameter.id(), name);
    t.parameter = parameter;
    t.spec = parameter.spec();
  }
  for (const auto& [name, buffer] : model.named_buffers(Persistent::yes, Tied::every_name)) {
    Target& t = target(buffer.id(), name);
    t.buffer = buffer;
    t.spec = {buffer.shape(), 1, 0};
    t.dtype = buffer.dtype();
  }
  return targets;
}

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

// A target and the name under which the source has it.
struct Match {
  Target target;
  std::string name;
  bool transposed = false;
};

class Matching {
 public:
  Matching(const Module& model, const StateSource& source, const LoadOptions& options)
      : model_(model), source_(source) {
    find_prefix();
    for (const Target& target : targets_of(model)) match(target);
    find_unexpected();
    if (!options.strict) return;
    if (!report.missing.empty())
      source.refuse(concat(source.what(), " has no tensor ", first_of(report.missing),
                           "; is it a model of this kind and size?"));
    if (!report.unexpected.empty())
      source.refuse(
          concat(source.what(), " holds ", first_of(report.unexpected),
                 ", which the model does not have; is it a model of this kind and size?"));
  }

  std::vector<Match> matches;
  LoadReport report;

 private:
  // Either all of a file's names have the beginning that they may lack, or none.
  void find_prefix() {
    if (!source_.is_file()) return;
    const std::string_view prefix = model_.optional_prefix();
    const auto names = source_.names();
    if (std::none_of(names.begin(), names.end(),
                     [&](const std::string& name) { return name.starts_with(prefix); }))
      prefix_ = prefix;
  }
  std::string name_in_source(const std::string& name) const {
    return name.starts_with(prefix_) ? name.substr(prefix_.size()) : name;
  }

  void match(const Target& target) {
    Match found{target, {}};
    for (const std::string& own : target.names) {
      const std::string name = name_in_source(own);
      if (!source_.has(name)) continue;
      known_.push_back(name);
      if (!found.name.empty()) {
        if (!source_.is_same(found.name, name)) differs_.push_back(name);
        continue;
      }
      found.name = name;
      found.transposed = source_.is_file() && target.parameter.defined() &&
                         model_.saves_transposed(target.names[0]);
    }
    if (found.name.empty()) {
      report.missing.push_back(target.names[0]);
      return;
    }
    check(found);
    matches.push_back(std::move(found));
  }

  void check(const Match& found) const {
    const auto [shape, dtype, foreign] = source_.entry(found.name);
    const auto refuse = [&](const auto&... parts) {
      source_.refuse(concat("tensor '", found.name, "' in ", source_.what(), " is ", parts...));
    };
    const Target& target = found.target;
    const bool fits = foreign.empty() &&
                      (target.dtype == dtype || (is_floating(target.dtype) && is_floating(dtype)));
    const std::string own = foreign.empty() ? concat(dtype) : foreign;
    if (!fits && target.parameter.defined())
      refuse("of ", own, ", and weights are floating; convert it when the file is written");
    if (!fits) refuse("of ", own, ", the buffer is of ", target.dtype, "; convert it first");
    std::vector<std::int64_t> expected(target.spec.shape.begin(), target.spec.shape.end());
    if (found.transposed) std::swap(expected.at(0), expected.at(1));
    if (shape != expected)
      refuse(text_of(shape), " of ", own, ", the model has ", text_of(expected),
             "; give the sizes that it was saved with");
    if (const std::string fault = source_.fault(found.name, target.spec); !fault.empty())
      refuse(fault);
  }

  // A tied parameter may stand under each of its names, with the same bytes.
  void find_unexpected() {
    std::sort(known_.begin(), known_.end());
    for (const std::string& name : source_.names()) {
      if (std::binary_search(known_.begin(), known_.end(), name)) continue;
      if (source_.is_file() && model_.is_left_in_files(name)) continue;
      report.unexpected.push_back(name);
    }
    if (!differs_.empty())
      source_.refuse(concat(source_.what(), " holds '", differs_[0],
                            "', which the model ties to another tensor of other values; is it a "
                            "model of this kind?"));
  }

  const Module& model_;
  const StateSource& source_;
  std::string prefix_;                // of the model's names, which the file lacks
  std::vector<std::string> known_;    // to the model, of the source's
  std::vector<std::string> differs_;  // of them, those with other bytes than their tied ones
};

const std::string kStateDict = "the state dict";

class DictSource final : public StateSource {
 public:
  explicit DictSource(const StateDict& state) : state_(state) {
    for (const auto& [name, entry] : state)
      TESSERA_EXPECT(entry.values.defined(), "load: the state dict holds '", name,
                     "' without a tensor; give its values");
  }
  const std::string& what() const noexcept override { return kStateDict; }
  std::vector<std::string> names() const override {
    std::vector<std::string> names;
    for (const auto& [name, entry] : state_) names.push_back(name);
    return names;
  }
  bool has(std::string_view name) const override { return state_.find(name) != state_.end(); }
  Entry entry(std::string_view name) const override {
    const StateTensor& t = at(name);
    return {{t.spec.shape.begin(), t.spec.shape.end()}, t.values.dtype()};
  }
  bool is_file() const noexcept override { return false; }
  bool is_same(std::string_view a, std::string_view b) const override {
    const Tensor &x = at(a).values, &y = at(b).values;
    if (x.dtype() != y.dtype() || x.shape() != y.shape()) return false;
    return bytes_of(x) == bytes_of(y);
  }
  std::string fault(std::string_view name, const ShardSpec& spec) const override {
    const auto& [values, own] = at(name);
    (void)values.data();  // it may have been lent, or a unit's that is closed
    if (values.device().is_meta()) return "on meta, without values; load tensors that have memory";
    if (own.world < 1 || own.rank < 0 || own.rank >= own.world ||
        own.chunk_rows() != ShardSpec{own.shape, own.world, own.rank}.chunk_rows())
      return concat("with a spec of rank ", own.rank, " of ", own.world, " and chunks of ",
                    own.rows_of_chunk, " rows; give that of a state_dict, or {shape, 1, 0}");
    if (values.shape() != own.local_shape())
      return concat("of ", values.shape(), " as rows ", own.owned().begin, " to ", own.owned().end,
                    " of ", own.shape, "; give the rows that its spec says");
    if (own.world == 1 || (own.world == spec.world && own.rank == spec.rank)) return "";
    return concat("the rows of rank ", own.rank, " of ", own.world, ", and this is rank ",
                  spec.rank, " of ", spec.world,
                  "; load whole tensors, or a file, on another number of ranks");
  }
  Tensor rows(std::string_view name, const ShardSpec& spec, bool, DType dtype,
              const Device& device) const override {
    const auto& [values, own] = at(name);
    Tensor rows = values.detach();
    if (own.world == 1 && spec.shape.ndim() > 0)
      rows = raw::slice(rows, 0, spec.owned().begin, spec.owned().end);
    if (rows.device() != device)
      rows = Tensor::from_bytes(bytes_of(rows), rows.shape(), rows.dtype(), device);
    return raw::cast(rows, dtype);
  }
  [[noreturn]] void refuse(const std::string& message) const override {
    throw ContractError("load: " + message);
  }

 private:
  const StateTensor& at(std::string_view name) const { return state_.find(name)->second; }
  static std::vector<std::byte> bytes_of(const Tensor& t) {
    std::vector<std::byte> out(static_cast<std::size_t>(t.numel()) * size_bytes(t.dtype()));
    t.to_bytes(out);
    return out;
  }

  const StateDict& state_;
};

}  // namespace

LoadReport check_load(const Module& model, const StateSource& source, const LoadOptions& options) {
  return Matching(model, source, options).report;
}

LoadReport load(Module& model, const StateSource& source, const LoadOptions& options) {
  const Matching matching(model, source, options);
  for (const auto& [target, name, transposed] : matching.matches)  // before the first is written
    target.parameter.defined() ? target.parameter.shard() : target.buffer.value();
  for (const auto& [target, name, transposed] : matching.matches) {
    if (const Parameter& p = target.parameter; p.defined())
      p.assign(source.rows(name, target.spec, transposed, f32, p.shard().device()));
    else
      target.buffer.assign(
          source.rows(name, target.spec, false, target.dtype, target.buffer.value().device()));
  }
  return matching.report;
}

StateDict Module::state_dict(const StateDictOptions& options) const {
  TESSERA_EXPECT(options.form == StateForm::sharded, "state_dict: unknown form");
  StateDict state;
  const auto keep = [&](const std::string& name, const Tensor& values, const ShardSpec& spec) {
    const OwnerGuard owner(values.device(), "state dicts");
    const Tensor copy = Tensor::empty(values.shape(), values.dtype(), values.device());
    raw::copy_into(copy, values);
    state.emplace(name, StateTensor(copy, spec));
  };
  for (const auto& [name, p] : named_parameters()) keep(name, p.shard(), p.spec());
  for (const auto& [name, b] : named_buffers(Persistent::yes))
    keep(name, b.value(), {b.shape(), 1, 0});
  return state;
}

LoadReport Module::load(const StateDict& state, const LoadOptions& options) {
  return nn::load(*this, DictSource(state), options);
}

void Module::register_buffer(std::string_view name, const Buffer& buffer, Persistent persistent) {
  TESSERA_EXPECT(buffer.defined(), "register_buffer: '", name, "' is undefined; give it a shape");
  expect_free("register_buffer", name);
  buffers_.push_back({std::string(name), buffer, persistent});
}

std::vector<std::pair<std::string, Buffer>> Module::named_buffers(Persistent least,
                                                                  Tied tied) const {
  std::vector<std::pair<std::string, Buffer>> found;
  for (const auto& [path, module] : const_cast<Module*>(this)->named_modules())
    for (const auto& [name, buffer, persistent] : module->buffers_) {
      if (persistent < least) continue;
      const bool known = std::any_of(found.begin(), found.end(),
                                     [&b = buffer](const auto& f) { return f.second == b; });
      if (known && tied == Tied::once) continue;
      found.emplace_back(path.empty() ? name : path + '.' + name, buffer);
      if (!known && buffer.name().size() < found.back().first.size())
        buffer.set_name(found.back().first);
    }
  return found;
}

}  // namespace tessera::nn
