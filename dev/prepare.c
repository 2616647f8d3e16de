// prepare.c: text -> token files, which the training programs read. `prepare --help` says how it is used.
//
// A token file is a header of 256 int32 and then the tokens, each a uint16 (both little-endian):
//     header[0]     20240520
//     header[1]     version: 1 is llm.c's format, whose published files work here; prepare writes version 2
//     header[2]     number of tokens, below 2^31
//     header[3]     version 2: the tokenizer's vocabulary; every token is below it
//     header[4..5]  version 2: how many bytes of text the tokens stand for, low and high 32 bits. With that, a loss
//                   per token becomes bits per byte, which may be compared between tokenizers
//     the rest      0
// More tokens than one file can count go to NAME_000000.bin, NAME_000001.bin, ... instead of NAME.bin.
//
// The tokenizer is saved beside: DIR/tokenizer.tok, or FILE.tok for --out FILE.bin.
#define _GNU_SOURCE                                     // memmem
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { MAGIC = 20240520, HEADER = 256, MAX_PATH = 4096 };

// ----------------------------------------------------------------------------
// Errors, and the files that are not finished yet: all outputs get their names together at the very end, so that after
// an error (or Ctrl-C) everything is as it was before.

typedef struct { char tmp[MAX_PATH], path[MAX_PATH]; } Output;
static Output* outputs = NULL;
static volatile sig_atomic_t n_outputs = 0;

static void remove_unfinished(void) {
    for (int i = 0; i < n_outputs; i++) if (strcmp(outputs[i].tmp, outputs[i].path) != 0) unlink(outputs[i].tmp);
}

static void on_signal(int sig) {
    remove_unfinished();
    _exit(128 + sig);
}

__attribute__((format(printf, 1, 2), noreturn))
static void die(const char* fmt, ...) {
    va_list args;
    va_start(args, fmt);
    fprintf(stderr, "error: ");
    vfprintf(stderr, fmt, args);
    fprintf(stderr, "\n");
    va_end(args);
    remove_unfinished();
    exit(2);
}

#include "tokenizer.h"

// ----------------------------------------------------------------------------
// Input texts.

typedef struct { const char* data; size_t n; } Text;
typedef struct { Text* texts; size_t n, cap; } TextList;

static void text_list_add(TextList* l, const char* data, size_t n) {
    l->texts = (Text*)tok_grow(l->texts, l->n, &l->cap, sizeof(Text));
    l->texts[l->n].data = data;
    l->texts[l->n++].n = n;
}

static size_t text_list_bytes(const TextList* l) {
    size_t n = 0;
    for (size_t i = 0; i < l->n; i++) n += l->texts[i].n;
    return n;
}

// Adds a file to the list: mapped into memory, so that it may be larger than that; "-" is the standard input.
static void text_list_open(TextList* l, const char* path) {
    int fd = strcmp(path, "-") == 0 ? 0 : open(path, O_RDONLY);
    struct stat st;
    if (fd < 0 || fstat(fd, &st) != 0) die("%s: cannot open: %s", path, strerror(errno));
    if (S_ISDIR(st.st_mode)) die("%s: is a folder: name text files", path);
    if (S_ISREG(st.st_mode) && st.st_size > 0 && lseek(fd, 0, SEEK_CUR) == 0) {
        void* p = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
        if (p == MAP_FAILED) die("%s: cannot read: %s", path, strerror(errno));
        text_list_add(l, (const char*)p, (size_t)st.st_size);
    } else {                                            // a pipe, an empty file
        char* data = NULL;
        size_t n = 0, cap = 0;
        ssize_t got;
        do {
            data = (char*)tok_grow(data, n, &cap, 1);
            got = read(fd, data + n, cap - n);
            if (got < 0) die("%s: cannot read: %s", path, strerror(errno));
            n += (size_t)got;
        } while (got > 0);
        text_list_add(l, data, n);
    }
    if (fd > 0) close(fd);
}

