#!/bin/bash
# test_prepare.sh: the command line of prepare, its files, and the scripts in data/, without network.
# Usage, from the project's folder: test/test_prepare.sh. PREPARE is the program (default build/dev/prepare).
export LC_ALL=C
PREPARE=$(realpath "${PREPARE:-build/dev/prepare}")
ROOT=$PWD
W=$(mktemp -d)
trap 'chmod -R u+w "$W"; rm -rf "$W"' EXIT
cd "$W" || exit 1
passed=0 failed=0

report() {                                  # report STATUS NAME
    if [ "$1" = 0 ]; then echo "  ok    $2"; passed=$((passed + 1)); else echo "  FAIL  $2"; failed=$((failed + 1)); fi
}
check() {                                   # check NAME COMMAND...: it must succeed
    "${@:2}" > "$W/.out" 2> "$W/.err"
    report $? "$1"
}
fails() {                                   # fails NAME WORDS COMMAND...: exit 2, one line with WORDS, no new file
    local before after rc
    before=$(find . -not -name '.*' | sort)
    "${@:3}" > "$W/.out" 2> "$W/.err"
    rc=$?
    after=$(find . -not -name '.*' | sort)
    [ $rc = 2 ] && [ "$(wc -l < .err)" = 1 ] && grep -q '^error: ' .err && grep -qF -- "$2" .err &&
        [ "$before" = "$after" ]
    report $? "$1: exit $rc, $(head -c 160 .err)"
}
header() { od -An -td4 -N1024 -v "$1" | tr -s ' \n' ' ' | cut -d' ' -f2-"${2:-7}"; }
tokens() { tail -c +1025 "$1"; }
prepare() { "$PREPARE" "$@"; }
decodes() { local text=$1; shift; prepare --decode "$@" | cmp - "$text"; }

# ---- text to work with: words, UTF-8, stray bytes
for i in $(seq 300); do
    printf "Line %d: the quick brown fox, it's %d years old.\n" "$i" $((i * 7))
    printf '  Caf\303\251 \344\275\240\345\245\275 \377 %d\n' $((i * i))
done > text.txt
head -c 3000 text.txt > val.txt
size=$(wc -c < text.txt)

# ---- one file, and its format
check "bytes" "$PREPARE" --bytes text.txt --out one.bin
grep -q "^one.bin: $size tokens, $size bytes, 1.000 bytes/token, vocabulary 256$" .out
report $? "  and says how many"
[ "$(header one.bin)" = "20240520 2 $size 256 $size 0" ]
report $? "  header: $(header one.bin)"
[ "$(header one.bin 257 | cut -d' ' -f7- | tr -d '0 ')" = "" ]
report $? "  the rest of the header is 0"
tokens one.bin | od -An -v -tu2 -w2 | tr -d ' ' | cmp -s - <(od -An -v -tu1 -w1 text.txt | tr -d ' ')
report $? "  the tokens are the bytes"
[ "$(cat one.tok)" = bytes ]
report $? "  the tokenizer is saved beside"
check "  decoded again" decodes text.txt one.bin
check "from a pipe" eval 'cat text.txt | prepare --bytes - --out pipe.bin && cmp one.bin pipe.bin'
check "two texts are one" \
    eval 'head -c 5001 text.txt > a; tail -c +5002 text.txt > b; prepare --bytes a b --out ab.bin && cmp one.bin ab.bin'
check "over an old file" \
    eval 'echo old > ab.bin; prepare --bytes a b --out ab.bin && cmp one.bin ab.bin && [ ! -e ab.bin.tmp ]'

