// dataloader.h: batches of tokens from files, or from a generated task. All of train_*.c and train_*.cu read data
// through it, and nothing in it knows of any model.
//
// A token file ("shard") is llm.c's, so that its published .bin files work as they are:
//
//     256 x int32 header                                     count x uint16
//     [0] 20240520  [1] version  [2] count of tokens  ...    token token token ...
//
// Version 1 is llm.c's own. Version 2, written by dev/prepare, adds [3] the vocabulary's size and [4], [5] the low and
// high 32 bits of the number of text bytes that the tokens stand for, so that a loss can be given in bits per *byte*,
// which is comparable between tokenizers. Numbers are little-endian.
//
// A row is T inputs and the same tokens shifted by one as targets, T+1 tokens that lie inside one shard: text of one
// file never runs on into the next one's. Rows follow each other with a step of T, so that each token is a target once:
//
//     shard     t0 t1 t2 t3 t4 t5 t6 t7 t8        n = 9 tokens, T = 4: (n-1)/T = 2 rows
//     row 0     [---------] +                     inputs t0..t3, targets t1..t4
//     row 1                 [---------] +         inputs t4..t7, targets t5..t8
//
//     CONTIGUOUS   batch k is rows kB .. kB+B-1. For validation: the same tokens in the same order each time.
//     STREAMS      the rows are cut into B equal streams, and row b of batch k is row k of stream b: it continues row b
//                  of batch k-1, whose state can be carried over, except where `reset` says otherwise.
//     RANDOM       a row starts at any token from which T+1 can be read, each equally likely. For training.
//
// The including file defines  static void die(const char* fmt, ...)  before it includes this one: printf's arguments,
// one line on stderr, exit(2).
#ifndef DATALOADER_H
#define DATALOADER_H

#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define LOADER_MAGIC 20240520
#define LOADER_HEADER 256   // int32s
#define LOADER_HOW "(token files are made from text with build/dev/prepare)"

enum { LOADER_RANDOM, LOADER_CONTIGUOUS, LOADER_STREAMS, LOADER_COPY, LOADER_RECALL };

typedef struct LoaderShard {
    const char* path;
    void* map;              // the whole file, read-only
    size_t map_bytes;
    const uint16_t* tokens; // (num_tokens), inside map
    size_t num_tokens;
    uint64_t text_bytes;    // that the tokens stand for; 0 = unknown
    size_t first_row;       // rows of all shards before this one
} LoaderShard;

typedef struct DataLoader {
    int B, T, mode;
    int* tokens;            // (B,T) inputs
    int* targets;           // (B,T) next tokens; -1 = no loss here
    int* reset;             // (B)   1: a carried state must be zeroed before this row; always 1 unless LOADER_STREAMS
    size_t num_tokens;      // over all shards; 0 for a task
    size_t num_batches;     // full batches of one pass; 0 where there is no end (RANDOM and tasks)
    double bytes_per_token; // of text; 0 if a shard does not say
    int vocab;              // the largest that a shard states; 0 if none does
    uint64_t rng, position; // all that moves: save these two, put them back, and the same batches follow
    // inside
    uint64_t seed;
    int vocab_limit;        // tokens are below this, or die
    glob_t files;
    LoaderShard* shards;
    size_t num_shards;
    size_t num_rows, step;  // rows of all shards, and the tokens from one row's start to the next: T, or 1 if RANDOM
    int* keys;              // (vocab/2) scratch for recall
} DataLoader;

