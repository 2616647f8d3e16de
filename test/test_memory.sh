#!/bin/bash
# test_memory.sh: a step of training takes the memory that --plan says, no more (but for 40 MB of program and batch) and not much
# less, and nothing in it is of size (T,T): with 16,384 tokens that would be 1.07 GB. cli.sh says how to choose the model.
. "$(dirname "$0")/cli.sh"
PEAK="$W/peak"
"${CC:-cc}" -O1 "$HERE/peak.c" -o "$PEAK" || { echo "no C compiler ($CC)"; exit 1; }
export OMP_NUM_THREADS=2
LONG=(--task copy --vocab 16 --channels 16 --layers 1 --batch 1 --seq 16384 --steps 1 --val-batches 1 --save-every -1)

planned() { train "${LONG[@]}" "$@" --plan | sed -n 's/^bytes in all: \([0-9]*\).*/\1/p'; }

# fits NAME FLAGS...
fits() {
    local plan longer peak
    plan=$(planned "${@:2}")
    longer=$(planned "${@:2}" --seq 65536)
    [ -n "$plan" ] && [ "$plan" -lt 500000000 ] && [ "$longer" -le $((4 * plan)) ] && [ "$longer" -gt "$plan" ]
    report $? "$1: the plan is $plan bytes, less than half of a (T,T) tensor, and $longer for 65,536 tokens"
    rm -rf run
    "$PEAK" "$TRAIN" "${LONG[@]}" "${@:2}" --out run > .out 2> .err
    report $? "  a step of training runs: $(grep -o 'loss [0-9.]* nats' .out)"
    peak=$(tail -n 1 .err)
    [ "$peak" -le $((plan + 40000000)) ] && [ "$peak" -ge $((plan * 4 / 5)) ]
    report $? "  and takes $peak bytes, of $plan planned"
}
case $MODEL in
harmonic)
    fits harmonic ;;
baselines)
    fits transformer --model transformer --heads 2
    fits "linear attention" --model transformer --heads 2 --attention linear
    fits "a window" --model transformer --heads 2 --window 256
    fits "blocks" --model transformer --heads 2 --block 256
    fits mamba --model mamba
    fits mamba2 --model mamba2 --head-dim 16
    fits "mamba2, the largest chunks" --model mamba2 --head-dim 16 --chunk 16384
    fits hyena --model hyena ;;     # half of it is the threads' own work space
esac
finish
