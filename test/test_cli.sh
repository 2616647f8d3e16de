#!/bin/bash
# test_cli.sh: the command line of a training program: what it prints, and that every kind of bad input ends in one clear
# line, exit code 2 and no file touched. Run in the project's folder, after make cpu; cli.sh says how to choose the model.
. "$(dirname "$0")/cli.sh"

# ---- help and plan
check "--help" train --help
missing=
for flag in preset plan train val tokenizer out batch seq steps accum lr min-lr warmup schedule weight-decay clip seed val-every \
    val-batches sample-every sample-len prompt temperature top-k generate save-every resume init eval dump task threads vocab \
    channels layers; do grep -q -- "^  --$flag " .out || missing="$missing --$flag"; done
[ -z "$missing" ]
report $? "--help lists every flag$missing"
check "--plan" train --plan --channels 8 --vocab 50 --batch 1 --seq 1
says "  parameters" '^parameters: [0-9]+$'
says "  bytes" '^bytes in all: [0-9]+'
plan() {                                    # plan PARAMETERS FLAGS...
    local n
    n=$(train --plan "${@:2}" 2> .err | sed -n 's/^parameters: //p')
    [ "$n" = "$1" ]
    report $? "--plan ${*:2}: $n parameters"
}
case $MODEL in harmonic)
    plan 27965952 --preset harmonic-28m
    plan 27834880 --preset harmonic-28m --error off
    plan 13425920 --preset harmonic-28m --channels 128
    plan 60388352 --preset harmonic-28m --channels 512
    for size in 128:6993024 256:15100160 512:34656768; do plan ${size#*:} --preset harmonic-28m --tie --channels ${size%:*}; done ;;
esac
check "--plan of a million tokens, which would not fit here" train --plan --batch 1 --seq 1048576
says "  bytes" '^bytes in all: [0-9]{11,}'
case $MODEL in baselines) huge=(--channels 65536 --heads 256) ;; *) huge=(--channels 65536) ;; esac
check "--plan of what no machine holds" train --plan "${huge[@]}" --vocab 65536 --layers 100 --batch 1 --seq 1
says "  does not overflow" '^parameters: [0-9]{13,}'

# ---- a run
check "training" train "${DATA[@]}" "${SMALL[@]}" --val-every 2 --sample-every 4 --sample-len 5 --tokenizer bytes --out run
says "  a line a step" '^step 4/4 \| loss [0-9.]+ \| [0-9.]+ bits/token \| lr [0-9.e-]+ \| norm [0-9.]+ \| [0-9]+ ms \| [0-9]+ tok/s \| ETA '
[ "$(grep -c '^step ' .out)" = 4 ]; report $? "  one for each"
tail -n 1 .out | grep -qE '^final val loss [0-9.]+ nats  [0-9.]+ bits/token  [0-9.]+ bits/byte$'
report $? "  the last line: $(tail -n 1 .out)"
[ "$(cut -f1 run/log.tsv | tr '\n' ' ')" = "step 0 1 2 3 4 " ]; report $? "  log.tsv has a row for each"
logged=$(awk -F'\t' '$1 == 4 { print $3 }' run/log.tsv) printed=$(sed -n 's/^final val loss \([0-9.]*\).*/\1/p' .out)
[ -n "$logged" ] && [ "$(printf %.4f "$logged")" = "$printed" ]; report $? "  the last validation is logged: $logged"
cp .out first.txt
check "--plan of --generate" train --plan --init run/model.safetensors --generate
says "  is that of one token" 'activations of 1 x 1 tokens [0-9]+, of one token [0-9]+'
check "--eval" train --init run/model.safetensors --eval --val val.bin "${SMALL[@]:2}"
[ "$(tail -n 1 .out)" = "$(tail -n 1 first.txt)" ]; report $? "  gives the same last line: $(tail -n 1 .out)"
check "the same on one thread" train "${DATA[@]}" "${SMALL[@]}" --val-every 2 --tokenizer bytes --sample-every 4 --sample-len 5 --out again --threads 1
cmp -s run/model.safetensors again/model.safetensors; report $? "  gives the same checkpoint, bit for bit"
fails "the same folder twice" "already holds a run" train "${DATA[@]}" "${SMALL[@]}" --out run
check "another run from its weights" train --init run/model.safetensors "${DATA[@]}" "${SMALL[@]:2}" --out init
check "a task" train --task copy "${SMALL[@]}" --vocab 9 --out task
says "  has an accuracy" 'accuracy [01]\.[0-9]+'
check "no validation" train --train train.bin "${SMALL[@]}" --out noval
check "no steps" train "${DATA[@]}" "${SMALL[@]}" --steps 0 --out nothing
[ ! -e nothing ]; report $? "  leave no folder"
check "no checkpoint with --save-every -1" train "${DATA[@]}" "${SMALL[@]}" --save-every -1 --out nosave
[ ! -e nosave/model.safetensors ]; report $? "  and indeed there is none"