// Where the next <|endoftext|> begins, or NULL.
static const char* find_marker(const char* p, size_t n) {
    return (const char*)memmem(p, n, END_OF_TEXT, strlen(END_OF_TEXT));
}

// Cuts the texts in two after a share of their bytes: never within a UTF-8 character, and with `documents` behind the
// next <|endoftext|>, if that text has another.
static void text_list_split(const TextList* all, double share, int documents, TextList* first, TextList* second) {
    size_t cut = (size_t)(share * (double)text_list_bytes(all));
    for (size_t i = 0; i < all->n; i++) {
        Text t = all->texts[i];
        size_t at = cut < t.n ? cut : t.n;
        cut -= at;
        if (at > 0 && at < t.n) {
            for (int k = 0; k < 3 && at < t.n && (t.data[at] & 0xC0) == 0x80; k++) at++;
            size_t from = at > strlen(END_OF_TEXT) - 1 ? at - (strlen(END_OF_TEXT) - 1) : 0;    // it may lie across
            const char* marker = documents ? find_marker(t.data + from, t.n - from) : NULL;
            if (marker) at = (size_t)(marker - t.data) + strlen(END_OF_TEXT);
        }
        if (at > 0) text_list_add(first, t.data, at);
        if (at < t.n) text_list_add(second, t.data + at, t.n - at);
    }
    if (first->n == 0 || second->n == 0)
        die("--split %g: %zu bytes of text can't be split so that both parts have some", share, text_list_bytes(all));
}

// Learns a tokenizer from the first GiB of the texts; <|endoftext|> is left out if it separates documents.
static void train_tokenizer(Tokenizer* t, const TextList* l, int documents, int vocab) {
    size_t limit = (size_t)1 << 30, n = text_list_bytes(l), used = 0;
    if (n > limit) n = limit;
    fprintf(stderr, "learning a BPE of %d tokens from %zu bytes ...\n", vocab, n);
    char* all = (char*)tok_alloc(NULL, n, 1);
    for (size_t i = 0; i < l->n; i++) {
        const char* p = l->texts[i].data;
        const char* end = p + (l->texts[i].n < limit - used ? l->texts[i].n : limit - used);
        while (p < end) {
            const char* marker = documents ? find_marker(p, (size_t)(end - p)) : NULL;
            size_t len = (size_t)((marker ? marker : end) - p);
            memcpy(all + used, p, len);
            used += len;
            p += len + (marker ? strlen(END_OF_TEXT) : 0);
        }
    }
    tokenizer_train(t, all, used, vocab);
    free(all);
    if (t->vocab < vocab)
        fprintf(stderr, "note: this text has too few pairs that repeat: %d tokens instead of %d\n", t->vocab, vocab);
}

// ----------------------------------------------------------------------------
// Output.

typedef struct {
    const Tokenizer* tokenizer;
    const char* path;                                   // NAME.bin
    uint32_t max_tokens;                                // in one file
    FILE* f;                                            // the file being written, its tokens and their bytes
    uint32_t tokens;
    uint64_t bytes;
    int shards;                                         // files so far, this one included
    int first_output;                                   // index of the first of them in outputs
    uint64_t all_tokens, all_bytes;
} Writer;

static void shard_path(char* out, const char* path, int shard) {    // NAME.bin -> NAME_000007.bin
    size_t stem = strlen(path) - strlen(".bin");
    memcpy(out, path, stem);
    snprintf(out + stem, MAX_PATH - stem, "_%06d.bin", shard);
}

static void writer_header(Writer* w) {
    int32_t header[HEADER] = { MAGIC, 2, (int32_t)w->tokens, w->tokenizer->vocab,
                               (int32_t)(uint32_t)w->bytes, (int32_t)(uint32_t)(w->bytes >> 32) };
    fwrite(header, sizeof(int32_t), HEADER, w->f);      // file_close reports what could not be written
}

