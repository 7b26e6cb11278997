// What the ranks of a save agree on: which error is everybody's, the save's name, what each wrote.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "runtime/checkpoint/manifest.hpp"
#include "tessera/comm/world.hpp"

namespace tessera::checkpoint {

// All are collective.

// Runs f on this rank. Where it throws on some, all throw what it was on the first of them, whose
// rank the error has.
void on_all(const World& world, const std::function<void()>& f);

// A name of 32 digits that rank 0 draws, the same on every rank: its host's 16, then random ones.
std::string common_id(const World& world);

// What every rank's files are, rank after rank: by sums of a few numbers, which need no memory of a
// device, since each rank has a place of its own in them.
std::vector<Manifest::File> gathered(const World& world, const std::vector<Manifest::File>& own);

}  // namespace tessera::checkpoint
