// An owning list of modules, as of a model's blocks.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tessera/nn/module.hpp"

namespace tessera::nn {

// An owning list of modules of one type, whose members keep their address:
// for (auto& block : blocks) ...
template <class M>
class ModuleList : public Module {
 public:
  template <class... Args>
  M& emplace_back(Args&&... args) {
    items_.push_back(std::make_unique<M>(std::forward<Args>(args)...));
    register_module(std::to_string(items_.size() - 1), *items_.back());
    return *items_.back();
  }
  std::size_t size() const noexcept { return items_.size(); }
  M& operator[](std::size_t i) { return *items_[i]; }

  class iterator {
   public:
    explicit iterator(const std::unique_ptr<M>* at) : at_(at) {}
    M& operator*() const { return **at_; }
    iterator& operator++() {
      ++at_;
      return *this;
    }
    bool operator==(const iterator&) const = default;

   private:
    const std::unique_ptr<M>* at_;
  };
  iterator begin() { return iterator(items_.data()); }
  iterator end() { return iterator(items_.data() + items_.size()); }

 private:
  std::vector<std::unique_ptr<M>> items_;
};

}  // namespace tessera::nn