# ---- bad token files
small() { train --train "$1" "${SMALL[@]}" --out bad "${@:2}"; }
: > empty.bin
head -c 2000 train.bin > short.bin
head -c 600 train.bin > headless.bin
{ printf 'XXXX'; tail -c +5 train.bin; } > foreign.bin
{ cat train.bin; printf 'xx'; } > long.bin
fails "no such token file" "No such file" small nope.bin
fails "no file matches" "no file matches" small 'nope*.bin'
fails "an empty token file" "empty" small empty.bin
fails "a truncated token file" "truncated" small short.bin
fails "a token file cut in its header" "truncated" small headless.bin
fails "too long a token file" "too long" small long.bin
fails "a foreign file" "not a token file" small foreign.bin
fails "a text" "not a token file" small text.txt
fails "a checkpoint for data" "not a token file" small run/model.safetensors
fails "a folder for data" "is a folder" small run
fails "a bad validation file" "empty" train --train train.bin --val empty.bin "${SMALL[@]}" --out bad
fails "one bad shard of three" "empty" small '*mp*.bin'
for n in 33 32; do head -c $n text.txt > n.txt; "$PREPARE" --bytes n.txt --out n$n.bin > /dev/null; done
head -c 10 text.txt > n.txt; "$PREPARE" --bytes n.txt --out n10.bin > /dev/null
check "exactly B T + 1 tokens, one batch" train --train n33.bin --val n33.bin --batches contiguous "${SMALL[@]}" --out exact
fails "one token fewer" "token" train --train n32.bin --batches contiguous "${SMALL[@]}" --out bad
fails "a text shorter than a sequence" "token" small n10.bin
check "T + 1 tokens and random batches" train --train n33.bin --channels 8 --batch 3 --seq 32 --steps 2 --out exact2
fails "tokens past the vocabulary" "vocab" small train.bin --vocab 100

