// Tests of dev/dataloader.h: which tokens come in which order, every error, resuming, and the structure of the tasks.
//     gcc -std=gnu11 -O1 -Wall -Wextra -fsanitize=address,undefined test/test_dataloader.c -o /tmp/t && /tmp/t
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "check.h"

static jmp_buf on_die;
static char died_with[4096]; // what die was called with

__attribute__((noreturn, format(printf, 1, 2)))
static void die(const char* fmt, ...) {
    va_list args;
    va_start(args, fmt);
    vsnprintf(died_with, sizeof died_with, fmt, args);
    va_end(args);
    longjmp(on_die, 1);
}
#include "../dev/dataloader.h"

// ----------------------------------------------------------------------------
// Files

static char folder[256];

static const char* path_of(const char* name) {
    static char paths[4][512]; // so that a few can be named in one line
    static int i = 0;
    i = (i + 1) % 4;
    snprintf(paths[i], sizeof paths[i], "%s/%s", folder, name);
    return paths[i];
}

static void write_file(const char* name, const void* data, size_t bytes) {
    FILE* f = fopen(path_of(name), "wb");
    if (!f || fwrite(data, 1, bytes, f) != bytes || fclose(f) != 0) {
        perror(name);
        exit(1);
    }
}

// A token file of n tokens: first, first+1, ... It is written as the header claims, plus `extra` bytes (or less them).
static void write_shard(const char* name, int version, int n, int first, int vocab, uint64_t text_bytes, int extra) {
    size_t bytes = 1024 + 2 * (size_t)n;
    char* data = (char*)calloc(bytes + 64, 1);
    int32_t header[6] = { 20240520, version, n, vocab, (int32_t)(uint32_t)text_bytes, (int32_t)(text_bytes >> 32) };
    memcpy(data, header, sizeof header);
    for (int i = 0; i < n; i++) {
        uint16_t token = (uint16_t)(first + i);
        memcpy(data + 1024 + 2 * (size_t)i, &token, 2);
    }
    write_file(name, data, bytes + extra);
    free(data);
}

// A token file whose header bears these numbers, then two tokens.
static void write_header(const char* name, int magic, int version, int count, int vocab, int text_low, int text_high) {
    int32_t data[257] = { magic, version, count, vocab, text_low, text_high };
    write_file(name, data, sizeof data);
}

// ----------------------------------------------------------------------------

// 1 if opening and reading `batches` batches dies, with a message of one line.
static int dies(DataLoader* d, const char* pattern, int B, int T, int vocab, int mode, int batches) {
    memset(d, 0, sizeof *d);
    died_with[0] = 0;
    if (setjmp(on_die)) {
        loader_free(d);
        return strlen(died_with) > 20 && !strchr(died_with, '\n');
    }
    loader_open(d, pattern, B, T, vocab, mode, 1);
    for (int i = 0; i < batches; i++) loader_next(d);
    loader_free(d);
    return 0;
}

static int task_dies(DataLoader* d, const char* task, int B, int T, int vocab) {
    memset(d, 0, sizeof *d);
    died_with[0] = 0;
    if (setjmp(on_die)) {
        loader_free(d);
        return strlen(died_with) > 20 && !strchr(died_with, '\n');
    }
    loader_task(d, task, B, T, vocab, 1);
    loader_next(d);
    loader_free(d);
    return 0;
}

// Opening the file must die, naming it and what is wrong.
static void check_refused(const char* name, const char* word) {
    DataLoader d;
    const char* path = path_of(name);
    int ok = dies(&d, path, 1, 1, 65536, LOADER_CONTIGUOUS, 0) && strstr(died_with, word) && strstr(died_with, path);
    check(ok, "%s is refused: %s", name, died_with);
}

static void check_dies(int died, const char* word) {
    check(died && strstr(died_with, word), "refused, with '%s': %s", word, died_with);
}

// Row b of the batch is `first`, first+1, ... and the same shifted by one as targets.
static int row_is(const DataLoader* d, int b, int first) {
    for (int t = 0; t < d->T; t++) {
        if (d->tokens[b * d->T + t] != first + t || d->targets[b * d->T + t] != first + t + 1) return 0;
    }
    return 1;
}

