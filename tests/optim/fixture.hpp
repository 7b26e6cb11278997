// Parameters of odd sizes with random values, and what AdamW makes of them in double precision.
#pragma once

#include <algorithm>
#include <cmath>
#include <map>
#include <vector>

#include "tessera/memory/memory.hpp"
#include "tessera/optim/adamw.hpp"
#include "tests/optim/helpers.hpp"

namespace tessera::testing {

inline const std::vector<Shape> kShapes{{5, 7}, {3}, {64, 2}, {1}, {129}};

struct Reference {
  std::vector<double> p, m, v;
  double largest = 0;  // |p| so far

  explicit Reference(const Values& start) : p(start.begin(), start.end()) {
    m.resize(p.size());
    v.resize(p.size());
    for (const double x : p) largest = std::max(largest, std::abs(x));
  }
  void adamw(const Values& g, const optim::AdamWOptions& o, int t) {
    for (std::size_t i = 0; i < p.size(); ++i) {
      m[i] = o.beta1 * m[i] + (1 - o.beta1) * g[i];
      v[i] = o.beta2 * v[i] + (1 - o.beta2) * static_cast<double>(g[i]) * g[i];
      const double m_hat = m[i] / (1 - std::pow(o.beta1, t)),
                   v_hat = v[i] / (1 - std::pow(o.beta2, t));
      p[i] -= o.lr * o.weight_decay * p[i];
      p[i] -= o.lr * m_hat / (std::sqrt(v_hat) + o.eps);
      largest = std::max(largest, std::abs(p[i]));
    }
  }
  double distance(const Values& got) const {
    double worst = 0;
    for (std::size_t i = 0; i < p.size(); ++i) worst = std::max(worst, std::abs(p[i] - got[i]));
    return worst;
  }
};

inline constexpr double kEps = 0x1p-24;  // half a unit in the last place of f32, relative

// A bag on its device with random values, and the reference of each parameter.
struct Fixture {
  Draw draw;
  Device device = Device::cpu();
  Bag bag{kShapes};
  std::vector<Reference> references;

  void start() {
    for (const Parameter& p : bag.items) {
      const Values values = draw.values(p.shape().numel(), 0.1f, 2);
      set(p, values);
      references.emplace_back(values);
    }
  }
  std::map<std::size_t, Values> gradients(const std::vector<std::size_t>& of) {
    std::map<std::size_t, Values> out;
    for (const std::size_t i : of) out[i] = draw.values(bag.items[i].shape().numel(), 0.5f, 2);
    return out;
  }
  Ledger& ledger() { return Memory::of(device).ledger(); }
};

}  // namespace tessera::testing
