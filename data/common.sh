# common.sh: what the scripts beside it share. Such a script sets NAME, ABOUT (for --help) and BPE (the default
# tokenizer), maybe defines option(), and reads this file; then it fetches, and calls `prepare`.
#
# What they promise: a file that is there is used and not downloaded again; a partial download never becomes a file;
# what can't be downloaded is named in one line, with the place to put it by hand, and the exit code is 2.
set -euo pipefail
export LC_ALL=C
START=$PWD                                  # relative names in the command line and environment start here
case ${PREPARE:=} in "" | /*) ;; *) PREPARE=$PWD/$PREPARE ;; esac
case ${DATA:=} in "" | /*) ;; *) DATA=$PWD/$DATA ;; esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PREPARE=${PREPARE:-build/dev/prepare}       # the program
DATA=${DATA:-data}                          # where the data sets' folders are
DIR=$DATA/$NAME

die() { echo "error: $*" >&2; exit 2; }
PART= SCRATCH=                              # the file being written, a folder for a while: removed when we stop
trap 'rm -rf ${PART:+"$PART"} ${SCRATCH:+"$SCRATCH"}' EXIT
need() { command -v "$1" > /dev/null || die "$0 needs the program $1: install it"; }

# The scripts' own options: option NAME VALUE returns 1 for one that it doesn't know.
declare -F option > /dev/null || option() { return 1; }

while [ $# -gt 0 ]; do
    case $1 in
        -h | --help)
            echo "data/$NAME.sh: $ABOUT"
            if [ -n "$BPE" ]; then
                echo "  --bpe TOKENIZER   gpt2; bytes; a number: a BPE of so many tokens, learned from the training"
                echo "                    text; or a file: a tokenizer saved earlier (default $BPE)"
            fi
            echo "Writes into $DIR. Environment: PREPARE (default build/dev/prepare), DATA (default data)."
            exit 0 ;;
        --*)
            [ $# -gt 1 ] || die "$1 needs a value, or is unknown: see data/$NAME.sh --help"
            if [ "$1" = --bpe ] && [ -n "$BPE" ]; then BPE=$2; if [ -f "$START/$2" ]; then BPE=$START/$2; fi
            elif ! option "$1" "$2"; then die "unknown option $1: see data/$NAME.sh --help"; fi
            shift 2 ;;
        *) die "what is $1? See data/$NAME.sh --help" ;;
    esac
done

sha256() { if command -v sha256sum > /dev/null; then sha256sum < "$1"; else shasum -a 256 < "$1"; fi | cut -d' ' -f1; }

# is_whole FILE SIZE CHECK: is this file what it should be? SIZE in bytes, or -. CHECK: a sha256; or zip, tar, tokens:
# what the format itself can tell.
is_whole() {
    [ "$2" = - ] || [ "$(wc -c < "$1")" -eq "$2" ] || return 1
    case $3 in
        zip) unzip -tqq "$1" > /dev/null 2>&1 ;;
        tar)                                # a list of members, and 1024 zeros at the end
            [ -n "$(tar -tf "$1" 2> /dev/null | head -1)" ] && [ -z "$(tail -c 1024 "$1" | tr -d '\0')" ] ;;
        tokens)                             # a token file: magic, version, count, and so many tokens
            local magic version count
            read -r magic version count <<< "$(od -An -td4 -N12 "$1" | tr '\n' ' ')"
            [ "$magic" = 20240520 ] && [ "$(wc -c < "$1")" -eq $((1024 + 2 * count)) ] ;;
        *) [ "$(sha256 "$1")" = "$3" ] ;;
    esac
}

# fetch FILE SIZE CHECK URL...: afterwards FILE is there and whole, from the first URL that gives it; or we stop here.
fetch() {
    local file=$1 size=$2 check=$3 url first=$4 quiet=-s
    shift 3
    [ "$check" != zip ] || need unzip
    if [ -e "$file" ]; then
        is_whole "$file" "$size" "$check" && return
        die "$file is not the whole file from $first: remove it, then run this again"
    fi
    mkdir -p "$(dirname "$file")"
    if [ -t 2 ]; then quiet=--progress-bar; fi
    for url; do
        command -v curl > /dev/null || break
        echo "downloading $url"
        PART=$file.part
        if curl -fL --connect-timeout 20 --retry 2 $quiet -o "$PART" "$url" && is_whole "$PART" "$size" "$check"; then
            mv "$PART" "$file"
            return
        fi
        rm -f "$PART"
    done
    rmdir "$(dirname "$file")" 2> /dev/null || true
    die "no whole download: fetch $first by hand, put it at $file, and run this again"
}

# put_file FILE COMMAND...: FILE is what the command prints, once it has succeeded.
put_file() {
    local file=$1
    shift
    PART=$file.part
    "$@" > "$PART" || die "$file: could not be made"
    mv "$PART" "$file"
}

# prepare ARGUMENTS...: prepare with the chosen tokenizer, into the data set's folder.
prepare() {
    local tokenizer
    case $BPE in
        bytes) tokenizer=(--bytes) ;;
        gpt2)
            fetch "$DATA/gpt2/vocab.bpe" 456318 1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5 \
                https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/vocab.bpe
            tokenizer=(--bpe gpt2 --vocab-bpe "$DATA/gpt2/vocab.bpe") ;;
        *) tokenizer=(--bpe "$BPE") ;;
    esac
    [ -x "$PREPARE" ] || die "$PREPARE is missing: run make first"
    "$PREPARE" "${tokenizer[@]}" "$@" --out "$DIR"
}
