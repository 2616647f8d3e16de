#!/usr/bin/env bash
# run.sh: runs test programs and adds up what they report.
#
#   test/run.sh 'build/cpu/test_a' 'build/cpu/test_b --quick' test/test_c.sh      or one command a line on stdin
#
# A test ends with the line `N passed, N failed`. One that crashes, exits with an error, ends with no such line, checks
# nothing, or takes longer than TIMEOUT seconds (300 unless set) counts as one failed at least. What it prints is shown
# where it failed, or always with VERBOSE=1. The last line of all is the sum; the exit code is 1 unless all passed.
: "${TIMEOUT:=300}"
output=$(mktemp) || exit 1
pid=
trap 'rm -f "$output"' EXIT
trap 'kill "$pid" 2>/dev/null; echo "interrupted"; exit 130' INT TERM # timeout takes the test's children along

total_passed=0 total_failed=0 failures=()

run() { # COMMAND
    local start=$EPOCHREALTIME code last passed=0 failed=0 why=
    timeout -k 5 "$TIMEOUT" bash -c "$1" > "$output" 2>&1 < /dev/null &
    pid=$!
    wait "$pid"
    code=$?
    local us=$((${EPOCHREALTIME/[.,]/} - ${start/[.,]/}))

    last=$(tail -n 1 "$output" | tr -d '\0\r')
    if [[ $last =~ ^([0-9]{1,9})\ passed,\ ([0-9]{1,9})\ failed$ ]]; then
        passed=$((10#${BASH_REMATCH[1]})) failed=$((10#${BASH_REMATCH[2]}))
        [ $((passed + failed)) -gt 0 ] || why="it checked nothing"
    else
        why="no closing line"
    fi
    if [ $code = 124 ] || [ $code = 137 ]; then why="stopped after $TIMEOUT s, or killed"
    elif [ $code -gt 128 ]; then why="signal $((code - 128))"
    elif [ $code != 0 ] && [ $failed = 0 ]; then why="exit code $code"
    fi
    [ -z "$why" ] || [ $failed -gt 0 ] || failed=1
    total_passed=$((total_passed + passed)) total_failed=$((total_failed + failed))

    local seconds=$((us / 1000000)).$((us / 100000 % 10))
    printf '%-4s %7s s  %5d passed %4d failed  %s%s\n' "$([ $failed = 0 ] && echo ok || echo FAIL)" \
        "$seconds" "$passed" "$failed" "$1" "${why:+  ($why)}"
    if [ $failed != 0 ]; then failures+=("$1"); fi
    if [ $failed != 0 ] || [ "${VERBOSE:-0}" = 1 ]; then sed 's/^/    | /' "$output"; fi
}

if [ $# -gt 0 ]; then
    for command in "$@"; do run "$command"; done
else
    while IFS= read -r command <&3 || [ -n "$command" ]; do
        [ -z "$command" ] || run "$command"
    done 3<&0
fi
for command in "${failures[@]}"; do echo "failed: $command"; done
if [ $((total_passed + total_failed)) = 0 ]; then
    echo "no test was run"
    total_failed=1
fi
echo "$total_passed passed, $total_failed failed"
[ $total_failed = 0 ]
