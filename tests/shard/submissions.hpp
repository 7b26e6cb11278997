// What a host asks the network for, in its order, as a line of text.
#pragma once

#include <ostream>
#include <string>
#include <string_view>
#include <utility>

#include "tessera/autograd/node.hpp"
#include "tessera/device/device_context.hpp"
#include "tests/shard/support.hpp"

namespace tessera::testing {

// As "root 0 -0": a gather of the root, one of unit 0, a reduction of it. With `shows_products`
// each product of a forward is a '*' behind what was asked for before it.
class Submissions final : public Observer {
 public:
  explicit Submissions(const Device& device, bool shows_products = false)
      : device_(device), shows_products_(shows_products) {
    device_.context().add_observer(*this);
  }
  ~Submissions() override { device_.context().remove_observer(*this); }
  void launched(StreamId, Tick, const Op& op) override {
    std::string_view name = op.name;
    if (shows_products_ && name == "matmul" && !autograd::in_backward()) text_ += '*';
    const bool gathers = name.starts_with("all_gather ");
    if (!gathers && !name.starts_with("reduce_scatter ")) return;
    name.remove_prefix(name.find(' ') + 1);
    name = name.substr(0, name.find(" ("));  // behind it: what the program has decided
    std::string of(name == "(root)" ? "root" : name);
    for (const char* const list : {"layers.", "blocks."})
      for (std::size_t at; (at = of.find(list)) != of.npos;) of.erase(at, 7);
    if (const std::size_t at = of.find(", "); at != of.npos) of.erase(at + 1, 1);
    text_ += (text_.empty() ? "" : " ") + std::string(gathers ? "" : "-") + of;
  }
  std::string take() { return std::exchange(text_, {}); }

 private:
  Device device_;
  const bool shows_products_;
  std::string text_;
};

struct SubmittedStep {
  std::string forward, backward;
  bool operator==(const SubmittedStep&) const = default;
};
inline std::ostream& operator<<(std::ostream& out, const SubmittedStep& s) {
  return out << '"' << s.forward << "\", \"" << s.backward << '"';
}

}  // namespace tessera::testing