# ---- a trained tokenizer
check "train and val, BPE of 400" "$PREPARE" --bpe train 400 --train text.txt --val val.txt --out d/e
check "  train.bin decoded" decodes text.txt d/e/train.bin
check "  val.bin decoded" decodes val.txt d/e/val.bin
[ "$(header d/e/train.bin | cut -d' ' -f1,2,4-)" = "20240520 2 400 $size 0" ]
report $? "  header: $(header d/e/train.bin)"
check "  the saved tokenizer gives the same" \
    eval 'prepare --bpe d/e/tokenizer.tok text.txt --out again.bin && cmp again.bin d/e/train.bin &&
          cmp again.tok d/e/tokenizer.tok'
check "  trained again: the same" \
    eval 'prepare --bpe 400 --train text.txt --val val.txt --out f && cmp f/tokenizer.tok d/e/tokenizer.tok &&
          cmp f/val.bin d/e/val.bin'
check "  only val, with that tokenizer" \
    eval 'prepare --bpe f/tokenizer.tok --val val.txt --out g && cmp g/val.bin f/val.bin && [ ! -e g/train.bin ]'
check "too little text: a smaller vocabulary" \
    eval 'echo aa aa | prepare --bpe 1000 - --out small.bin 2> note | grep "vocabulary 258"'
check "  and a note" grep "note: .* 258 tokens instead of 1000" note
check "one byte" eval 'printf x | prepare --bytes - --out x.bin && [ $(wc -c < x.bin) = 1026 ]'

# ---- split
for share in 0.9 0.5 0.001 0.999; do
    check "split $share" "$PREPARE" --bpe 300 text.txt --split $share --out s
    check "  train and val are the text" decodes text.txt s/train.bin s/val.bin
    n=$("$PREPARE" --decode s/train.bin | wc -c)
    awk -v n="$n" -v want="$size" -v share=$share 'BEGIN { d = n - int(want * share); exit !(d >= 0 && d <= 3) }'
    report $? "  $n of $size bytes"
done

# ---- documents
printf 'first one<|endoftext|>second one<|endoftext|>third' > docs.txt
check "--eot" "$PREPARE" --bpe f/tokenizer.tok docs.txt docs.txt --eot --out docs.bin
[ "$(tokens docs.bin | od -An -v -tu2 -w2 | grep -c '^ *399$')" = 5 ]
report $? "  five times the token, one between the texts"
[ "$(header docs.bin | cut -d' ' -f5)" = 48 ]
report $? "  which stands for no bytes of text"
check "  decoded again" \
    eval 'prepare --decode docs.bin | cmp - <(cat docs.txt; printf "<|endoftext|>"; cat docs.txt)'
printf '<|endoftext|>fourth' > marked.txt
check "  a text that begins with it needs no other" \
    prepare --bpe f/tokenizer.tok docs.txt marked.txt --eot --out docs.bin
[ "$(tokens docs.bin | od -An -v -tu2 -w2 | grep -c '^ *399$')" = 3 ]
report $? "  three in all"
check "without --eot it is text" "$PREPARE" --bpe f/tokenizer.tok docs.txt --out docs.bin
[ "$(tokens docs.bin | od -An -v -tu2 -w2 | grep -c '^ *399$')" = 0 ]
report $? "  and never the token"

# ---- several files
echo old > sh.bin
check "shards" prepare --bytes text.txt --shard-tokens 7000 --out sh.bin
[ ! -e sh.bin ] && [ "$(header sh_000000.bin)" = "20240520 2 7000 256 7000 0" ]
report $? "  of 7000 tokens"
check "  all together" decodes text.txt sh_00000?.bin
last=$(find . -name 'sh_*.bin' | sort | tail -1)
check "  fewer of them later: the old ones go" \
    eval 'prepare --bytes text.txt --shard-tokens 14000 --out sh.bin && [ ! -e $last ] && decodes text.txt sh_*.bin'
check "  and one again" \
    eval 'prepare --bytes text.txt --out sh.bin && [ ! -e sh_000000.bin ] && cmp sh.bin one.bin'

