#include "tests/kernels/case.hpp"

#include <cmath>
#include <cstring>

namespace kernel_test {
namespace {

constexpr std::int64_t kGuardBytes = 256;
constexpr auto kGuard = std::byte{0xa5};

void expect(DriverError error) {
  if (error) throw CaseFailure(error);
}

}  // namespace

std::vector<NamedCase>& all_cases() {
  static std::vector<NamedCase> cases;
  return cases;
}

// ---- Operand

Operand::Operand(const Target& target, DType dtype, std::int64_t size, std::int64_t shift_bytes)
    : target_(target), dtype_(dtype), size_(size) {
  const auto whole = static_cast<std::int64_t>(bytes()) + shift_bytes + 2 * kGuardBytes;
  host_memory_ = std::make_unique<std::byte[]>(static_cast<std::size_t>(whole) + 16);
  auto start = reinterpret_cast<std::uintptr_t>(host_memory_.get());
  start += (16 - start % 16) % 16;
  host_ = reinterpret_cast<std::byte*>(start) + shift_bytes;
  void* data = nullptr;
  expect(target.allocate(whole, &data));
  if (!data) throw CaseFailure(concat("the device has no ", whole, " bytes for an operand"));
  device_memory_ = static_cast<std::byte*>(data);
  device_ = device_memory_ + kGuardBytes + shift_bytes;
}

Operand::~Operand() { target_.release(device_memory_); }

double Operand::get(const std::byte* from, std::int64_t i) const {
  return visit(dtype_, [&](auto tag) {
    typename decltype(tag)::type x;
    std::memcpy(&x, from + static_cast<std::size_t>(i) * sizeof x, sizeof x);
    return static_cast<double>(x);
  });
}

void Operand::set(std::int64_t i, double value) {
  visit(dtype_, [&](auto tag) {
    using T = typename decltype(tag)::type;
    T x;
    if constexpr (std::is_class_v<T>)
      x = T(static_cast<float>(value));
    else if constexpr (std::is_same_v<T, std::uint8_t>)
      x = static_cast<T>(static_cast<std::int64_t>(value));  // of a negative number too
    else
      x = static_cast<T>(value);
    std::memcpy(host_ + static_cast<std::size_t>(i) * sizeof x, &x, sizeof x);
  });
}

void Operand::upload() {
  const auto shift = device_ - device_memory_;
  const auto tail = static_cast<std::int64_t>(bytes()) + kGuardBytes;
  expect(target_.fill(device_memory_, std::to_integer<std::uint8_t>(kGuard), shift + tail));
  if (!before_.empty())
    expect(target_.copy(device_, before_.data(), static_cast<std::int64_t>(before_.size())));
}

std::vector<std::byte> Operand::download() const {
  const auto shift = static_cast<std::size_t>(device_ - device_memory_);
  std::vector<std::byte> all(shift + bytes() + kGuardBytes);
  expect(target_.copy(all.data(), device_memory_, static_cast<std::int64_t>(all.size())));
  expect(target_.drain());
  for (std::size_t i = 0; i < all.size(); ++i)
    if ((i < shift || i >= shift + bytes()) && all[i] != kGuard)
      throw CaseFailure(concat("wrote byte ", static_cast<std::int64_t>(i - shift),
                               " of an array of ", bytes(), " bytes"));
  return {all.begin() + static_cast<std::ptrdiff_t>(shift),
          all.begin() + static_cast<std::ptrdiff_t>(shift + bytes())};
}

// ---- Case

Operand& Case::add(DType dtype, std::int64_t size, std::int64_t shift_bytes) {
  operands_.push_back(std::make_unique<Operand>(target_, dtype, size, shift_bytes));
  return *operands_.back();
}

void Case::draw(Operand& operand, double low, double high) {
  for (std::int64_t i = 0; i < operand.size(); ++i)
    operand.set(i, operand.dtype() == boolean     ? static_cast<double>(integer(0, 1))
                   : is_floating(operand.dtype()) ? uniform(low, high)
                                                  : std::floor(uniform(low, high + 1)));
}

Operand& Case::input(DType dtype, std::int64_t size, double low, double high,
                     std::int64_t shift_bytes) {
  Operand& operand = updated(dtype, size, low, high, shift_bytes);
  operand.is_input_ = true;
  return operand;
}

Operand& Case::updated(DType dtype, std::int64_t size, double low, double high,
                       std::int64_t shift_bytes) {
  Operand& operand = add(dtype, size, shift_bytes);
  draw(operand, low, high);
  return operand;
}

Operand& Case::output(DType dtype, std::int64_t size, std::int64_t shift_bytes) {
  Operand& operand = add(dtype, size, shift_bytes);
  std::memset(operand.host_, dtype == boolean ? 0 : 0xff, operand.bytes());
  return operand;
}

void Case::compute(const Call& call) {
  for (auto& operand : operands_)
    operand->before_.assign(operand->host_, operand->host_ + operand->bytes());
  for (const bool again : {false, true}) {
    for (auto& operand : operands_) operand->upload();
    Exec exec = target_.exec();
    if (again) exec.workers = target_.workers;
    call(target_.table ? *target_.table : kernels_of(target_.driver), Side::device, exec);
    if (exec.error) fail(exec.error);
    if (exec.note) notes_.emplace_back(exec.note);
    if (target_.driver)
      if (const DriverError error = target_.driver->failure()) fail(error);
    for (std::size_t i = 0; i < operands_.size(); ++i) {
      Operand& operand = *operands_[i];
      std::vector<std::byte> after = operand.download();
      if (operand.is_input_ && after != operand.before_)
        fail(concat("operand ", i, ", an input, has changed"));
      if (again && after != operand.after_)
        fail(concat("operand ", i, " has other bits after a second run"));
      operand.after_ = std::move(after);
    }
  }
}

void Case::near(const Operand& operand, std::int64_t i, double expected, double bound) {
  const double actual = on_device(operand, i);
  const bool agree = std::isnan(expected)   ? std::isnan(actual)
                     : std::isinf(expected) ? actual == expected
                                            : std::abs(actual - expected) <= bound;
  if (!agree)
    fail(concat("element ", i, " of ", operand.size(), " (", operand.dtype(), ") is ", actual,
                " instead of ", expected, "; off by ", std::abs(actual - expected),
                " where the bound is ", bound));
  if (std::isfinite(expected) && bound > 0)
    worst_ = std::max(worst_, std::abs(actual - expected) / bound);
  ++compared_;
}

double Case::on_device(const Operand& operand, std::int64_t i) const {
  return operand.get(operand.after_.data(), i);
}

void Case::fail(const std::string& what) const {
  throw CaseFailure(concat(what, " (seed ", seed_, ")"));
}

}  // namespace kernel_test
