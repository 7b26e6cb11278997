// Rows of a table by id, and their gradient; see kernels/rows_by_id.hpp for the order of its sums.
#include "kernels/embedding.hpp"

#include "kernels/cuda/indexed.hpp"
#include "kernels/cuda/kernels.hpp"
#include "kernels/formulas.hpp"

namespace tessera::kernels::cuda {

namespace {

template <class U>
struct Clear {
  U* data;
  std::int64_t count;

  TESSERA_DEVICE void operator()(Thread& t) const {
    for (std::int64_t i = t.global_index(); i < count; i += t.global_threads())
      data[i] = indexed::unit_of<U>(0);
  }
};

struct Locate {
  LocateArgs a;

  TESSERA_DEVICE void operator()(Thread& t) const {
    const indexed::Ids ids = {a.ids, a.id_dtype == DType::i64};
    for (std::int64_t i = t.global_index(); i < a.count; i += t.global_threads())
      locate_one(a, i, ids[i]);
  }
};

}  // namespace

void locate(const LocateArgs& a, Exec& exec) {
  launch<indexed::kThreads>(exec, {blocks_for(a.count, indexed::kThreads)}, 0, Locate{a});
}

void embedding(const EmbeddingArgs& a, Exec& exec) {
  indexed::copy_rows({a.out, const_cast<void*>(a.table), indexed::ids_of(a.ids, a.id_dtype), 1,
                      a.vocab, a.count, a.cols},
                     a.dtype, exec, a.is_part);
}

void embedding_backward(const EmbeddingBackwardArgs& a, Exec& exec) {
  if (!a.accumulate)
    indexed::with_unit(a.grad_dtype, a.vocab * a.cols, are_aligned(static_cast<char*>(a.d_table)),
                       [&](auto unit, std::int64_t units) {
                         using U = decltype(unit);
                         const std::int64_t blocks = blocks_for(units, 4 * indexed::kThreads);
                         launch<indexed::kThreads>(exec, {blocks}, 0,
                                                   Clear<U>{static_cast<U*>(a.d_table), units});
                       });
  indexed::add_rows({const_cast<void*>(a.dy), a.d_table, indexed::ids_of(a.ids, a.id_dtype), 1,
                     a.vocab, a.count, a.cols},
                    a.order, a.workspace, a.dtype, a.grad_dtype, a.scale, exec);
}

}  // namespace tessera::kernels::cuda
