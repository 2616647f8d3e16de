#!/bin/bash
# OpenWebText: the web pages that Reddit linked to, 8 million documents in 21 archives. An archive holds a thousand .xz
# files, which are tar archives of one .txt per document.
NAME=openwebtext
ABOUT="OpenWebText: 8 million web pages in 21 archives
  --subsets N       the first N archives only (default 21: 13 GB to download, 38 GB of text, 18 GB of tokens)"
BPE=gpt2
SUBSETS=21
option() {
    [ "$1" = --subsets ] || return 1
    [[ $2 =~ ^[0-9]+$ ]] && [ "$2" -ge 1 ] && [ "$2" -le 21 ] || die "--subsets $2: expected 1 to 21"
    SUBSETS=$2
}
. "$(dirname "$0")/common.sh"

# Prints the documents of an archive in a fixed order, each after <|endoftext|>.
documents() {
    local dir=$DIR/unpacked xz
    SCRATCH=$dir
    rm -rf "$dir"
    mkdir "$dir"
    tar -xf "$1" -C "$dir" || return 1
    find "$dir" -name '*.xz' | sort -V > "$dir/list"
    [ -s "$dir/list" ] || return 1
    while read -r xz; do
        mkdir "$dir/txt"
        tar -xJf "$xz" -C "$dir/txt" || return 1
        find "$dir/txt" -name '*.txt' | sort -V | tr '\n' '\0' |
            xargs -0 awk 'FNR == 1 { printf "<|endoftext|>" } { print }' || return 1
        rm -r "$dir/txt" "$xz"
    done < "$dir/list"
    rm -r "$dir"
}

need xz
TEXTS=()
for n in $(seq -f %02g 0 $((SUBSETS - 1))); do
    TEXTS+=("$DIR/urlsf_subset$n.txt")
    [ -e "$DIR/urlsf_subset$n.txt" ] && continue
    fetch "$DIR/urlsf_subset$n.tar" - tar \
        "https://huggingface.co/datasets/Skylion007/openwebtext/resolve/main/subsets/urlsf_subset$n.tar"
    echo "unpacking urlsf_subset$n.tar"
    put_file "$DIR/urlsf_subset$n.txt" documents "$DIR/urlsf_subset$n.tar"
done
prepare "${TEXTS[@]}" --eot --split 0.9995