static uint64_t batch_hash(const DataLoader* d) {
    uint64_t h = 14695981039346656037ull;
    for (int i = 0; i < d->B * d->T; i++) h = (h ^ (uint64_t)d->tokens[i]) * 1099511628211ull;
    for (int i = 0; i < d->B * d->T; i++) h = (h ^ (uint64_t)(d->targets[i] + 2)) * 1099511628211ull;
    for (int i = 0; i < d->B; i++) h = (h ^ (uint64_t)d->reset[i]) * 1099511628211ull;
    return h;
}

static void open_or_exit(DataLoader* d, const char* pattern, int B, int T, int vocab, int mode, uint64_t seed) {
    memset(d, 0, sizeof *d);
    if (setjmp(on_die)) {
        check(0, "unexpected: %s", died_with);
        exit(check_report());
    }
    loader_open(d, pattern, B, T, vocab, mode, seed);
}

static void task_or_exit(DataLoader* d, const char* task, int B, int T, int vocab, uint64_t seed) {
    memset(d, 0, sizeof *d);
    if (setjmp(on_die)) {
        check(0, "unexpected: %s", died_with);
        exit(check_report());
    }
    loader_task(d, task, B, T, vocab, seed);
}

// ----------------------------------------------------------------------------

// Every way in which a file can be wrong.
static void test_bad_files(void) {
    printf("bad files\n");
    DataLoader d;
    check_refused("missing.bin", "No such file");
    check_refused("missing_*.bin", "no file matches");
    write_file("empty.bin", "", 0);
    check_refused("empty.bin", "is empty");
    write_file("one_byte.bin", "a", 1);
    check_refused("one_byte.bin", "text");
    write_file("text.txt", "It is a truth universally acknowledged\n", 39);
    check_refused("text.txt", "it looks like text (token files are made");
    write_file("checkpoint.safetensors", "\x40\0\0\0\0\0\0\0{\"__metadata__\":{}}", 27);
    check_refused("checkpoint.safetensors", "safetensors");
    write_header("gpt2.bin", 20240326, 3, 1024, 50257, 12, 12);
    check_refused("gpt2.bin", "model checkpoint of llm.c");
    write_header("llama3.bin", 20240801, 7, 2, 0, 0, 0);
    check_refused("llama3.bin", "32-bit tokens");
    write_header("big_endian.bin", (int)__builtin_bswap32(20240520), 1 << 24, 2 << 24, 0, 0, 0);
    check_refused("big_endian.bin", "big-endian");
    write_header("foreign.bin", 7, 1, 2, 0, 0, 0);
    check_refused("foreign.bin", "another magic number");
    write_header("version3.bin", 20240520, 3, 2, 0, 0, 0);
    check_refused("version3.bin", "version 3");
    write_header("count0.bin", 20240520, 1, 0, 0, 0, 0);
    check_refused("count0.bin", "claims to hold 0 tokens");
    write_header("negative.bin", 20240520, 1, -5, 0, 0, 0);
    check_refused("negative.bin", "claims to hold -5 tokens");
    write_header("huge.bin", 20240520, 1, INT32_MAX, 0, 0, 0);
    check_refused("huge.bin", "truncated");
    write_header("vocab_negative.bin", 20240520, 2, 2, -1, 0, 0);
    check_refused("vocab_negative.bin", "vocabulary of -1");
    write_header("vocab_huge.bin", 20240520, 2, 2, 65537, 0, 0);
    check_refused("vocab_huge.bin", "vocabulary of 65537");
    write_header("text_huge.bin", 20240520, 2, 2, 0, 0, -1);
    check_refused("text_huge.bin", "header is damaged");
    write_shard("short_header.bin", 1, 0, 0, 0, 0, -1);
    check_refused("short_header.bin", "truncated");
    write_shard("short_by_one.bin", 1, 100, 0, 0, 0, -1);
    check_refused("short_by_one.bin", "truncated");
    write_shard("short_by_a_token.bin", 2, 100, 0, 100, 300, -2);
    check_refused("short_by_a_token.bin", "truncated");
    write_shard("too_long.bin", 1, 100, 0, 0, 0, 2);
    check_refused("too_long.bin", "too long");
    check_refused(".", "is a folder");
    if (symlink("/dev/zero", path_of("device.bin")) != 0) perror("symlink");
    check_refused("device.bin", "not a regular file");

    // one bad shard among good ones is named
    write_shard("mix_0.bin", 1, 100, 0, 0, 0, 0);
    write_shard("mix_1.bin", 1, 100, 0, 0, 0, -10);
    write_shard("mix_2.bin", 1, 100, 0, 0, 0, 0);
    check_dies(dies(&d, path_of("mix_*.bin"), 1, 4, 100, LOADER_RANDOM, 0), "mix_1.bin");

    // a token outside the vocabulary: found where it is read, and not before
    write_shard("vocab.bin", 1, 100, 0, 0, 0, 0);
    check(!dies(&d, path_of("vocab.bin"), 1, 10, 100, LOADER_CONTIGUOUS, 9), "tokens 0..99 fit a vocabulary of 100");
    check(!dies(&d, path_of("vocab.bin"), 1, 10, 70, LOADER_CONTIGUOUS, 6), "... and the first 6 batches one of 70");
    check_dies(dies(&d, path_of("vocab.bin"), 1, 10, 70, LOADER_CONTIGUOUS, 7), "vocab.bin");
    check_dies(dies(&d, path_of("vocab.bin"), 1, 10, 70, LOADER_CONTIGUOUS, 7), "number 70 is 70");
    check(!dies(&d, path_of("vocab.bin"), 1, 9, 99, LOADER_STREAMS, 10), "row 10 of 11 reads up to token 90");
    check_dies(dies(&d, path_of("vocab.bin"), 1, 9, 99, LOADER_STREAMS, 11), "number 99 is 99"); // only a target
    check_dies(dies(&d, path_of("vocab.bin"), 1, 99, 99, LOADER_RANDOM, 1), "vocabulary has 99");

    // sizes
    check_dies(dies(&d, path_of("vocab.bin"), 0, 10, 100, LOADER_RANDOM, 0), "at least 1");
    check_dies(dies(&d, path_of("vocab.bin"), 1, -1, 100, LOADER_RANDOM, 0), "at least 1");
    check_dies(dies(&d, path_of("vocab.bin"), 1 << 16, 1 << 16, 100, LOADER_RANDOM, 0), "more than 2^30");
    check_dies(dies(&d, path_of("vocab.bin"), 1, INT32_MAX, 100, LOADER_RANDOM, 0), "more than 2^30");
    check_dies(dies(&d, path_of("vocab.bin"), 1, 10, 0, LOADER_RANDOM, 0), "vocabulary of 0");
}