static void writer_open_shard(Writer* w) {
    outputs = (Output*)realloc(outputs, (size_t)(n_outputs + 1) * sizeof(Output));
    if (!outputs) die("out of memory");
    Output* o = &outputs[n_outputs];
    if (strlen(w->path) > MAX_PATH - 32) die("%s: name too long", w->path);
    if (w->shards == 0) snprintf(o->path, MAX_PATH, "%s", w->path);
    else shard_path(o->path, w->path, w->shards);
    w->f = file_create(o->path, o->tmp, MAX_PATH);
    n_outputs++;
    w->shards++;
    w->tokens = 0;
    w->bytes = 0;
    writer_header(w);                                   // its place; the numbers are known at the end
}

static void writer_close_shard(Writer* w) {
    Output* o = &outputs[n_outputs - 1];
    if (fseek(w->f, 0, SEEK_SET) != 0) die("%s: cannot write: %s", o->path, strerror(errno));
    writer_header(w);
    file_close(w->f, o->tmp, o->path);
    w->f = NULL;
}

static void writer_open(Writer* w, const Tokenizer* t, const char* path, uint32_t max_tokens) {
    memset(w, 0, sizeof(*w));
    w->tokenizer = t;
    w->path = path;
    w->max_tokens = max_tokens;
    w->first_output = n_outputs;
    writer_open_shard(w);
}

// Appends tokens. They stand for their bytes; <|endoftext|> stands for none.
static void writer_put(Writer* w, const int* ids, size_t n) {
    uint16_t buffer[4096];
    while (n > 0) {
        if (w->tokens == w->max_tokens) { writer_close_shard(w); writer_open_shard(w); }
        size_t k = 0, len;
        for (; k < n && k < 4096 && w->tokens < w->max_tokens; k++, w->tokens++, w->all_tokens++) {
            buffer[k] = (uint16_t)ids[k];
            tokenizer_decode(w->tokenizer, ids[k], &len);
            if (ids[k] != w->tokenizer->eot) { w->bytes += len; w->all_bytes += len; }
        }
        if (fwrite(buffer, sizeof(uint16_t), k, w->f) != k) die("%s: cannot write: %s", w->path, strerror(errno));
        ids += k;
        n -= k;
    }
}

static void writer_close(Writer* w) {
    writer_close_shard(w);
    Output* first = &outputs[w->first_output];
    if (w->shards > 1) {
        if (strcmp(first->tmp, first->path) == 0) die("%s: no plain file, can't become several", w->path);
        shard_path(first->path, w->path, 0);
    }
}

// Names of an earlier run that the new files don't replace would still match NAME*.bin: they go.
static void writer_remove_old(const Writer* w) {
    char path[MAX_PATH];
    if (w->shards > 1) unlink(w->path);
    for (int i = w->shards > 1 ? w->shards : 0;; i++) {
        shard_path(path, w->path, i);
        if (unlink(path) != 0) break;
    }
}

static void writer_report(const Writer* w) {
    char first[MAX_PATH];
    shard_path(first, w->path, 0);
    printf("%s: ", w->shards > 1 ? first : w->path);
    if (w->shards > 1) printf("and %d more files: ", w->shards - 1);
    printf("%" PRIu64 " tokens, %" PRIu64 " bytes, %.3f bytes/token, vocabulary %d\n", w->all_tokens, w->all_bytes,
           w->all_tokens ? (double)w->all_bytes / (double)w->all_tokens : 0.0, w->tokenizer->vocab);
}

// ----------------------------------------------------------------------------
// Text to tokens, a chunk at a time.

static size_t chunk_bytes = 8 << 20;

// A space or newline at p[i] after a visible ASCII character: no piece of the tokenizer's goes across such a place, so
// the parts of a text cut there have the tokens that the whole text has.
static int may_cut(const char* p, size_t i) {
    return (p[i] == ' ' || p[i] == '\n') && p[i - 1] > ' ' && p[i - 1] < 127;
}

