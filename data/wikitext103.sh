#!/bin/bash
# WikiText-103: 28,475 good articles of Wikipedia, in the raw edition: rare words stand there, not <unk>, which is what
# a BPE is for.
NAME=wikitext103
ABOUT="WikiText-103, raw edition (192 MB to download, 540 MB of training text)"
BPE=gpt2
. "$(dirname "$0")/common.sh"

for part in train valid test; do
    [ -e "$DIR/$part.txt" ] && continue
    fetch "$DIR/wikitext-103-raw-v1.zip" 191984949 zip \
        https://wikitext.smerity.com/wikitext-103-raw-v1.zip \
        https://huggingface.co/datasets/mattdangerw/wikitext-103-raw/resolve/main/wikitext-103-raw-v1.zip
    put_file "$DIR/$part.txt" unzip -p "$DIR/wikitext-103-raw-v1.zip" wikitext-103-raw/wiki.$part.raw
done
prepare --train "$DIR/train.txt" --val "$DIR/valid.txt"
