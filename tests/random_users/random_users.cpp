// Tries seeds of random users:
//
//   random_users expressions --count 20000 [--first N] [--jobs N]
//   random_users expressions --seed 7          one of them, and what it is: what a failure prints
//
// Exit code: 0 all is well, 1 a seed failed, 2 bad arguments.
#include <iostream>

#include "tests/promises/seeds.hpp"
#include "tests/random_users/users.hpp"

using namespace tessera::testing;

int main(int count, char** arguments) {
  std::vector<std::string> words(arguments, arguments + count);
  for (const User& user : kUsers)
    if (words.size() > 1 && words[1] == user.name) {
      words[0] += ' ' + words[1];
      words.erase(words.begin() + 1);
      return try_asked(
          user.name, words,
          [&](std::uint64_t seed) { std::cout << user.describe(seed) << std::flush; },
          user.complaint);
    }
  std::cerr << "random_users: whose seeds?";
  for (const User& user : kUsers) std::cerr << ' ' << user.name;
  std::cerr << '\n';
  return 2;
}
