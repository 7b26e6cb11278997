#include "tests/emulator/nccl/board.hpp"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <ctime>
#include <map>
#include <mutex>
#include <stdexcept>

namespace tessera::nccl_double {
namespace {

constexpr std::size_t kHeadBytes = std::size_t{1} << 16;
constexpr std::size_t kBytes = kHeadBytes + kMostRanks * kWireBytes;  // a file with holes

// One mapping a process, so that its threads meet at one address.
std::mutex boards_mutex;
std::map<std::string, std::weak_ptr<Board>>& boards() {
  static std::map<std::string, std::weak_ptr<Board>> all;
  return all;
}

// A lock goes with its process, however that ends. It belongs to the file's description, so that
// ranks of one process do not see each other's.
struct flock lock_of(int rank, short type) {
  struct flock lock{};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank;
  lock.l_len = 1;
  return lock;
}

}  // namespace

std::uint64_t process_number() {
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  static const std::uint64_t start = static_cast<std::uint64_t>(now.tv_nsec) << 32;
  return start | static_cast<std::uint64_t>(getpid());
}

std::shared_ptr<Board> Board::open(const std::string& name) {
  const std::lock_guard lock(boards_mutex);
  const auto known = boards().find(name);
  std::shared_ptr<Board> board = known == boards().end() ? nullptr : known->second.lock();
  if (known != boards().end() && !board)
    throw std::runtime_error("the communicator of this id has ended; every attempt has its own id");
  if (!board) boards()[name] = board = std::make_shared<Board>(name);
  return board;
}

Board::Board(const std::string& name) : name_("/" + name) {
  static_assert(sizeof(Head) <= kHeadBytes);
  file_ = shm_open(name_.c_str(), O_RDWR | O_CREAT, 0600);
  if (file_ < 0 || ftruncate(file_, static_cast<off_t>(kBytes)) != 0)
    throw std::runtime_error("no shared memory '" + name_ + "': " + std::strerror(errno));
  void* const memory =
      mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file_, 0);
  if (memory == MAP_FAILED)
    throw std::runtime_error("no addresses for '" + name_ + "': " + std::strerror(errno));
  head_ = static_cast<Head*>(memory);
  wires_ = static_cast<std::byte*>(memory) + kHeadBytes;
}

Board::~Board() {
  drop_name();
  if (head_) munmap(static_cast<void*>(head_), kBytes);
  if (file_ >= 0) close(file_);
}

bool Board::take_seat(int rank, int device, int ranks) {
  if (head_->seats[rank].exchange(1) != 0) return false;
  Slot& mine = slot(rank);
  mine.process = process_number();
  mine.device = device;
  mine.ranks = ranks;
  struct flock lock = lock_of(rank, F_WRLCK);
  fcntl(file_, F_OFD_SETLK, &lock);
  mine.presence = Presence::here;
  if (head_->came.fetch_add(1) + 1 == static_cast<std::uint32_t>(ranks)) drop_name();
  ring();
  return true;
}

void Board::drop_name() {
  if (has_name_.exchange(false)) shm_unlink(name_.c_str());
}

bool Board::is_dead(int rank) {
  Slot& one = slot(rank);
  if (one.presence == Presence::absent || one.process == process_number()) return false;
  struct flock lock = lock_of(rank, F_WRLCK);
  return fcntl(file_, F_OFD_GETLK, &lock) == 0 && lock.l_type == F_UNLCK;
}

bool Board::reserve(int rank, std::size_t bytes) {
  if (bytes > kWireBytes) return false;
  if (bytes <= reserved_[rank]) return true;
  const auto at = static_cast<std::size_t>(wire(rank) - reinterpret_cast<std::byte*>(head_));
  if (posix_fallocate(file_, static_cast<off_t>(at), static_cast<off_t>(bytes)) != 0) return false;
  reserved_[rank] = bytes;
  return true;
}

void Board::ring() {
  head_->bell.fetch_add(1);
  syscall(SYS_futex, &head_->bell, FUTEX_WAKE, kMostRanks * 4, nullptr, nullptr, 0);
}

void Board::sleep(std::uint32_t heard) {
  const timespec most{0, 20'000'000};  // who died rings no bell
  syscall(SYS_futex, &head_->bell, FUTEX_WAIT, heard, &most, nullptr, 0);
}

}  // namespace tessera::nccl_double
