#!/bin/bash
# smoke.sh: Harmonic, its four baselines, and the Transformer of its paper, on WikiText-2, one after another: the same tokens
# in the same order, the same optimizer and schedule (those of Harmonic's own run in README.md), C = 256, about the same
# number of parameters. Prints a table; tokens/s are of the median step. It is a smoke test of a comparison, 10 to 20 minutes
# a model on a laptop's CPU: one seed, one setting, far fewer tokens than any model here could learn from.
#
#   make cpu && data/wikitext2.sh --bpe 4096 && dev/repro/smoke.sh        STEPS=700 (of 8,192 tokens) LR=4e-3
#                                                                         OUT=out/smoke ONLY="mamba hyena" (else all)
cd "$(dirname "$0")/../.." || exit 1
STEPS=${STEPS:-700} LR=${LR:-4e-3} OUT=${OUT:-out/smoke} DATA=${DATA:-data/wikitext2}
[ -e "$DATA/train.bin" ] || { echo "no $DATA/train.bin: run data/wikitext2.sh --bpe 4096 first" >&2; exit 2; }
[ -x build/cpu/train_baselines ] && [ -x build/cpu/train_harmonic ] || { echo "run make cpu first" >&2; exit 2; }
[ ! -e "$OUT" ] || { echo "$OUT is there already: choose another OUT, or delete it" >&2; exit 2; }
common="--train $DATA/train.bin --val $DATA/val.bin --tokenizer $DATA/tokenizer.tok --channels 256 --batch 16 --seq 512
        --steps $STEPS --lr $LR --val-every 0 --val-batches 0 --save-every -1"
table="| model | parameters | val nats | bits/token | bits/byte | tokens/s | MB |
|---|---|---|---|---|---|---|"
run() { # NAME PROGRAM FLAGS...
    local name=$1 program=$2 log=$OUT/$1.log plan parameters bytes final
    [[ -z $ONLY || " $ONLY " = *" $name "* ]] || return
    shift 2
    mkdir -p "$OUT"
    plan=$($program $common "$@" --plan) || exit 2
    parameters=$(sed -n 's/^parameters: //p' <<< "$plan")
    bytes=$(sed -n 's/^bytes in all: \([0-9]*\).*/\1/p' <<< "$plan")
    $program $common "$@" --out "$OUT/$name" | tee "$log" || exit 1
    final=$(grep '^final' "$log") || exit 1
    table="$table
| $name | $parameters | $(awk '{ print $4 " | " $6 " | " $8 }' <<< "$final") | $(awk -F'\t' 'NR > 1 && $8 { print $8 }' "$OUT/$name/log.tsv" | sort -n | awk '{ a[NR] = $1 } END { print a[int((NR + 1) / 2)] }') | $((bytes / 1000000)) |"
}
run harmonic    build/cpu/train_harmonic
run transformer build/cpu/train_baselines --model transformer --layers 3 --heads 4
run harmonic-tf build/cpu/train_baselines --model transformer --layers 3 --heads 4 --pos none --norm layer --post-norm --mlp gelu --weights spread
run mamba       build/cpu/train_baselines --model mamba --layers 5
run mamba2      build/cpu/train_baselines --model mamba2 --layers 5
run hyena       build/cpu/train_baselines --model hyena --layers 3
echo
echo "WikiText-2, BPE of 4096; $STEPS steps of 8,192 tokens; val: all of its validation text"
echo "$table"
