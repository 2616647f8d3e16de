#!/bin/bash
# smoke.sh: Harmonic and its four baselines on WikiText-2, one after another: the same tokens in the same order, the same
# optimizer and schedule, C = 256, about the same number of parameters. Prints a table. It is a smoke test of a comparison,
# a few minutes a model on a laptop's CPU: one seed, one setting, far fewer tokens than any model here could learn from.
#
#   make cpu && data/wikitext2.sh --bpe 4096 && dev/repro/smoke.sh        STEPS=150 (of 8,192 tokens) OUT=out/smoke
cd "$(dirname "$0")/../.." || exit 1
STEPS=${STEPS:-150} OUT=${OUT:-out/smoke} DATA=${DATA:-data/wikitext2}
[ -e "$DATA/train.bin" ] || { echo "no $DATA/train.bin: run data/wikitext2.sh --bpe 4096 first" >&2; exit 2; }
[ -x build/cpu/train_baselines ] && [ -x build/cpu/train_harmonic ] || { echo "run make cpu first" >&2; exit 2; }
[ ! -e "$OUT" ] || { echo "$OUT is there already: choose another OUT, or delete it" >&2; exit 2; }
common="--train $DATA/train.bin --val $DATA/val.bin --tokenizer $DATA/tokenizer.tok --channels 256 --batch 16 --seq 512
        --steps $STEPS --lr 2e-3 --val-every 0 --val-batches 0 --save-every -1"
table="| model | parameters | val nats | bits/token | bits/byte | tokens/s | MB |
|---|---|---|---|---|---|---|"
run() { # NAME PROGRAM FLAGS...
    local name=$1 program=$2 log=$OUT/$1.log parameters bytes final
    shift 2
    mkdir -p "$OUT"
    parameters=$($program $common "$@" --plan | sed -n 's/^parameters: //p')
    bytes=$($program $common "$@" --plan | sed -n 's/^bytes in all: \([0-9]*\).*/\1/p')
    $program $common "$@" --out "$OUT/$name" | tee "$log" || exit 1
    final=$(grep '^final' "$log") || exit 1
    table="$table
| $name | $parameters | $(awk '{ print $4 " | " $6 " | " $8 }' <<< "$final") | $(awk -F'\t' 'NR > 1 && $8 { n++; s += 1 / $8 } END { printf "%.0f", n / s }' "$OUT/$name/log.tsv") | $((bytes / 1000000)) |"
}
run harmonic    build/cpu/train_harmonic
run transformer build/cpu/train_baselines --model transformer --layers 3 --heads 4
run mamba       build/cpu/train_baselines --model mamba --layers 5
run mamba2      build/cpu/train_baselines --model mamba2 --layers 5
run hyena       build/cpu/train_baselines --model hyena --layers 3
echo
echo "WikiText-2, BPE of 4096; $STEPS steps of 8,192 tokens; val: all of its validation text"
echo "$table"
