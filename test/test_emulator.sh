#!/usr/bin/env bash
# test_emulator.sh: does cuda_on_cpu.h catch what it says it catches, and let healthy kernels through with the same bits in
# every order and build? Planted faults (emulator/planted.cu) must each be reported with the fitting message.
#   test/test_emulator.sh            [CXX=clang++] [KEEP=1 leaves the build folder]
set -u
cd "$(dirname "$0")/.."
out=build/test_emulator
rm -rf $out && mkdir -p $out || exit 1
export OMP_WAIT_POLICY=passive
unset CUDA_ON_CPU_ORDER CUDA_ON_CPU_MEMORY

passed=0 failed=0
check() {                                   # check STATUS TEXT: one line, counted
    if [ "$1" = 0 ]; then passed=$((passed + 1)); echo "  ok    $2"; else failed=$((failed + 1)); echo "  FAIL  $2"; fi
}

# ---- build everything, two compilers at a time, without optimisation where it does not matter: build COMPILER NAME SUFFIX FLAGS...
flags="-std=c++17 -fopenmp -fno-strict-aliasing -Wall -Wextra -Wno-unknown-pragmas -Wno-sign-compare -I test -include test/cuda_on_cpu.h"
sanitize="-fsanitize=alignment,bounds -fno-sanitize-recover=all"
for f in healthy planted libraries; do
    sed -E -e "1i #line 1 \"test/emulator/$f.cu\"" -f test/cuda_on_cpu.sed test/emulator/$f.cu > $out/$f.cpp || exit 1
done
build() {
    local cxx=$1 name=$2 suffix=$3; shift 3
    $cxx $flags "$@" -c $out/$name.cpp -o $out/$name.$suffix.o 2> $out/$name.$suffix.log &&
    $cxx -fopenmp ${LINK:-} $out/$name.$suffix.o -o $out/$name.$suffix 2>> $out/$name.$suffix.log
}
cxx=${CXX:-g++}
other=$(command -v clang++ || true)
case $cxx in *clang*) other=$(command -v g++ || true) ;; esac
nvcc=$(command -v nvcc || ls /usr/local/cuda/bin/nvcc 2> /dev/null || true)
{
    LINK=$sanitize build $cxx libraries plain -O1 $sanitize
    LINK=$sanitize build $cxx healthy plain -O2 $sanitize
    build $cxx healthy races -O1 -fsanitize=thread
    build $cxx healthy ucontext -DCUDA_ON_CPU_UCONTEXT
    [ -n "$nvcc" ] && for f in healthy planted libraries; do $nvcc -arch=sm_80 -I test -c test/emulator/$f.cu -o $out/$f.nvcc.o 2> $out/$f.nvcc.log; done
} &
{
    LINK=$sanitize build $cxx planted plain $sanitize
    build $cxx planted races -fsanitize=thread
    [ -n "$other" ] && for f in healthy libraries; do build $other $f other -O1; done
    [ -n "$other" ] && build $other planted other -fsanitize=thread
} &
wait
for name in healthy.plain libraries.plain planted.plain healthy.races planted.races healthy.ucontext ${other:+healthy.other libraries.other planted.other} ; do
    [ -x $out/$name ] && [ ! -s $out/$name.log ]
    check $? "$name builds without a warning"
    head -20 $out/$name.log
done
if [ -n "$nvcc" ]; then
    for f in healthy planted libraries; do [ -s $out/$f.nvcc.o ]; check $? "nvcc compiles $f.cu"; head -5 $out/$f.nvcc.log; done
else
    echo "  (no nvcc here: the .cu files were not compiled with it)"
fi

# ---- healthy kernels: right, and the same bits everywhere
orders="forward reverse 1 2"
bits=""
for build in plain races ucontext ${other:+other}; do
    for order in $orders; do
        text=$(CUDA_ON_CPU_ORDER=$order $out/healthy.$build 2>&1)
        status=$?
        now=$(grep '^bits' <<< "$text")
        [ -z "$bits" ] && bits=$now
        [ $status = 0 ] && [ -n "$now" ] && [ "$now" = "$bits" ]
        ok=$?
        check $ok "healthy kernels, $build build, order $order: $(tail -n 1 <<< "$text")"
        [ $ok = 0 ] || grep -v '^  ok' <<< "$text" | head -20
    done
