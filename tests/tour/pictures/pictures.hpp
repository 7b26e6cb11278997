// Pictures of the READMEs, drawn from what a program does when it runs: offsets, bytes, ticks and
// types are read off the run, so a picture can't say what is no longer so. `tools/pictures`
// compares them with the files beside the READMEs, and rewrites these.
//
// Each is at most 100 columns wide and the same on every run.
#pragma once

#include <string>

namespace tessera::pictures {

std::string unit_on_two_ranks();       // runtime/shard/
std::string record_stream_and_gate();  // runtime/memory/
std::string streams_and_observers();   // runtime/device/
std::string slots_of_a_step();         // runtime/shard/
std::string peak_of_a_step();          // runtime/memory/
std::string worlds();                  // runtime/comm/; empty where this process is not to print

// `text`, and blanks up to `width` columns; signs of UTF-8 count as one.
std::string padded(const std::string& text, std::size_t width);

}  // namespace tessera::pictures
