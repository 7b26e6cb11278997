// Optimizer steps over a unit's flat array in one launch: blocks take chunks of segments, read
// arrival counts and scalars where they lie, and move four elements at a time.
#include <cmath>

#include "kernels/cuda/chunks.hpp"
#include "kernels/cuda/elements.hpp"
#include "kernels/cuda/kernels.hpp"
#include "kernels/cuda/math.hpp"
#include "tessera/kernels/update_formulas.hpp"

namespace tessera::kernels::cuda {

namespace {

// Elements of a chunk: one group of four for each thread. Chunks start at multiples of four of the
// flat array, so the first and the last of a segment may be partly its neighbours'.
constexpr std::int64_t kChunk = 4 * kChunkThreads;

static_assert(kMostScalarBytes / 4 <= kWarp);  // a word for each thread of PutScalars

using Four = Pack<float, 4>;

template <class Tag>
struct Segments {
  using V = Value<float>;
  UpdateArgs a;
  bool aligned;

  TESSERA_DEVICE void operator()(Thread& t) const {
    const auto chunks = [this](int s) {
      const FlatSegment segment = a.segments[s];
      const bool none =
          a.counts != nullptr && segment.count_index >= 0 && a.counts[segment.count_index] == 0;
      if (none || segment.end <= segment.begin) return std::int64_t{0};
      return (segment.end - segment.begin / 4 * 4 + kChunk - 1) / kChunk;
    };
    for_chunks(t, a.segment_count, chunks, [&](int s, std::int64_t chunk) {
      const FlatSegment segment = a.segments[s];
      const UpdateScalars scalars = *a.scalars;
      const Update<Tag::op, V> update(scalars, segment);
      const float factor = scalars.grad_scale * (a.clip == nullptr ? 1.0f : *a.clip);
      const std::int64_t begin = segment.begin / 4 * 4 + chunk * kChunk, end = begin + kChunk;
      for_fours(
          t, begin < segment.begin ? segment.begin : begin, end < segment.end ? end : segment.end,
          aligned, [&](std::int64_t i) { elements<4>(update, segment, factor, i); },
          [&](std::int64_t i) { elements<1>(update, segment, factor, i); });
    });
  }

 private:
  // Of what is aligned; as a struct the moments would go in four stores.
  static TESSERA_DEVICE void put(float* to, const Four& pack) { store_whole(to, &pack); }
  static TESSERA_DEVICE void put(float* to, const Pack<float, 1>& one) { *to = one.at[0]; }

  template <int N>
  TESSERA_DEVICE void elements(const Update<Tag::op, V>& update, const FlatSegment& segment,
                               float factor, std::int64_t i) const {
    const bool keeps = a.moments[0] != nullptr;
    const std::int64_t moment = i + segment.moment_shift;
    const Pack<float, N> g = load<N>(a.gradient + i + segment.gradient_shift);
    Pack<float, N> p = load<N>(a.values + i), kept[Tag::moments];
    for (int k = 0; keeps && k < Tag::moments; ++k) kept[k] = load<N>(a.moments[k] + moment);
    for (int j = 0; j < N; ++j) {
      V moments[Tag::moments];
      for (int k = 0; keeps && k < Tag::moments; ++k) moments[k] = V(kept[k].at[j]);
      p.at[j] =
          update(V(p.at[j]), V(cuda::rounded_product(g.at[j], factor)), keeps ? moments : nullptr)
              .v;
      for (int k = 0; keeps && k < Tag::moments; ++k) kept[k].at[j] = moments[k].v;
    }
    for (int k = 0; keeps && k < Tag::moments; ++k) put(a.moments[k] + moment, kept[k]);
    put(a.values + i, p);
  }
};

struct Clip {
  ClipArgs a;

  TESSERA_DEVICE void operator()(Thread& t) const {
    if (t.index() != 0) return;
    const double sum = a.dtype == DType::f64
                           ? *static_cast<const double*>(a.sumsq)
                           : static_cast<double>(*static_cast<const float*>(a.sumsq));
    const double norm = std::sqrt(sum), ratio = a.max_norm / (norm + 1e-6);
    if (a.norm != nullptr) *a.norm = static_cast<float>(norm);
    if (a.coefficient != nullptr) *a.coefficient = static_cast<float>(ratio > 1 ? 1 : ratio);
  }
};

struct ScaleFlat {
  float* data;
  const float* factor;
  std::int64_t count;
  bool aligned;

  struct Item {
    Four x;
  };
  TESSERA_DEVICE int elements(std::int64_t pack) const {
    return count - 4 * pack < 4 ? static_cast<int>(count - 4 * pack) : 4;
  }
  TESSERA_DEVICE Item load(std::int64_t pack) const {
    if (*factor == 1) return {};
    const float* from = data + 4 * pack;
    return {aligned ? load_most<4>(from, elements(pack)) : load_few<4>(from, elements(pack))};
  }
  TESSERA_DEVICE void finish(std::int64_t pack, const Item& item) const {
    const float by = *factor;
    if (by == 1) return;
    Four y = item.x;
    for (float& x : y.at) x *= by;
    aligned ? store_most(data + 4 * pack, y, elements(pack))
            : store_few(data + 4 * pack, y, elements(pack));
  }
};

struct PutScalars {
  PutScalarsArgs a;

  TESSERA_DEVICE void operator()(Thread& t) const {
    if (t.index() < a.count) static_cast<std::uint32_t*>(a.out)[t.index()] = a.values[t.index()];
  }
};

}  // namespace

void update(const UpdateArgs& a, Exec& exec) {
  // Moments that are null are aligned.
  visit_update(a.op, [&](auto tag) {
    launch<kChunkThreads>(exec, chunk_grid(a.segment_count), kChunkShared,
                          Segments<decltype(tag)>{a, are_aligned(a.values, a.gradient, a.moments[0],
                                                                 a.moments[1], a.moments[2])});
  });
}

void clip(const ClipArgs& a, Exec& exec) { launch<kWarp>(exec, Grid{1}, 0, Clip{a}); }

void scale_flat(const ScaleFlatArgs& a, Exec& exec) {
  launch_packs<4>(exec, blocks_for(a.count, 4),
                  ScaleFlat{a.data, a.factor, a.count, are_aligned(a.data)});
}

void put_scalars(const PutScalarsArgs& a, Exec& exec) {
  launch<kWarp>(exec, Grid{1}, 0, PutScalars{a});
}

}  // namespace tessera::kernels::cuda
