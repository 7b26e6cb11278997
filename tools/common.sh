# Sourced by the scripts beside it: one line of speech, packages through apt, a configured build folder.

# shellcheck shell=bash disable=SC2034  # sourced
tessera_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# Lists of Debian packages; CMake, Boost and pip are not among them.
packages_library="g++ meson ninja-build pkg-config libeigen3-dev nlohmann-json3-dev libxxhash-dev libasio-dev"
packages_tools="libtomlplusplus-dev"
packages_tests="catch2 libopenmpi-dev openmpi-bin bible-kjv valgrind"

# GCC collects its garbage from 1 GiB on, not from 128 MiB: a tenth less to compute for a quarter more memory (15.4 s for 17.2 and
# 1.03 GB for 0.82 of a unit of tests/shard; 15.8 s for 17.1 of one of the library).
less_garbage="--param ggc-min-heapsize=1048576"

say() { printf '%s\n' "$*"; }
die() { printf '%s: %s\n' "$(basename "$0")" "$*" >&2; exit "${status:-1}"; }

# computed_ms PID: what the children for which a shell has waited have computed, in milliseconds of processors.
computed_ms() { awk -v tick=$((1000 / $(getconf CLK_TCK))) '{ print tick * ($16 + $17) }' "/proc/$1/stat"; }

missing_packages() {
  local package
  for package in "$@"; do
    [ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null)" = installed ] || printf '%s\n' "$package"
  done | paste -sd ' '
}

# Installs what is missing of the named packages, with one line that says so. Quiet and without questions.
need_packages() {
  local missing as_root="" log
  command -v dpkg-query >/dev/null || { say "This is not a Debian system; needed are: $*"; return; }
  missing=$(missing_packages "$@")
  [ -n "$missing" ] || return 0
  if [ "$(id -u)" != 0 ]; then
    command -v sudo >/dev/null || die "needs root or sudo for: apt-get install $missing"
    if [ -t 0 ]; then sudo true; else sudo -n true 2>/dev/null; fi || die "sudo refused; as root: apt-get install $missing"
    as_root="sudo"
  fi
  say "Installing with apt: $missing"
  log=$(mktemp)
  # shellcheck disable=SC2086  # the list is meant to be split
  if ! { $as_root apt-get -q update && $as_root env DEBIAN_FRONTEND=noninteractive \
         apt-get -qy -o DPkg::Lock::Timeout=300 install --no-install-recommends $missing; } </dev/null >"$log" 2>&1; then
    tail -n 5 "$log" >&2
    rm -f "$log"
    die "apt-get could not install: $missing"
  fi
  rm -f "$log"
}

# configure FOLDER [meson options...]: sets the build folder up, or brings an existing one up to date. Several sources at a time
# are one unit of compilation: what they include is compiled once, which halves a first build. CMake's build and a plain
# `meson setup` compile each source alone, and so show what it forgot to include.
configure() {
  local folder=$1 log=$1/configure.log
  local state=() flags=${CXXFLAGS:-}
  shift
  case ${CXX:-c++} in *clang*) ;; *) flags+=" $less_garbage" ;; esac
  [ ! -f "$folder/build.ninja" ] || state=(--reconfigure)
  mkdir -p "$folder"
  if ! CXXFLAGS=$flags meson setup "${state[@]}" "$folder" "$tessera_root" -Dunity=on -Dunity_size=20 "$@" </dev/null >"$log" 2>&1; then
    grep -E 'ERROR' "$log" >&2 || tail -n 5 "$log" >&2
    die "meson could not configure $folder; all of its output is in $log"
  fi
}

# progress: reads what ninja says. On a terminal it draws one line, anew each second; elsewhere it says a line every 20 seconds.
progress() {
  local line done=0 all=0 begin=$SECONDS said=$SECONDS status bar
  while :; do
    status=0
    IFS= read -r -t 1 line || status=$?
    [ $status = 0 ] || [ $status -gt 128 ] || break  # the end; above 128 a second has passed
    ! [[ $status = 0 && $line =~ ^\[([0-9]+)/([0-9]+)\] ]] || done=${BASH_REMATCH[1]} all=${BASH_REMATCH[2]}
    if [ -t 1 ]; then
      bar=$(printf '%*s' $((all ? 30 * done / all : 0)) '')
      printf '\r  [%-30s] built %d of %s, %d s\e[K' "${bar// /#}" "$done" "${all/#0/?}" $((SECONDS - begin))
    elif [ $((SECONDS - said)) -ge 20 ]; then
      said=$SECONDS
      say "  built $done of ${all/#0/?}, $((SECONDS - begin)) s"
    fi
  done
  [ ! -t 1 ] || printf '\r\e[K'
}

packages_sanitizers="ccache clang-16 libclang-rt-16-dev llvm-16"
# sanitized FOLDER address|thread: configures it. A report names lines; other debug information would only be compiled, and so would
# going on after a report. Only kernels are optimized: 7 s for 26 of a unit of the library. No ignore_noninstrumented_modules: MPI, whose libraries would need it under the thread sanitizer, is left out.
sanitized() {
  local options
  [ "$2" = address ] && options="-Db_sanitize=address,undefined" || options="-Db_sanitize=thread -Dmpi=disabled"
  # shellcheck disable=SC2086  # a list of words
  CC="ccache clang-16" CXX="ccache clang++-16" CXXFLAGS="-gline-tables-only -fno-sanitize-recover=all" \
    configure "$1" $options -Dbuildtype=debugoptimized -Ddebug=false -Doptimization=0 -Db_lundef=false \
    -Dtests=enabled -Dtools=disabled -Dbench=disabled -Dwerror=true
}

# compile FOLDER [targets...]: shows progress, and the errors only, when there are any. Wants `set -o pipefail`.
compile() {
  local folder=$1 log=$1/compile.log
  shift
  if ! NINJA_STATUS='[%f/%t] ' ninja -C "$folder" -k 20 "$@" </dev/null 2>&1 | tee "$log" | progress; then
    grep -vE '^\[[0-9]+/[0-9]+\]|^ninja: Entering' "$log" | head -n 60 >&2
    die "the build failed; all of its output is in $log"
  fi
}
