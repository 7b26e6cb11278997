// The call tree of one forward: its regions and recomputed functions, and the way back along them.
//
//   forward    root( a( ) recompute( b( ) c( ) ) )
//   backward   root( [ b( c( ] runs again, and back [ ) ) ] a( ) )
//
// Every begin and end has a number between those of the nodes before and after it. Backward takes
// the steps back in one order, and before it runs a node, all those with greater numbers. So a node
// says when a step is due, and never which: the order is that of the calls, on every rank alike.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "tessera/autograd/node.hpp"

namespace tessera::autograd {

class CallTree {
 public:
  explicit CallTree(std::uint64_t forward) : forward_(forward) {}

  // Of this thread's forwards the number, from 1: the same on all ranks.
  std::uint64_t forward() const noexcept { return forward_; }

  // Around a call, and around a recomputed function, its first run and its node.
  struct Mark {
    std::shared_ptr<Region> region;  // null of a recomputed function
    std::uint64_t number;
    enum Kind : std::uint8_t { begin, end, begin_recomputed, end_recomputed } kind;
  };

  // --- forward ---
  void add(Mark mark) { marks_.push_back(std::move(mark)); }
  // Whether it has a region for which f holds.
  bool has(const std::function<bool(Region&)>& f) const;

  // --- backward ---
  // Goes to the last mark, from where the way back begins. Calls that still run are told.
  void rewind();
  // The number of the next step; 0 when all are taken.
  std::uint64_t next() const noexcept { return at_ < steps_.size() ? steps_[at_].number : 0; }
  void step();
  // f(region, whether it begins) of the steps that come next, until f says false.
  void for_each_upcoming(const std::function<bool(Region&, bool)>& f) const;
  // The way back is over. Of a forward that goes on the calls that have ended are forgotten, unless
  // their graph is retained.
  void finish(bool is_retained);

  std::weak_ptr<CallGraph> graph;  // gone once there is no node that backward could run
  bool is_walked = false;          // by the running backward

 private:
  struct Step {
    Region* region;
    std::uint64_t number;
    bool begins;
  };
  const std::uint64_t forward_;
  std::deque<Mark> marks_;   // in order of forward; in small pieces, which malloc has at hand
  std::vector<Step> steps_;  // in order of backward
  std::size_t at_ = 0;
};

// What the nodes of a forward hold.
struct CallGraph {
  std::shared_ptr<CallTree> tree;
  std::vector<std::shared_ptr<const void>> kept;  // of what its regions need
};

}  // namespace tessera::autograd
