// pictures NAME: one picture of the READMEs, on stdout.
#include <algorithm>
#include <iostream>
#include <map>

#include "tests/tour/pictures/pictures.hpp"

namespace tessera::pictures {

std::string padded(const std::string& text, std::size_t width) {
  const auto columns = static_cast<std::size_t>(std::count_if(text.begin(), text.end(), [](char c) {
    return (static_cast<unsigned char>(c) & 0xc0) != 0x80;
  }));
  return text + std::string(width > columns ? width - columns : 0, ' ');
}

}  // namespace tessera::pictures

int main(int argc, char** argv) {
  using namespace tessera::pictures;
  const std::map<std::string, std::string (*)()> all = {
      {"unit_on_two_ranks", unit_on_two_ranks},
      {"record_stream_and_gate", record_stream_and_gate},
      {"streams_and_observers", streams_and_observers},
      {"slots_of_a_step", slots_of_a_step},
      {"peak_of_a_step", peak_of_a_step},
      {"worlds", worlds}};
  const auto chosen = argc == 2 ? all.find(argv[1]) : all.end();
  if (chosen == all.end()) {
    std::cerr << "usage: pictures NAME, one of";
    for (const auto& [name, draw] : all) std::cerr << ' ' << name;
    std::cerr << '\n';
    return 2;
  }
  std::cout << chosen->second();
}
