#include "runtime/autograd/call_tree.hpp"

#include <algorithm>

namespace tessera::autograd {

bool CallTree::has(const std::function<bool(Region&)>& f) const {
  return std::ranges::any_of(marks_, [&](const Mark& m) { return m.region && f(*m.region); });
}

// The mirror of the marks. A recomputed function is entered as a whole: its regions begin in the
// order of their calls, in which the second run needs them, and end once its node has run.
void CallTree::rewind() {
  at_ = 0;
  steps_.clear();
  steps_.reserve(marks_.size());
  std::vector<const Region*> around;  // of the calls that have ended
  for (std::size_t i = marks_.size(); i-- > 0;) {
    const Mark& mark = marks_[i];
    if (mark.kind == Mark::end_recomputed) {
      std::size_t first = i;
      while (marks_[first].kind != Mark::begin_recomputed) --first;
      std::vector<Region*> inside;
      for (std::size_t k = first; k < i; ++k)
        if (marks_[k].kind == Mark::begin) inside.push_back(marks_[k].region.get());
      for (Region* const region : inside) steps_.push_back({region, mark.number, true});
      std::reverse(inside.begin(), inside.end());
      for (Region* const region : inside) steps_.push_back({region, marks_[first].number, false});
      i = first;
    } else if (mark.kind == Mark::end) {
      steps_.push_back({mark.region.get(), mark.number, true});
      around.push_back(mark.region.get());
    } else if (!around.empty() && around.back() == mark.region.get()) {
      steps_.push_back({mark.region.get(), mark.number, false});
      around.pop_back();
    } else if (mark.kind == Mark::begin) {
      mark.region->on_backward_inside();
    }
  }
}

void CallTree::step() {
  const Step step = steps_[at_++];
  step.begins ? step.region->on_backward_begin() : step.region->on_backward_end();
}

void CallTree::for_each_upcoming(const std::function<bool(Region&, bool)>& f) const {
  for (std::size_t i = at_; i < steps_.size(); ++i)
    if (!f(*steps_[i].region, steps_[i].begins)) return;
}

void CallTree::finish(bool is_retained) {
  is_walked = false;
  if (is_retained) return;
  std::deque<Mark> left;
  for (const Mark& mark : marks_) {
    if (mark.kind == Mark::begin) left.push_back(mark);
    if (mark.kind == Mark::end) {
      while (left.back().region != mark.region) left.pop_back();
      left.pop_back();
    }
  }
  if (!left.empty()) marks_ = std::move(left);
}

}  // namespace tessera::autograd
