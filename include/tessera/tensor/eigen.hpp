// Eigen's view of a tensor's values, without a copy. It is for programs that include <Eigen/Core>
// themselves, before this header or behind it. tessera/tessera.hpp leaves it out.
//
//   const auto w = eigen_matrix<float>(weight);       // [rows, columns], row-major
//   const Eigen::VectorXf y = w * eigen_vector<float>(x);
#pragma once

#include "tessera/tensor/tensor.hpp"

namespace Eigen {  // as <Eigen/Core> declares them; its defaults are spelt out below
template <class Scalar, int Rows, int Columns, int Options, int MostRows, int MostColumns>
class Matrix;
template <int Outer, int Inner>
class Stride;
template <class Plain, int Options, class Strides>
class Map;
}  // namespace Eigen

namespace tessera {

// Matrix<T, Dynamic, Dynamic, RowMajor>, Matrix<T, Dynamic, 1>, and Map of these.
template <class T>
using EigenMatrix = Eigen::Matrix<T, -1, -1, 1, -1, -1>;
template <class T>
using EigenVector = Eigen::Matrix<T, -1, 1, 0, -1, 1>;
template <class M>
using EigenMap = Eigen::Map<M, 0, Eigen::Stride<0, 0>>;

// Maps a contiguous CPU tensor of two dimensions, or of one. The host blocks until its values are
// there. Valid as `to_span` is, and as long as `x` lives.
// Throws: as Tensor::to_span, and ContractError for another number of dimensions.
template <class T>
EigenMap<const EigenMatrix<T>> eigen_matrix(const Tensor& x) {
  TESSERA_EXPECT(x.ndim() == 2, "eigen_matrix: the tensor has shape ", x.shape(),
                 ", expected two dimensions");
  return {x.to_span<T>().data(), x.size(0), x.size(1)};
}
template <class T>
EigenMap<const EigenVector<T>> eigen_vector(const Tensor& x) {
  TESSERA_EXPECT(x.ndim() == 1, "eigen_vector: the tensor has shape ", x.shape(),
                 ", expected one dimension");
  return {x.to_span<T>().data(), x.size(0)};
}

// Maps it for the host to write, as Tensor::to_writable_span.
template <class T>
EigenMap<EigenMatrix<T>> writable_eigen_matrix(const Tensor& x) {
  TESSERA_EXPECT(x.ndim() == 2, "writable_eigen_matrix: the tensor has shape ", x.shape(),
                 ", expected two dimensions");
  return {x.to_writable_span<T>().data(), x.size(0), x.size(1)};
}
template <class T>
EigenMap<EigenVector<T>> writable_eigen_vector(const Tensor& x) {
  TESSERA_EXPECT(x.ndim() == 1, "writable_eigen_vector: the tensor has shape ", x.shape(),
                 ", expected one dimension");
  return {x.to_writable_span<T>().data(), x.size(0)};
}

// A map of a temporary would outlive its bytes.
template <class T>
void eigen_matrix(Tensor&&) = delete;
template <class T>
void eigen_vector(Tensor&&) = delete;
template <class T>
void writable_eigen_matrix(Tensor&&) = delete;
template <class T>
void writable_eigen_vector(Tensor&&) = delete;

}  // namespace tessera
