#include "runtime/param/renamed_source.hpp"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "tessera/base/error.hpp"

namespace tessera {
namespace {

// What stands between the stars.
std::vector<std::string_view> texts_of(std::string_view pattern) {
  std::vector<std::string_view> parts;
  for (std::size_t star = 0; (star = pattern.find('*')) != std::string_view::npos;
       pattern.remove_prefix(star + 1))
    parts.push_back(pattern.substr(0, star));
  parts.push_back(pattern);
  return parts;
}

// The name that the rule makes of `name`; nothing where it does not fit. A part is taken where it
// comes first, so that each star but the last stands for as little as can be.
std::optional<std::string> renamed_by(const Rename& rule, std::string_view name) {
  const auto from = texts_of(rule.pattern), to = texts_of(rule.replacement);
  if (!name.starts_with(from.front())) return {};
  if (from.size() == 1) return name == from[0] ? std::optional(rule.replacement) : std::nullopt;
  name.remove_prefix(from.front().size());
  if (!name.ends_with(from.back())) return {};
  name.remove_suffix(from.back().size());
  std::string made(to.front());
  for (std::size_t i = 1; i < from.size(); ++i) {
    const bool is_last = i + 1 == from.size();
    const std::size_t at = is_last ? name.size() : name.find(from[i]);
    if (at == std::string_view::npos) return {};
    made += concat(name.substr(0, at), to[i]);
    if (!is_last) name.remove_prefix(at + from[i].size());
  }
  return made;
}

class RenamedSource final : public StateSource {
 public:
  RenamedSource(std::shared_ptr<const StateSource> source, const std::vector<Rename>& rules)
      : source_(std::move(source)) {
    const auto names = source_->names();
    std::vector<bool> fits(rules.size());
    for (const std::string& original : names) {
      std::string name = original;
      for (std::size_t i = 0; i < rules.size(); ++i)
        if (auto made = renamed_by(rules[i], name)) {
          name = std::move(*made);
          fits[i] = true;
        }
      const auto [other, is_new] = originals_.try_emplace(name, original);
      TESSERA_EXPECT(is_new, "load: rename makes '", name, "' of '", other->second, "' and of '",
                     original, "' in ", source_->what(), "; give rules that keep names apart");
    }
    std::string idle;
    for (std::size_t i = 0; i < rules.size(); ++i)
      if (!fits[i]) idle += concat(idle.empty() ? "'" : ", '", rules[i].pattern, '\'');
    TESSERA_EXPECT(idle.empty(), "load: no name in ", source_->what(), " fits ", idle,
                   " of LoadOptions::rename",
                   originals_.empty() ? "" : concat("; one name is ", example()));
  }

  const std::string& what() const noexcept override { return source_->what(); }
  std::vector<std::string> names() const override {
    std::vector<std::string> names;
    for (const auto& [name, original] : originals_) names.push_back(name);
    return names;
  }
  bool has(std::string_view name) const override { return originals_.contains(name); }
  Entry entry(std::string_view name) const override { return source_->entry(original(name)); }
  bool is_file() const noexcept override { return source_->is_file(); }
  bool is_same(std::string_view a, std::string_view b) const override {
    return source_->is_same(original(a), original(b));
  }
  std::string fault(std::string_view name, const ShardSpec& spec) const override {
    return source_->fault(original(name), spec);
  }
  void read(const Tensor& to, std::span<const std::string> names, const ShardSpec& spec,
            bool transposed) const override {
    std::vector<std::string> originals;
    for (const std::string& name : names) originals.push_back(original(name));
    source_->read(to, originals, spec, transposed);
  }
  [[noreturn]] void refuse(const std::string& message) const override {
    source_->refuse(message);
    throw ContractError(message);  // not reached, which g++ does not know of a virtual call
  }

 private:
  // 'lm.kernel', or 'lm.kernel' ('head.weight' by the other rules)
  std::string example() const {
    const auto& [name, original] = *originals_.begin();
    return name == original ? concat('\'', name, '\'')
                            : concat('\'', original, "' ('", name, "' by the other rules)");
  }
  const std::string& original(std::string_view name) const { return originals_.find(name)->second; }

  std::shared_ptr<const StateSource> source_;
  std::map<std::string, std::string, std::less<>> originals_;  // by their new names
};

}  // namespace

std::shared_ptr<const StateSource> renamed(std::shared_ptr<const StateSource> source,
                                           const LoadOptions& options) {
  if (options.rename.empty()) return source;
  for (const auto& [pattern, replacement] : options.rename)
    TESSERA_EXPECT(
        std::ranges::count(pattern, '*') == std::ranges::count(replacement, '*'), "load: rename '",
        pattern, "' to '", replacement,
        "'; give both sides the same number of *, each of which stands for the same text");
  return std::make_shared<RenamedSource>(std::move(source), options.rename);
}

}  // namespace tessera
