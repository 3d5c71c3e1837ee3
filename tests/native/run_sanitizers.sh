#!/bin/sh
# Builds the native tests with the address and undefined-behaviour sanitizers, then with the thread sanitizer, and runs
# both. Ends with an error at the first report. Further names of sanitizer sets may be given as arguments.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
[ $# -gt 0 ] || set -- address,undefined thread
for sanitizers in "$@"; do
  build="$root/build/native-$(echo "$sanitizers" | tr , -)"
  cmake -S "$root/tests/native" -B "$build" -DCMAKE_BUILD_TYPE=RelWithDebInfo -DPYSCAN_SANITIZE="$sanitizers" >/dev/null
  cmake --build "$build" --target test_core >/dev/null
  scratch=$(mktemp -d)
  UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 TSAN_OPTIONS=halt_on_error=1 "$build/test_core" "$scratch"
  rm -r "$scratch"
  echo "clean under $sanitizers"
done
