#!/bin/bash
# WikiText-2: 600 good articles of Wikipedia, cut into words, with rare words as <unk> (the word-level edition, whose
# figures papers print). test.txt is unpacked too; prepare makes tokens of it if you want them.
NAME=wikitext2
ABOUT="WikiText-2, word-level edition (10.8 MB of training text)"
BPE=4096
. "$(dirname "$0")/common.sh"

URL=https://wikitext.smerity.com/wikitext-2-v1.zip
for part in train valid test; do
    [ -e "$DIR/$part.txt" ] && continue
    fetch "$DIR/wikitext-2-v1.zip" - zip $URL
    put_file "$DIR/$part.txt" unzip -p "$DIR/wikitext-2-v1.zip" wikitext-2/wiki.$part.tokens
done
fetch "$DIR/train.txt" 10797148 9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f $URL
fetch "$DIR/valid.txt" 1121681 f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8 $URL
fetch "$DIR/test.txt" 1256449 d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0 $URL
prepare --train "$DIR/train.txt" --val "$DIR/valid.txt"