// Exactly enough, and one token less.
static void test_smallest(void) {
    printf("the smallest files\n");
    DataLoader d;
    const int modes[2] = { LOADER_CONTIGUOUS, LOADER_STREAMS };
    for (int i = 0; i < 2; i++) {
        write_shard("exact.bin", 1, 3 * 5 + 1, 0, 0, 0, 0);
        open_or_exit(&d, path_of("exact.bin"), 3, 5, 100, modes[i], 1);
        loader_next(&d);
        check(d.num_batches == 1 && row_is(&d, 0, 0) && row_is(&d, 1, 5) && row_is(&d, 2, 10),
              "B*T+1 tokens: one batch");
        uint64_t h = batch_hash(&d);
        loader_next(&d);
        check(batch_hash(&d) == h, "... and again the same");
        loader_free(&d);
        write_shard("exact.bin", 1, 3 * 5, 0, 0, 0, 0);
        check_dies(dies(&d, path_of("exact.bin"), 3, 5, 100, modes[i], 0), "has 15 tokens in 1 file(s), which is 2");
        check_dies(dies(&d, path_of("exact.bin"), 3, 5, 100, modes[i], 0), "at least 3 are needed (16 tokens");
    }
    write_shard("exact.bin", 1, 5, 0, 0, 0, 0);
    check_dies(dies(&d, path_of("exact.bin"), 3, 5, 100, LOADER_RANDOM, 0), "(6 tokens");
    write_shard("exact.bin", 1, 6, 0, 0, 0, 0);
    open_or_exit(&d, path_of("exact.bin"), 3, 5, 100, LOADER_RANDOM, 1);
    loader_next(&d);
    check(row_is(&d, 0, 0) && row_is(&d, 1, 0) && row_is(&d, 2, 0),
          "random rows need T+1 tokens, and find the only start");
    loader_free(&d);
    // enough tokens in all, but no shard has T+1 of them
    write_shard("tiny_0.bin", 1, 5, 0, 0, 0, 0);
    write_shard("tiny_1.bin", 1, 5, 5, 0, 0, 0);
    check_dies(dies(&d, path_of("tiny_*.bin"), 1, 5, 100, LOADER_RANDOM, 0), "10 tokens in 2 file(s), which is 0 rows");
}

