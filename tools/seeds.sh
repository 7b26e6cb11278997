# Sourced by tools/schedules, tools/programs and tools/attacks, behind common.sh: the arguments of both, fresh seeds, and the soak.

# shellcheck shell=bash

# read_arguments "$@": sets `folder` and `count`, which is empty where none is given. Needs a function `usage`.
read_arguments() {
  folder=$tessera_root/build-test
  count=
  while [ $# -gt 0 ]; do
    case $1 in
      --help | -h) usage; exit 0 ;;
      --build) [ $# -gt 1 ] || status=2 die "--build needs a folder"; folder=$(realpath -m "$2"); shift ;;
      *[!0-9]* | '') status=2 die "'$1' is no number of seeds; try --help" ;;
      *) count=$1 ;;
    esac
    shift
  done
}

# built NAME: builds it and sets `program`.
built() {
  cd "$tessera_root"
  [ -f "$folder/build.ninja" ] || configure "$folder" -Dtests=enabled
  compile "$folder" "tests/promises/$1"
  program=$(realpath --relative-to=. "$folder")/tests/promises/$1
}

# fresh COUNT [options...]: so many seeds from a random one.
fresh() {
  local seeds=$1
  shift
  "$program" --first "$(od -An -N4 -tu4 /dev/urandom | tr -d ' ')" --count "$seeds" --jobs "$(nproc)" "$@"
}

# soak LOG TARGET SLICE [options...]: goes on where LOG ends, a line a slice, up to TARGET seeds in all or `count` more.
soak() {
  local log=$1 target=$2 slice=$3 commit next end size begin result summary
  shift 3
  commit=$(git describe --always --dirty --exclude '*')  # of what was built
  mkdir -p "$(dirname "$log")"
  touch "$log"
  next=$(sed -n 's/^[^#].* seeds [0-9]*\.\.\([0-9]*\) of [0-9]*: passed.*/\1/p' "$log" | tail -n 1)
  next=$((${next:--1} + 1))
  end=$((next + ${count:-$target}))
  [ "$end" -le "$target" ] || end=$target
  while [ "$next" -lt "$end" ]; do
    size=$((end - next < slice ? end - next : slice))
    begin=$SECONDS
    result=passed
    summary=$("$program" --first "$next" --count "$size" --jobs "$(nproc)" "$@") || result=FAILED
    say "$summary"
    printf '%s commit %s seeds %s..%s of %s: %s, %s, %s s on %s cores\n' "$(date -u +%FT%TZ)" \
      "$commit" "$next" $((next + size - 1)) "$target" \
      "$result" "$(sed -n 's/^[a-z]*: [a-z]*s=[0-9]* \(.*failures=[0-9]*\).*/\1/p' <<<"$summary")" \
      $((SECONDS - begin)) "$(nproc)" >>"$log"
    [ $result = passed ] || exit 1  # the next soak starts with this slice again
    next=$((next + size))
  done
  say "$log: $next of $target seeds"
}
