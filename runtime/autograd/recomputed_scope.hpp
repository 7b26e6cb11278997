// What recomputation needs of the engine.
#pragma once

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
  bool is_entry_ = false, is_outermost_ = false;
};

// No history is recorded, but calls are in the tree: their history comes with the second run.
class FirstRunGuard {
 public:
  FirstRunGuard() noexcept;
  ~FirstRunGuard();
  FirstRunGuard(const FirstRunGuard&) = delete;
  FirstRunGuard& operator=(const FirstRunGuard&) = delete;

 private:
  bool before_;
};

}  // namespace tessera::autograd