// Shards of 23, 3, 12, 1 and 9 tokens that begin at 0, 100, 200, 300, 400; with T = 4 they have 5, 0, 2, 0 and 2 rows.
static void write_five_shards(void) {
    const int sizes[5] = { 23, 3, 12, 1, 9 };
    for (int i = 0; i < 5; i++) {
        char name[32];
        snprintf(name, sizeof name, "five_%d.bin", i);
        write_shard(name, 1, sizes[i], 100 * i, 0, 0, 0);
    }
}

static void test_contiguous(void) {
    printf("contiguous\n");
    write_five_shards();
    const int rows[9] = { 0, 4, 8, 12, 16, 200, 204, 400, 404 }; // the tokens that rows begin with
    DataLoader d;
    for (int B = 1; B <= 9; B++) {
        open_or_exit(&d, path_of("five_*.bin"), B, 4, 500, LOADER_CONTIGUOUS, 1);
        int ok = d.num_tokens == 48 && d.num_batches == (size_t)(9 / B);
        for (int k = 0; k < 3 * (int)d.num_batches; k++) { // three passes, in which only whole batches count
            loader_next(&d);
            for (int b = 0; b < B; b++) ok &= row_is(&d, b, rows[k % (9 / B) * B + b]) && d.reset[b] == 1;
        }
        loader_restart(&d);
        loader_next(&d);
        check(ok && row_is(&d, 0, 0) && row_is(&d, B - 1, rows[B - 1]),
              "B = %d: %zu batches in order, restart", B, d.num_batches);
        loader_free(&d);
    }
    open_or_exit(&d, path_of("five_*.bin"), 2, 4, 500, LOADER_CONTIGUOUS, 1); // 4 batches
    d.position = (1ull << 40) + 3;
    loader_next(&d);
    check(row_is(&d, 0, 204) && row_is(&d, 1, 400), "a position beyond 2^32 is batch 3 of its pass");
    loader_free(&d);
    check_dies(dies(&d, path_of("five_*.bin"), 10, 4, 500, LOADER_CONTIGUOUS, 0), "9 rows of 4 + 1; at least 10");
    write_shard("odd[name].bin", 1, 9, 7, 0, 0, 0);
    open_or_exit(&d, path_of("odd[name].bin"), 2, 4, 500, LOADER_CONTIGUOUS, 1);
    loader_next(&d);
    check(row_is(&d, 0, 7) && row_is(&d, 1, 11), "a name that reads as a glob is found as a file");
    loader_free(&d);
}

static void test_streams(void) {
    printf("streams\n");
    const int rows[9] = { 0, 4, 8, 12, 16, 200, 204, 400, 404 };
    const int first[9] = { 1, 0, 0, 0, 0, 1, 0, 1, 0 }; // of their shard
    DataLoader d;
    for (int B = 1; B <= 5; B++) {
        open_or_exit(&d, path_of("five_*.bin"), B, 4, 500, LOADER_STREAMS, 1);
        int R = 9 / B, ok = (int)d.num_batches == R, resets = 1, continues = 1;
        for (int k = 0; k < 3 * R; k++) {
            int before = d.targets[3]; // the last target of stream 0
            loader_next(&d);
            for (int b = 0; b < B; b++) {
                int r = b * R + k % R;
                ok &= row_is(&d, b, rows[r]);
                resets &= d.reset[b] == (k % R == 0 || first[r]);
            }
            if (!d.reset[0]) continues &= d.tokens[0] == before;
        }
        check(ok && resets && continues, "B = %d: %d rows a stream, resets where streams and shards begin", B, R);
        loader_free(&d);
    }
}