# ---- a version 1 file, as llm.c writes it
{ printf '\210\330\64\1\1\0\0\0\3\0\0\0'; head -c 1012 /dev/zero; printf 'h\0i\0\n\0'; } > v1.bin
check "a file of version 1" eval 'prepare --decode v1.bin --bytes | cmp - <(echo hi)'

# ---- errors
fails "no text" "no text named" prepare --bytes --out x.bin
fails "no tokenizer" "which tokenizer?" prepare text.txt --out new.bin
fails "two tokenizers" "choose one" prepare --bytes --bpe 300 text.txt --out new.bin
fails "no --out" "--out is missing" prepare --bytes text.txt
fails "unknown option" "unknown option --byte" prepare --byte text.txt --out new.bin
fails "option without its value" "--out needs a value" prepare --bytes text.txt --out
fails "--bpe train without a number" "--bpe train needs a number" prepare text.txt --out new.bin --bpe train
fails "--bpe train with a word" "expected a whole number" prepare --bpe train text.txt --out new.bin
for n in 0 256 65536 99999999999999999999; do
    fails "--bpe $n" "from 257 to 65535" prepare --bpe $n text.txt --out new.bin
done
for s in 0 1 1.5 -1 nan x ""; do
    fails "--split '$s'" "above 0 and below 1" prepare --bytes text.txt --split "$s" --out new
done
for n in 0 -5 2147483648 1e3; do
    fails "--shard-tokens $n" "whole number" prepare --bytes text.txt --shard-tokens $n --out new.bin
done
fails "a folder where a file is expected" "expected FILE.bin" prepare --bytes text.txt --out new
fails "a file where a folder is expected" "expected a folder" prepare --bytes text.txt --split 0.9 --out new.bin
fails "texts on both sides of --val" "either before" prepare --bytes text.txt --val val.txt --out new
fails "--split with --train" "--split is for" prepare --bytes --train text.txt --split 0.9 --out new
fails "training on nothing" "learned from --train" prepare --bpe 300 --val val.txt --out new
fails "--eot with bytes" "has no <|endoftext|>" prepare --bytes text.txt --eot --out new.bin
fails "--eot with a saved byte tokenizer" "has no <|endoftext|>" prepare --bpe one.tok text.txt --eot --out new.bin
fails "missing text" "nowhere.txt: cannot open" prepare --bytes text.txt nowhere.txt --out new.bin
fails "a folder as text" "is a folder" prepare --bytes d --out new.bin
: > empty.txt
fails "empty text" "no text in it" prepare --bytes empty.txt --out new.bin
fails "empty standard input" "no text in it" prepare --bytes - --out new.bin < /dev/null
fails "empty val" "no text in it" prepare --bytes --train text.txt --val empty.txt --out new
printf x > x.txt
fails "one byte can't be split" "can't be split" prepare --bytes x.txt --split 0.5 --out new
fails "missing tokenizer" "cannot open this tokenizer" prepare --bpe nowhere.tok text.txt --out new.bin
fails "a text as tokenizer" "not a tokenizer" prepare --bpe text.txt text.txt --out new.bin
fails "no vocab.bpe" "data/gpt2/vocab.bpe: cannot open" prepare --bpe gpt2 text.txt --out new.bin
fails "another vocab.bpe than GPT-2's" "GPT-2 has 50257" \
    prepare --bpe gpt2 --vocab-bpe f/tokenizer.tok text.txt --out new.bin
