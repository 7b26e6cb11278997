// Results that the first run of a recomputed function keeps for the second one, in the order of its
// operations. What the policy keeps is taken there, and all else is made again:
//
//   first run    norm  linear ─┐  rotary  attention ─┐  linear, behind which nothing is saved
//   second run   norm     <────┘  rotary     <───────┘  linear is held, and never made
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <utility>
#include <vector>

#include "tessera/autograd/node.hpp"
#include "tessera/autograd/recompute.hpp"

namespace tessera::autograd {

enum class Expensive : std::uint8_t { product, attention };

class KeptResults {
 public:
  explicit KeptResults(Keep what) noexcept : what_(what) {}

  // Those of the innermost recomputed function that runs on this thread, null where it keeps none.
  static KeptResults* current() noexcept;

  bool keeps(Expensive kind) const noexcept {
    return kind == Expensive::product ? what_.products > 0 : what_.attention;
  }
  // The function's next operation begins. Gives its results where they are kept; else the caller
  // makes them, and gives them.  Throws: ContractError where the first run had another operation.
  bool take(Expensive kind, const char* name, std::initializer_list<Tensor> inputs,
            std::span<Tensor> results);
  void give(std::span<const Tensor> results);
  // Something is saved for backward, so that the second run has to come as far.
  void note_saved() noexcept { is_needed_ = true; }

  void end_first_run();
  void begin_second_run(bool graph_is_retained) noexcept;
  // Throws: ContractError where the first run had more operations.
  void expect_all_taken() const;

 private:
  struct Operand {
    Shape shape;
    DType dtype;
    bool operator==(const Operand&) const = default;
  };
  struct Operation {
    const char* name;
    std::vector<Operand> inputs;
    bool is_kept;
    std::vector<Saved> results;  // none of one that is made again
  };

  const Keep what_;
  std::vector<Operation> operations_;
  int products_ = 0;  // of the first run
  std::size_t next_ = 0;
  bool is_second_run_ = false, graph_is_retained_ = false;
  bool is_needed_ = false;  // the last operation of the first run
};

// A recomputed function runs in this scope; null: it keeps nothing, whatever one around it keeps.
class KeptScope {
 public:
  explicit KeptScope(KeptResults* kept) noexcept;
  ~KeptScope();
  KeptScope(const KeptScope&) = delete;
  KeptScope& operator=(const KeptScope&) = delete;

 private:
  KeptResults* const before_;
};

// The results of an operation: make(), or what the first run kept of it. make gives an array.
template <class Make>
auto kept_or(Expensive kind, const char* name, std::initializer_list<Tensor> inputs, Make make) {
  KeptResults* const kept = KeptResults::current();
  if (!kept || !kept->keeps(kind)) return make();
  decltype(make()) results;
  if (!kept->take(kind, name, inputs, results)) {
    results = make();
    kept->give(results);
  }
  return results;
}

// The same of one result.
template <class Make>
Tensor kept_product_or(const char* name, const Tensor& a, const Tensor& b, Make make) {
  return kept_or(Expensive::product, name, {a, b}, [&] { return std::array{make()}; })[0];
}

}  // namespace tessera::autograd
