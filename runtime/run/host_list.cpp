#include "runtime/run/host_list.hpp"

#include <algorithm>
#include <charconv>
#include <utility>

#include "tessera/base/error.hpp"

namespace tessera {
namespace {

constexpr std::size_t kMostDigits = 9, kMostNameBytes = 255;

// Reads a list from the front.
class Reader {
 public:
  Reader(std::string_view variable, std::string_view list, std::string_view form)
      : variable_(variable), list_(list), form_(form) {}

  bool is_at(char c) const { return !is_at_end() && list_[at_] == c; }
  bool is_at_end() const { return at_ == list_.size(); }
  bool skip(char c) {
    if (!is_at(c)) return false;
    ++at_;
    return true;
  }
  void expect(char c) {
    if (!skip(c)) fail();
  }
  std::string_view until(std::string_view stops) {
    const std::size_t begin = at_;
    at_ = std::min(list_.find_first_of(stops, at_), list_.size());
    return list_.substr(begin, at_ - begin);
  }
  std::string_view digits() {
    const std::size_t begin = at_;
    while (!is_at_end() && list_[at_] >= '0' && list_[at_] <= '9') ++at_;
    if (at_ == begin || at_ - begin > kMostDigits) fail();
    return list_.substr(begin, at_ - begin);
  }
  int number() { return value_of(digits()); }
  static int value_of(std::string_view digits) {
    int value = 0;
    std::from_chars(digits.data(), digits.data() + digits.size(), value);
    return value;
  }
  [[noreturn]] void fail() const {
    throw DataError(concat(variable_, "='", list_, "' is not of the form ", form_,
                           "; what follows '", list_.substr(0, at_), "' is wrong"));
  }
  [[noreturn]] void fail_backwards(std::string_view first, std::string_view last) const {
    throw DataError(concat(variable_, "='", list_, "': the range ", first, '-', last,
                           " runs backwards; write ", last, '-', first));
  }
  void expect_room(std::size_t count) const {
    if (count > kMostHosts)
      throw DataError(concat(variable_, "='", list_, "' has more than ", kMostHosts, " entries"));
  }

 private:
  const std::string_view variable_, list_, form_;
  std::size_t at_ = 0;
};

// "01-08": each as wide as the first.
void append_range(Reader& reader, std::vector<std::string>& all) {
  const std::string_view first = reader.digits();
  const std::string_view last = reader.skip('-') ? reader.digits() : first;
  const int low = Reader::value_of(first), high = Reader::value_of(last);
  if (high < low) reader.fail_backwards(first, last);
  reader.expect_room(all.size() + static_cast<std::size_t>(high - low) + 1);
  for (int i = low; i <= high; ++i) {
    const std::string digits = std::to_string(i);
    all.push_back(std::string(first.size() - std::min(first.size(), digits.size()), '0') + digits);
  }
}

std::vector<std::string> read_host(Reader& reader) {
  std::vector<std::string> names = {""};
  do {
    const std::string_view plain = reader.until("[],");
    std::vector<std::string> endings = {""};
    if (reader.skip('[')) {
      endings.clear();
      do append_range(reader, endings);
      while (reader.skip(','));
      reader.expect(']');
    }
    reader.expect_room(names.size() * endings.size());
    std::vector<std::string> longer;
    for (const std::string& name : names)
      for (const std::string& ending : endings) {
        longer.push_back(concat(name, plain, ending));
        if (longer.back().size() > kMostNameBytes) reader.fail();
      }
    if (plain.empty() && endings.front().empty()) reader.fail();
    names = std::move(longer);
  } while (!reader.is_at_end() && !reader.is_at(','));
  return names;
}

}  // namespace

std::vector<std::string> expand_hosts(std::string_view variable, std::string_view list) {
  Reader reader(variable, list, "n[01-08,12],m");
  std::vector<std::string> hosts;
  do {
    std::vector<std::string> names = read_host(reader);
    reader.expect_room(hosts.size() + names.size());
    hosts.insert(hosts.end(), names.begin(), names.end());
  } while (reader.skip(','));
  if (!reader.is_at_end()) reader.fail();
  return hosts;
}

std::vector<int> expand_counts(std::string_view variable, std::string_view list) {
  Reader reader(variable, list, "2(x3),1");
  std::vector<int> counts;
  do {
    const int count = reader.number();
    int times = 1;
    if (reader.skip('(')) {
      reader.expect('x');
      times = reader.number();
      reader.expect(')');
    }
    reader.expect_room(counts.size() + static_cast<std::size_t>(times));
    counts.insert(counts.end(), static_cast<std::size_t>(times), count);
  } while (reader.skip(','));
  if (!reader.is_at_end()) reader.fail();
  return counts;
}

}  // namespace tessera