// All starts come, the last one too, about equally often, and with T = 4 there are 19 + 0 + 8 + 0 + 5 of them.
static void test_random(void) {
    printf("random\n");
    DataLoader d;
    open_or_exit(&d, path_of("five_*.bin"), 8, 4, 500, LOADER_RANDOM, 42);
    int counts[500] = { 0 }, ok = d.num_batches == 0, draws = 32 * 1000;
    for (int i = 0; i < draws / 8; i++) {
        loader_next(&d);
        for (int b = 0; b < 8; b++) {
            int start = d.tokens[b * 4];
            ok &= row_is(&d, b, start) && d.reset[b] == 1;
            counts[start]++;
        }
    }
    int starts = 0, least = draws;
    double chi2 = 0;
    for (int i = 0; i < 500; i++) {
        int is_start = (i <= 18) || (i >= 200 && i <= 207) || (i >= 400 && i <= 404);
        if (!is_start) ok &= counts[i] == 0;
        else {
            starts++;
            if (counts[i] < least) least = counts[i];
            chi2 += (counts[i] - 1000.0) * (counts[i] - 1000.0) / 1000.0;
        }
    }
    check(ok && starts == 32 && least > 0,
          "rows lie inside their shards, and each of %d starts is drawn (least: %d)", starts, least);
    check(chi2 < 65, "equally often: chi-squared %.1f of 31 degrees, bound 65", chi2); // 65: once in 3000 seeds
    check(counts[18] > 0 && counts[207] > 0 && counts[404] > 0, "the last start of every shard is drawn");

    loader_restart(&d);
    loader_next(&d);
    uint64_t first = batch_hash(&d);
    loader_free(&d);
    open_or_exit(&d, path_of("five_*.bin"), 8, 4, 500, LOADER_RANDOM, 42);
    loader_next(&d);
    check(batch_hash(&d) == first, "the same seed gives the same batch, restart goes back to it");
    loader_free(&d);
    open_or_exit(&d, path_of("five_*.bin"), 8, 4, 500, LOADER_RANDOM, 43);
    loader_next(&d);
    check(batch_hash(&d) != first, "another seed another");
    loader_free(&d);
}

// rng and position are the whole state: with them, a new loader goes on as the old one, in each mode.
static void test_resume(void) {
    printf("resume\n");
    const char* names[5] = { "random", "contiguous", "streams", "copy", "recall" };
    for (int mode = 0; mode < 5; mode++) {
        DataLoader d;
        uint64_t after[7], rng = 0, position = 0;
        int ok = 1, distinct = 0;
        for (int run = 0; run < 2; run++) {
            int seed = 5 + run; // a resumed run takes the saved state, whatever its own seed
            if (mode < 3) open_or_exit(&d, path_of("five_*.bin"), 2, 4, 500, mode, seed);
            else task_or_exit(&d, names[mode], 2, 9, 50, seed);
            if (run == 0) {
                for (int i = 0; i < 6; i++) loader_next(&d);
                rng = d.rng;
                position = d.position;
            } else {
                d.rng = rng;
                d.position = position;
            }
            for (int i = 0; i < 7; i++) {
                loader_next(&d);
                if (run == 0) after[i] = batch_hash(&d);
                else ok &= after[i] == batch_hash(&d);
                if (run == 0 && i > 0) distinct += after[i] != after[i - 1];
            }
            loader_free(&d);
        }
        check(ok && distinct >= 5, "%s: the same 7 batches after rng and position are put back", names[mode]);
    }
}

static void test_version_2(void) {
    printf("version 2\n");
    DataLoader d;
    write_shard("v2_0.bin", 2, 100, 0, 300, 450, 0);
    write_shard("v2_1.bin", 2, 50, 0, 200, 150, 0);
    open_or_exit(&d, path_of("v2_*.bin"), 1, 4, 100, LOADER_RANDOM, 1);
    check(d.vocab == 300, "vocabulary: the largest, even if above the model's (%d)", d.vocab);
    check(fabs(d.bytes_per_token - 4.0) < 1e-12, "bytes per token over all shards: %g", d.bytes_per_token);
    loader_free(&d);
    write_shard("v2_1.bin", 2, 50, 0, 200, 0, 0);
    open_or_exit(&d, path_of("v2_*.bin"), 1, 4, 100, LOADER_RANDOM, 1);
    check(d.bytes_per_token == 0, "unknown where a shard does not say");
    loader_free(&d);
    write_shard("v2_1.bin", 1, 50, 0, 70000, 150, 0);
    open_or_exit(&d, path_of("v2_*.bin"), 1, 4, 100, LOADER_RANDOM, 1);
    check(d.bytes_per_token == 0 && d.vocab == 300, "unknown where a shard is of version 1");
    loader_free(&d);
    write_shard("v2_0.bin", 2, 100, 0, 65536, 5ull << 32 | 3000000000u, 0);
    open_or_exit(&d, path_of("v2_0.bin"), 1, 4, 100, LOADER_RANDOM, 1);
    check(d.bytes_per_token == (5.0 * 4294967296.0 + 3e9) / 100,
          "text beyond 4 GB: %.0f bytes per token", d.bytes_per_token);
    loader_free(&d);
}