// How much of the text to encode at once: about chunk_bytes.
static size_t chunk_size(const char* p, size_t n) {
    size_t i = chunk_bytes;
    if (n <= i) return n;
    while (i > chunk_bytes / 2 && !may_cut(p, i)) i--;
    if (i > chunk_bytes / 2) return i;
    for (i = chunk_bytes; i < n && !may_cut(p, i); i++) {}
    return i;
}

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void encode_text(Writer* w, const char* p, size_t n, size_t done, size_t total, double started) {
    while (n > 0) {
        size_t size = chunk_size(p, n);
        int* ids;
        size_t count = tokenizer_encode(w->tokenizer, p, size, &ids);
        writer_put(w, ids, count);
        free(ids);
        p += size;
        n -= size;
        done += size;
        double passed = seconds() - started;
        if (isatty(2) && passed > 0.5) {
            double rate = (double)done / passed;
            fprintf(stderr, "\r%s: %3.0f%%  %.0f MB/s  %.0f s left\033[K", w->path,
                    100.0 * (double)done / (double)total, rate / 1e6, (double)(total - done) / rate);
            if (done == total) fprintf(stderr, "\r\033[K");
        }
    }
}

// Encodes the texts one after another. With `documents`, <|endoftext|> in them is that token, and where a text does not
// begin with it, it is put between that and the one before.
static void encode_all(Writer* w, const TextList* l, int documents) {
    size_t total = text_list_bytes(l), done = 0;
    double started = seconds();
    for (size_t i = 0; i < l->n; i++) {
        const char* p = l->texts[i].data;
        const char* end = p + l->texts[i].n;
        int marked = find_marker(p, (size_t)(end - p) < strlen(END_OF_TEXT) ? 0 : strlen(END_OF_TEXT)) != NULL;
        if (documents && i > 0 && !marked) writer_put(w, &w->tokenizer->eot, 1);
        while (p < end) {
            const char* marker = documents ? find_marker(p, (size_t)(end - p)) : NULL;
            size_t len = (size_t)((marker ? marker : end) - p);
            encode_text(w, p, len, done, total, started);
            if (marker) {
                writer_put(w, &w->tokenizer->eot, 1);
                len += strlen(END_OF_TEXT);
            }
            p += len;
            done += len;
        }
    }
}

// ----------------------------------------------------------------------------
// Tokens back to text.

static void decode_file(const Tokenizer* t, const char* path) {
    int32_t header[HEADER];
    uint16_t buffer[4096];
    struct stat st;
    FILE* f = fopen(path, "rb");
    if (!f || fstat(fileno(f), &st) != 0) die("%s: cannot open: %s", path, strerror(errno));
    if (fread(header, sizeof(int32_t), HEADER, f) != HEADER || header[0] != MAGIC)
        die("%s: not a token file (prepare makes them from text)", path);
    if (header[1] != 1 && header[1] != 2) die("%s: version %d, this program knows 1 and 2", path, header[1]);
    if (header[2] < 0 || (int64_t)st.st_size != (int64_t)sizeof(header) + 2 * (int64_t)header[2])
        die("%s: %lld bytes don't hold the %d tokens that its header names: cut off?", path,
            (long long)st.st_size, header[2]);
    if (header[1] == 2 && header[3] != t->vocab)
        die("%s: made with a vocabulary of %d, this tokenizer has %d", path, header[3], t->vocab);
    size_t left = (size_t)header[2], len;
    while (left > 0) {
        size_t k = fread(buffer, sizeof(uint16_t), left < 4096 ? left : 4096, f);
        if (k == 0) die("%s: cannot read: %s", path, strerror(errno));
        for (size_t i = 0; i < k; i++) {
            if (buffer[i] >= t->vocab) die("%s: token %d, but this tokenizer has %d", path, buffer[i], t->vocab);
            const char* s = tokenizer_decode(t, buffer[i], &len);
            fwrite(s, 1, len, stdout);
        }
        if (ferror(stdout)) die("standard output: cannot write: %s", strerror(errno));
        left -= k;
    }
    fclose(f);
}

