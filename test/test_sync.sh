#!/usr/bin/env bash
# Tests of dev/sync.sh, on small files in a temporary folder.
here=$(cd "$(dirname "$0")" && pwd)
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
mkdir "$tmp/dev" && cp "$here/../dev/sync.sh" "$tmp/dev/" && cd "$tmp" || exit 1
passed=0 failed=0

ok() { # DESCRIPTION COMMAND...: the command succeeds
    local what=$1
    shift
    if "$@"; then echo "  ok    $what"; passed=$((passed + 1)); else echo "  FAIL  $what"; failed=$((failed + 1)); fi
}
sync() { out=$(dev/sync.sh "$@" 2>&1); code=$?; } # its output and exit code
is() { [ "$code" = "$1" ] && [[ "$out" == *"$2"* ]] || { echo "$out (exit $code)"; return 1; }; }
not() { ! "$@"; }

sync --check
ok "no files at all: fails" is 1 "0 passed, 1 failed"
echo "int x;" > train_harmonic.c
sync --check
ok "a file without functions: fails" is 1 "train_harmonic.c: no function found"

# what counts as a function, and what does not
cat > train_harmonic.c <<'END'
// head comment
#include <stdio.h>
#define MACRO(x) do { \
static int not_a_function(void) { \
} while (0)
static const float table[] = { 1, 2,
    3, 4 };
static const char* braces[2] = { "}", "{" };
typedef struct {
    void (*call)(int);
} Thing;
enum { A, B };
static int prototype(int a, int b);

// ----------------------------------------------------------------------------
// squares
/* a second line
   and a third */
static int square(int x) { return x * x; } // one line

__attribute__((noreturn, format(printf, 1, 2)))
static void die(const char* fmt, ...) {
    if (fmt) { puts("}"); }
    for (;;) ;
}
#ifdef SLOW
static int twice(int x) {
    return x + x;
}
#else
static int twice(int x) {
    return 2 * x;
}
#endif
static void long_signature(float* out, const float* in,
                           int B, int T, char c) {
    out[0] = in[0] * B * T + (c == '{') + '"';
}
static float model_forward(int train) {
    return train;
}
int main(void)
{
    return square(twice(1));
}
END
sync --check
ok "one file: nothing to compare, and that is fine" is 0 "1 file(s), 6 functions, 0 of them"
ok "... its closing line" is 0 "1 passed, 0 failed"
cp train_harmonic.c train_b.c
sync --check
ok "two equal files agree" is 0 "2 file(s), 6 functions, 6 of them"
ok "... one check for each" is 0 "7 passed, 0 failed"

differs() { # NAME SED-SCRIPT: check complains of NAME, and of nothing else; sync NAME makes it equal again
    sed "$2" train_harmonic.c > train_b.c
    sync --check
    ok "a change in $1 is seen: $2" is 1 "$1 differs between train_b.c and train_harmonic.c"
    ok "... and nothing else" is 1 "6 passed, 1 failed"
    sync "$1"
    ok "... and undone" cmp train_b.c train_harmonic.c
    sync --check
    ok "... seen too" is 0 "7 passed, 0 failed"
}
differs square 's/x \* x/x * x + 0/'
differs square 's/static int square/static long square/'
differs die 's/noreturn, //'
differs die 's/puts("}")/puts("{")/'
differs twice 's/2 \* x/x * 2/'
differs twice 's/x + x/x - -x/'
differs long_signature 's/int T, char c/int U, char c/'
differs main 's/twice(1)/twice(2)/'

# the comment directly above goes along, up to the rule; permissions stay; other lines stay
sed 's/a second line/an old line/; s/x \* x/x/; s/squares/an old name/' train_harmonic.c > train_b.c
echo "int at_the_end;" >> train_b.c
chmod 750 train_b.c
sync square
ok "sync takes the comment along" cmp <(cat train_harmonic.c; echo "int at_the_end;") train_b.c
ok "... and keeps the permissions" [ "$(stat -c %a train_b.c)" = 750 ]
sed -i '/^int main/i // above main' train_b.c
sync main
ok "a comment that the source lacks is removed" not grep -q "above main" train_b.c
sync main
ok "twice is once" is 0 "the same already"

# from another file, and into several
sed 's/x \* x/x * x * 1/' train_harmonic.c > train_b.c
cp train_harmonic.c train_c.c
sync square train_b.c
ok "FILE is the source" [ "$(grep -c 'x \* x \* 1' train_harmonic.c train_b.c train_c.c | tr '\n' ' ')" = \
    "train_harmonic.c:1 train_b.c:1 train_c.c:1 " ]

# the interface: own bodies, one signature
sed 's/return train/return 2 * train/' train_harmonic.c > train_b.c
sync --check
ok "model_forward may have another body" is 0 " 0 failed"
sed 's/model_forward(int train)/model_forward(int t)/' train_harmonic.c > train_b.c
sync --check
ok "... but not another signature" is 1 "model_forward differs"
cp train_harmonic.c train_b.c
sync model_forward
ok "... and is not copied" is 2 "part of the interface"

# definitions that do not pair up, unknown names, an end that is not in column 0
sed '/^#ifdef SLOW/,/^#else/d; /^#endif/d' train_harmonic.c > train_b.c
sync --check
ok "one definition against two differs" is 1 "twice differs"
cp train_b.c before
sync twice
ok "... and is left to the hand" is 2 "defined 2 times in train_harmonic.c and 1 times in train_b.c"
ok "... untouched" cmp train_b.c before
sync no_such
ok "an unknown name" is 2 "error: no function no_such"
sync square no_such.c
ok "an unknown file" is 2 "error: no function square in no_such.c"
sync
ok "no arguments: usage" is 2 "dev/sync.sh --check"
sync --chekc
ok "an unknown flag: usage" is 2 "dev/sync.sh --check"
sed 's/^}$/ }/' train_harmonic.c > train_b.c
sync --check
ok "an end outside column 0 is an error" is 2 "has no } in column 0"
rm train_b.c train_c.c before

# .cu files are compared among themselves
cat > train_harmonic.cu <<'END'
extern "C" {
}
// adds
template <typename T, int N = 3>
__global__ void __launch_bounds__(256) add(T* x, int n) {
    x[n] += N;
}
static __device__ float square(float x, bool fast = true) { return x * x; }
struct Pair { float a, s; };
__device__ inline Pair operator+(Pair l, Pair r) {
    return l;
}
END
sed 's/int N = 3/int N = 4/; s/return l/return r/; s/fast = true/fast = false/' train_harmonic.cu > train_b.cu
sync --check
ok "kernels, templates, operators, defaults" is 1 "2 file(s), 3 functions, 3 of them"
ok "... all three seen" is 1 "2 passed, 3 failed"
sync add && sync operator+ && sync square
ok "... and synced; the .c's square is another" cmp train_b.cu train_harmonic.cu
sync --check
ok "... and agree" is 0 "5 passed, 0 failed"

echo "$passed passed, $failed failed"
[ "$failed" = 0 ] && [ "$passed" -gt 0 ]
