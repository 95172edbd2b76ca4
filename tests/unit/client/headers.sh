#!/usr/bin/env bash
# Each public header compiles alone, as strict C99 and as C++, without a warning.
# usage: headers.sh SOURCE_DIR C_COMPILER
set -euo pipefail
source_dir=$1 cc=$2
include=(-I "$source_dir/client/include" -I "$source_dir/proto")
strict=(-pedantic-errors -Wall -Wextra -Wundef -Werror -fsyntax-only)

cxx=$(command -v c++ || command -v g++ || command -v clang++) || { echo "no C++ compiler"; exit 77; }
for header in mok/mok.h mok/types.h; do
    echo "$header as C99"
    printf '#include "%s"\nint main(void) { return 0; }\n' "$header" |
        "$cc" -std=c99 "${strict[@]}" -Wstrict-prototypes "${include[@]}" -x c -
    for std in c++11 c++20; do
        echo "$header as $std"
        printf '#include "%s"\nint main() { return 0; }\n' "$header" |
            "$cxx" -std=$std "${strict[@]}" "${include[@]}" -x c++ -
    done
done
