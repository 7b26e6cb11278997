// The call tree of one forward: its regions and recomputed functions, and the way back along them.
//
//   forward    root( a( ) recompute( b( ) c( ) ) )
//   backward   root( [ b( c( ] runs again, and back [ ) ) ] a( ) )
//
// Every begin and end has a number between those of the nodes before and after it. Backward takes
// the steps back in one order, and before it runs a node, all those with greater numbers. So a node
// says when a step is due, and never which: the order is that of the calls, on every rank alike.
//
// A forward that goes on is one in parts: of the calls that have ended in those that still run, a
// pass goes back along what it reaches, and what is gone. The others it leaves to a later pass.
//
//   root( a( ) b( ) loss of b goes backward: b( )   ...   ) backward of what a gave: root( a( ) )
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "tessera/autograd/node.hpp"

namespace tessera::autograd {

struct CallGraph;

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
    std::weak_ptr<CallGraph> graph{};  // of a begin: gone once no node made inside could run
  };
  // Whether a node is reached whose number lies between these.
  using IsReached = std::function<bool(std::uint64_t, std::uint64_t)>;

  // --- forward ---
  void add(Mark mark) { marks_.push_back(std::move(mark)); }
  // Whether it has a region for which f holds.
  bool has(const std::function<bool(Region&)>& f) const;

  // --- backward ---
  // Goes to the last mark, from where the way back begins: of a forward that goes on, in parts.
  // Calls that still run are told.
  void rewind(const IsReached& is_reached);
  // The number of the next step; 0 when all are taken.
  std::uint64_t next() const noexcept { return at_ < steps_.size() ? steps_[at_].number : 0; }
  void step();
  // f(region, whether it begins) of the steps that come next, until f says false.
  void for_each_upcoming(const std::function<bool(Region&, bool)>& f) const;
  // The way back is over. Of a forward that goes on its calls are forgotten, unless their graph is
  // retained.
  void finish(bool is_retained);

  std::weak_ptr<CallGraph> graph;  // gone once there is no node that backward could run
  bool is_walked = false;          // by the running backward
  bool goes_on = true;             // its outermost call has not ended

 private:
  // Marks from `first` to the one of `end`.
  struct Part {
    std::size_t first, end;
  };
  std::vector<Part> parts(std::vector<std::size_t>& begun) const;  // and what has not ended
  void rewind(const Part& part);

  struct Step {
    Region* region;
    std::uint64_t number;
    bool begins;
  };
  const std::uint64_t forward_;
  std::deque<Mark> marks_;    // in order of forward; in small pieces, which malloc has at hand
  std::vector<Part> walked_;  // of a forward that goes on, by the running backward
  std::vector<Step> steps_;   // in order of backward
  std::size_t at_ = 0;
};

// What the nodes hold that are made in a call, or in a recomputed function.
struct CallGraph {
  std::shared_ptr<CallTree> tree;
  std::shared_ptr<CallGraph> around;              // null of the outermost, which has
  std::vector<std::shared_ptr<const void>> kept;  // what the forward's regions need
};

}  // namespace tessera::autograd
