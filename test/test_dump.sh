#!/bin/bash
# test_dump.sh: what --dump writes, checked by dump_check.c, which has a parser of its own. Run like test_cli.sh;
# DUMP_CHECK (default build/test/dump_check) is that program.
DUMP_CHECK=$(realpath "${DUMP_CHECK:-build/test/dump_check}")
. "$(dirname "$0")/cli.sh"
[ -x "$DUMP_CHECK" ] || { echo "$DUMP_CHECK is not there"; exit 1; }

dumped() {                                  # dumped NAME FLAGS...
    train "${SMALL[@]}" --steps 0 --dump d.safetensors "${@:2}" > .out 2> .err && "$DUMP_CHECK" d.safetensors > .check
    report $? "$1: $(tail -n 1 .check), $(grep -o 'the loss from.*' .check)"
    [ "$failed" = 0 ] || grep FAIL .check
}
dumped "untrained" --train train.bin
dumped "two layers, tied" --train train.bin --layers 2 --tie
dumped "one token" --train train.bin --batch 1 --seq 1
dumped "a task, with targets that do not count" --task copy --vocab 9
case $MODEL in harmonic)
    dumped "error off" --train train.bin --error off
    dumped "stateful" --train train.bin --stateful ;;
esac
check "after training" train "${DATA[@]}" "${SMALL[@]}" --out run --dump trained.safetensors
check "  it is sound" "$DUMP_CHECK" trained.safetensors
check "the same weights again" train --init run/model.safetensors --train train.bin --batch 2 --seq 16 --steps 0 --dump again.safetensors
check "  it is sound" "$DUMP_CHECK" again.safetensors
check "a checkpoint is a sound file too, but no dump" eval '! "$DUMP_CHECK" run/model.safetensors > .check && grep -q "ok    every tensor has" .check'

# the check must be able to fail: a number changed in the logits, a byte gone, an offset off by 8
size=$(wc -c < d.safetensors)
cp trained.safetensors broken.safetensors
header=$(od -An -tu8 -N8 broken.safetensors | tr -d ' ')
offset=$(head -c $((8 + header)) broken.safetensors | grep -ao '"logits":{[^}]*' | sed 's/.*data_offsets":\[\([0-9]*\),.*/\1/')
printf '\0\0\310\102' | dd of=broken.safetensors bs=1 seek=$((8 + header + offset)) conv=notrunc 2> /dev/null      # 100.0
! "$DUMP_CHECK" broken.safetensors > .check; report $? "planted: one logit changed: $(grep -m1 FAIL .check)"
head -c -1 trained.safetensors > broken.safetensors
! "$DUMP_CHECK" broken.safetensors > .check; report $? "planted: a byte gone: $(grep -m1 FAIL .check)"
sed 's/"data_offsets":\[0,/"data_offsets":[8,/' trained.safetensors > broken.safetensors
! "$DUMP_CHECK" broken.safetensors > .check; report $? "planted: an offset wrong: $(grep -m1 FAIL .check)"
fails "a dump that cannot be written" "cannot write" train --train train.bin "${SMALL[@]}" --steps 0 --dump nowhere/d.safetensors

finish