// Two shards of 2^31 - 1 tokens each (files with holes): positions beyond 2^31 and 2^32.
static void test_large(void) {
    printf("beyond 2^32 tokens\n");
    const int n = INT32_MAX;
    int made = 1;
    for (int i = 0; i < 2; i++) {
        write_header(i ? "large_1.bin" : "large_0.bin", 20240520, 1, n, 0, 0, 0);
        int fd = open(path_of(i ? "large_1.bin" : "large_0.bin"), O_WRONLY);
        uint16_t last[2] = { (uint16_t)(10 + i), (uint16_t)(20 + i) };
        off_t end = 1024 + 2 * (off_t)n;
        made &= fd >= 0 && ftruncate(fd, end) == 0 && pwrite(fd, last, 4, end - 4) == 4;
        if (fd >= 0) close(fd);
    }
    DataLoader d;
    if (!made) {
        printf("  left out: no room for files with holes of 4 GB in %s\n", folder);
    } else {
        open_or_exit(&d, path_of("large_*.bin"), 2, 1, 100, LOADER_STREAMS, 1);
        check(d.num_tokens == 2 * (size_t)n && d.num_batches == (size_t)n - 1, "%zu tokens", d.num_tokens);
        d.position = (uint64_t)n - 2;
        loader_next(&d);
        check(d.tokens[0] == 10 && d.targets[0] == 20 && d.tokens[1] == 11 && d.targets[1] == 21,
              "both streams' last rows");
        loader_next(&d);
        check(d.tokens[0] == 0 && d.reset[0] == 1 && d.reset[1] == 1, "and around");
        loader_free(&d);
        open_or_exit(&d, path_of("large_*.bin"), 1, 1, 100, LOADER_RANDOM, 1);
        int beyond = 0;
        for (int i = 0; i < 64; i++) {
            uint64_t rng = d.rng;
            beyond += loader_rand(&rng) % (2 * ((size_t)n - 1)) > (size_t)n;
            loader_next(&d);
        }
        check(d.num_rows == 2 * ((size_t)n - 1) && beyond > 16 && beyond < 48,
              "random rows come from both (%d of 64)", beyond);
        loader_free(&d);
    }
    unlink(path_of("large_0.bin"));
    unlink(path_of("large_1.bin"));
}

// ----------------------------------------------------------------------------

// 1 if row b is as copy promises, judged from the tokens alone.
static int copy_row_ok(const DataLoader* d, int b, int V) {
    const int* x = d->tokens + (size_t)b * d->T;
    const int* y = d->targets + (size_t)b * d->T;
    int n = d->T / 2, losses = 0;
    for (int t = 0; t < d->T; t++) {
        if (x[t] < 0 || x[t] >= V) return 0;
        if (t >= n && t < 2 * n && x[t] != x[t - n]) return 0;
        if (y[t] == -1) continue;
        losses++;
        if (t + 1 < n || t + 1 >= 2 * n || y[t] != x[t + 1]) return 0;
    }
    return losses == n;
}

// 1 if row b is as recall promises. Sets bit i of *asked where pair i is asked for.
static int recall_row_ok(const DataLoader* d, int b, int V, int* asked) {
    const int* x = d->tokens + (size_t)b * d->T;
    const int* y = d->targets + (size_t)b * d->T;
    int P = d->T / 4 < V / 2 ? d->T / 4 : V / 2;
    for (int i = 0; i < P; i++) {
        if (x[2 * i] < 0 || x[2 * i] >= V / 2 || x[2 * i + 1] < V / 2 || x[2 * i + 1] >= V) return 0;
        for (int j = 0; j < i; j++) if (x[2 * i] == x[2 * j]) return 0;
    }
    for (int t = 0; t < d->T; t++) {
        if (t < 2 * P || (t - 2 * P) % 2 == 1) {
            if (y[t] != -1) return 0;
            continue;
        }
        int found = -1;
        for (int i = 0; i < P; i++) if (x[2 * i] == x[t]) found = i;
        if (found < 0 || y[t] != x[2 * found + 1] || (t + 1 < d->T && x[t + 1] != y[t])) return 0;
        *asked |= 1 << (found < 30 ? found : 30);
    }
    return 1;
}

