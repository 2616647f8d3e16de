#!/usr/bin/env bash
# Tests of test/run.sh: no way of failing may pass for a success.
run="$(cd "$(dirname "$0")" && pwd)/run.sh"
passed=0 failed=0
export VERBOSE=0

# Runs run.sh with the commands given; its exit code, its last line and some text of its output have to be these.
expect() { # DESCRIPTION EXIT_CODE LAST_LINE TEXT COMMAND...
    local what=$1 want_code=$2 want_last=$3 text=$4 out code
    shift 4
    out=$("$run" "$@" < /dev/null 2>&1)
    code=$?
    if [ $code = "$want_code" ] && [ "$(tail -n 1 <<< "$out")" = "$want_last" ] && [[ "$out" == *"$text"* ]]; then
        echo "  ok    $what"
        passed=$((passed + 1))
    else
        echo "  FAIL  $what: exit code $code, output:"
        echo "$out"
        failed=$((failed + 1))
    fi
}
check() { # DESCRIPTION COMMAND...
    local what=$1
    shift
    if "$@"; then echo "  ok    $what"; passed=$((passed + 1)); else echo "  FAIL  $what"; failed=$((failed + 1)); fi
}

good='echo hidden; echo "3 passed, 0 failed"'
bad='echo shown; echo "5 passed, 2 failed"; exit 1'
expect "one that passes"             0 "3 passed, 0 failed" "ok"            "$good"
expect "sums"                        0 "7 passed, 0 failed" "ok"            "$good" 'echo "4 passed, 0 failed"'
expect "one that fails"              1 "8 passed, 2 failed" "    | shown"   "$good" "$bad"
expect "... is named at the end"     1 "8 passed, 2 failed" "failed: echo shown" "$good" "$bad"
expect "... the rest still runs"     1 "8 passed, 2 failed" "3 passed"      "$bad" "$good"
expect "failures with exit code 0"   1 "5 passed, 2 failed" "FAIL"          'echo "5 passed, 2 failed"'
expect "an exit code without one"    1 "3 passed, 1 failed" "exit code 7"   "$good; exit 7"
expect "no closing line"             1 "0 passed, 1 failed" "no closing"    'echo all is well'
expect "no output"                   1 "0 passed, 1 failed" "no closing"    true
expect "a line after the closing"    1 "0 passed, 1 failed" "no closing"    "$good; echo more"
expect "a closing line of its own making" 1 "0 passed, 1 failed" "no closing" 'echo "all 3 passed, 0 failed"'
expect "nothing checked"             1 "0 passed, 1 failed" "checked nothing" 'echo "0 passed, 0 failed"'
expect "a crash"                     1 "0 passed, 1 failed" "signal 11"     'kill -SEGV $$'
expect "a crash after the end"       1 "3 passed, 1 failed" "signal 6"      "$good"'; kill -ABRT $$'
expect "a command that isn't there"  1 "0 passed, 1 failed" "exit code 127" /no/such/test
expect "nothing to run"              1 "0 passed, 1 failed" "no test was run"
TIMEOUT=1 expect "a hang"            1 "0 passed, 1 failed" "stopped after 1 s" 'sleep 30'
TIMEOUT=1 expect "a hang with a closing line" 1 "3 passed, 1 failed" "stopped after" "$good; sleep 30"
TIMEOUT=1 expect "... the rest still runs" 1 "3 passed, 1 failed" "ok"      'sleep 30' "$good"
expect "tests get no stdin"          0 "1 passed, 0 failed" "ok"            'cat; echo "1 passed, 0 failed"'
expect "leading zeros are decimal"   0 "8 passed, 0 failed" "ok"            'echo "08 passed, 00 failed"'

check "output of what passes is hidden" [ "$("$run" "$good" | grep -c '| hidden')" = 0 ]
check "... and shown with VERBOSE=1" [ "$(VERBOSE=1 "$run" "$good" | grep -c '| hidden')" = 1 ]
sum=$(printf 'echo "1 passed, 0 failed"\n\ncat; echo "2 passed, 0 failed"' | "$run" | tail -n 1)
check "commands from stdin, an empty line, no newline at the end" [ "$sum" = "3 passed, 0 failed" ]
check "the time is shown" grep -Eq ' (0\.[2-9]|[1-9][0-9]*\.[0-9]) s' <<< "$("$run" "sleep 0.25; $good")"

echo "$passed passed, $failed failed"
[ "$failed" = 0 ] && [ "$passed" -gt 0 ]
