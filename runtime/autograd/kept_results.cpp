#include "runtime/autograd/kept_results.hpp"

#include <string>
#include <string_view>

#include "tessera/base/error.hpp"

namespace tessera::autograd {
namespace {

KeptResults*& innermost() noexcept {
  thread_local KeptResults* instance = nullptr;
  return instance;
}

}  // namespace

KeptResults* KeptResults::current() noexcept { return innermost(); }

KeptScope::KeptScope(KeptResults* kept) noexcept : before_(std::exchange(innermost(), kept)) {}
KeptScope::~KeptScope() { innermost() = before_; }

bool KeptResults::take(Expensive kind, const char* name, std::initializer_list<Tensor> inputs,
                       std::span<Tensor> results) {
  std::vector<Operand> operands;
  for (const Tensor& x : inputs) operands.push_back({x.shape(), x.dtype()});
  if (!is_second_run_) {
    const bool is_kept = kind == Expensive::attention || products_++ % what_.products == 0;
    operations_.push_back({name, std::move(operands), is_kept, {}});
    return false;
  }
  const auto text = [](const char* of, const std::vector<Operand>& from) {
    std::string all = concat('\'', of, '\'');
    for (const Operand& x : from)
      all += concat(&x == from.data() ? " of " : " and ", x.shape, " in ", x.dtype);
    return all;
  };
  const bool is_more = next_ == operations_.size();
  TESSERA_EXPECT(!is_more && std::string_view(name) == operations_[next_].name &&
                     operands == operations_[next_].inputs,
                 "recompute: in backward the function's product or attention number ", next_ + 1,
                 " is ", text(name, operands), ", in forward it was ",
                 is_more ? "none" : text(operations_[next_].name, operations_[next_].inputs),
                 "; the function must do the same each time, or keep nothing");
  Operation& first = operations_[next_++];
  for (std::size_t i = 0; i < first.results.size(); ++i) {
    Tensor x = graph_is_retained_ ? first.results[i].get() : first.results[i].extract();
    if (!x.defined()) return false;  // a run that has failed took it
    results[i] = x.detach();         // a handle of its own, for a history of this run
  }
  return !first.results.empty();
}

void KeptResults::give(std::span<const Tensor> results) {
  if (is_second_run_ || !operations_.back().is_kept) return;
  operations_.back().results = std::vector<Saved>(results.begin(), results.end());
  is_needed_ = false;
}

void KeptResults::end_first_run() {
  if (!is_needed_ && !operations_.empty()) operations_.back().results.clear();
}

void KeptResults::begin_second_run(bool graph_is_retained) noexcept {
  next_ = 0;
  is_second_run_ = true;
  graph_is_retained_ = graph_is_retained;
}

void KeptResults::expect_all_taken() const {
  TESSERA_EXPECT(next_ == operations_.size(), "recompute: in backward the function has ", next_,
                 " products and attentions, in forward it had ", operations_.size(),
                 "; the function must do the same each time, or keep nothing");
}

}  // namespace tessera::autograd
