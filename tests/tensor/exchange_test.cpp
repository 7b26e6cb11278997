// Values that change hands without a copy: spans, DLPack and Eigen maps of tensors.
#include <Eigen/Core>
#include <array>
#include <atomic>
#include <numeric>
#include <thread>

#include "tessera/device/device_context.hpp"
#include "tessera/device/observe/race_checker.hpp"
#include "tessera/tensor/dlpack.hpp"
#include "tessera/tensor/eigen.hpp"
#include "tests/tensor/host.hpp"

using namespace tessera;
using namespace tessera::testing;
using Catch::Matchers::Contains;
using dlpack::DLManagedTensor;
using dlpack::DLManagedTensorVersioned;
using dlpack::Owned;

namespace {

constexpr DType kAllDTypes[] = {f32, bf16, f16, f64, i32, i64, boolean};

// An array of another library: [2, 3] floats, whose deleter counts.
template <class Managed>
struct Foreign {
  std::vector<float> values = {0, 1, 2, 3, 4, 5};
  std::array<std::int64_t, 2> shape{2, 3}, strides{3, 1};
  int deleted = 0;
  Managed managed{};

  Foreign() {
    managed.dl_tensor = {values.data(), {1, 0}, 2, {2, 32, 1}, shape.data(), strides.data(), 0};
    managed.manager_ctx = this;
    managed.deleter = [](Managed* self) { ++static_cast<Foreign*>(self->manager_ctx)->deleted; };
    if constexpr (requires { managed.version; }) managed.version = {1, 1};
  }
  Owned<Managed> lend() { return Owned<Managed>(&managed); }
};
using ForeignTensor = Foreign<DLManagedTensorVersioned>;

std::vector<float> values_of(const Tensor& x) { return x.to_vector<float>(); }

// Makes the compute stream sleep until `open`.
void hold_up(const Device& device, const std::atomic<bool>& open) {
  device.compute().launch({.name = "hold up"}, [&open](Exec&) { open.wait(false); });
}

struct Watched {
  std::shared_ptr<RaceChecker> checker = RaceChecker::make();
  Device device = Device::cpu();
  Watched() { checker->watch(device.context()); }
};

}  // namespace

TEST_CASE("a tensor is made from spans and read where it lies") {
  const Device device = any_device();
  std::array<double, 6> values{0, 1, 2, 3, 4, 5};
  const Tensor x = Tensor::from(std::span(values), {2, 3}, device);
  values.fill(-1);  // it was copied
  const std::span<const double> seen = x.to_span<double>();
  CHECK(std::vector(seen.begin(), seen.end()) == std::vector<double>{0, 1, 2, 3, 4, 5});
  CHECK(static_cast<const void*>(seen.data()) == x.data());
  const Tensor row = raw::slice(x, 0, 1, 2);
  CHECK(row.to_span<double>()[2] == 5);
  row.to_writable_span<double>()[0] = 30;
  CHECK(raw::mul(x, 2.0).to_vector<double>() == std::vector<double>{0, 2, 4, 60, 8, 10});
  const Tensor none = Tensor::zeros({2, 0}, f32, device);
  CHECK(none.to_span<float>().empty());
}

TEST_CASE("a span waits for what was submitted on its bytes") {
  const Device device = Device::cpu();
  std::atomic<bool> open = false;
  hold_up(device, open);
  const Tensor x = Tensor::full({3}, 7, f32, device);
  std::jthread opener([&] {
    open = true;
    open.notify_all();
  });
  CHECK(x.to_span<float>()[2] == 7);
}

TEST_CASE("spans of what the host cannot see, or not so, are refused in one line") {
  const Device device = Device::cpu();
  const Tensor x = Tensor::zeros({2, 3}, f32, device);
  const Tensor turned = raw::transpose(x, 0, 1), meta = Tensor::zeros({2}, f32, Device::meta());
  const Tensor planned = Tensor::zeros({2}, f32, Device::cpu({.executor = ExecutorKind::virtual_}));
  CHECK_THROWS_WITH(x.to_span<double>(), Contains("f32") && Contains("f64"));
  CHECK_THROWS_WITH(turned.to_span<float>(), Contains("[1, 3]") && Contains("contiguous"));
  CHECK_THROWS_WITH(meta.to_span<float>(), Contains("meta"));
  CHECK_THROWS_WITH(planned.to_span<float>(), Contains("to_vector"));
}

