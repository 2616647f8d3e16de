#!/usr/bin/env bash
# test_twin.sh: train_X.cu against train_X.c, kernel by kernel and whole, in fp32 and bf16, on the emulator: every shape once,
# then a smaller set of them in four orders of threads and blocks, which must give the same bits, and once in a build that
# reports data races. Then the two programs: they read each other's checkpoints, resume to the same bits, and need exactly
# the memory that --plan says.
#
#   test/test_twin.sh [MODEL]            harmonic unless given; GPU=1 test/test_twin.sh: natively, with nvcc
model=${1:-harmonic}
cd "$(dirname "$0")/.." || exit 1
root=$PWD
: "${CC:=gcc}" "${CXX:=g++}" "${NVCC:=nvcc}" "${GPU:=0}"
export OMP_NUM_THREADS=1                # the sizes are tiny: threads would only wait for each other
dir=build/twin
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
mkdir -p $dir
passed=0 failed=0
check() { # OK(0 or 1) NAME
    if [ "$1" = 1 ]; then passed=$((passed + 1)); echo "  ok    $2"; else failed=$((failed + 1)); echo "  FAIL  $2"; fi
}
report() { echo "$passed passed, $failed failed"; [ $failed = 0 ]; exit; }

# ------------------------------------------------------------------------------------------------------------------
# builds, in parallel

fast="-O3 -march=native -ffp-contract=fast -fno-math-errno -fno-trapping-math -fassociative-math -fno-signed-zeros -freciprocal-math"
files="-DMODEL_FILE=\"models/$model.h\" -DTRAIN_FILE=\"../train_$model.c\" -Itest -I."
quiet="-Wall -Wextra -Wno-unused-function -Wno-unused-variable -Wno-unknown-pragmas"

emulate() { sed -E -e "1i #line 1 \"$1\"" -f test/cuda_on_cpu.sed "$1" > "$2"; } # FILE.cu FILE.cpp
emu() { # SOURCE OUT FLAGS...
    local source=$1 out=$2
    shift 2
    emulate "$source" "$dir/$out.cpp"
    $CXX -std=c++17 -O2 -fopenmp -fno-strict-aliasing $quiet -include test/cuda_on_cpu.h $files -DTRAIN_CU="\"$dir/$model.cpp\"" "$@" "$dir/$out.cpp"
}
exact="-fsanitize=alignment,bounds -fno-sanitize-recover=all"

$CC -std=gnu11 $fast -fopenmp $quiet $files -c test/twin_ref.c -o $dir/ref_$model.o || { check 0 "twin_ref.c does not compile"; report; }
if [ "$GPU" = 1 ]; then
    for p in fp32 bf16; do
        $NVCC -std=c++17 -O3 -arch=native -diag-suppress 177 -Xcompiler -Wno-unused-function $files -DTRAIN_CU="\"../train_$model.cu\"" \
            $([ $p = fp32 ] && echo -DPRECISION_FP32) test/twin.cu $dir/ref_$model.o -o $dir/twin_$p -lcublas -lcufft -lgomp -lm &
    done
    wait
else
    emulate "train_$model.cu" "$dir/$model.cpp"
    pids=()
    emu test/twin.cu twin_fp32 -DPRECISION_FP32 $exact $dir/ref_$model.o -o $dir/twin_fp32 -lm & pids+=($!)
    emu test/twin.cu twin_bf16 $exact $dir/ref_$model.o -o $dir/twin_bf16 -lm & pids+=($!)
    emu test/twin.cu races -DPRECISION_FP32 -fsanitize=thread -c -o $dir/races.o && $CXX -fopenmp $dir/races.o $dir/ref_$model.o -o $dir/races -lm & pids+=($!)
    emu test/bench_gpu.cu bench_gpu $exact -o $dir/bench_gpu -lm & pids+=($!)
    emu "train_$model.cu" train $exact -o $dir/train_$model -lm & pids+=($!)
    $CC -std=gnu11 $fast -fopenmp $quiet train_$model.c -o $dir/train_$model.cpu -lm & pids+=($!)
    $CC -std=gnu11 -O2 $quiet dev/prepare.c -o $dir/prepare -lm & pids+=($!)
    ok=1
    for p in "${pids[@]}"; do wait "$p" || ok=0; done
    if [ $ok = 0 ]; then check 0 "everything compiles"; report; fi
