#!/bin/bash
# LAMBADA: 5153 passages whose last word can only be guessed from all of the passage. There is nothing to train on:
# val.bin only, the passages separated by <|endoftext|>. Give the tokenizer of the model to be tested.
NAME=lambada
ABOUT="LAMBADA's test passages (1.8 MB), as val.bin"
BPE=gpt2
. "$(dirname "$0")/common.sh"

# The file has a line {"text": "..."} per passage. Prints the passages with JSON's escapes resolved, \uXXXX as UTF-8
# (characters above 0xFFFF would be written as two escapes; there are none).
passages() {
    awk '
    function hex(s,   i, n) {
        for (i = 1; i <= 4; i++) n = 16 * n + index("0123456789abcdef", tolower(substr(s, i, 1))) - 1
        return n
    }
    function utf8(c) {
        if (c < 128) return sprintf("%c", c)
        if (c < 2048) return sprintf("%c%c", 192 + int(c / 64), 128 + c % 64)
        return sprintf("%c%c%c", 224 + int(c / 4096), 128 + int(c / 64) % 64, 128 + c % 64)
    }
    {
        if (!sub(/^{"text": "/, "") || !sub(/"}$/, "")) exit 1
        out = ""
        while ((i = index($0, "\\")) > 0) {
            e = substr($0, i + 1, 1)
            c = e == "n" ? "\n" : e == "t" ? "\t" : e == "u" ? utf8(hex(substr($0, i + 2, 4))) : e
            out = out substr($0, 1, i - 1) c
            $0 = substr($0, i + (e == "u" ? 6 : 2))
        }
        printf "%s%s%s", (NR > 1 ? "<|endoftext|>" : ""), out, $0
    }' "$1"
}

fetch "$DIR/lambada_test.jsonl" 1819752 4aa8d02cd17c719165fc8a7887fddd641f43fcafa4b1c806ca8abc31fabdb226 \
    https://openaipublic.blob.core.windows.net/gpt-2/data/lambada_test.jsonl
put_file "$DIR/passages.txt" passages "$DIR/lambada_test.jsonl"
if [ "$BPE" = bytes ]; then
    prepare --val "$DIR/passages.txt"       # the byte tokenizer has no token for <|endoftext|>: it stays text
else
    prepare --val "$DIR/passages.txt" --eot
fi
