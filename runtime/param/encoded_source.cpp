#include "runtime/param/encoded_source.hpp"

#include <algorithm>
#include <map>
#include <utility>

#include "tessera/autograd/rows_in_8_bits.hpp"
#include "tessera/base/error.hpp"
#include "tessera/tensor/ops.hpp"

namespace tessera {
namespace {

class EncodedSource final : public StateSource {
 public:
  // A name of values, and whether files hold them transposed.
  struct Values {
    std::string name;
    bool is_transposed = false;
  };
  EncodedSource(std::shared_ptr<const StateSource> source,
                std::map<std::string, Values, std::less<>> by_scales)
      : source_(std::move(source)), by_scales_(std::move(by_scales)) {
    for (const auto& [scales, values] : by_scales_)
      if (source_->has(values.name) && !source_->has(scales) &&
          source_->entry(values.name).dtype != e4m3)  // codes that lack their scales are no values
        encodes_.emplace(values.name, scales);
  }

  const std::string& what() const noexcept override { return source_->what(); }
  std::vector<std::string> names() const override { return source_->names(); }
  bool has(std::string_view name) const override { return source_->has(name) || made_of(name); }
  Entry entry(std::string_view name) const override {
    const Values* const values = made_of(name);
    if (!values) return source_->entry(name);
    Entry entry = source_->entry(values->name);
    if (entry.shape.size() > 1) {
      if (is_transposed(*values)) std::swap(entry.shape[0], entry.shape[1]);
      std::fill(entry.shape.begin() + 1, entry.shape.end(), 1);
    }
    entry.dtype = f32;
    return entry;
  }
  bool is_file() const noexcept override { return source_->is_file(); }
  bool is_same(std::string_view a, std::string_view b) const override {
    const Values *const x = made_of(a), *const y = made_of(b);
    return (x && y) ? source_->is_same(x->name, y->name) : !x && !y && source_->is_same(a, b);
  }
  std::string fault(std::string_view name, const ShardSpec& spec) const override {
    const Values* const values = made_of(name);
    return values ? source_->fault(values->name, spec_of(*values, spec))
                  : source_->fault(name, spec);
  }
  void read(const Tensor& to, std::span<const std::string> names, const ShardSpec& spec,
            bool transposed) const override {
    if (const Values* const values = made_of(names[0])) {
      std::vector<std::string> all;
      for (const std::string& name : names) all.push_back(made_of(name)->name);
      ShardSpec of = spec_of(*values, spec);
      return raw::copy_into(to, encoded_rows(all, of, is_transposed(*values), to).scales);
    }
    if (!encodes_.contains(names[0])) return source_->read(to, names, spec, transposed);
    // A row that is cut has one scale all the same.
    const ShardSpec of = spec.dim == 0 ? spec : ShardSpec{spec.shape, 1, 0};
    const Tensor codes = encoded_rows(names, of, transposed, to).codes;
    raw::copy_into(to, spec.dim == 0 ? codes : rows_of(codes, spec));
  }
  [[noreturn]] void refuse(const std::string& message) const override {
    source_->refuse(message);
    throw ContractError(message);  // not reached, which g++ does not know of a virtual call
  }

 private:
  // Of a name of scales that the source does not have: the values that it has.
  const Values* made_of(std::string_view name) const {
    const auto found = by_scales_.find(name);
    return found != by_scales_.end() && encodes_.contains(found->second.name) ? &found->second
                                                                              : nullptr;
  }
  bool is_transposed(const Values& values) const {
    return source_->is_file() && values.is_transposed;
  }
  // Of the values, from that of their scales.
  ShardSpec spec_of(const Values& values, const ShardSpec& scales) const {
    ShardSpec spec = scales;
    Entry entry = source_->entry(values.name);
    if (is_transposed(values) && entry.shape.size() > 1) std::swap(entry.shape[0], entry.shape[1]);
    for (int d = 1; d < spec.shape.ndim(); ++d)
      spec.shape[d] = entry.shape.at(static_cast<std::size_t>(d));
    return spec;
  }
  RowsIn8Bits encoded_rows(std::span<const std::string> names, const ShardSpec& spec,
                           bool transposed, const Tensor& beside) const {
    return encode_rows(source_->rows(names, spec, transposed, f32, beside.device()));
  }

  std::shared_ptr<const StateSource> source_;
  std::map<std::string, Values, std::less<>> by_scales_;       // by the names of scales
  std::map<std::string, std::string, std::less<>> encodes_{};  // values to their scales
};

}  // namespace

std::shared_ptr<const StateSource> encoded(std::shared_ptr<const StateSource> source,
                                           const std::vector<StateTarget>& targets,
                                           const StateHolder& holder) {
  std::map<std::string, EncodedSource::Values, std::less<>> by_scales;
  const auto values_of = [](const std::string& scales) {
    return scales.substr(0, scales.size() - kRowScales.size());
  };
  const auto has = [&](const std::string& name) {
    return source->has(name) ||
           (!holder.optional_prefix.empty() && name.starts_with(holder.optional_prefix) &&
            source->has(name.substr(holder.optional_prefix.size())));
  };
  // Codes are no values. Who loads them without their scales has another model.
  for (const StateTarget& target : targets) {
    const auto are_codes = [&](const std::string& name) {
      return source->has(name) && source->entry(name).dtype == e4m3 &&
             source->has(concat(name, kRowScales));
    };
    if (target.dtype == e4m3 || !std::ranges::any_of(target.names, are_codes)) continue;
    source->refuse(concat("has '", target.names[0], "' in 8 bits, with scales that belong to it, ",
                          "and the model has it in ", target.dtype,
                          "; store its layers in 8 bits, too (nn::store_in_8_bits)"));
  }
  for (const StateTarget& target : targets) {
    if (!target.are_row_scales) continue;
    const auto is_there = [&](const RowPart& part) { return has(values_of(part.name)); };
    const auto has_scales = [&](const RowPart& part) { return is_there(part) && has(part.name); };
    const auto with = std::ranges::count_if(target.parts_in_files, has_scales);
    if (with > 0 && with < std::ranges::count_if(target.parts_in_files, is_there))
      source->refuse(concat("has scales of some parts of '", values_of(target.names[0]),
                            "' only; give scales of all parts, or of none"));
    const auto of = std::ranges::find_if(targets, [&](const StateTarget& values) {
      return std::ranges::count(values.names, values_of(target.names[0])) > 0;
    });
    const bool is_transposed = of != targets.end() && of->is_transposed_in_files;
    std::vector<std::string> names = target.names;
    for (const RowPart& part : target.parts_in_files) names.push_back(part.name);
    for (const std::string& name : names) {  // as the holder has it, and as files may
      by_scales[name] = {values_of(name), is_transposed};
      if (const std::string_view prefix = holder.optional_prefix;
          !prefix.empty() && name.starts_with(prefix))
        by_scales[name.substr(prefix.size())] = {values_of(name.substr(prefix.size())),
                                                 is_transposed};
    }
  }
  if (by_scales.empty()) return source;
  return std::make_shared<EncodedSource>(std::move(source), std::move(by_scales));
}

}  // namespace tessera
