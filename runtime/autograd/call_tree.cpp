#include "runtime/autograd/call_tree.hpp"

#include <algorithm>

namespace tessera::autograd {

bool CallTree::has(const std::function<bool(Region&)>& f) const {
  return std::ranges::any_of(marks_, [&](const Mark& m) { return m.region && f(*m.region); });
}

// What has ended within what still runs.
std::vector<CallTree::Part> CallTree::parts(std::vector<std::size_t>& begun) const {
  std::vector<Part> parts;
  for (std::size_t i = 0; i < marks_.size(); ++i) {
    if (marks_[i].kind == Mark::begin || marks_[i].kind == Mark::begin_recomputed) {
      begun.push_back(i);
      continue;
    }
    const std::size_t first = begun.back();
    begun.pop_back();
    while (!parts.empty() && parts.back().first > first) parts.pop_back();
    parts.push_back({first, i});
  }
  for (const std::size_t i : begun)  // its first run, which has no history yet
    if (marks_[i].kind == Mark::begin_recomputed)
      while (!parts.empty() && parts.back().first > i) parts.pop_back();
  return parts;
}

void CallTree::rewind(const IsReached& is_reached) {
  at_ = 0;
  steps_.clear();
  steps_.reserve(marks_.size());
  if (!goes_on) return rewind({0, marks_.size() - 1});
  std::vector<std::size_t> running;
  walked_ = parts(running);
  std::erase_if(walked_, [&](const Part& part) {
    const Mark& begin = marks_[part.first];
    return !begin.graph.expired() && !is_reached(begin.number, marks_[part.end].number);
  });
  std::reverse(walked_.begin(), walked_.end());
  for (const Part& part : walked_) rewind(part);
  for (const std::size_t i : running)
    if (marks_[i].region) marks_[i].region->on_backward_inside();
}

// The mirror of the marks. A recomputed function is entered as a whole: its regions begin in the
// order of their calls, in which the second run needs them, and end once its node has run.
void CallTree::rewind(const Part& part) {
  for (std::size_t i = part.end + 1; i-- > part.first;) {
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
    } else {
      steps_.push_back({mark.region.get(), mark.number, false});
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
  if (is_retained || !goes_on) return;
  for (const Part& part : walked_)
    marks_.erase(marks_.begin() + static_cast<std::ptrdiff_t>(part.first),
                 marks_.begin() + static_cast<std::ptrdiff_t>(part.end) + 1);
}

}  // namespace tessera::autograd
