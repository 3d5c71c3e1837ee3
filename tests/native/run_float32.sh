#!/bin/sh
# Builds all_float32.cpp with optimisation and runs it: the codes of all 2^31 float32 values, for every instruction set.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
build="$root/build/native-float32"
cmake -S "$root/tests/native" -B "$build" -DCMAKE_BUILD_TYPE=Release >/dev/null
cmake --build "$build" --target all_float32 >/dev/null
"$build/all_float32"