fails "output where no folder is" "cannot write" prepare --bytes text.txt --out no/such/new.bin
fails "output under a file" "cannot make this folder" prepare --bytes text.txt --split 0.9 --out text.txt/new
fails "decode nothing" "needs the name" prepare --decode
fails "decode into a file" "--decode takes" prepare --decode one.bin --out new.bin
fails "decode a text" "not a token file" prepare --bytes --decode text.txt
fails "decode a missing file" "cannot open" prepare --bytes --decode nowhere.bin
head -c 2000 one.bin > cut.bin
fails "decode a cut-off file" "cut off" prepare --bytes --decode cut.bin
head -c 500 one.bin > cut.bin
fails "decode half a header" "not a token file" prepare --bytes --decode cut.bin
{ cat one.bin; printf ab; } > long.bin
fails "decode a file with more tokens than announced" "its header names" prepare --bytes --decode long.bin
{ printf '\210\330\64\1\3\0\0\0\0\0\0\0'; head -c 1012 /dev/zero; } > v3.bin
fails "decode version 3" "version 3" prepare --bytes --decode v3.bin
{ printf '\210\330\64\1\1\0\0\0\377\377\377\377'; head -c 1012 /dev/zero; } > negative.bin
fails "decode a negative count" "its header names" prepare --bytes --decode negative.bin
{ printf '\210\330\64\1\1\0\0\0\1\0\0\0'; head -c 1012 /dev/zero; printf '\0\1'; } > token256.bin
fails "decode a token beyond the vocabulary" "token256.bin: token 256" prepare --bytes --decode token256.bin
fails "decode with another tokenizer" "vocabulary of 400" prepare --bytes --decode d/e/val.bin
mkdir alone; cp one.bin alone/other.bin
fails "decode without tokenizer" "no tokenizer beside" prepare --decode alone/other.bin
check "--help" eval 'prepare --help | grep -q -- --split'
"$PREPARE" > .out 2> .err
[ $? = 2 ] && grep -q -- --split .err
report $? "no arguments: help, exit 2"

# ---- disks that are full, folders that are closed, interruption: what was there stays
if [ -w /dev/full ]; then
    mkdir full; ln -s /dev/full full/val.bin; echo old > full/train.bin
    fails "full disk" "No space left" prepare --bytes text.txt --split 0.5 --out full
    [ "$(cat full/train.bin)" = old ]
    report $? "  and the other file is as it was"
    fails "full disk while decoding" "No space left" eval 'prepare --decode one.bin > /dev/full'
fi
echo old > limited.bin
limited() { (trap '' XFSZ; ulimit -f 8; prepare "$@"); }
fails "file size limit" "limited.bin: cannot write" limited --bytes text.txt --out limited.bin
[ "$(cat limited.bin)" = old ]
report $? "  and the old file is as it was"
mkfifo slow; mkdir late
"$PREPARE" --bytes text.txt --out late/a.bin > .out 2> .err; cp late/a.bin late/keep
head -c 100000000 /dev/zero | tr '\0' 'x' > large.txt
"$PREPARE" --bytes large.txt --out late/a.bin > .out 2> .err & pid=$!
for _ in $(seq 200); do [ -e late/a.bin.tmp ] && break; sleep 0.01; done
kill -TERM $pid; wait $pid
[ $? = 143 ] && cmp -s late/a.bin late/keep && [ ! -e late/a.bin.tmp ]
report $? "stopped in the middle: the old file is as it was"
rm large.txt

# ---- data/: with a curl that fails, one that stops half-way without saying so, one that works
cd "$ROOT" || exit 1
mkdir -p "$W/data" "$W/fail" "$W/half" "$W/whole"
export DATA=$W/data PREPARE
printf '#!/bin/bash\necho "curl: (6) no network" >&2\nexit 6\n' > "$W/fail/curl"
printf '#!/bin/bash\nwhile [ "$1" != -o ]; do shift; done\nhead -c 1000 /dev/zero > "$2"\n' > "$W/half/curl"
chmod +x "$W/fail/curl" "$W/half/curl"
script() {                                  # script NAME MESSAGE COMMAND...: exit 2, one error line, no file left
    "${@:3}" > "$W/.out" 2> "$W/.err"
    local rc=$?
    [ $rc = 2 ] && [ "$(grep -c '^error: ' "$W/.err")" = 1 ] && grep -q "$2" "$W/.err" &&
        [ -z "$(find "$DATA" -mindepth 1)" ]
    report $? "$1: exit $rc, $(grep '^error' "$W/.err" | head -c 100)"
}
for s in tinyshakespeare enwik8 wikitext2 wikitext103 openwebtext fineweb_edu lambada; do
    script "$s without network" "by hand, put it at $DATA/$s/" env PATH="$W/fail:$PATH" "data/$s.sh"
    script "$s with a partial download" "by hand" env PATH="$W/half:$PATH" "data/$s.sh"
