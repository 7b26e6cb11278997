#include "runtime/param/group_part.hpp"

#include <unordered_map>

#include "runtime/param/parameter_state.hpp"
#include "tessera/tensor/ops.hpp"

namespace tessera {

std::vector<GroupPart> parts_of(const std::vector<Parameter>& parameters) {
  std::vector<GroupPart> parts;
  std::vector<std::vector<bool>> is_given;  // of the trainable entries, and one that is not
  std::unordered_map<const FlatGroup*, std::size_t> part_of;
  std::size_t at = 0;  // of the last one, whose neighbours are mostly in its group
  for (const Parameter& p : parameters) {
    TESSERA_EXPECT(p.defined(), "an undefined parameter was given");
    const ParameterState& state = *state_of(p);
    const std::shared_ptr<FlatGroup>& group = state.group;
    TESSERA_EXPECT(group != nullptr, state.without_memory());
    if (parts.empty() || parts[at].group != group)
      at = part_of.try_emplace(group.get(), parts.size()).first->second;
    if (at == parts.size()) {
      parts.push_back({group, {}});
      is_given.emplace_back(group->trainable.size() + 1);
    }
    if (state.has_gradient())
      is_given[at][static_cast<std::size_t>(state.flat_entry().trainable)] = true;
  }
  for (std::size_t i = 0; i < parts.size(); ++i)
    for (std::size_t end = 0; end < is_given[i].size(); ++end) {
      if (!is_given[i][end]) continue;
      const std::size_t first = end;
      while (is_given[i][end]) ++end;
      parts[i].stretches.push_back({first, end});
    }
  return parts;
}

bool GroupPart::is_whole() const {
  return stretches.size() == 1 && stretches[0].end - stretches[0].first == group->trainable.size();
}

void GroupPart::expect_reduced(const char* function) const {
  for (const Stretch& stretch : stretches)
    group->expect_reduced(function, stretch.first, stretch.end);
}

Tensor GroupPart::gradient(const Stretch& stretch) const {
  const auto offset_of = [&](std::size_t i) {
    return i < group->trainable.size() ? group->trained(i).gradient_offset : group->gradient_numel;
  };
  const std::int64_t begin = offset_of(stretch.first);
  return group->await_gradient().view({offset_of(stretch.end) - begin}, {1}, begin);
}

Tensor GroupPart::counts(const Stretch& stretch) const {
  group->await_reduced();
  return group->gradient.view({static_cast<std::int64_t>(stretch.end - stretch.first)}, {1},
                              group->gradient_numel + static_cast<std::int64_t>(stretch.first));
}

void GroupPart::drop_gradient() const {
  for (const auto& [first, end] : stretches)
    for (std::size_t i = first; i < end && !group->unreduced.empty(); ++i)
      if (const auto p = group->trained(i).parameter.lock()) p->drop_unreduced();
  if (is_whole()) group->drop_gradient();
  if (!group->gradient.defined()) return;
  for (const Stretch& stretch : stretches) {
    raw::fill(gradient(stretch), 0);
    raw::fill(counts(stretch), 0);
  }
}

}  // namespace tessera
