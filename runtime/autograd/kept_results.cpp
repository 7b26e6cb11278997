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

constexpr const char* kRemedy = "; it has to do the same each time, or keep nothing";

}  // namespace

KeptResults* KeptResults::current() noexcept { return innermost(); }

KeptScope::KeptScope(KeptResults* kept) noexcept : before_(std::exchange(innermost(), kept)) {}
KeptScope::~KeptScope() { innermost() = before_; }

bool KeptResults::take(const char* name, std::initializer_list<Tensor> inputs,
                       std::span<Tensor> results) {
  std::vector<Operand> operands;
  for (const Tensor& x : inputs) operands.push_back({x.shape(), x.dtype()});
  if (!is_second_run_) {
    operations_.push_back({name, std::move(operands), {}});
    return false;
  }
  const auto text = [](const char* of, const std::vector<Operand>& inputs) {
    std::string all = concat('\'', of, '\'');
    for (const Operand& x : inputs)
      all += concat(&x == inputs.data() ? " of " : " and ", x.shape, " in ", x.dtype);
    return all;
  };
  const bool is_more = next_ == operations_.size();
  if (is_more || std::string_view(name) != operations_[next_].name ||
      operands != operations_[next_].inputs)
    throw ContractError(concat(
        "recompute: in backward the function's product or attention number ", next_ + 1, " is ",
        text(name, operands), ", in forward it was ",
        is_more ? "none" : text(operations_[next_].name, operations_[next_].inputs), kRemedy));
  Operation& first = operations_[next_++];
  for (std::size_t i = 0; i < first.results.size(); ++i) {
    Tensor x = graph_is_retained_ ? first.results[i].get() : first.results[i].extract();
    if (!x.defined()) return false;  // a run that has failed took it
    results[i] = x.detach();         // a handle of its own, for a history of this run
  }
  return !first.results.empty();
}

void KeptResults::give(std::span<const Tensor> results) {
  if (is_second_run_) return;
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
  if (next_ < operations_.size())
    throw ContractError(concat("recompute: in backward the function has ", next_,
                               " products and attentions, in forward it had ", operations_.size(),
                               kRemedy));
}

}  // namespace tessera::autograd
