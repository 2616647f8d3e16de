# cli.sh: what the tests of a program's command line share. Sourced, not run. MODEL (default harmonic), TRAIN (default
# build/cpu/train_MODEL) and PREPARE (default build/dev/prepare) say what is tested. Work happens in a folder of its own.
export LC_ALL=C OMP_WAIT_POLICY=passive         # threads that wait do not steal time from other programs
MODEL=${MODEL:-harmonic}
TRAIN=$(realpath "${TRAIN:-build/cpu/train_$MODEL}")
PREPARE=$(realpath "${PREPARE:-build/dev/prepare}")
HERE=$(realpath "$(dirname "${BASH_SOURCE[0]}")")
W=$(mktemp -d)
trap 'kill $(jobs -p) 2> /dev/null; rm -rf "$W"' EXIT
cd "$W" || exit 1
passed=0 failed=0
for program in "$TRAIN" "$PREPARE"; do [ -x "$program" ] || { echo "$program is not there: make cpu"; exit 1; }; done

report() {                                  # report STATUS NAME
    if [ "$1" = 0 ]; then echo "  ok    $2"; passed=$((passed + 1)); else echo "  FAIL  $2"; failed=$((failed + 1)); fi
}
check() {                                   # check NAME COMMAND...: it must succeed
    "${@:2}" > .out 2> .err
    local rc=$?
    report $rc "$1$([ $rc = 0 ] || echo ": exit $rc, $(head -c 200 .err)")"
}
says() {                                    # says NAME WORDS: the last command's output has them
    grep -qE -- "$2" .out
    report $? "$1: $(grep -E -m1 -- "$2" .out || echo "no '$2'")"
}
fails() {                                   # fails NAME WORDS COMMAND...: exit 2, one line that has WORDS, no file made or changed
    local before after rc
    before=$(find . -type f -not -name '.*' -exec cksum {} + | sort)
    "${@:3}" > .out 2> .err
    rc=$?
    after=$(find . -type f -not -name '.*' -exec cksum {} + | sort)
    [ $rc = 2 ] && [ "$(wc -l < .err)" = 1 ] && grep -q '^error: ' .err && grep -qF -- "$2" .err && [ "$before" = "$after" ]
    report $? "$1: exit $rc, $(head -c 220 .err)"
}
train() { "$TRAIN" "$@"; }
finish() {
    echo "$passed passed, $failed failed"
    [ "$failed" = 0 ] && [ "$passed" -gt 0 ]
}

# A text, its tokens (bytes, so V = 256), and flags for a model that trains in milliseconds.
for i in $(seq 400); do echo "line $i of $((i * i)): the quick brown fox"; done > text.txt
"$PREPARE" --bytes text.txt --out train.bin > /dev/null || exit 1
head -c 3000 text.txt > val.txt
"$PREPARE" --bytes val.txt --out val.bin > /dev/null || exit 1
SMALL=(--channels 8 --batch 2 --seq 16 --steps 4 --val-batches 3)
DATA=(--train train.bin --val val.bin)