done
now=$(OMP_NUM_THREADS=1 $out/healthy.plain | grep '^bits')
[ "$now" = "$bits" ]; check $? "healthy kernels, one OS thread"
for build in plain ${other:+other}; do
    text=$($out/libraries.$build 2>&1)
    status=$?
    check $status "cuBLAS, cuFFT, runtime, $build build: $(tail -n 1 <<< "$text")"
    if [ $build = plain ]; then grep '^  ok' <<< "$text"; fi
    grep -v '^  ok' <<< "$text" | grep -v ' passed, 0 failed$'
done

# ---- planted faults that end the program: fault BUILD NAME MESSAGE (a pattern; the whole text must match it)
fault() {
    local build=$1 name=$2 pattern=$3 text status
    text=$($out/planted.$build $name 2>&1)
    status=$?
    text=$(tr '\n' '|' <<< "$text")
    [ $status != 0 ] && [ $status != 3 ] && [[ $text =~ $pattern ]]
    local ok=$?
    check $ok "$build: $name"
    [ $ok = 0 ] || echo "        exit $status, expected '$pattern', got: $text" | cut -c1-400
}
at() { echo "kernel $1 launched at test/emulator/planted.cu:$(grep -n "is(\"$2\"))" test/emulator/planted.cu | tail -1 | cut -d: -f1)"; }   # KERNEL NAME

fault plain past_end "access 0 bytes past the end of a device allocation of 256 bytes.*$(at write_at past_end).*block .0,0,0., thread .0,0,0."
fault plain past_end_strip "wrote past the end of a device allocation of 244 bytes.*$(at write_at past_end_strip)"
fault plain before_start "wrote before the start of a device allocation of 256 bytes.*$(at write_at before_start)"
fault plain host_touches "host code touched device memory"
fault plain host_argument "argument 1 is a pointer to host memory.*$(at write_at host_argument)"
fault plain freed_argument "argument 1 points inside 244 bytes of device memory that were freed"
fault plain freed_in_struct "access inside 244 bytes of device memory that were freed.*kernel write_struct"
fault plain free_twice "cudaFree of memory that was freed before"
fault plain free_inside "cudaFree of a pointer that cudaMalloc did not return"
fault plain copy_too_long "cudaMemcpy: the source takes 248 bytes, but the device allocation of 244"
fault plain copy_wrong_way "cudaMemcpy: the destination is not device memory"
fault plain copy_from_device "cudaMemcpy: the source is device memory, the direction says host"
fault plain set_host "cudaMemset: the destination is not device memory"
fault plain past_dynamic "access past the end of 16 bytes of dynamic shared memory.*kernel write_dynamic"
fault plain past_dynamic_strip "write past the end of 4 bytes of dynamic shared memory"
fault plain no_dynamic "access past the end of 0 bytes of dynamic shared memory.*kernel write_dynamic"
fault plain past_static "planted.cu:[0-9]+.*index 8 out of bounds"
case $cxx in *clang*) echo "  (clang does not check the alignment of whole structs: planted fault not run)" ;; *) fault plain misaligned "planted.cu:[0-9]+.*misaligned address" ;; esac
fault plain stack_overflow "more than 64 KB of stack"
fault plain too_many_threads "invalid launch: grid .1,1,1., block .1025,1,1."
fault plain empty_grid "invalid launch: grid .0,1,1."
fault plain grid_y "invalid launch: grid .1,65536,1."
fault plain block_z "invalid launch"
fault plain no_opt_in "50000 bytes of dynamic shared memory, the limit is 49152"
fault plain static_and_dynamic "32768 bytes of static and 20000 of dynamic shared memory are more"
fault plain lane_outside "planted.cu:[0-9]+: lane 16 calls a warp collective whose mask 0000ffff does not name it"
fault plain lane_exited "lane 8 has exited, but the mask ffffffff of the warp collective at test/emulator/planted.cu:[0-9]+ names it.*thread .32,0,0."
fault plain diverged "different __syncthreads.*64 threads from .0,0,0. on at .*64 threads from .64,0,0."
fault plain half_barrier "wait for others that never come.*__syncthreads.*mask ffffffff"
fault plain mask_differs "wait for others that never come.*mask fffffffe"
fault plain gemm_host "cublasSgemm: A is not device memory"
fault plain gemm_short "cublasSgemm: C takes 256 bytes"
fault plain gemm_ld "leading dimension of A, 4, is less than its 5 rows"
fault plain gemm_size "sizes must be positive"
fault plain gemm_overlap "C overlaps A or B"
fault plain gemm_types "cublasGemmEx: types must be"
fault plain gemm_alpha "alpha and beta must be host pointers"
fault plain fft_short "cufftExecR2C: the output takes 248 bytes"
fault plain fft_type "plan is for another type"
fault plain fft_no_plan "plan 1 does not exist"
for build in races ${other:+other}; do
    fault $build no_barrier "race: threads [0-9]+ and [0-9]+ of a block touch shared address.*kernel no_barrier"
    fault $build no_second_barrier "race: threads .* shared address.*kernel no_second_barrier"
    fault $build no_syncwarp "race: threads .* shared address.*kernel no_syncwarp"
    fault $build two_blocks_write "race: two blocks of one launch touch global address .* both write"
    fault $build two_blocks_write_same "race: two blocks of one launch touch global address .* both write"
    fault $build block_reads_block "race: two blocks of one launch touch global address .* one writes, one reads"
    fault $build read_before_write "race: two blocks of one launch touch global address .* one reads, one writes"
    fault $build atomic_and_plain "race: two blocks"
    fault $build past_end_strip "write of 4 bytes 3 bytes past the end of a device allocation of 244 bytes.*thread .0,0,0."
    fault $build read_strip "read of 4 bytes 3 bytes past the end"
    fault $build before_start "write of 4 bytes in device memory that nobody allocated.*thread .0,0,0."
