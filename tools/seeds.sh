# Sourced by tools/schedules, tools/programs and tools/attacks, behind common.sh: their arguments, and which seeds they try.

# shellcheck shell=bash

# read_arguments NAME "$@": sets `folder`, `count`, by default what tests/shares.txt has for NAME in the gate, and `first`, by default
# the number from which all seeds of a run come. Needs a function `usage`.
read_arguments() {
  folder=$tessera_root/build-test
  count=$(awk -v name="$1" '$1 == name { print $3 }' "$tessera_root/tests/shares.txt")
  first=${SEED_BASE:-$(tail -n 1 "$tessera_root/tests/seed.txt")}
  shift
  while [ $# -gt 0 ]; do
    case $1 in
      --help | -h) usage; exit 0 ;;
      --build) [ $# -gt 1 ] || status=2 die "--build needs a folder"; folder=$(realpath -m "$2"); shift ;;
      --first) [[ "${2-}" =~ ^[0-9]+$ ]] || status=2 die "--first needs a seed"; first=$2; shift ;;
      *[!0-9]* | '') status=2 die "'$1' is no number of seeds; try --help" ;;
      *) count=$1 ;;
    esac
    shift
  done
}

# built TARGET: builds it, or ends with 125, which tells `git bisect run` to pass this commit over.
built() {
  cd "$tessera_root"
  [ -f "$folder/build.ninja" ] || status=125 configure "$folder" -Dtests=enabled
  status=125 compile "$folder" "$1"
  program=$(realpath --relative-to=. "$folder")/$1
}