TEST_CASE("the race checker sees the host read and write spans") {
  const Watched ordered;
  {
    const Tensor x = Tensor::ones({8}, f32, ordered.device);
    x.to_writable_span<float>()[0] = 5;
    const Tensor y = raw::add(x, x);
    CHECK(y.to_span<float>()[0] == 10);
    x.to_writable_span<float>()[0] = 6;
  }
  ordered.device.synchronize();
  CHECK(ordered.checker->race_count() == 0);

  const Watched racing;
  const Tensor x = Tensor::ones({8}, f32, racing.device);
  const std::span<float> kept = x.to_writable_span<float>();
  const Tensor y = raw::add(x, x);
  // What a program that writes on must not do.
  racing.device.context().host_writes(kept.data(), kept.size_bytes());
  racing.device.synchronize();
  CHECK(racing.checker->race_count() == 1);
}

TEST_CASE("dlpack: every dtype goes out and comes in, in any layout") {
  const Device device = any_device(), other = Device::cpu();
  Draw draw;
  INFO("seed " << draw.seed);
  std::vector<View> views = same_shape_views();
  for (const View& view : odd_views()) views.push_back(view);
  for (const DType dtype : kAllDTypes)
    for (const View& view : views) {
      INFO(dtype << ", " << view.name);
      const auto [x, host] = draw(view, dtype, device);
      check_values(from_dlpack(to_dlpack(x), device), dtype, host);
      check_values(from_dlpack(to_dlpack(x), other), dtype, host);
      check_values(from_dlpack(to_dlpack<DLManagedTensor>(x, AccessMode::write), other), dtype,
                   host);
    }
}

TEST_CASE("dlpack: the struct says what the public one says") {
  const Device device = Device::cpu();
  const Tensor x = raw::transpose(Tensor::ones({2, 3}, bf16, device), 0, 1);
  const auto lent = to_dlpack(x);
  CHECK((lent->version.major == 1 && lent->flags == 1));
  const dlpack::DLTensor& t = lent->dl_tensor;
  CHECK((t.data == x.data() && t.byte_offset == 0 && t.ndim == 2));
  CHECK((t.device.device_type == 1 && t.device.device_id == 0));
  CHECK((t.dtype.code == 4 && t.dtype.bits == 16 && t.dtype.lanes == 1));
  CHECK((t.shape[0] == 3 && t.shape[1] == 2 && t.strides[0] == 1 && t.strides[1] == 3));
  CHECK(to_dlpack(x, AccessMode::write)->flags == 0);
  // Offsets in the 64-bit ABI of dlpack.h 1.x.
  static_assert(sizeof(dlpack::DLTensor) == 48 && sizeof(DLManagedTensor) == 64 &&
                sizeof(DLManagedTensorVersioned) == 80);
  static_assert(offsetof(dlpack::DLTensor, shape) == 24 &&
                offsetof(dlpack::DLTensor, byte_offset) == 40);
  static_assert(offsetof(DLManagedTensorVersioned, manager_ctx) == 8 &&
                offsetof(DLManagedTensorVersioned, flags) == 24 &&
                offsetof(DLManagedTensorVersioned, dl_tensor) == 32);
}

TEST_CASE("dlpack: what is lent stays until the deleter is called, and no longer") {
  const Device device = any_device();
  const Ledger& ledger = Memory::of(device).ledger();
  auto lent = to_dlpack(Tensor::ones({1000}, f32, device));
  CHECK(ledger.live_bytes() == 4096);
  CHECK(static_cast<const float*>(lent->dl_tensor.data)[999] == 1);
  lent.reset();
  CHECK(ledger.live_bytes() == 0);
}

TEST_CASE("dlpack: values are there when a tensor is lent, and written ones are seen") {
  const Device device = Device::cpu();
  std::atomic<bool> open = false;
  hold_up(device, open);
  const Tensor x = Tensor::full({2}, 3, f32, device);
  std::jthread opener([&] {
    open = true;
    open.notify_all();
  });
  const auto lent = to_dlpack(x, AccessMode::write);
  auto* const values = static_cast<float*>(lent->dl_tensor.data);
  CHECK(values[1] == 3);
  values[1] = 4;
  CHECK(values_of(raw::add(x, x)) == std::vector<float>{6, 8});
}

TEMPLATE_TEST_CASE("dlpack: a borrowed array goes back once, with its last tensor", "",
                   DLManagedTensor, DLManagedTensorVersioned) {
  Foreign<TestType> array;
  {
    const Device device = any_device();
    Tensor row;
    {
      const Tensor x = from_dlpack(array.lend(), device);
      CHECK(x.data() == reinterpret_cast<std::byte*>(array.values.data()));
      CHECK(values_of(x) == array.values);
      row = raw::slice(x, 0, 1, 2);
    }
    CHECK(array.deleted == 0);
    CHECK(values_of(row) == std::vector<float>{3, 4, 5});
    row = {};
    device.synchronize();
    CHECK(array.deleted == 1);
  }
  CHECK(array.deleted == 1);
}