done
text=$($out/planted.races float_atomics 2>&1); check $? "races: atomics of several blocks are no race"
text=$(CUDA_ON_CPU_ORDER=backward $out/planted.plain no_barrier 2>&1); [ $? = 134 ] && [[ $text == *"forward, reverse or a number"* ]]
check $? "an order that does not exist is refused"

# ---- faults that show in the result: NaN, or bits that depend on the order
differs() {
    local seen
    seen=$(for order in $orders; do CUDA_ON_CPU_ORDER=$order $out/planted.plain $1 2>&1 || echo "exit $?"; done | sort -u)
    [ "$(wc -l <<< "$seen")" -ge 2 ] && [[ $seen != *exit* ]]
    check $? "plain: $1 gives other results in other orders"
}
differs no_barrier
differs no_second_barrier
differs no_syncwarp
differs two_blocks_write
differs block_reads_block
differs float_atomics
for name in unwritten_shared unwritten_global read_strip; do
    for order in $orders; do
        text=$(CUDA_ON_CPU_ORDER=$order $out/planted.plain $name 2>&1) && [[ $text == *nan* ]]
        check $? "plain: $name is NaN, order $order"
    done
done
text=$($out/planted.plain opt_in_too_much | head -1); [ "$text" = cudaErrorInvalidValue ]
check $? "cudaFuncSetAttribute refuses more shared memory than there is"
text=$(CUDA_ON_CPU_MEMORY=50000 $out/planted.plain no_memory | head -1); [ "$text" = "cudaErrorMemoryAllocation, out of memory, no error" ]
check $? "CUDA_ON_CPU_MEMORY makes cudaMalloc fail, and the error is kept until it is read"
text=$($out/planted.plain no_memory | head -1); [ "$text" = "cudaSuccess, no error, no error" ]
check $? "without it the same cudaMalloc succeeds"

[ -n "${KEEP:-}" ] || rm -rf $out
echo "$passed passed, $failed failed"
[ $failed = 0 ] && [ $passed != 0 ]
