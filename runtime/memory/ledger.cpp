#include "tessera/memory/ledger.hpp"

#include <algorithm>
#include <iomanip>
#include <sstream>

#include "runtime/base/assert.hpp"

namespace tessera {

OwnerId Ledger::owner(std::string_view name) {
  for (std::size_t i = 0; i < entries_.size(); ++i)
    if (entries_[i].name == name) return static_cast<OwnerId>(i);
  entries_.push_back({std::string(name), 0, 0});
  return static_cast<OwnerId>(entries_.size() - 1);
}

// The columns of the peak are copied when the level leaves it, not at every new height.
void Ledger::settle() const {
  if (!at_peak_) return;
  for (Entry& entry : entries_) entry.at_peak = entry.live;
  at_peak_ = false;
}

void Ledger::add(OwnerId owner, std::int64_t bytes) {
  entries_[owner].live += bytes;
  live_ += bytes;
  if (live_ > peak_) {
    peak_ = live_;
    at_peak_ = true;
  }
}

void Ledger::remove(OwnerId owner, std::int64_t bytes) {
  if (bytes == 0) return;
  settle();
  entries_[owner].live -= bytes;
  live_ -= bytes;
  TESSERA_ASSERT(entries_[owner].live >= 0);
}

std::int64_t Ledger::live_bytes(std::string_view owner) const {
  const auto found = std::find_if(entries_.begin(), entries_.end(),
                                  [&](const Entry& entry) { return entry.name == owner; });
  return found == entries_.end() ? 0 : found->live;
}

void Ledger::add_outside(std::string_view what, std::int64_t bytes) {
  const auto found = std::ranges::find(outside_, what, &Outside::what);
  if (found == outside_.end())
    outside_.push_back({std::string(what), bytes});
  else
    found->bytes += bytes;
}

std::int64_t Ledger::outside_bytes(std::string_view what) const {
  const auto found = std::ranges::find(outside_, what, &Outside::what);
  return found == outside_.end() ? 0 : found->bytes;
}

void Ledger::reset_peak() noexcept {
  peak_ = live_;
  at_peak_ = true;
}

std::vector<Ledger::Line> Ledger::lines() const {
  settle();
  std::vector<Line> lines;
  for (const Entry& entry : entries_) lines.push_back({entry.name, entry.live, entry.at_peak});
  return lines;
}

std::string Ledger::table() const {
  std::ostringstream out;
  out << std::left << std::setw(14) << "owner" << std::right << std::setw(16) << "live bytes"
      << std::setw(16) << "at peak";
  for (const Line& line : lines())
    if (line.live_bytes != 0 || line.at_peak_bytes != 0)
      out << '\n'
          << std::left << std::setw(14) << line.owner << std::right << std::setw(16)
          << line.live_bytes << std::setw(16) << line.at_peak_bytes;
  out << '\n'
      << std::left << std::setw(14) << "all" << std::right << std::setw(16) << live_
      << std::setw(16) << peak_;
  for (const Outside& one : outside_)
    if (one.bytes != 0) out << "\noutside: " << one.what << ", " << one.bytes << " bytes";
  return std::move(out).str();
}

}  // namespace tessera
