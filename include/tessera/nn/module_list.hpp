// An owning list of modules, for example a model's blocks.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tessera/nn/module.hpp"

namespace tessera::nn {

// A list of modules of one type, which it owns. Members keep their address:
// for (auto& block : blocks) ...
template <class M>
class ModuleList : public Module {
 public:
  template <class... Args>
  M& emplace_back(Args&&... args) {
    M* const item = new M(std::forward<Args>(args)...);
    items_.push_back(std::unique_ptr<Module>(item));
    register_module(std::to_string(items_.size() - 1), *item);
    return *item;
  }
  std::size_t size() const noexcept { return items_.size(); }
  M& operator[](std::size_t i) { return static_cast<M&>(*items_[i]); }

  class iterator {
   public:
    explicit iterator(const std::unique_ptr<Module>* at) : at_(at) {}
    M& operator*() const { return static_cast<M&>(**at_); }
    iterator& operator++() {
      ++at_;
      return *this;
    }
    bool operator==(const iterator&) const = default;

   private:
    const std::unique_ptr<Module>* at_;
  };
  iterator begin() { return iterator(items_.data()); }
  iterator end() { return iterator(items_.data() + items_.size()); }

 private:
  std::vector<std::unique_ptr<Module>> items_;  // each an M, and one type of vector to compile
};

}  // namespace tessera::nn
