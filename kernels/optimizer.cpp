#include "kernels/optimizer.hpp"

#include <cmath>

#include "kernels/host/cpu.hpp"
#include "kernels/host/ranges.hpp"
#include "kernels/host/rows.hpp"

namespace tessera::kernels::cpu {

using namespace host;

namespace {

using V = Vec<float>;

// Calls f(segment, begin, end) over the segments that have a gradient.
template <class F>
void for_segments(Exec& exec, const OptimSegment* segments, std::int32_t count, const float* counts,
                  F f) {
  for (std::int32_t s = 0; s < count; ++s) {
    const OptimSegment segment = segments[s];
    if (counts != nullptr && segment.count_index >= 0 && counts[segment.count_index] == 0) continue;
    for_ranges(exec, segment.end - segment.begin, kGrain,
               [&](std::int64_t begin, std::int64_t end) {
                 f(segment, segment.begin + begin, segment.begin + end);
               });
  }
}

}  // namespace

void adamw(const AdamWArgs& a, Exec& exec) {
  const OptimScalars s = *a.scalars;
  const V beta1(s.beta1), beta2(s.beta2), rest1(1 - s.beta1), rest2(1 - s.beta2), eps(s.eps);
  const V factor(s.grad_scale * (a.clip == nullptr ? 1.0f : *a.clip));
  const V rate(s.lr / s.bias_correction1), root(1 / std::sqrt(s.bias_correction2));
  for_segments(exec, a.segments, a.segment_count, a.counts,
               [&](const OptimSegment& segment, std::int64_t begin, std::int64_t end) {
                 const V decay(1 - s.lr * segment.weight_decay);
                 for_lanes<float>(end - begin, [&](std::int64_t i, auto io) {
                   const V g = io.load(a.gradient + begin + i) * factor;
                   const V m = fma(beta1, io.load(a.m + begin + i), rest1 * g);
                   const V v = fma(beta2, io.load(a.v + begin + i), rest2 * g * g);
                   const V p = io.load(a.parameter + begin + i) * decay;
                   io.store(a.m + begin + i, m);
                   io.store(a.v + begin + i, v);
                   io.store(a.parameter + begin + i, p - rate * m / fma(sqrt(v), root, eps));
                 });
               });
}

void sgd(const SgdArgs& a, Exec& exec) {
  const OptimScalars s = *a.scalars;
  const V factor(s.grad_scale * (a.clip == nullptr ? 1.0f : *a.clip)), rate(s.lr),
      momentum(s.momentum);
  for_segments(exec, a.segments, a.segment_count, a.counts,
               [&](const OptimSegment& segment, std::int64_t begin, std::int64_t end) {
                 const V decay(segment.weight_decay);
                 for_lanes<float>(end - begin, [&](std::int64_t i, auto io) {
                   const V p = io.load(a.parameter + begin + i);
                   V g = fma(decay, p, io.load(a.gradient + begin + i) * factor);
                   if (a.buffer != nullptr) {
                     g = fma(momentum, io.load(a.buffer + begin + i), g);
                     io.store(a.buffer + begin + i, g);
                   }
                   io.store(a.parameter + begin + i, p - rate * g);
                 });
               });
}

void clip(const ClipArgs& a, Exec&) {
  const double sum = a.dtype == DType::f64
                         ? *static_cast<const double*>(a.sumsq)
                         : static_cast<double>(*static_cast<const float*>(a.sumsq));
  const double norm = std::sqrt(sum), ratio = a.max_norm / (norm + 1e-6);
  if (a.norm != nullptr) *a.norm = static_cast<float>(norm);
  if (a.coefficient != nullptr) *a.coefficient = static_cast<float>(ratio > 1 ? 1 : ratio);
}

void scale_flat(const ScaleFlatArgs& a, Exec& exec) {
  if (*a.factor == 1) return;
  const V factor(*a.factor);
  for_ranges(exec, a.count, kGrain, [&](std::int64_t begin, std::int64_t end) {
    map(a.data + begin, end - begin, [factor](V x) { return x * factor; }, a.data + begin);
  });
}

void put_scalars(const PutScalarsArgs& a, Exec&) { *a.out = a.values; }

}  // namespace tessera::kernels::cpu