// The tokenizer that prepare put beside a token file: FILE.tok for FILE.bin or FILE_000000.bin, or DIR/tokenizer.tok.
static void find_tokenizer(char* out, const char* path) {
    size_t stem = strlen(path);
    if (stem > MAX_PATH - 32) die("%s: name too long", path);
    if (stem > 4 && strcmp(path + stem - 4, ".bin") == 0) stem -= 4;
    snprintf(out, MAX_PATH, "%.*s.tok", (int)stem, path);
    if (access(out, R_OK) == 0) return;
    if (stem > 7 && path[stem - 7] == '_') {
        snprintf(out, MAX_PATH, "%.*s.tok", (int)stem - 7, path);
        if (access(out, R_OK) == 0) return;
    }
    const char* slash = strrchr(path, '/');
    snprintf(out, MAX_PATH, "%.*stokenizer.tok", slash ? (int)(slash + 1 - path) : 0, path);
    if (access(out, R_OK) != 0) die("%s: no tokenizer beside it: name one with --bytes or --bpe", path);
}

// ----------------------------------------------------------------------------
// Command line.

static const char HELP[] =
    "prepare: text to token files, and back\n"
    "\n"
    "  prepare TOKENIZER TEXT... --out FILE.bin            all the text in one token file\n"
    "  prepare TOKENIZER TEXT... --split 0.9 --out DIR     DIR/train.bin, and the last 10% in DIR/val.bin\n"
    "  prepare TOKENIZER --train TEXT... --val TEXT... --out DIR    the same from separate texts (or one of them)\n"
    "  prepare --decode FILE.bin...                        token files back to text, on the standard output\n"
    "\n"
    "TOKENIZER\n"
    "  --bytes             every byte is a token (256)\n"
    "  --bpe gpt2          GPT-2's (50257), from its file vocab.bpe; --vocab-bpe FILE says where that is\n"
    "                      (default data/gpt2/vocab.bpe)\n"
    "  --bpe train N       learned from the training text (its first GiB), N tokens: 257 to 65535; also --bpe N\n"
    "  --bpe FILE          saved by an earlier run\n"
    "It is saved as DIR/tokenizer.tok or FILE.tok, where --decode looks for it.\n"
    "\n"
    "TEXT is a file, taken as it is; several are taken one after another; - is the standard input.\n"
    "\n"
    "Options\n"
    "  --eot               documents: \"<|endoftext|>\" in the text becomes the token of that name, and one is put\n"
    "                      between texts. Without it, \"<|endoftext|>\" is text like any other\n"
    "  --shard-tokens N    at most N tokens in a file (default 2147483647); more go to NAME_000000.bin,\n"
    "                      NAME_000001.bin, ... and NAME.bin, if there was one, is removed\n"
    "  --help\n";

// A whole number in [low, high], or dies.
static long parse_int(const char* option, const char* value, long low, long high) {
    char* end;
    errno = 0;
    long n = strtol(value, &end, 10);
    if (end == value || *end || errno || n < low || n > high)
        die("%s %s: expected a whole number from %ld to %ld", option, value, low, high);
    return n;
}

static void make_folder(const char* path) {             // like mkdir -p
    char part[MAX_PATH];
    if (strlen(path) >= MAX_PATH) die("%s: name too long", path);
    for (size_t i = 1; i <= strlen(path); i++) {
        if (path[i] != '/' && path[i] != 0) continue;
        memcpy(part, path, i);
        part[i] = 0;
        if (mkdir(part, 0777) != 0 && errno != EEXIST) die("%s: cannot make this folder: %s", part, strerror(errno));
    }
}

