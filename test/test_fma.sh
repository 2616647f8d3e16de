#!/bin/bash
# test_fma.sh: did the compiler make of matmul what it must be? With -std=c11 instead of gnu11, or without -march=native, the
# program is as right as before and several times slower, and nothing says so. Looks into the program itself.
. "$(dirname "$0")/cli.sh"
code() { objdump -d --no-show-raw-insn "$1"; }

if ! command -v objdump > /dev/null; then
    echo "  skipped: no objdump here (it comes with gcc's binutils)"; passed=1
elif ! grep -qw fma /proc/cpuinfo 2> /dev/null; then
    echo "  skipped: this CPU has no FMA instructions that are known here"; passed=1
else
    code "$TRAIN" > code.txt
    # gcc names the parallel parts matmul._omp_fn.N, clang .omp_outlined.N
    awk '/^[0-9a-f]+ <(matmul|\.omp_outlined)/ { on = 1 } /^$/ { on = 0 } on' code.txt > matmul.txt
    fused=$(grep -cE 'vfmadd[0-9]*ps .*%[yz]mm' matmul.txt) separate=$(grep -cE 'vmulps .*%[yz]mm' matmul.txt)
    [ "$fused" -ge 12 ]; report $? "matmul: $fused vector multiply-adds (and $separate separate products)"
    if grep -qw avx512f /proc/cpuinfo; then
        wide=$(grep -cE 'vfmadd[0-9]*ps .*%zmm' matmul.txt)
        [ "$wide" -ge 12 ]; report $? "  $wide of them 512 bits wide"
    fi
    ! grep -qE 'call.*<(expf|tanhf)(@|>)' code.txt; report $? "no exponential is left to libm, one at a time"
    echo 'float f(float a, float b, float c) { return a * b + c; }' > f.c        # the check must be able to fail
    if gcc -O2 -mno-fma -ffp-contract=off -c f.c -o f.o 2> .err; then
        code f.o > f.txt; ! grep -q vfmadd f.txt; report $? "planted: a product and a sum without FMA have none"
    fi
fi
finish
