#!/bin/bash
# This project's own source text, as bytes: something to train on without any download.
#
# The files are joined in the order of their names, and of every ten blocks of 40 lines the last goes to validation. So
# both parts have the same mixture of C, CUDA, shell and prose. They are not independent (a validation block is next to
# training blocks): a corpus to try things out with, not to compare models by.
# Rules of dashes are cut to four: nothing is easier to predict, and a sample would never leave one.
NAME=self
ABOUT="this project's own source text, no download"
BPE=bytes
. "$(dirname "$0")/common.sh"

sources() {
    local names='*.c *.h *.cu *.sh *.py *.md Makefile' name
    set -f
    if [ -e .git ] && command -v git > /dev/null && git ls-files > /dev/null 2>&1; then
        git ls-files -- $names
    else
        local match=()
        for name in $names; do match+=(-o -name "$name"); done
        find . \( -name build -o -name out -o -path './data/*/*' -o -name '.?*' \) -prune -o \
            -type f \( "${match[@]:1}" \) -print | sed 's|^\./||'
    fi | sort | while read -r name; do if [ -f "$name" ]; then cat "$name"; fi; done | sed 's/-----*/----/g'
}
part() { sources | awk -v want="$1" '{ is_val = int((NR - 1) / 40) % 10 == 9 } is_val == (want == "val")'; }

mkdir -p "$DIR"
put_file "$DIR/train.txt" part train
put_file "$DIR/val.txt" part val
prepare --train "$DIR/train.txt" --val "$DIR/val.txt"