int main(int argc, char** argv) {
    TextList texts = { NULL, 0, 0 }, train = { NULL, 0, 0 }, val = { NULL, 0, 0 };
    const char **names[3], *bpe = NULL, *vocab_bpe = "data/gpt2/vocab.bpe", *out = "";
    size_t n_names[3] = { 0, 0, 0 };                    // how many texts: without --train or --val, --train, --val
    int kind = 0, bytes = 0, vocab = 0, documents = 0, decode = 0;
    long shard_tokens = INT32_MAX;
    double split = 0;
    for (int i = 0; i < 3; i++) names[i] = (const char**)tok_alloc(NULL, (size_t)argc, sizeof(char*));
    if (argc < 2) { fputs(HELP, stderr); return 2; }

    for (int i = 1; i < argc; i++) {
        const char* a = argv[i];
        if (strncmp(a, "--", 2) != 0) { names[kind][n_names[kind]++] = a; continue; }
        if (strcmp(a, "--help") == 0) { fputs(HELP, stdout); return 0; }
        if (strcmp(a, "--bytes") == 0) { bytes = 1; continue; }
        if (strcmp(a, "--eot") == 0) { documents = 1; continue; }
        if (strcmp(a, "--decode") == 0) { decode = 1; continue; }
        if (strcmp(a, "--train") == 0) { kind = 1; continue; }
        if (strcmp(a, "--val") == 0) { kind = 2; continue; }
        const char* value = i + 1 < argc ? argv[i + 1] : "";
        const char* known[] = { "--bpe", "--vocab-bpe", "--out", "--split", "--shard-tokens" };
        int which = 0;
        while (which < 5 && strcmp(a, known[which]) != 0) which++;
        if (which == 5) die("unknown option %s: prepare --help lists them", a);
        if (i + 1 == argc) die("%s needs a value: see prepare --help", a);
        i++;
        if (which == 0) bpe = value;
        if (which == 1) vocab_bpe = value;
        if (which == 2) out = value;
        if (which == 3) {
            char* end;
            split = strtod(value, &end);
            if (end == value || *end || !(split > 0 && split < 1))
                die("--split %s: expected the training share, above 0 and below 1, as in --split 0.9", value);
        }
        if (which == 4) shard_tokens = parse_int(a, value, 1, INT32_MAX);
        if (which == 0 && strcmp(bpe, "train") == 0) {
            if (++i == argc) die("--bpe train needs a number of tokens, as in --bpe train 4096");
            bpe = argv[i];
            vocab = (int)parse_int("--bpe train", bpe, 257, TOKENIZER_MAX_VOCAB);
        } else if (which == 0 && bpe[0] && strspn(bpe, "0123456789") == strlen(bpe)) {
            vocab = (int)parse_int("--bpe", bpe, 257, TOKENIZER_MAX_VOCAB);
        }
    }

    // Combinations.
    size_t n_out = strlen(out);
    int one_file = n_out > 4 && strcmp(out + n_out - 4, ".bin") == 0;
    if (bytes && bpe) die("--bytes and --bpe: choose one tokenizer");
    if (decode) {
        if (n_out || split > 0 || n_names[1] || n_names[2] || vocab)
            die("--decode takes token files and, if need be, --bytes or --bpe FILE, and writes to the standard output");
        if (n_names[0] == 0) die("--decode needs the name of a token file");
    } else {
        if (!bytes && !bpe) die("which tokenizer? --bytes, --bpe gpt2, --bpe train N or --bpe FILE");
        if (n_names[0] + n_names[1] + n_names[2] == 0) die("no text named (- is the standard input)");
        if (n_names[0] && (n_names[1] || n_names[2]))
            die("%s: texts come either before --train and --val, or all after them", names[0][0]);
        if (!n_out) die("--out is missing: FILE.bin, or with --split or --train and --val a folder");
        if (split > 0 && !n_names[0]) die("--split is for texts that --train and --val don't separate already");
        if (n_names[0] && !(split > 0) && !one_file)
            die("--out %s: expected FILE.bin, or also --split 0.9 for train.bin and val.bin in that folder", out);
        if ((split > 0 || !n_names[0]) && one_file) die("--out %s: expected a folder, for train.bin and val.bin", out);
        if (vocab && !n_names[0] && !n_names[1])
            die("--bpe train %d: the tokenizer is learned from --train, which is missing", vocab);
        if (documents && bytes) die("--eot: the byte tokenizer has no %s token", END_OF_TEXT);
    }

    // Everything is read before anything is written.
    Tokenizer t;
    char beside[MAX_PATH];
    if (decode && !bytes && !bpe) { find_tokenizer(beside, names[0][0]); bpe = beside; }
    int gpt2 = bpe && strcmp(bpe, "gpt2") == 0;
    if (gpt2 && access(vocab_bpe, R_OK) != 0)
        die("%s: cannot open: %s (it comes from "
            "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/vocab.bpe)", vocab_bpe, strerror(errno));
    if (!vocab) tokenizer_load(&t, bytes ? "bytes" : gpt2 ? vocab_bpe : bpe);
    if (gpt2 && t.vocab != 50257) die("%s: %d tokens, but GPT-2 has 50257: cut off?", vocab_bpe, t.vocab);
    if (documents && !vocab && t.eot < 0) die("--eot: the byte tokenizer has no %s token", END_OF_TEXT);
    if (decode) {
        for (size_t i = 0; i < n_names[0]; i++) decode_file(&t, names[0][i]);
        if (fclose(stdout) != 0) die("standard output: cannot write: %s", strerror(errno));
        return 0;
    }
    for (size_t i = 0; i < n_names[0]; i++) text_list_open(&texts, names[0][i]);
    for (size_t i = 0; i < n_names[1]; i++) text_list_open(&train, names[1][i]);
    for (size_t i = 0; i < n_names[2]; i++) text_list_open(&val, names[2][i]);
    const TextList* all[] = { &texts, &train, &val };
    for (int i = 0; i < 3; i++)
        if (n_names[i] && text_list_bytes(all[i]) == 0) die("%s: no text in it", names[i][0]);
    if (split > 0) text_list_split(&texts, split, documents, &train, &val);
    if (vocab) train_tokenizer(&t, one_file ? &texts : &train, documents, vocab);

    // Write, and only when all is written give the files their names.
    signal(SIGINT, on_signal);
    signal(SIGTERM, on_signal);
    char path[3][MAX_PATH];
    Writer w[2];
    int n_writers = 0;
    if (n_out > MAX_PATH - 32) die("%s: name too long", out);
    if (one_file) {
        snprintf(path[0], MAX_PATH, "%s", out);
        snprintf(path[2], MAX_PATH, "%.*s.tok", (int)n_out - 4, out);
    } else {
        make_folder(out);
        snprintf(path[0], MAX_PATH, "%s/train.bin", out);
        snprintf(path[1], MAX_PATH, "%s/val.bin", out);
        snprintf(path[2], MAX_PATH, "%s/tokenizer.tok", out);
    }
    for (int i = 0; i < 2; i++) {
        const TextList* l = one_file ? (i == 0 ? &texts : NULL) : i == 0 ? &train : &val;
        if (!l || l->n == 0) continue;
        writer_open(&w[n_writers], &t, path[i], (uint32_t)shard_tokens);
        encode_all(&w[n_writers], l, documents);
        writer_close(&w[n_writers++]);
    }
    tokenizer_save(&t, path[2]);
    for (int i = 0; i < n_outputs; i++) file_commit(outputs[i].tmp, outputs[i].path);
    for (int i = 0; i < n_writers; i++) writer_remove_old(&w[i]);
    for (int i = 0; i < n_writers; i++) writer_report(&w[i]);
    if (fclose(stdout) != 0) die("standard output: cannot write: %s", strerror(errno));
    return 0;
}
