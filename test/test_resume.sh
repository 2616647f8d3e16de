#!/bin/bash
# test_resume.sh: a run that was stopped and resumed ends with the same checkpoint, bit for bit, as one that was not; a run
# killed while it saves loses nothing; what a checkpoint generates is decided by the seed. Run like test_cli.sh.
. "$(dirname "$0")/cli.sh"

# ---- stop at step k, resume, compare: weights, AdamW's state, carried states, the data's place, and every option
both() {                                    # both NAME FLAGS...
    local name=$1 dir=${1// /-}
    shift
    local flags=("${SMALL[@]}" --schedule constant --warmup 2 --val-every 3 "$@")
    for k in 2 5; do
        train "${flags[@]}" --steps 7 --out "$dir-whole$k" > whole.out 2> .err &&
            train "${flags[@]}" --steps $k --out "$dir-$k" > .out 2> .err &&
            train --resume "$dir-$k/model.safetensors" --steps 7 --threads 1 > resumed.out 2> .err &&
            cmp -s "$dir-whole$k/model.safetensors" "$dir-$k/model.safetensors" &&
            [ "$(tail -n 1 whole.out)" = "$(tail -n 1 resumed.out)" ] &&
            [ "$(cut -f1-6 "$dir-whole$k/log.tsv" | grep -v "^$k	")" = "$(cut -f1-6 "$dir-$k/log.tsv" | grep -v "^$k	")" ]
        report $? "$name: stopped at step $k and resumed: the same bits at step 7 $(head -c 200 .err)"
    done
}
both "random batches" "${DATA[@]}"
both "contiguous batches" "${DATA[@]}" --batches contiguous --seq 50 --batch 45     # fewer than 7 in a pass: it wraps
both "accumulation" "${DATA[@]}" --accum 3
both "copy" --task copy --vocab 11
both "recall" --task recall --vocab 11
both "layers and tie" "${DATA[@]}" --layers 2 --tie
case $MODEL in harmonic)
    both "stateful" "${DATA[@]}" --stateful
    both "stateful, wrapping" "${DATA[@]}" --stateful --seq 100 --batch 25
    both "free bands, no error" "${DATA[@]}" --bands free --error off ;;
esac
train "${DATA[@]}" "${SMALL[@]}" --seed 7 --out other > /dev/null
train "${DATA[@]}" "${SMALL[@]}" --seed 8 --out different > /dev/null
! cmp -s other/model.safetensors different/model.safetensors; report $? "planted: another seed gives another checkpoint"
train "${DATA[@]}" "${SMALL[@]}" --schedule constant --warmup 2 --val-every 3 --steps 2 --out fresh > /dev/null
train --init fresh/model.safetensors "${DATA[@]}" "${SMALL[@]}" --schedule constant --warmup 2 --val-every 3 --steps 7 --out fresh2 > /dev/null
! cmp -s random-batches-whole2/model.safetensors fresh2/model.safetensors; report $? "planted: starting anew from its weights is not resuming"

# ---- with the default schedule, stopped by Ctrl-C wherever that hits
flags=("${DATA[@]}" --channels 24 --batch 8 --seq 64 --steps 40 --val-every 0 --val-batches 2)
"$TRAIN" "${flags[@]}" --out whole > whole.out
rm -f .out                                  # or what the last run said is taken for this one's
"$TRAIN" "${flags[@]}" --out stopped > .out 2> .err &
for i in $(seq 200); do grep -qs '^step 5/' .out && break; sleep 0.02; done
kill -INT $!
wait $!
code=$? step=$(sed -n 's/^stopped by .* after step //p' .out)
if [ $code = 0 ]; then echo "  skipped: the run was over before Ctrl-C reached it"; else
    train --resume stopped/model.safetensors > resumed.out 2> .err
    [ $code = 130 ] && cmp -s whole/model.safetensors stopped/model.safetensors
    report $? "Ctrl-C after step $step of 40, resumed: the same bits at the end"
fi

# ---- kill -9 again and again, during saves: there is always a whole checkpoint, never older than the last one seen
big=("${DATA[@]}" --channels 96 --batch 1 --seq 8 --val-batches 1 --val-every 0 --steps 1000000 --save-every 1 --warmup 0)
"$TRAIN" "${big[@]}" --out killed > .out 2> .err &
pid=$! last=0 sound=1 inside=0 round=0
for i in $(seq 400); do [ -s killed/model.safetensors ] && break; sleep 0.02; done
while [ $round -lt 40 ] && [ $((round < 10 || inside == 0)) = 1 ]; do
    round=$((round + 1))
    sleep 0.0$((RANDOM % 90 + 10))
    kill -9 $pid
    wait $pid 2> /dev/null
    [ -e killed/model.safetensors.tmp ] && inside=$((inside + 1))
    rm -f .out
    "$TRAIN" --resume killed/model.safetensors > .out 2> .err &
    pid=$!
    for i in $(seq 400); do grep -qs '^step ' .out && break; kill -0 $pid 2> /dev/null || break; sleep 0.02; done
    now=$(sed -n 's/^step \([0-9]*\).*/\1/p' .out | head -n 1)
    if [ -z "$now" ] || [ "$now" -le "$last" ]; then sound=0; break; fi
    last=$now
done
kill -9 $pid
wait $pid 2> /dev/null
[ $sound = 1 ]; report $? "killed $round times, $inside of them while saving: resumed each time, at step $last in the end $(head -c 200 .err)"
[ $inside -gt 0 ]; report $? "  and some of the kills did hit a save"

# ---- generation
generate() { "$TRAIN" --init whole/model.safetensors --generate --tokenizer bytes --sample-len 60 --temperature 1 "$@"; }
generate > one.txt 2> .err; generate > two.txt; generate --threads 1 > three.txt; generate --seed 5 > four.txt
[ -s one.txt ] && cmp -s one.txt two.txt && cmp -s one.txt three.txt; report $? "--generate twice, and on one thread: the same text"
! cmp -s one.txt four.txt; report $? "  another seed: another text"
generate --temperature 0 --seed 1 > one.txt; generate --temperature 0 --seed 2 > two.txt; generate --top-k 1 > three.txt
cmp -s one.txt two.txt && cmp -s one.txt three.txt; report $? "  at temperature 0 any seed gives the same, as does --top-k 1"
[ "$(wc -c < one.txt)" = 61 ]; report $? "  as long as asked for: $(wc -c < one.txt) bytes with the newline"
generate --prompt "line 7" > one.txt
[ "$(head -c 6 one.txt)" = "line 7" ] && [ "$(wc -c < one.txt)" = 67 ]; report $? "  after a prompt: $(head -c 20 one.txt | tr -c '[:print:]' ?)"
generate --sample-len 3000 > one.txt
[ "$(wc -c < one.txt)" = 3001 ]; report $? "  far past the length of a training sequence"

finish
