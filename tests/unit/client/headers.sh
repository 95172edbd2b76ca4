#!/usr/bin/env bash
# Each public header compiles alone, as strict C99 and as C++, without a warning.
# usage: headers.sh SOURCE_DIR C_COMPILER
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
source_dir=$1 cc=$2
include=(-I "$source_dir/client/include" -I "$source_dir/proto")
strict=(-pedantic-errors -Wall -Wextra -Wundef -Werror -fsyntax-only)

cxx=$(command -v c++ || command -v g++ || command -v clang++) || { echo "no C++ compiler"; exit 77; }
for header in mok/mok.h mok/types.h mok/bf16.h; do
    echo "$header as C99"
    printf '#include "%s"\nint main(void) { return 0; }\n' "$header" |
        "$cc" -std=c99 "${strict[@]}" -Wstrict-prototypes "${include[@]}" -x c -
    for std in c++11 c++20; do
        echo "$header as $std"
        printf '#include "%s"\nint main() { return 0; }\n' "$header" |
            "$cxx" -std=$std "${strict[@]}" "${include[@]}" -x c++ -
    done
done

# Views of buffers as a program writes them.
echo "views"
cat >"$tmp/views.c" <<'PROGRAM'
#include "mok/bf16.h"
#include "mok/mok.h"
mok_view whole(mok_buffer *buffer);
mok_view part(mok_buffer *buffer, int layer);
mok_view whole(mok_buffer *buffer) { return MOK_VIEW(buffer); }
mok_view part(mok_buffer *buffer, int layer)
{
    mok_view view = MOK_VIEW_AT(buffer, layer * 16, sizeof(int) * 4);
    view.offset += mok_bf16_from_float(mok_bf16_to_float(0)) ? 16 : 0;
    return view;
}
PROGRAM
"$cc" -std=c99 "${strict[@]}" "${include[@]}" "$tmp/views.c"
for std in c++11 c++20; do
    "$cxx" -std=$std "${strict[@]}" "${include[@]}" -x c++ "$tmp/views.c"
done