// splitmix64: the state is a counter, the output its hash. `% n` of it favours small values by less than n / 2^64.
static uint64_t loader_rand(uint64_t* state) {
    uint64_t z = (*state += 0x9E3779B97F4A7C15ull);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

static void* loader_alloc(size_t count, size_t size) {
    void* p = calloc(count, size); // which also refuses a product that overflows
    if (!p) die("not enough memory for the data loader (%zu x %zu bytes)", count, size);
    return p;
}

static void loader_init(DataLoader* d, int B, int T, int vocab, int mode, uint64_t seed) {
    memset(d, 0, sizeof *d);
    if (B < 1 || T < 1) die("a batch of %d x %d tokens: --batch and --seq must be at least 1", B, T);
    if (T > (1 << 30) / B) die("a batch of %d x %d tokens is more than 2^30: use a smaller --batch or --seq", B, T);
    if (vocab < 1) die("a vocabulary of %d tokens: it must have at least one", vocab);
    d->B = B; d->T = T; d->mode = mode;
    d->vocab_limit = vocab;
    d->seed = d->rng = seed;
}

static void loader_alloc_batch(DataLoader* d) {
    d->tokens = (int*)loader_alloc((size_t)d->B * d->T, sizeof(int));
    d->targets = (int*)loader_alloc((size_t)d->B * d->T, sizeof(int));
    d->reset = (int*)loader_alloc(d->B, sizeof(int));
}

// ----------------------------------------------------------------------------
// Token files

// What a file without our magic number seems to be, for the error message.
static const char* loader_guess(const unsigned char* bytes, size_t n) {
    uint32_t magic = 0;
    memcpy(&magic, bytes, n < 4 ? n : 4);
    if (magic == __builtin_bswap32(LOADER_MAGIC)) return "it is a big-endian token file, ours are little-endian";
    if (magic == 20240326) return "it is a model checkpoint of llm.c";
    if (magic == 20240801) return "it holds llm.c's 32-bit tokens, ours have 16 bits";
    if (n > 8 && bytes[8] == '{') return "it looks like a safetensors checkpoint, which --init and --resume take";
    for (size_t i = 0; i < n && i < 1024; i++) {
        if (bytes[i] < '\t') return "it starts with another magic number";
    }
    return "it looks like text";
}

// Maps one file and checks all that its header claims. A shard that is cut short while it is mapped ends the program
// with SIGBUS: replace token files, don't rewrite them in place.
static LoaderShard* loader_add_shard(DataLoader* d, const char* path) {
    struct stat st;
    if (stat(path, &st) != 0) {
        if (errno == ENOENT && strpbrk(path, "*?[")) die("no file matches '%s' " LOADER_HOW, path);
        die("cannot open token file '%s': %s " LOADER_HOW, path, strerror(errno));
    }
    if (S_ISDIR(st.st_mode)) die("'%s' is a folder: name the token files in it, as in '%s/*.bin'", path, path);
    if (!S_ISREG(st.st_mode)) die("'%s' is not a regular file: token files are mapped, others can't be", path);
    if (st.st_size == 0) die("token file '%s' is empty " LOADER_HOW, path);
    int fd = open(path, O_RDONLY);
    if (fd < 0) die("cannot open token file '%s': %s", path, strerror(errno));
    void* map = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    close(fd);
    if (map == MAP_FAILED) die("cannot map token file '%s': %s", path, strerror(errno));

    LoaderShard* s = &d->shards[d->num_shards++];
    s->path = path;
    s->map = map;
    s->map_bytes = (size_t)st.st_size;
    const int32_t* header = (const int32_t*)map;
    const size_t header_bytes = LOADER_HEADER * sizeof(int32_t);
    if (s->map_bytes < sizeof(int32_t) || header[0] != LOADER_MAGIC) {
        die("'%s' is not a token file: %s " LOADER_HOW, path, loader_guess((const unsigned char*)map, s->map_bytes));
    }
    if (s->map_bytes < header_bytes) {
        die("token file '%s' is truncated: %zu bytes, its header alone has %zu", path, s->map_bytes, header_bytes);
    }
    int version = header[1], count = header[2];
    if (version != 1 && version != 2) die("token file '%s' has version %d: only 1 and 2 can be read", path, version);
    if (count < 1) die("token file '%s' claims to hold %d tokens: it needs at least one", path, count);
    size_t expected = header_bytes + (size_t)count * sizeof(uint16_t);
    if (s->map_bytes != expected) {
        die("token file '%s' is %s: %zu bytes, its %d tokens need %zu: fetch or make it anew", path,
            s->map_bytes < expected ? "truncated" : "too long", s->map_bytes, count, expected);
    }
    s->tokens = (const uint16_t*)(header + LOADER_HEADER);
    s->num_tokens = (size_t)count;
    d->num_tokens += s->num_tokens;

    if (version == 2) {
        int vocab = header[3];
        if (vocab < 0 || vocab > 65536) {
            die("token file '%s' states a vocabulary of %d: 16-bit tokens allow 1 to 65536, 0 = unknown", path, vocab);
        }
        if (vocab > d->vocab) d->vocab = vocab;
        s->text_bytes = (uint64_t)(uint32_t)header[5] << 32 | (uint32_t)header[4];
        if (s->text_bytes >> 48) {
            die("token file '%s' claims to stand for %llu bytes of text: its header is damaged", path,
                (unsigned long long)s->text_bytes);
        }
    }
    return s;
}

// Opens all files that match `pattern` (a name, or a glob such as "data/owt/train_*.bin"; in order of their names).
// `vocab` is the model's: a token that it has no row for ends the program when it is read. Dies on any bad file, and
// when there is not enough for one batch.
static inline void loader_open(DataLoader* d, const char* pattern, int B, int T, int vocab, int mode, uint64_t seed) {
    loader_init(d, B, T, vocab, mode, seed);
    // NOCHECK gives back the pattern itself where nothing matches, which is right for a name with a '[' in it
    int err = glob(pattern, GLOB_NOCHECK, NULL, &d->files);
    if (err) die("cannot look for files '%s': %s", pattern, err == GLOB_NOSPACE ? "not enough memory" : "read error");
    d->shards = (LoaderShard*)loader_alloc(d->files.gl_pathc, sizeof(LoaderShard));
    double text_bytes = 0;
    int known = 1;
    d->step = mode == LOADER_RANDOM ? 1 : (size_t)T;
    for (size_t i = 0; i < d->files.gl_pathc; i++) {
        LoaderShard* s = loader_add_shard(d, d->files.gl_pathv[i]);
        text_bytes += (double)s->text_bytes;
        if (s->text_bytes == 0) known = 0;
        s->first_row = d->num_rows;
        // the last row starts at n-1-T, where n tokens still have a target for each input
        if (s->num_tokens > (size_t)T) d->num_rows += (s->num_tokens - 1 - T) / d->step + 1;
    }
    size_t needed = mode == LOADER_RANDOM ? 1 : (size_t)B;
    if (d->num_rows < needed) {
        die("'%s' has %zu tokens in %zu file(s), which is %zu rows of %d + 1; at least %zu are needed (%zu tokens in "
            "one file): use a smaller --batch or --seq, or more text",
            pattern, d->num_tokens, d->num_shards, d->num_rows, T, needed, needed * T + 1);
    }
    if (mode != LOADER_RANDOM) d->num_batches = d->num_rows / B; // rows beyond the last full batch are left out
    if (known) d->bytes_per_token = text_bytes / (double)d->num_tokens;
    loader_alloc_batch(d);
}

// Row number `row` of all shards into row `b` of the batch. Returns 1 if it is the first of its shard.
static int loader_read_row(DataLoader* d, size_t row, int b) {
    size_t lo = 0, hi = d->num_shards; // finds the last shard with first_row <= row, which is never one without rows
    while (hi - lo > 1) {
        size_t mid = lo + (hi - lo) / 2;
        if (d->shards[mid].first_row <= row) lo = mid; else hi = mid;
    }
    const LoaderShard* s = &d->shards[lo];
    size_t start = (row - s->first_row) * d->step;
    int* tokens = d->tokens + (size_t)b * d->T;
    int* targets = d->targets + (size_t)b * d->T;
    for (int t = 0; t <= d->T; t++) {
        int token = s->tokens[start + t];
        if (token >= d->vocab_limit) {
            die("token file '%s': token number %zu is %d, but the vocabulary has %d: give the --tokenizer (or --vocab) "
                "that it was made with", s->path, start + t, token, d->vocab_limit);
        }
        if (t < d->T) tokens[t] = token;
        if (t > 0) targets[t - 1] = token;
    }
    return start == 0;
}

// ----------------------------------------------------------------------------
// Generated tasks. Both ask what a recurrent model finds hard: to keep exact tokens, for long.
//
//     copy     a b c d a b c d             the second half repeats the first; loss on the repeated tokens only
//     recall   k v k v k v  k v k v k v    pairs of a key and its value, then keys drawn from them; loss on the value

// Opens a task instead of files. Sequences never end, and batch k depends on `seed` and k alone.
static inline void loader_task(DataLoader* d, const char* task, int B, int T, int vocab, uint64_t seed) {
    int copy = strcmp(task, "copy") == 0;
    if (!copy && strcmp(task, "recall") != 0) die("unknown --task '%s': there are copy and recall", task);
    loader_init(d, B, T, vocab, copy ? LOADER_COPY : LOADER_RECALL, seed);
    int least = copy ? 2 : 4;
    if (T < least) die("--task %s needs --seq of at least %d, not %d", task, least, T);
    if (vocab < 2) die("--task %s needs a vocabulary of at least 2 tokens, not %d", task, vocab);
    if (!copy) d->keys = (int*)loader_alloc(vocab / 2, sizeof(int));
    loader_alloc_batch(d);
}

// One row of copy. n = T/2 random tokens, then the same n again. The target of the last random token is the first of
// the copy: where the copy begins is known from the position alone. An odd T leaves a 0 at the end.
static void loader_copy_row(DataLoader* d, uint64_t* rng, int* tokens, int* targets) {
    int n = d->T / 2;
    for (int i = 0; i < n; i++) tokens[i] = tokens[n + i] = (int)(loader_rand(rng) % d->vocab_limit);
    for (int i = n - 1; i < 2 * n - 1; i++) targets[i] = tokens[i + 1];
}

// One row of recall. P pairs fill the first half: distinct keys from [0, V/2), values from [V/2, V). A vocabulary that
// has fewer keys makes fewer pairs and more queries.
static void loader_recall_row(DataLoader* d, uint64_t* rng, int* tokens, int* targets) {
    int V = d->vocab_limit, num_keys = V / 2;
    int P = d->T / 4 < num_keys ? d->T / 4 : num_keys;
    for (int i = 0; i < num_keys; i++) d->keys[i] = i;
    for (int i = 0; i < P; i++) { // Fisher-Yates, stopped after P
        int j = i + (int)(loader_rand(rng) % (num_keys - i));
        tokens[2 * i] = d->keys[j];
        d->keys[j] = d->keys[i];
        tokens[2 * i + 1] = num_keys + (int)(loader_rand(rng) % (V - num_keys));
    }
    for (int t = 2 * P; t < d->T; t += 2) {
        int pair = (int)(loader_rand(rng) % P);
        tokens[t] = tokens[2 * pair];
        targets[t] = tokens[2 * pair + 1];
        if (t + 1 < d->T) tokens[t + 1] = targets[t];
    }
}

static void loader_task_batch(DataLoader* d) {
    uint64_t k = d->position, rng = loader_rand(&k) ^ d->rng; // d->rng stays: only position moves
    memset(d->tokens, 0, (size_t)d->B * d->T * sizeof(int));
    memset(d->targets, 0xff, (size_t)d->B * d->T * sizeof(int)); // -1 everywhere
    for (int b = 0; b < d->B; b++) {
        int* tokens = d->tokens + (size_t)b * d->T;
        int* targets = d->targets + (size_t)b * d->T;
        if (d->mode == LOADER_COPY) loader_copy_row(d, &rng, tokens, targets);
        else loader_recall_row(d, &rng, tokens, targets);
        d->reset[b] = 1;
    }
}

// ----------------------------------------------------------------------------

// Fills tokens, targets and reset with the next batch; begins again after the last full one.
static inline void loader_next(DataLoader* d) {
    if (d->mode == LOADER_COPY || d->mode == LOADER_RECALL) {
        loader_task_batch(d);
    } else {
        size_t k = d->num_batches ? d->position % d->num_batches : 0;
        for (int b = 0; b < d->B; b++) {
            size_t row = d->mode == LOADER_RANDOM     ? loader_rand(&d->rng) % d->num_rows
                       : d->mode == LOADER_CONTIGUOUS ? k * d->B + b
                                                      : b * d->num_batches + k;
            int first = loader_read_row(d, row, b);
            d->reset[b] = d->mode != LOADER_STREAMS || k == 0 || first;
        }
    }
    d->position++;
}

// Back to the first batch, so that each validation sees the same tokens.
static inline void loader_restart(DataLoader* d) {
    d->rng = d->seed;
    d->position = 0;
}

// Also frees what a loader that failed to open had taken by then.
static inline void loader_free(DataLoader* d) {
    for (size_t i = 0; i < d->num_shards; i++) munmap(d->shards[i].map, d->shards[i].map_bytes);
    globfree(&d->files);
    free(d->shards);
    free(d->tokens);
    free(d->targets);
    free(d->reset);
    free(d->keys);
    memset(d, 0, sizeof *d);
}
#endif
