// Slurm's short forms of lists, written out: pure functions, which bound what a few bytes may
// become.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

inline constexpr std::size_t kMostHosts = 65536;

// "n[01-03,12],login" as n01, n02, n03, n12, login. A name may have several brackets, of which the
// last counts fastest.
// Throws: DataError, which begins with `variable` and its value, for another form, and for more
// than kMostHosts.
std::vector<std::string> expand_hosts(std::string_view variable, std::string_view list);

// "2(x3),1" as 2, 2, 2, 1.  Throws: as above.
std::vector<int> expand_counts(std::string_view variable, std::string_view list);

}  // namespace tessera