static void test_tasks(void) {
    printf("tasks\n");
    DataLoader d;
    const int Ts[9] = { 2, 3, 4, 5, 7, 8, 31, 64, 257 };
    const int Vs[4] = { 2, 3, 11, 256 };
    for (int recall = 0; recall < 2; recall++) {
        int ok = 1, differ = 1, seen[256] = { 0 }, asked = 0;
        for (int i = 0; i < 9; i++) for (int j = 0; j < 4; j++) {
            int T = Ts[i], V = Vs[j], B = 3;
            if (recall && T < 4) continue;
            task_or_exit(&d, recall ? "recall" : "copy", B, T, V, 9);
            ok &= d.num_batches == 0 && d.num_tokens == 0;
            for (int k = 0; k < 20; k++) {
                uint64_t before = batch_hash(&d);
                loader_next(&d);
                if (T > 30 && V > 3) {
                    differ &= batch_hash(&d) != before && memcmp(d.tokens, d.tokens + T, T * sizeof(int));
                }
                for (int b = 0; b < B; b++) {
                    int which = 0;
                    ok &= recall ? recall_row_ok(&d, b, V, &which) : copy_row_ok(&d, b, V);
                    if (T == 31 && V == 256) asked |= which;
                    ok &= d.reset[b] == 1;
                    if (V == 256) for (int t = 0; t < T; t++) seen[d.tokens[b * T + t]]++;
                }
            }
            loader_free(&d);
        }
        int all = 1;
        for (int v = 0; v < 256; v++) all &= seen[v] > 0;
        check(ok, "%s: every row as promised, for T from 2 to 257, V from 2 to 256", recall ? "recall" : "copy");
        check(differ, "... rows and batches differ");
        check(all, "... every token of the vocabulary comes");
        if (recall) check(asked == 0x7f, "... every one of 7 pairs is asked for (%x)", asked);
    }

    task_or_exit(&d, "copy", 2, 16, 30, 9); // batch k by itself, without those before it
    for (int k = 0; k < 5; k++) loader_next(&d);
    uint64_t fifth = batch_hash(&d);
    loader_restart(&d);
    d.position = 4;
    loader_next(&d);
    check(batch_hash(&d) == fifth, "batch 4 depends on the seed and 4 only");
    loader_free(&d);
    task_or_exit(&d, "copy", 2, 16, 30, 10);
    d.position = 4;
    loader_next(&d);
    check(batch_hash(&d) != fifth, "and on the seed");
    loader_free(&d);

    check_dies(task_dies(&d, "sort", 1, 8, 8), "there are copy and recall");
    check_dies(task_dies(&d, "", 1, 8, 8), "there are copy and recall");
    check_dies(task_dies(&d, "copy", 1, 1, 8), "at least 2, not 1");
    check_dies(task_dies(&d, "recall", 1, 3, 8), "at least 4, not 3");
    check_dies(task_dies(&d, "copy", 1, 8, 1), "at least 2 tokens, not 1");
    check_dies(task_dies(&d, "recall", 1, 8, 1), "at least 2 tokens, not 1");
    check_dies(task_dies(&d, "recall", 1 << 20, 1 << 20, 8), "more than 2^30");
}

int main(void) {
    const char* tmp = getenv("TMPDIR");
    snprintf(folder, sizeof folder, "%s/test_dataloader_XXXXXX", tmp && *tmp ? tmp : "/tmp");
    if (!mkdtemp(folder)) {
        perror(folder);
        return 1;
    }
    test_bad_files();
    test_smallest();
    test_contiguous();
    test_streams();
    test_random();
    test_resume();
    test_version_2();
    test_large();
    test_tasks();
    char command[300];
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    if (system(command) != 0) printf("  could not remove %s\n", folder);
    return check_report();
}