fi

# ------------------------------------------------------------------------------------------------------------------
# kernels and models

bits() { grep '^bits: ' "$1"; }
count() { # LOG NAME: adds up what a twin reported
    local last
    last=$(tail -n 1 "$1")
    if [[ $last =~ ^([0-9]+)\ passed,\ ([0-9]+)\ failed$ ]]; then
        passed=$((passed + BASH_REMATCH[1])) failed=$((failed + BASH_REMATCH[2]))
        echo "  $2: $last"
        grep FAIL "$1"
    else
        check 0 "$2: stopped"
        tail -n 8 "$1"
    fi
}
if [ "$GPU" = 1 ]; then
    for p in fp32 bf16; do
        $dir/twin_$p > "$work/$p.1" 2>&1
        $dir/twin_$p > "$work/$p.2" 2>&1
        count "$work/$p.1" "$p on the GPU"
        check "$([ -n "$(bits "$work/$p.1")" ] && [ "$(bits "$work/$p.1")" = "$(bits "$work/$p.2")" ] && echo 1)" "$p: two runs give the same bits"
    done
    report
fi
(for o in forward reverse 1 2; do CUDA_ON_CPU_ORDER=$o $dir/twin_fp32 --quick; done > "$work/fp32.orders" 2>&1
 for o in forward reverse 1 2; do CUDA_ON_CPU_ORDER=$o $dir/twin_bf16 --quick; done > "$work/bf16.orders" 2>&1
 $dir/races --quick > "$work/races" 2>&1) &
$dir/twin_fp32 > "$work/fp32" 2>&1
$dir/twin_bf16 > "$work/bf16" 2>&1
wait
for p in fp32 bf16; do
    count "$work/$p" "$p, all shapes"
    check "$([ "$(bits "$work/$p.orders" | wc -l)" = 4 ] && [ "$(bits "$work/$p.orders" | sort -u | wc -l)" = 1 ] && echo 1)" \
        "$p: the same bits in four orders of threads and blocks"
done
count "$work/races" "fp32, looking for data races"

if [ $model = baselines ]; then kinds=(transformer mamba mamba2 hyena); else kinds=(""); fi
for kind in "${kinds[@]}"; do
    $dir/bench_gpu --tiny ${kind:+--model $kind} > "$work/bench" 2>&1
    check "$([ $? = 0 ] && grep -q '^sampling: ' "$work/bench" && ! grep -qi 'nan\|inf' "$work/bench" && echo 1)" "bench_gpu runs $kind"
done

# ------------------------------------------------------------------------------------------------------------------
# the programs

cu=$PWD/$dir/train_$model c=$PWD/$dir/train_$model.cpu
$dir/prepare --bytes README.md train_$model.c --out "$work/text.bin" > /dev/null 2>&1
data="--train $work/text.bin --val $work/text.bin"
final() { grep '^final' "$1" | grep -o '[0-9.]* nats' | grep -o '[0-9.]*'; }
dumped() { grep '^dumped' "$1" | grep -o 'loss [0-9.]*' | grep -o '[0-9.]*'; }
near() { awk -v a="$1" -v b="$2" 'BEGIN { print (a != "" && b != "" && a - b < 0.01 && b - a < 0.01) ? 1 : 0 }'; }
run() { # NAME PROGRAM FLAGS...
    local name=$1
    shift
    "$@" > "$name.log" 2>&1
}

planned() { "$@" --plan | sed -n 's/.*GPU bytes in all: \([0-9]*\).*/\1/p'; } # PROGRAM FLAGS...

