#!/bin/bash
# FineWeb-Edu, 100 billion tokens of educational web pages: published as GPT-2's tokens, in files of 100 million
# (200 MB) in the format of llm.c, which the training programs read. No text is downloaded, nothing is encoded here.
NAME=fineweb_edu
ABOUT="FineWeb-Edu as published GPT-2 tokens: val_000000.bin and train_000001.bin, train_000002.bin ...
  --shards N        so many training files of 100 million tokens, 200 MB each (default 10; there are 1001)"
BPE=
SHARDS=10
option() {
    [ "$1" = --shards ] || return 1
    [[ $2 =~ ^[0-9]+$ ]] && [ "$2" -ge 1 ] && [ "$2" -le 1001 ] || die "--shards $2: expected 1 to 1001"
    SHARDS=$2
}
. "$(dirname "$0")/common.sh"

URL=https://huggingface.co/datasets/karpathy/fineweb-edu-100B-gpt2-token-shards/resolve/main
fetch "$DIR/tokenizer.tok" 456318 1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5 \
    https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/vocab.bpe
fetch "$DIR/val_000000.bin" - tokens $URL/edu_fineweb_val_000000.bin
for n in $(seq -f %06g 1 "$SHARDS"); do
    fetch "$DIR/train_$n.bin" - tokens "$URL/edu_fineweb_train_$n.bin"
done
echo "train with --train '$DIR/train_*.bin' --val $DIR/val_000000.bin --tokenizer $DIR/tokenizer.tok"