# ---- bad checkpoints
good=run/model.safetensors size=$(wc -c < run/model.safetensors)
from() { train --init "$1" "${DATA[@]}" --batch 2 --seq 16 --steps 1 --out bad "${@:2}"; }
: > empty.safetensors
for n in 4 8 100 2000 $((size / 2)) $((size - 1)); do head -c $n $good > cut$n.safetensors; done
sed "s/\"program\":\"$MODEL\"/\"program\":\"$(printf "%${#MODEL}s" | tr ' ' x)\"/" $good > other.safetensors
sed 's/"wte"/"WTE"/' $good > noname.safetensors
sed 's/F32/F64/' $good > dtype.safetensors
sed 's/"shape":\[256,8\]/"shape":[8,256]/' $good > shape.safetensors
sed 's/"vocab":"256"/"vocab":"257"/' $good > larger.safetensors
sed 's/"channels":"8"/"channels":"-"/' $good > word.safetensors
fails "no such checkpoint" "No such file" from nope.safetensors
fails "an empty checkpoint" "empty.safetensors" from empty.safetensors
for n in 4 8 100 2000 $((size / 2)) $((size - 1)); do fails "a checkpoint cut at byte $n" "cut$n.safetensors" from cut$n.safetensors; done
fails "a text for a checkpoint" "not a safetensors" from text.txt
fails "a token file for a checkpoint" "safetensors" from train.bin
fails "a folder for a checkpoint" "not a file" from run
fails "another program's checkpoint" "not a checkpoint of this program" from other.safetensors
fails "a checkpoint without a tensor" "wte" from noname.safetensors
fails "a checkpoint of another precision" "wte" from dtype.safetensors
fails "a tensor of another shape" "wte" from shape.safetensors
fails "a checkpoint whose flags and tensors differ" "shape" from larger.safetensors
fails "a checkpoint whose flags are no numbers" "channels" from word.safetensors
fails "a flag against the checkpoint" "--channels 8, not 16" from $good --channels 16
fails "--resume with another batch" "--batch 2, not 3" train --resume $good --steps 9 --batch 3
fails "--resume past its end" "past --steps" train --resume $good --steps 2
header=$(od -An -tu8 -N8 $good | tr -d ' ')
{ head -c $((8 + header)) $good; head -c $((size - 8 - header)) /dev/zero | tr '\0' '\377'; } > nan.safetensors
# training has begun by then, so the log is there; but no checkpoint is
train --init nan.safetensors "${DATA[@]}" --batch 2 --seq 16 --steps 1 --val-every 0 --out nan > .out 2> .err
[ $? = 2 ] && grep -q 'step 1: the loss is -\?nan; the first tensor that is not finite: wte' .err && [ ! -e nan/model.safetensors ]
report $? "NaN in the weights: $(cat .err)"

# ---- bad flags
fails "an unknown flag" "did you mean --channels" small train.bin --chanels 9
fails "another" "did you mean --steps" small train.bin --step 9
fails "a word that is no flag" "unknown flag 'hello'" small train.bin hello
fails "a single dash" "did you mean --lr" small train.bin -lr 1
fails "an unknown preset" "did you mean" train --preset "$MODEL-27m" --plan
fails "a flag without its value" "needs a value" small train.bin --lr
fails "a value that is no number" "takes a number" small train.bin --lr fast
fails "half a number" "takes a number" small train.bin --steps 10x
fails "no value" "takes a number" small train.bin --steps ''
fails "a fraction of a step" "whole number" small train.bin --steps 1.5
fails "an unknown word" "takes one of" small train.bin --schedule step
fails "the start of a word" "takes one of" small train.bin --schedule cos
for pair in batch:0 batch:-1 batch:1e30 batch:nan seq:0 seq:99999999999 steps:-1 accum:0 lr:-1 lr:nan lr:inf warmup:-2 clip:-1 \
    seed:-1 vocab:0 vocab:65537 channels:0 channels:1e9 layers:0 layers:1e9 temperature:-1 top-k:-1 sample-len:0 threads:-1 \
    val-batches:-1 save-every:-2 weight-decay:-1; do
    fails "--${pair%:*} ${pair#*:}" "--${pair%:*} takes" small train.bin --${pair%:*} ${pair#*:}
done
fails "more tokens than 2^31" "2^31" small train.bin --batch 1000000 --seq 1000000
fails "a sequence longer than the text" "token" small train.bin --seq 100000
fails "more memory than there is" "not enough memory" train --task copy "${huge[@]}" --layers 100 --vocab 100 --batch 1 --seq 4 --out bad

# ---- impossible combinations
fails "nothing to train on" "--train" train
fails "--resume and --init" "one of them" train --resume $good --init $good
fails "--eval of nothing" "--init" train --eval --val val.bin
fails "--generate from nothing" "--init" train --generate
fails "--eval on nothing" "--val" train --eval --init $good
fails "--dump with --eval" "leave --eval out" train --eval --init $good --val val.bin --dump d.safetensors
fails "--task and --train" "--task" train --task copy --train train.bin "${SMALL[@]}" --out bad
fails "--task that never ends" "--val-batches 0" train --task copy "${SMALL[@]}" --val-batches 0 --out bad
fails "--min-lr above --lr" "--min-lr" small train.bin --lr 1e-3 --min-lr 1
fails "--warmup longer than --steps" "--warmup" small train.bin --warmup 100
fails "--prompt without a tokenizer" "--tokenizer" small train.bin --prompt hello
fails "a tokenizer that is not there" "nope" small train.bin --tokenizer nope
fails "a tokenizer larger than the vocabulary" "--vocab" small train.bin --tokenizer bytes --vocab 100
case $MODEL in baselines)
    # each without --channels 8, so that what is wrong is what the name says
    with() { train --task copy --vocab 9 --batch 2 --seq 16 --steps 1 --out bad "$@"; }
    for pair in d-state:257 d-state:-1 conv:0 conv:1 conv:9 expand:0 expand:17 chunk:-1 chunk:1e9; do
        for m in mamba mamba2; do fails "$m --${pair%:*} ${pair#*:}" "--${pair%:*} takes" with --model $m --${pair%:*} ${pair#*:}; done
    done
    for pair in heads:0 heads:-1 heads:1e9 kv-heads:-1 ff:-1 ff:1e9 window:-1 block:-1 window:1e10; do
        fails "--${pair%:*} ${pair#*:}" "--${pair%:*} takes" with --${pair%:*} ${pair#*:}
    done
    for pair in emb:0 emb:2 emb:1e9; do fails "--${pair%:*} ${pair#*:}" "--${pair%:*} takes" with --model hyena --${pair%:*} ${pair#*:}; done
    for n in 0 -1 1025; do fails "--head-dim $n" "--head-dim takes" with --model mamba2 --head-dim $n; done
    for n in 0 -1 2e9; do fails "--context $n" "--context" with --model mamba --context $n; done
    fails "an even --emb" "3 or 5" with --model hyena --emb 4
    fails "heads that do not divide" "--heads 6: 4 would do" with --channels 8 --heads 6
    fails "more heads than channels" "--heads 60000: 8 would do" with --channels 8 --heads 60000
    fails "groups that do not divide" "--kv-heads 3 groups: 2 would do" with --kv-heads 3
    fails "more groups than heads" "--kv-heads 8 groups: 4 would do" with --kv-heads 8
    fails "mamba2's heads" "--head-dim 48: 32 would do" with --model mamba2 --head-dim 48
    fails "a head too large" "give more heads" with --channels 514 --heads 2
    fails "RoPE and an odd head" "--pos rope" with --channels 6 --heads 2
    fails "linear attention and a window" "--attention linear" with --attention linear --window 4
    fails "linear attention and blocks" "--attention linear" with --attention linear --block 4
    fails "--post-norm without an MLP" "--post-norm" with --post-norm --mlp none
    fails "--ff without an MLP" "--ff 7" with --mlp none --ff 7
    fails "--context where nothing is positioned" "--context 16" with --context 16
    fails "another model's flag" "--d-state is a flag of --model mamba mamba2" with --d-state 4
    fails "and another" "--window is a flag of --model transformer" with --model hyena --window 4
    for preset in harmonic-tf:mamba harmonic-tf:hyena gpt2:mamba2 mamba-tiny:mamba2 mamba2-tiny:mamba hyena-tiny:transformer; do
        fails "--preset ${preset%:*} with --model ${preset#*:}" "--preset ${preset%:*} is of --model" with --preset ${preset%:*} --model ${preset#*:}
    done
    check "a preset with its own model" train --plan --preset mamba-tiny --model mamba
    fails "more numbers than can be counted" "10^18" train --plan --model mamba --channels 65536 --expand 16 --d-state 256 --chunk 1 --batch 16000000 --seq 127 --layers 100
    check "chunks longer than the text" with --model mamba2 --head-dim 64 --chunk 60000 --out chunks
    for kind in "--model hyena" "--pos learned"; do     # what was trained on 16 positions has no more
        short=$(tr -dc a-z <<< "$kind")
        fails "$kind: a context shorter than --seq" "8 positions" with $kind --context 8
        check "$kind: 16 positions" with $kind --channels 8 --out "$short"
        fails "$kind: --eval on longer sequences" "give --seq 16" train --init $short/model.safetensors --eval --task copy --seq 32
        fails "$kind: more training on longer ones" "give --seq 16" train --init $short/model.safetensors --task copy --seq 32 --steps 1 --out bad
        fails "$kind: --resume with a longer context" "--context 16, not 32" train --resume $short/model.safetensors --steps 2 --context 32
        check "$kind: a sample as long as the positions" train --init $short/model.safetensors --generate --sample-len 16
        says "  is complete" '^([0-8] ){16}$'
        check "$kind: a longer one" train --init $short/model.safetensors --generate --sample-len 17
        says "  ends where they end" '^\[here the positions end'
    done
    check "a mamba" with --model mamba --channels 8 --out mamba
    sed 's/"post-norm":"0"/"post-norm":"1"/' mamba/model.safetensors > mamba/post.safetensors
    check "  whose checkpoint says what mamba has not, a norm after" train --init mamba/post.safetensors --eval --task copy
    check "--plan of GPT-2" train --plan --preset gpt2
    says "  keys and values" "^keys and values of a generated text: $((2 * 768 * 12 * 4)) bytes a token"
    check "--plan with two groups" train --plan --preset gpt2 --kv-heads 2
    says "  a sixth" "^keys and values of a generated text: $((2 * 128 * 12 * 4)) bytes a token"
    for threads in 1 3; do          # E = 16, N = 128, one head: what ssd_backward lays out, in float
        check "--plan of mamba2, $threads threads" train --plan --model mamba2 --channels 8 --head-dim 16 --layers 1 --vocab 9 --seq 64 --threads $threads
        says "  their work space" "^work space per thread: $(((8 * 64 + 4 * 64 * 16 + 64 * 128 + 5 * 64 * 64) * 4)) bytes, threads: $threads"
        eval "all$threads=$(sed -n 's/^bytes in all: \([0-9]*\).*/\1/p' .out)"
    done
    [ $((all3 - all1)) = $((2 * (8 * 64 + 4 * 64 * 16 + 64 * 128 + 5 * 64 * 64) * 4)) ]; report $? "  is in the sum"
    ;;
esac
case $MODEL in harmonic)
    fails "--stateful and --task" "--stateful" train --task copy --stateful "${SMALL[@]}" --out bad
    fails "--stateful and random batches" "--batches random" small train.bin --stateful --batches random ;;
esac

# ---- bad output folders
fails "a file for --out" "text.txt" small train.bin --out text.txt
fails "below a file" "text.txt" small train.bin --out text.txt/x
fails "where nothing can be made" "/proc" small train.bin --out /proc/nope
if [ "$(id -u)" = 0 ]; then
    echo "  skipped: a folder without write permission (root may write anywhere)"
else
    mkdir readonly; chmod 555 readonly
    fails "a folder without write permission" "readonly" small train.bin --out readonly
fi

# ---- full disk: a limit on the size of files, as the shell can set it, is met in the middle of a checkpoint
limited() { (ulimit -f 100; train "${DATA[@]}" "${SMALL[@]}" --channels 64 --save-every 2 --out full "$@"); }
limited > .out 2> .err
[ $? = 2 ] && grep -q '^error: cannot write full/model.safetensors: File too large' .err && [ ! -e full/model.safetensors.tmp ]
report $? "full disk: $(tail -n 1 .err)"
grep -q '^warning: cannot write full/model.safetensors' .err && grep -q '^step 4/4' .out
report $? "  a failed save on the way is a warning, and training went on"
check "  a run saved before the disk is full" train "${DATA[@]}" "${SMALL[@]}" --channels 64 --out kept
before=$(cksum kept/model.safetensors)
(ulimit -f 100; train --resume kept/model.safetensors --steps 6 > .out 2> .err)
[ $? = 2 ] && [ "$before" = "$(cksum kept/model.safetensors)" ]
report $? "  keeps its checkpoint: $(tail -n 1 .err)"
check "  and goes on when there is room" train --resume kept/model.safetensors --steps 6

# ---- signals: the step in hand is finished, and saved if saving is on
interrupted() {                             # interrupted SIGNAL CODE FOLDER FLAGS...
    local code
    rm -f .out                              # or what the last run said is taken for this one's
    "$TRAIN" "${DATA[@]}" "${SMALL[@]}" --steps 1000000 --val-every 0 --out "$3" "${@:4}" > .out 2> .err &
    for i in $(seq 200); do grep -qs '^step 3/' .out && break; sleep 0.05; done
    kill -"$1" $!
    for i in $(seq 200); do kill -0 $! 2> /dev/null || break; sleep 0.05; done
    kill -9 $! 2> /dev/null                 # only where the signal did nothing
    wait $!
    code=$?
    [ $code = "$2" ] && grep -q '^stopped by .* after step [0-9]' .out
    report $? "SIG$1: exit code $code, $(tail -n 2 .out | tr '\n' ' ')"
}
interrupted INT 130 int
[ -s int/model.safetensors ] && says "  saved" "^saved int/model.safetensors; go on with --resume"
step=$(sed -n 's/^stopped by .* after step //p' .out)
check "  --resume goes on" train --resume int/model.safetensors --steps $((step + 2)) --warmup 0
[ "$(grep -c '^step ' .out)" = 2 ]; report $? "  at the next step: $(grep -m1 '^step ' .out | cut -c1-30)"
interrupted TERM 143 term
interrupted INT 130 unsaved --save-every -1
[ ! -e unsaved/model.safetensors ]; report $? "  --save-every -1: nothing is saved then either"

finish
