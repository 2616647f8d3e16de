#!/usr/bin/env bash
# sync.sh: a function that bears the same name in two train_*.c files has the same body in both; so have two
# train_*.cu files. The files share no header, so that each can be read alone; this script is what they have instead.
#
#   dev/sync.sh --check       lists the functions whose bodies differ; exit code 1 if there are any
#   dev/sync.sh NAME          copies NAME, with the comment directly above it, from train_harmonic.c to all other
#                             train_*.c that define it, and from train_harmonic.cu to the other train_*.cu
#   dev/sync.sh NAME FILE     the same from FILE, which is one of them
#
# A function starts in column 0 and ends with a } in column 0, or on the line it starts on. A name that is defined
# several times in one file (#ifdef, overloads) is compared and copied in the order of its definitions.

# The interface that every model implements in its own way: here only the first line, up to the {, has to agree.
interface=" model_build model_free model_init model_forward model_backward model_logits model_reset model_step model_flops_per_token "
interface+="params_layout acts_layout acts_forward workspace_size thread_bytes token_bytes config_check config_describe "

# Prints "NAME COMMENT_LINE FIRST_LINE BRACE_LINE LAST_LINE" for each function of the file given, by line numbers.
functions_of() {
    awk '
    # code without strings, character constants and comments, in which braces count
    function bare(line) {
        gsub(/\047(\\.|[^\047\\])\047/, "", line)
        gsub(/"([^"\\]|\\.)*"/, "", line)
        sub(/\/\/.*/, "", line)
        gsub(/\/\*([^*]|\*[^\/])*\*\//, "", line)
        return line
    }
    # without __attribute__((...)) and its like, whose parentheses come before those of the parameters
    function without(code, word,    i, end, depth, c) {
        while ((i = index(code, word "(")) > 0) {
            depth = 0
            for (end = i + length(word); end <= length(code); end++) {
                c = substr(code, end, 1)
                if (c == "(") depth++
                if (c == ")" && --depth == 0) break
            }
            code = substr(code, 1, i - 1) " " substr(code, end + 1)
        }
        return code
    }
    function forget() { comment = 0; first = 0; code = "" }

    function unended() { # its end would be taken from the next function
        print "error: " FILENAME ": function " name ", line " first ", has no } in column 0" > "/dev/stderr"
        in_body = 0
        exit 2
    }

    in_body && /^}/ { print name, comment, first, brace, NR; in_body = 0; forget(); next }
    in_body && /^(static|template|__global__|__device__)[ <]/ { unended() }
    in_body { next }
    depth > 0 { code = bare($0); depth += gsub(/[{]/, "", code) - gsub(/[}]/, "", code); forget(); next }
    in_macro || /^#/ { in_macro = /\\$/; forget(); next }
    in_note { if (/\*\//) in_note = 0; next }
    /^[ \t]*$/ { if (!first) forget(); next }
    /^\/\// && !first { if (/^\/\/ ?---/) forget(); else if (!comment) comment = NR; next } # a rule is no comment
    /^\/\*/ && !first { if (!comment) comment = NR; in_note = !/\*\//; next }
    /^[ \t}]/ && !first { forget(); next }
    {
        if (!first) first = NR
        if (!comment) comment = first
        code = code " " bare($0)
        if (code ~ /^ *(extern|namespace [A-Za-z0-9_]*) *[{]/) { forget(); next } # extern "C" {
        open = index(code, "{")
        if (!open) { if (code ~ /;/) forget(); next }
        before = without(without(without(substr(code, 1, open - 1), "__attribute__"), "__launch_bounds__"), "alignas")
        gsub(/template *<[^>]*>/, "", before)
        opened = gsub(/[{]/, "{", code) - gsub(/[}]/, "}", code)
        # what has no parameters, or is assigned to, is a type or a table
        if (!match(before, /(operator[^(A-Za-z]+|[A-Za-z_][A-Za-z0-9_]*) *\(/) || substr(before, 1, RSTART) ~ /=/) {
            depth = opened
            forget()
            next
        }
        name = substr(before, RSTART, RLENGTH - 1)
        gsub(/ /, "", name)
        brace = NR
        if (opened == 0) { print name, comment, first, brace, NR; forget() } else in_body = 1
    }
    END { if (in_body) unended() }
    ' "$1"
}

# Prints the lines of function NAME of FILE: all of it, or for the interface the lines up to the {.
body_of() { # NAME FILE
    local name from brace to
    while read -r name _ from brace to; do
        if [ "$name" = "$1" ]; then
            case "$interface" in
                *" $1 "*) sed -n "${from},${brace}p" "$2" | sed 's/{.*/{/' ;;
                *) sed -n "${from},${to}p" "$2" ;;
            esac
        fi
    done < "$work/$2"
}

fail() { echo "error: $*" >&2; exit 2; }

check() {
    local passed=0 failed=0 ext file name first others other
    for ext in c cu; do
        local files=()
        for file in train_*."$ext"; do
            [ -e "$file" ] || continue
            files+=("$file")
            if [ ! -s "$work/$file" ]; then
                echo "  FAIL  $file: no function found"
                failed=$((failed + 1))
            fi
        done
        [ ${#files[@]} -gt 0 ] || continue
        local functions=0 shared=0
        # each name, with the files that define it
        while read -r name first others; do
            functions=$((functions + 1))
            [ -n "$others" ] || continue
            shared=$((shared + 1))
            body_of "$name" "$first" > "$work/first"
            local ok=1
            for other in $others; do
                body_of "$name" "$other" > "$work/other"
                if ! cmp -s "$work/first" "$work/other"; then
                    echo "  FAIL  $name differs between $first and $other:"
                    diff "$work/first" "$work/other" | head -n 6 | sed 's/^/          /'
                    ok=0
                fi
            done
            if [ $ok = 1 ]; then passed=$((passed + 1)); else failed=$((failed + 1)); fi
        done < <(for file in "${files[@]}"; do awk -v f="$file" '!seen[$1]++ { print $1, f }' "$work/$file"; done |
                 awk '{ files[$1] = files[$1] " " $2 } END { for (name in files) print name files[name] }' | sort)
        echo "train_*.$ext: ${#files[@]} file(s), $functions functions, $shared of them in more than one file compared"
        [ $functions -gt 0 ] && passed=$((passed + 1))
    done
    [ $((passed + failed)) -gt 0 ] || { echo "  FAIL  there is no train_*.c or train_*.cu in $PWD"; failed=1; }
    echo "$passed passed, $failed failed"
    [ $failed = 0 ]
}

# Copies function NAME of FILE over to the other files of its kind.
copy() { # NAME FILE
    local file changed=0 name start from brace to i
    local source=() target
    while read -r name start from brace to; do
        [ "$name" != "$1" ] || source+=("$start,$to")
    done < "$work/$2"
    for file in train_*."${2##*.}"; do
        [ "$file" != "$2" ] && grep -q "^$1 " "$work/$file" || continue
        target=()
        while read -r name start from brace to; do
            [ "$name" != "$1" ] || target+=("$start $to")
        done < "$work/$file"
        [ ${#source[@]} = ${#target[@]} ] ||
            fail "$1 is defined ${#source[@]} times in $2 and ${#target[@]} times in $file: make these agree by hand"
        cp -p "$file" "$work/new" || fail "cannot copy $file" # for its permissions
        { # the target's lines with the source's in the place of each definition
            local next=1
            for i in "${!target[@]}"; do
                read -r start to <<< "${target[i]}"
                [ "$start" = "$next" ] || sed -n "${next},$((start - 1))p" "$file"
                sed -n "${source[i]}p" "$2"
                next=$((to + 1))
            done
            sed -n "${next},\$p" "$file"
        } > "$work/new" || fail "cannot write $work/new"
        if cmp -s "$file" "$work/new"; then
            echo "$file: $1 is the same already"
        else
            cp -p "$work/new" "$file.tmp" && mv "$file.tmp" "$file" || fail "cannot write $file"
            echo "$file: $1 taken from $2"
        fi
        changed=$((changed + 1))
    done
    [ $changed -gt 0 ] || echo "no other train_*.${2##*.} defines $1"
}

# ----------------------------------------------------------------------------

if [ $# -lt 1 ] || [ $# -gt 2 ] || [ "$1" = --help ] || { [ "${1#-}" != "$1" ] && [ "$*" != --check ]; }; then
    sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
    [ "$1" = --help ] && exit 0
    exit 2
fi
cd "$(dirname "$0")/.." || exit 2
work=$(mktemp -d) || exit 2
trap 'rm -rf "$work"' EXIT
for file in train_*.c train_*.cu; do
    [ -e "$file" ] || continue
    functions_of "$file" > "$work/$file" || exit 2
done

if [ "$1" = --check ]; then
    check
    exit
fi
case "$interface" in *" $1 "*) fail "$1 is part of the interface: each model has its own" ;; esac
found=0
for file in ${2:-train_harmonic.c train_harmonic.cu}; do
    file=$(basename "$file")
    if [ -e "$work/$file" ] && grep -q "^$1 " "$work/$file"; then
        copy "$1" "$file"
        found=1
    fi
done
[ $found = 1 ] || fail "no function $1 in ${2:-train_harmonic.c or train_harmonic.cu}"