TEST_CASE("dlpack: a borrowed array stays until queued operations have read it") {
  ForeignTensor array;
  const Device device = Device::cpu();
  std::atomic<bool> open = false;
  hold_up(device, open);
  const Tensor twice = [&] {
    const Tensor x = from_dlpack(array.lend(), device);
    return raw::add(x, x);
  }();
  CHECK(array.deleted == 0);
  open = true;
  open.notify_all();
  CHECK(values_of(twice) == std::vector<float>{0, 2, 4, 6, 8, 10});
  CHECK(array.deleted == 1);
}

TEST_CASE("dlpack: an exception on the way gives back once") {
  ForeignTensor array;
  const Device device = any_device();
  const auto fails = [&] {
    const Tensor x = from_dlpack(array.lend(), device), y = raw::neg(x);
    throw std::runtime_error("in the user's code");
  };
  CHECK_THROWS_AS(fails(), std::runtime_error);
  device.synchronize();
  CHECK(array.deleted == 1);

  ForeignTensor bad;
  bad.managed.dl_tensor.dtype.lanes = 4;
  CHECK_THROWS_AS(from_dlpack(bad.lend(), device), ContractError);
  CHECK(bad.deleted == 1);
}

TEST_CASE("dlpack: the last tensor may outlive every other handle of its device") {
  ForeignTensor array;
  Tensor x = from_dlpack(array.lend(), Device::cpu());
  CHECK(array.deleted == 0);
  x = {};
  CHECK(array.deleted == 1);
}

TEST_CASE("dlpack: nothing is written where memory is lent read-only, or in place of a borrowed") {
  const Device device = any_device();
  ForeignTensor array;
  array.managed.flags = dlpack::kReadOnly;
  const Tensor x = from_dlpack(array.lend(), device);
  CHECK(x.is_read_only());
  CHECK_THROWS_WITH(raw::fill(x, 1), Contains("read-only"));
  CHECK_THROWS_WITH(x.to_writable_span<float>(), Contains("read-only"));
  CHECK_THROWS_WITH(to_dlpack(x, AccessMode::write), Contains("read-only"));
  CHECK(to_dlpack(x)->flags == dlpack::kReadOnly);

  ForeignTensor shared;
  CHECK_FALSE(from_dlpack(shared.lend(), device).is_exclusive());

  const Tensor own = Tensor::ones({2}, f32, device);
  const Tensor back = from_dlpack(to_dlpack(own), device);
  CHECK(back.data() == own.data());
  CHECK_THROWS_WITH(raw::fill(back, 2), Contains("read-only"));
  raw::fill(from_dlpack(to_dlpack(own, AccessMode::write), device), 2);
  CHECK(values_of(own) == std::vector<float>{2, 2});

  const auto parameter = std::make_shared<const std::string>("w");
  const Tensor held = Tensor::ones({2}, f32, device).read_only(parameter);
  CHECK_THROWS_WITH(held.to_writable_span<float>(), Contains("'w'"));
  CHECK_THROWS_WITH(to_dlpack(held, AccessMode::write), Contains("'w'"));
  CHECK_THROWS_WITH(writable_eigen_vector<float>(held), Contains("'w'"));
  CHECK(held.to_span<float>()[1] == 1);
}

TEST_CASE("dlpack: what does not fit is refused in one line that names it") {
  const Device device = Device::cpu();
  struct Case {
    const char* says;
    std::function<void(ForeignTensor&)> spoil;
  };
  const Case cases[] = {
      {"version 2.0", [](ForeignTensor& a) { a.managed.version = {2, 0}; }},
      {"device type 2", [](ForeignTensor& a) { a.managed.dl_tensor.device.device_type = 2; }},
      {"4 lanes", [](ForeignTensor& a) { a.managed.dl_tensor.dtype.lanes = 4; }},
      {"no dtype uint16;", [](ForeignTensor& a) { a.managed.dl_tensor.dtype = {1, 16, 1}; }},
      {"no dtype complex64;", [](ForeignTensor& a) { a.managed.dl_tensor.dtype = {5, 64, 1}; }},
      {"is null", [](ForeignTensor& a) { a.managed.dl_tensor.data = nullptr; }},
      {"shape is null", [](ForeignTensor& a) { a.managed.dl_tensor.shape = nullptr; }},
      {"7 dimensions", [](ForeignTensor& a) { a.managed.dl_tensor.ndim = 7; }},
      {"-1 dimensions", [](ForeignTensor& a) { a.managed.dl_tensor.ndim = -1; }},
      {"negative size", [](ForeignTensor& a) { a.shape[0] = -2; }},
      {"go backwards", [](ForeignTensor& a) { a.strides[0] = -3; }},
      {"overflow", [](ForeignTensor& a) { a.strides[0] = std::int64_t{1} << 62; }},
      {"no multiple of the 4", [](ForeignTensor& a) { a.managed.dl_tensor.byte_offset = 2; }},
  };
  for (const Case& c : cases) {
    ForeignTensor array;
    c.spoil(array);
    INFO(c.says);
    std::string message;
    try {
      from_dlpack(array.lend(), device);
    } catch (const ContractError& error) {
      message = error.what();
    }
    CHECK_THAT(message, Contains(c.says));
    CHECK(message.find('\n') == std::string::npos);
    CHECK(array.deleted == 1);
  }
  CHECK_THROWS_WITH(from_dlpack(Owned<DLManagedTensor>(), device), Contains("null"));
  ForeignTensor array;
  CHECK_THROWS_WITH(from_dlpack(array.lend(), Device::meta()), Contains("not a CPU"));
  const Tensor x = Tensor::ones({2}, f32, device);
  CHECK_THROWS_WITH(to_dlpack<DLManagedTensor>(x), Contains("DLManagedTensorVersioned"));
  Tensor leaf = Tensor::ones({2}, f32, device);
  leaf.require_grad();
  CHECK_THROWS_WITH(to_dlpack(leaf), Contains("detach"));
  CHECK_THROWS_WITH(to_dlpack(Tensor::ones({2}, f32, Device::meta())), Contains("meta"));
}

