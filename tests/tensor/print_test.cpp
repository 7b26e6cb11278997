// Printing: the expected texts are what NumPy 2.4 prints for the same arrays,
// str(numpy.array(...)).
#include <limits>

#include "tests/tensor/host.hpp"

using namespace tessera;
using namespace tessera::testing;

namespace {

std::string print(const std::vector<double>& values, const Shape& shape, DType dtype = f32) {
  const Device device = Device::cpu({.executor = ExecutorKind::inlined});
  return to_device({shape, values}, dtype, device).to_string();
}
constexpr double kInf = std::numeric_limits<double>::infinity();

}  // namespace

TEST_CASE("floats align at the point and drop zeros that tell nothing") {
  CHECK(print({1, 2, 3}, {3}) == "[1. 2. 3.]");
  CHECK(print({1, 2.5, -0.125}, {3}) == "[ 1.     2.5   -0.125]");
  CHECK(print({0.1, 0.2, 0.7}, {3}) == "[0.1 0.2 0.7]");
  CHECK(print({1.0 / 3, 2.0 / 3}, {2}) == "[0.33333334 0.6666667 ]");
  CHECK(print({1.0 / 3, 2.0 / 3}, {2}, f64) == "[0.33333333 0.66666667]");
  CHECK(print({-0.0, 100.25}, {2}) == "[ -0.   100.25]");
}

TEST_CASE("values far apart, large or small print with exponents") {
  CHECK(print({1, 2000}, {2}) == "[1.e+00 2.e+03]");
  CHECK(print({1e-5, 2.5e-3}, {2}) == "[1.0e-05 2.5e-03]");
  CHECK(print({123456789, 1}, {2}, f64) == "[1.23456789e+08 1.00000000e+00]");
  CHECK(print({1e100, -1}, {2}, f64) == "[ 1.e+100 -1.e+000]");
  CHECK(print({0.1, 1e-5}, {2}) == "[1.e-01 1.e-05]");
}

TEST_CASE("infinities and NaN take part in the alignment") {
  CHECK(print({std::nan(""), 1, -kInf, kInf}, {4}) == "[ nan   1. -inf  inf]");
  CHECK(print({std::nan(""), std::nan("")}, {2}) == "[nan nan]");
  CHECK(print({kInf, 1234.5}, {2}) == "[   inf 1234.5]");
}

TEST_CASE("matrices and stacks nest with one blank line per level") {
  CHECK(print({1, 2, 3, 4}, {2, 2}) ==
        "[[1. 2.]\n"
        " [3. 4.]]");
  CHECK(print({1, -2, 3, 4, 5, 60, 7, 8}, {2, 2, 2}, i64) ==
        "[[[ 1 -2]\n"
        "  [ 3  4]]\n"
        "\n"
        " [[ 5 60]\n"
        "  [ 7  8]]]");
  CHECK(print({1, 2}, {2, 1, 1}, i32) ==
        "[[[1]]\n"
        "\n"
        " [[2]]]");
}

TEST_CASE("integers align to the right, truth values too") {
  CHECK(print({1, -20, 300}, {3}, i32) == "[  1 -20 300]");
  CHECK(print({1, 0, 0, 1}, {2, 2}, boolean) ==
        "[[ True False]\n"
        " [False  True]]");
  const Device device = Device::cpu({.executor = ExecutorKind::inlined});
  const std::vector<std::int64_t> large{9007199254740993, std::numeric_limits<std::int64_t>::min()};
  CHECK(Tensor::from(large, {2}, device).to_string() ==  // beyond what a double holds
        "[    9007199254740993 -9223372036854775808]");
}

TEST_CASE("a tensor without dimensions prints as a number") {
  CHECK(print({3}, {}) == "3.0");
  CHECK(print({0.1}, {}) == "0.1");
  CHECK(print({1e-5}, {}) == "1e-05");
  CHECK(print({2.5e16}, {}, f64) == "2.5e+16");
  CHECK(print({-7}, {}, i64) == "-7");
  CHECK(print({1}, {}, boolean) == "True");
  CHECK(print({-kInf}, {}) == "-inf");
}

TEST_CASE("16-bit floats print the digits that they hold") {
  CHECK(print({0.1, 3.14159}, {2}, f16) == "[0.1  3.14]");
  CHECK(print({65504, 1}, {2}, f16) == "[6.55e+04 1.00e+00]");
  CHECK(print({0.1, 3.14159}, {2}, bf16) == "[0.1  3.14]");  // NumPy has no such dtype
}

TEST_CASE("more than a thousand elements are shortened to three at each end") {
  const Device device = Device::cpu({.executor = ExecutorKind::inlined});
  CHECK(Tensor::arange(1001, i64, device).to_string() == "[   0    1    2 ...  998  999 1000]");
  CHECK(raw::reshape(Tensor::arange(2000, i32, device), {40, 50}).to_string() ==
        "[[   0    1    2 ...   47   48   49]\n"
        " [  50   51   52 ...   97   98   99]\n"
        " [ 100  101  102 ...  147  148  149]\n"
        " ...\n"
        " [1850 1851 1852 ... 1897 1898 1899]\n"
        " [1900 1901 1902 ... 1947 1948 1949]\n"
        " [1950 1951 1952 ... 1997 1998 1999]]");
  CHECK(raw::reshape(Tensor::arange(1002, f32, device), {2, 501}).to_string() ==
        "[[0.000e+00 1.000e+00 2.000e+00 ... 4.980e+02 4.990e+02 5.000e+02]\n"
        " [5.010e+02 5.020e+02 5.030e+02 ... 9.990e+02 1.000e+03 1.001e+03]]");
}

TEST_CASE("long rows wrap at 75 columns") {
  const Device device = Device::cpu({.executor = ExecutorKind::inlined});
  CHECK(Tensor::arange(40, i32, device).to_string() ==
        "[ 0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15 16 17 18 19 20 21 22 23\n"
        " 24 25 26 27 28 29 30 31 32 33 34 35 36 37 38 39]");
}

TEST_CASE("views print as what they show, and nothing prints as brackets") {
  const Device device = Device::cpu({.executor = ExecutorKind::inlined});
  const Tensor x = raw::reshape(Tensor::arange(6, f32, device), {2, 3});
  CHECK(raw::transpose(x, 0, 1).to_string() ==
        "[[0. 3.]\n"
        " [1. 4.]\n"
        " [2. 5.]]");
  CHECK(concat(raw::slice(x, 1, 1, 2)) ==
        "[[1.]\n"
        " [4.]]");
  CHECK(print({}, {2, 0}) == "[]");
  CHECK(Tensor().to_string() == "undefined");
}
