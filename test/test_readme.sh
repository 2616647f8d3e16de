#!/bin/bash
# test_readme.sh: the README's commands run as they are written. Commands stand in it as lines indented by four spaces.
# The block under "Train on your own text" is run whole, on a text of our own; of every other training command it is checked
# that the program takes it (with --plan), and of every make target and file that it names, that it exists.
cd "$(dirname "$0")/.." || exit 1
root=$PWD
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
passed=0 failed=0
report() { if [ "$1" = 0 ]; then passed=$((passed + 1)); echo "  ok    $2"; else failed=$((failed + 1)); echo "  FAIL  $2"; fi; }
cd "$work" || exit 1
ln -s "$root/build" "$root/dev" .
cat "$root"/dev/*.h > my.txt

# ---- run as written
sed -n '/^\*\*Train on your own text/,/^[^ ]*`--help`/p' "$root/README.md" | sed -n 's/^    //p' | grep -v '^make' | sed 's/ *# .*//' > block
[ "$(grep -c . block)" -ge 4 ]; report $? "the block 'Train on your own text' is there"
while IFS= read -r line; do
    [ -n "$line" ] || continue
    bash -c "$line" > log 2>&1 < /dev/null; report $? "$line"
    tail -n 2 log | sed 's/^/        /'
done < block

# ---- accepted as written: with tiny data under the names that they use
grep -E '^    \./build/(cpu|cuda)/train_' "$root/README.md" | sed 's/^    //' | grep -vxFf block > commands
for folder in $(grep -oE 'data/[a-z0-9_]+/' commands | sort -u); do
    build/dev/prepare --bytes my.txt --split 0.9 --out "$folder" > /dev/null 2>&1
done
[ -s commands ]; report $? "there are other training commands"
while IFS= read -r line; do
    program=${line%% *}
    [ -x "$program" ] || { echo "  (not built here: $program)"; continue; }
    bash -c "$line --plan" > log 2>&1; report $? "$line"
    [ "$failed" = 0 ] || head -n 1 log
done < commands

# ---- make run of every model takes a preset that the program knows
for program in "$root"/train_*.c; do
    model=$(basename "$program" .c) model=${model#train_}
    preset=$(make -n -C "$root" run MODEL="$model" 2> /dev/null | grep -o 'train_'"$model"' --preset [a-z0-9-]*' | sed 's/.* //')
    [ -n "$preset" ] && [ -x "build/cpu/train_$model" ] && "build/cpu/train_$model" --preset "$preset" --plan > /dev/null
    report $? "make run MODEL=$model: $preset"
done

# ---- named things exist
for target in $(grep -oE '(`|^    )make [a-z][a-z-]+' "$root/README.md" | awk '{ print $2 }' | sort -u); do
    grep -qE "^\.PHONY:.* $target( |$)" "$root/Makefile"; report $? "make $target"
done
for name in $(grep -oE '`(test|data|dev)/[A-Za-z0-9_./-]+`' "$root/README.md" | tr -d '\`' | sort -u); do
    [ -e "$root/$name" ]; report $? "$name is there"
done
for name in $(grep -oE '`[a-z_]+\.(c|cu|sh)`' "$root/README.md" | tr -d '\`' | sort -u); do
    [ -e "$root/$name" ] || [ -e "$root/test/$name" ] || [ -e "$root/dev/$name" ]; report $? "$name is there"
done
for name in $(grep -oE '`[a-z_]+_(forward|backward)`|`(matmul|band|head_loss|main|train)`' "$root/README.md" | tr -d '\`' | sort -u); do
    grep -qE "^(static )?[a-z].* \**$name\(" "$root"/train_*.c; report $? "a train file has $name"
done
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
