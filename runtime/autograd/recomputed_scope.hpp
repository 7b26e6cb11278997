// What recomputation needs of the engine.
#pragma once

#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "tessera/autograd/node.hpp"

namespace tessera::autograd {

// A recomputed function: its first run and its node are made in this scope, which is an entry of
// the call tree. Inside backward, that of a function within a recomputed one, it is none.
class RecomputedScope {
 public:
  RecomputedScope();
  ~RecomputedScope();
  RecomputedScope(const RecomputedScope&) = delete;
  RecomputedScope& operator=(const RecomputedScope&) = delete;

 private:
  bool is_entry_ = false;
};

// No history is recorded, but calls are in the tree, and leaves are noted: their history comes with
// the second run. So are tensors with history, none of which was made in here: the function has
// captured them.
class FirstRunGuard {
 public:
  FirstRunGuard() noexcept;
  void note_use(const std::shared_ptr<Leaf>& leaf) { uses_.push_back(leaf); }
  void note_captured(const Tensor& tensor);
  std::vector<std::shared_ptr<Leaf>> take_uses() { return std::move(uses_); }
  std::vector<Tensor> take_captured() { return std::move(captured_); }
  ~FirstRunGuard();
  FirstRunGuard(const FirstRunGuard&) = delete;
  FirstRunGuard& operator=(const FirstRunGuard&) = delete;

 private:
  bool grad_enabled_before_;
  FirstRunGuard* before_;
  std::vector<std::shared_ptr<Leaf>> uses_;
  std::vector<Tensor> captured_;  // each once
};

// Of the operation's inputs, or of what a function gives, those that it has captured, where it runs
// for the first time.
void note_captured(std::span<const Tensor> tensors);

}  // namespace tessera::autograd
