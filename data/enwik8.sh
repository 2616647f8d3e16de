#!/bin/bash
# enwik8: the first 10^8 bytes of a dump of the English Wikipedia of 2006, XML and all: 90 MB for training, 10 for
# validation. (Bits per character in the literature often go by 90 : 5 : 5; their validation part is the first half of
# ours.)
NAME=enwik8
ABOUT="the first 100 MB of English Wikipedia, with its markup, train and val 9 : 1"
BPE=gpt2
. "$(dirname "$0")/common.sh"

SUM=2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8
if [ ! -e "$DIR/enwik8" ]; then
    fetch "$DIR/enwik8.zip" - zip https://mattmahoney.net/dc/enwik8.zip http://mattmahoney.net/dc/enwik8.zip
    put_file "$DIR/enwik8" unzip -p "$DIR/enwik8.zip" enwik8
fi
fetch "$DIR/enwik8" 100000000 $SUM https://mattmahoney.net/dc/enwik8.zip
prepare "$DIR/enwik8" --split 0.9