TEST_CASE("dlpack: row-major without strides, an offset, odd strides of size 1, no elements") {
  const Device device = Device::cpu();
  ForeignTensor packed;
  packed.managed.dl_tensor.strides = nullptr;
  CHECK(values_of(from_dlpack(packed.lend(), device)) == packed.values);
  ForeignTensor offset;
  offset.shape = {1, 3};
  offset.strides = {-7, 1};
  offset.managed.dl_tensor.byte_offset = 12;
  CHECK(values_of(from_dlpack(offset.lend(), device)) == std::vector<float>{3, 4, 5});
  ForeignTensor empty;
  empty.shape = {0, 3};
  empty.managed.dl_tensor.data = nullptr;
  CHECK(values_of(from_dlpack(empty.lend(), device)).empty());
  CHECK(empty.deleted == 1);
}

TEST_CASE("dlpack: the race checker knows when the lender may write") {
  const Watched watched;
  for (int i = 0; i < 3; ++i) {
    ForeignTensor array;
    {
      const Tensor x = from_dlpack(array.lend(), watched.device);
      CHECK(values_of(raw::add(x, x))[5] == 10);
      const auto lent = to_dlpack(Tensor::ones({4}, f32, watched.device), AccessMode::write);
      const Tensor again = from_dlpack(to_dlpack(x), watched.device);
    }
    watched.device.synchronize();
    CHECK(array.deleted == 1);
  }
  for (const Race& race : watched.checker->races()) UNSCOPED_INFO(race.to_string());
  CHECK(watched.checker->race_count() == 0);
  // A lender that takes its array back while an operation may read it is seen.
  ForeignTensor array;
  const Tensor x = from_dlpack(array.lend(), watched.device), y = raw::add(x, x);
  watched.device.context().host_writes(array.values.data(), 24);
  CHECK(watched.checker->race_count() == 1);
  watched.device.synchronize();  // the array goes before the device does
}

// What eigen.hpp spells out is what programs that have Eigen write.
static_assert(
    std::is_same_v<EigenMatrix<float>,
                   Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>>);
static_assert(std::is_same_v<EigenVector<double>, Eigen::Matrix<double, Eigen::Dynamic, 1>>);
static_assert(std::is_same_v<EigenMap<EigenVector<float>>, Eigen::Map<EigenVector<float>>>);

TEST_CASE("eigen maps see a tensor's values, row by row") {
  const Device device = any_device();
  const Tensor w = Tensor::from({1, 2, 3, 4, 5, 6}, {2, 3}, device);
  const Tensor x = Tensor::from({1, 10, 100}, {3}, device);
  const Eigen::VectorXf y = eigen_matrix<float>(w) * eigen_vector<float>(x);
  CHECK((y[0] == 321 && y[1] == 654));
  writable_eigen_matrix<float>(w)(1, 0) = 7;
  writable_eigen_vector<float>(x) *= 2;
  CHECK(values_of(w) == std::vector<float>{1, 2, 3, 7, 5, 6});
  CHECK(values_of(x) == std::vector<float>{2, 20, 200});
  const Tensor none = Tensor::zeros({0, 3}, f32, device);
  CHECK((eigen_matrix<float>(none).rows() == 0 && eigen_matrix<float>(none).cols() == 3));
  CHECK_THROWS_WITH(eigen_vector<float>(w), Contains("[2, 3]"));
  CHECK_THROWS_WITH(eigen_matrix<float>(x), Contains("[3]"));
  const Tensor turned = raw::transpose(w, 0, 1);
  CHECK_THROWS_WITH(eigen_matrix<float>(turned), Contains("contiguous"));
  CHECK_THROWS_WITH(eigen_matrix<double>(w), Contains("f64"));
}