done
for s in data/*.sh; do
    [ "$s" = data/common.sh ] && continue
    check "$s --help" eval '$s --help | grep "^$s: "'
    script "$s --nonsense" "unknown option" "$s" --nonsense 1
    script "$s with a stray word" "what is" "$s" word
done
script "--subsets 0" "expected 1 to 21" data/openwebtext.sh --subsets 0
script "--shards x" "expected 1 to 1001" data/fineweb_edu.sh --shards x

check "self" data/self.sh
check "  decoded: train" decodes "$DATA/self/train.txt" "$DATA/self/train.bin"
check "  decoded: val" decodes "$DATA/self/val.txt" "$DATA/self/val.bin"
cat "$DATA/self/train.bin" "$DATA/self/val.bin" > "$W/self"
check "  again: the same bytes" \
    eval 'data/self.sh && cat "$DATA"/self/{train,val}.bin | cmp - "$W/self"'
n=$(wc -c < "$DATA/self/train.txt") m=$(wc -c < "$DATA/self/val.txt")
[ $((n + m)) -gt 20000 ] && [ $((12 * m)) -gt $((n / 2)) ] && [ $((5 * m)) -lt $n ]
report $? "  about 9 : 1: $n and $m bytes"
mkdir -p "$W/copy/data" "$W/copy/build"
cp data/*.sh "$W/copy/data"
cp -r test "$W/copy"
echo 'int x;' > "$W/copy/build/x.c"
check "  where there is no git" env -C "$W/copy" DATA="$W/copy/data" data/self.sh
grep -q 'test_prepare' "$W/copy/data/self/train.txt" && ! grep -qx 'int x;' "$W/copy/data/self/"*.txt
report $? "  the sources and nothing from build/"

# A download that works, and a file put there by hand: the text is used as it is, and curl isn't called again.
cat > "$W/whole/curl" <<'END'
#!/bin/bash
echo "$*" >> "$W/curl.log"
while [ "$1" != -o ]; do shift; done
cp "$W/payload" "$2"
END
chmod +x "$W/whole/curl"; export W
{ printf '\210\330\64\1\1\0\0\0\4\0\0\0'; head -c 1012 /dev/zero; printf '12345678'; } > "$W/payload"
run_fetch() {                               # fetch FILE SIZE CHECK URL, by common.sh alone
    local program='NAME=t; ABOUT=; BPE=; args=("$@"); set --; . data/common.sh; fetch "${args[@]}"'
    PATH=$W/whole:$PATH bash -c "$program" fetch "$@"
}
check "fetch: a whole token file" run_fetch "$DATA/t/a.bin" - tokens http://x/a.bin
check "  is there" cmp "$DATA/t/a.bin" "$W/payload"
check "  again" run_fetch "$DATA/t/a.bin" - tokens http://x/a.bin
[ "$(wc -l < "$W/curl.log")" = 1 ]
report $? "  curl was called once"
printf more >> "$W/payload"
run_fetch "$DATA/t/b.bin" - tokens http://x/b.bin > "$W/.out" 2> "$W/.err"
[ $? = 2 ] && [ ! -e "$DATA/t/b.bin" ] && [ ! -e "$DATA/t/b.bin.part" ]
report $? "fetch: a token file of a wrong length is none"
sum=$(sha256sum < "$W/payload" | cut -d' ' -f1)
check "fetch: by sha256" run_fetch "$DATA/t/c" 1036 "$sum" http://x/c
run_fetch "$DATA/t/d" 1036 "${sum/[0-9]/x}" http://x/d > "$W/.out" 2> "$W/.err"
[ $? = 2 ] && [ ! -e "$DATA/t/d" ]
report $? "fetch: another sha256 is refused"
run_fetch "$DATA/t/e" 1035 "$sum" http://x/e > "$W/.out" 2> "$W/.err"
[ $? = 2 ] && [ ! -e "$DATA/t/e" ]
report $? "fetch: another size is refused"
echo broken > "$DATA/t/c"
run_fetch "$DATA/t/c" 1036 "$sum" http://x/c > "$W/.out" 2> "$W/.err"
[ $? = 2 ] && [ "$(cat "$DATA/t/c")" = broken ] && grep -q 'remove it' "$W/.err"
report $? "fetch: a wrong file that is there is named, not touched"

# WikiText-103 and OpenWebText from made-up archives, by hand.
mkdir -p "$DATA/wikitext103" "$DATA/openwebtext" "$W/o/openwebtext"
cp "$W/text.txt" "$DATA/wikitext103/train.txt"
cp "$W/val.txt" "$DATA/wikitext103/valid.txt"
echo test > "$DATA/wikitext103/test.txt"
check "wikitext103 with texts put there by hand" env PATH="$W/fail:$PATH" data/wikitext103.sh --bpe 300
check "  decoded" decodes "$W/val.txt" "$DATA/wikitext103/val.bin"
check "  with a tokenizer in the folder where we are" eval 'cd "$W" && "$ROOT/data/wikitext103.sh" --bpe f/tokenizer.tok'
cd "$ROOT" || exit 1
check "  is with that one" cmp "$W/f/tokenizer.tok" "$DATA/wikitext103/tokenizer.tok"
if command -v xz > /dev/null; then
    for a in 1 2 10; do
        (cd "$W/o" && for d in 1 2 3; do printf 'subset %s document %s\n' $a $d > $a-$d.txt; done &&
            tar -cJf openwebtext/urlsf_subset00-${a}_data.xz $a-?.txt)
    done
    tar -cf "$DATA/openwebtext/urlsf_subset00.tar" -C "$W/o" openwebtext
    check "openwebtext with an archive put there by hand" \
        env PATH="$W/fail:$PATH" data/openwebtext.sh --subsets 1 --bpe 260
    for a in 1 2 10; do
        for d in 1 2 3; do printf '<|endoftext|>subset %s document %s\n' $a $d; done
    done > "$W/expected"
    check "  decoded: all documents in order" \
        decodes "$W/expected" "$DATA"/openwebtext/{train,val}.bin
    files=$(ls "$DATA/openwebtext" | tr '\n' ' ')
    head -c 3000 "$DATA/openwebtext/urlsf_subset00.tar" > "$DATA/openwebtext/urlsf_subset01.tar"
    env PATH="$W/fail:$PATH" data/openwebtext.sh --subsets 2 --bpe 260 > "$W/.out" 2> "$W/.err"
    [ $? = 2 ] && [ ! -e "$DATA/openwebtext/urlsf_subset01.txt" ]
    report $? "  an archive that is cut off is refused"
    (cd "$W/o" && echo broken > openwebtext/urlsf_subset00-2_data.xz)
    tar -cf "$DATA/openwebtext/urlsf_subset01.tar" -C "$W/o" openwebtext
    env PATH="$W/fail:$PATH" data/openwebtext.sh --subsets 2 --bpe 260 > "$W/.out" 2> "$W/.err"
    [ $? = 2 ] && [ "$(ls "$DATA/openwebtext" | grep -v subset01.tar | tr '\n' ' ')" = "$files" ]
    report $? "  a broken archive within it too, and nothing is left of it"
fi

echo "$passed passed, $failed failed"
[ "$failed" = 0 ] && [ "$passed" -gt 0 ]