programs() { # FLAGS...
    local small="--layers 2 --vocab 256 --channels 24 --batch 2 --seq 33 --accum 2 --val-batches 2 --lr 3e-3 --warmup 1 --schedule constant --sample-every 0 $*" bytes longer code
    local folder
    folder=$(mktemp -d -p "$work") && cd "$folder" || exit 1
    echo "  with $*:"
    run c "$c" $data $small --steps 8 --out c
    run cu "$cu" $data $small --steps 8 --out cu
    check "$(near "$(final c.log)" "$(final cu.log)")" "8 steps: loss $(final c.log) in C, $(final cu.log) in CUDA (bf16)"

    # each goes on from the other's checkpoint
    run c4 "$c" $data $small --steps 4 --out c4
    run cu4 "$cu" $data $small --steps 4 --out cu4
    cp -r cu4 cu8
    run cu8 "$cu" --resume cu8/model.safetensors --steps 8
    check "$(cmp -s cu8/model.safetensors cu/model.safetensors && echo 1)" "CUDA: resumed to the same bits as without the interruption"
    run c4cu "$cu" --resume c4/model.safetensors --steps 8
    run cu4c "$c" --resume cu4/model.safetensors --steps 8
    check "$(near "$(final c.log)" "$(final c4cu.log)")" "CUDA goes on from C's checkpoint: $(final c4cu.log)"
    check "$(near "$(final c.log)" "$(final cu4c.log)")" "C goes on from CUDA's checkpoint: $(final cu4c.log)"

    # a sample, a dump
    run g1 "$cu" --generate --init cu/model.safetensors --sample-len 40
    run g2 "$cu" --generate --init cu/model.safetensors --sample-len 40
    check "$([ -s g1.log ] && ! grep -q '^error' g1.log && cmp -s g1.log g2.log && echo 1)" "a sample is the same each time"
    run d1 "$c" $data $small --warmup 0 --steps 0 --dump c.dump
    run d2 "$cu" $data $small --warmup 0 --steps 0 --dump cu.dump
    check "$([ "$(stat -c %s c.dump)" = "$(stat -c %s cu.dump)" ] && [ "$(near "$(dumped d1.log)" "$(dumped d2.log)")" = 1 ] && echo 1)" \
        "dumps: loss $(dumped d1.log) in C, $(dumped d2.log) in CUDA"

    # the memory that the plan says, to the byte
    bytes=$(planned "$cu" $data $small)
    CUDA_ON_CPU_MEMORY=$bytes run enough "$cu" $data $small --steps 1 --save-every -1 --out enough
    code=$?
    CUDA_ON_CPU_MEMORY=$((bytes - 1)) run short "$cu" $data $small --steps 1 --save-every -1 --out short
    check "$([ -n "$bytes" ] && [ $code = 0 ] && [ "$(final enough.log)" ] && echo 1)" "runs in the $bytes bytes of --plan"
    longer=$(planned "$cu" $data $small --batch 1 --seq 65536)
    bytes=$(planned "$cu" $data $small --batch 1 --seq 16384)
    check "$([ -n "$bytes" ] && [ "$longer" -le $((4 * bytes)) ] && [ "$longer" -gt "$bytes" ] && echo 1)" "the plan of 1 x 65,536 tokens: $longer bytes, of 1 x 16,384: $bytes"
    check "$(grep -q '^error: not enough GPU memory: .*--plan' short.log && [ ! -e short/model.safetensors ] && echo 1)" "one byte less: $(head -n 1 short.log)"
}
case $model in
harmonic)
    programs --stateful ;;
baselines)
    programs --model transformer --heads 2 --kv-heads 1
    programs --model transformer --heads 2 --pos learned --norm layer --post-norm --mlp gelu --bias --window 9
    programs --model transformer --heads 2 --attention linear
    programs --model mamba
    programs --model mamba2 --head-dim 16
    programs --model hyena ;;
*)
    programs ;;
esac

# what reads and writes files, options and samples is one text in both; what differs there is the copying to and from the GPU
body() { awk -v start="^static .*[ *]$2\\\\(" '$0 ~ start { on = 1 } on { print } /^}/ { on = 0 }' "$root/$1"; }
differ=
for name in rng_next rng_uniform rng_normal sample_token generate config_check config_describe loss_text learning_rate on_signal log_open make_folder open_data; do
    [ -n "$(body train_$model.c $name)" ] && [ "$(body train_$model.c $name)" = "$(body train_$model.cu $name | sed 's/= {}/= {0}/g')" ] || differ+=" $name"
done
options() { grep '^    {"' "$root/$1" | grep -v '"threads"\|"tf32"'; }
[ "$(options train_$model.c)" = "$(options train_$model.cu)" ] || differ+=" option_table"
check "$([ -z "$differ" ] && echo 1)" "the host's functions are the same in train_$model.c and train_$model.cu${differ:+; these differ:$differ}"

check "$([ "$("$cu" --help | grep -o '^  --[a-z0-9-]*' | grep -v tf32)" = "$("$c" --help | grep -o '^  --[a-z0-9-]*')" ] && echo 1)" \
    "both have the same flags (and --tf32)"
report
