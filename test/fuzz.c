// fuzz.c: damaged files must end in a clear error or be read correctly, never in a crash, a hang or a wrong read.
//
//     gcc -std=gnu11 -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all test/fuzz.c -o build/fuzz -lm
//     build/fuzz loader 30 1        30 seconds with seed 1; the same seed makes the same files
//
// A round makes a valid file, damages it, reads it, and sees which of the two endings came. The sanitizers watch what
// else happens. die's exit becomes a longjmp, so that thousands of rounds a second run in one process: a child, whose
// parent is there to tell of a crash or a hang. On a failure the files of that round are kept and named.
//
// To add a target, write a function `void fuzz_x(void)` that does one round, and name it in the table at the end.
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static jmp_buf on_exit_call;
static FILE* captured; // what the code under test prints as its errors

__attribute__((noreturn))
static void exit_to_fuzzer(int code) {
    longjmp(on_exit_call, code ? code : -1);
}

// A file is mapped in whole pages, and a read behind its end goes unseen until the page ends. So mmap becomes a copy in
// a malloc of just the file's size, which the address sanitizer guards to the byte.
static void* map_to_the_byte(void* hint, size_t n, int protection, int flags, int fd, off_t offset) {
    (void)hint; (void)protection; (void)flags;
    char* p = (char*)calloc(n, 1);
    if (p && fd >= 0 && pread(fd, p, n, offset) != (ssize_t)n) {
        free(p);
        return MAP_FAILED;
    }
    return p ? p : MAP_FAILED;
}

static int unmap(void* p, size_t n) {
    (void)n;
    free(p);
    return 0;
}

// The code under test meets these instead of libc's; the sanitizers still report on the real stderr.
static FILE* real_stderr(void) { return stderr; }
#undef stderr
#define stderr captured
#define exit exit_to_fuzzer
#define mmap map_to_the_byte
#define munmap unmap
#define fsync(fd) 0 // a disk would slow the rounds a hundredfold
typedef float real;
__attribute__((noreturn, format(printf, 1, 2)))
static void die(const char* fmt, ...) {
    va_list args;
    va_start(args, fmt);
    fprintf(stderr, "error: ");
    vfprintf(stderr, fmt, args);
    fprintf(stderr, "\n");
    va_end(args);
    exit(2);
}
#include "../dev/dataloader.h"
#include "../dev/safetensors.h"
#undef exit
#undef mmap
#undef munmap
#undef fsync
#undef stderr
#define stderr real_stderr()

// ----------------------------------------------------------------------------
// What targets use

static char folder[256];
static uint64_t fuzz_rng;

// What the child tells its parent, in shared memory, so that it outlives a crash.
static struct Tally { long rounds, accepted, refused, wrong; char what[512]; } *tally;

static uint64_t rnd(uint64_t n) { return n ? loader_rand(&fuzz_rng) % n : 0; }

// A wrong ending of this round that no sanitizer would report.
__attribute__((format(printf, 1, 2)))
static void wrong(const char* fmt, ...) {
    va_list args;
    va_start(args, fmt);
    if (!tally->wrong++) vsnprintf(tally->what, sizeof tally->what, fmt, args);
    va_end(args);
}

// Numbers at which sizes overflow, change sign, or are off by one.
static uint64_t extreme(void) {
    static const uint64_t values[] = { 0, 1, 2, 255, 256, 65535, 65536, 0x7fffffff, 0x80000000, 0xffffffff, 0x100000000,
        0x3fffffff, 0x40000000, 0x7fffffffffffffff, 0x8000000000000000, 0xffffffffffffffff, 1024, 20240520 };
    uint64_t v = values[rnd(sizeof values / sizeof values[0])];
    return rnd(3) ? v : v + rnd(5) - 2;
}

// Damages bytes[0..n) in a few ways and returns the new length, at most `room`. `field` is where numbers are likely to
// stand: the header's length. Length 0 is possible. Sometimes nothing at all happens, *intact says so.
static size_t mutate(unsigned char* bytes, size_t n, size_t room, size_t field, int* intact) {
    int times = (int)rnd(4);
    *intact = times == 0;
    for (; times > 0; times--) {
        size_t at = rnd(n);
        switch (rnd(8)) {
        case 0: // a flipped bit
            if (n) bytes[at] ^= (unsigned char)(1 << rnd(8));
            break;
        case 1: // a random byte
            if (n) bytes[at] = (unsigned char)rnd(256);
            break;
        case 2: // cut short
            n = rnd(4) ? at : n - (n > 0);
            break;
        case 3: { // grown
            size_t more = rnd(rnd(2) ? 3 : room - n + 1);
            if (more > room - n) more = room - n;
            for (size_t i = 0; i < more; i++) bytes[n + i] = (unsigned char)rnd(256);
            n += more;
            break;
        }
        case 4: { // a splice: one part of the file over another
            size_t from = rnd(n), len = rnd(n - (at > from ? at : from) + 1);
            memmove(bytes + at, bytes + from, len);
            break;
        }
        default: { // an extreme number, of 4 or 8 bytes, aligned, in the header
            uint64_t v = extreme();
            size_t size = rnd(2) ? 4 : 8, where = rnd(field / size) * size;
            if (where + size <= n) memcpy(bytes + where, &v, size);
        }
        }
    }
    return n;
}

static void write_input(const char* name, const unsigned char* bytes, size_t n) {
    char path[512];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE* f = fopen(path, "wb");
    if (!f || fwrite(bytes, 1, n, f) != n || fclose(f) != 0) {
        perror(path);
        abort();
    }
}

// Called after an exit of the code under test: it must have been with code 2 and one line that names a file of ours.
static void judge_refusal(int code) {
    static char text[4096];
    long n = ftell(captured);
    rewind(captured);
    size_t got = fread(text, 1, sizeof text - 1, captured);
    text[got] = 0;
    rewind(captured);
    char* newline = strchr(text, '\n');
    if (code != 2) wrong("exit code %d, not 2: %s", code, text);
    else if (n < 1 || n >= (long)sizeof text) wrong("an error message of %ld bytes", n);
    else if (strncmp(text, "error: ", 7) != 0 || !newline || newline != text + n - 1) wrong("not one line: %s", text);
    else if (!strstr(text, folder)) wrong("no file named: %s", text);
    tally->refused++;
}

// ----------------------------------------------------------------------------
// Targets: one round each

// One or two token files, of either version, of a few to a few hundred tokens; B, T, mode and vocabulary vary too.
static void fuzz_loader(void) {
    static DataLoader d; // static: it is freed after the longjmp
    static int may_be_refused, vocab, files;
    memset(&d, 0, sizeof d);
    may_be_refused = 0;
    vocab = 1 + (int)rnd(300);
    files = 1 + (int)rnd(2);
    int B = 1 + (int)rnd(4), T = 1 + (int)rnd(rnd(4) ? 8 : 80), mode = (int)rnd(3);
    for (int i = 0; i < files; i++) {
        static unsigned char bytes[4096];
        int version = 1 + (int)rnd(2), n = 1 + (int)rnd(400), intact;
        int32_t header[256] = { 20240520, version, n, version == 2 ? vocab : (int)rnd(1000), (int)rnd(5000), 0 };
        memcpy(bytes, header, sizeof header);
        for (int j = 0; j < n; j++) {
            uint16_t token = (uint16_t)rnd(vocab);
            memcpy(bytes + sizeof header + 2 * j, &token, 2);
        }
        // a third of the fields that count are among the header's first six
        size_t size = mutate(bytes, sizeof header + 2 * (size_t)n, sizeof bytes, rnd(3) ? 24 : sizeof header, &intact);
        if (!intact || n < B * T + 1) may_be_refused = 1;
        write_input(i ? "tokens_1.bin" : "tokens_0.bin", bytes, size);
    }
    int code = setjmp(on_exit_call);
    if (code) {
        judge_refusal(code);
        if (!may_be_refused) wrong("refused a valid file");
    } else {
        char pattern[300];
        snprintf(pattern, sizeof pattern, "%s/tokens_%c.bin", folder, files == 1 ? '0' : '*');
        loader_open(&d, pattern, B, T, vocab, mode, rnd(100));
        d.position = rnd(2) ? 0 : extreme(); // as from a damaged checkpoint
        for (int k = 0; k < 4; k++) {
            loader_next(&d);
            for (int i = 0; i < B * T; i++) {
                if (d.tokens[i] < 0 || d.tokens[i] >= vocab) wrong("token %d of %d", d.tokens[i], vocab);
                if (d.targets[i] < 0 || d.targets[i] >= vocab) wrong("target %d of %d", d.targets[i], vocab);
                if (i % T && d.tokens[i] != d.targets[i - 1]) wrong("targets are not the next tokens");
            }
        }
        if (!(d.bytes_per_token >= 0 && d.bytes_per_token < 1e15)) wrong("bytes per token %g", d.bytes_per_token);
        tally->accepted++;
    }
    loader_free(&d);
}

// A checkpoint of up to four tensors and some metadata, damaged as bytes and as JSON.
static void fuzz_checkpoint(void) {
    static SafeTensors s;
    static char path[300];
    static int may_be_refused, count;
    static float numbers[64], copy[64];
    static unsigned char bytes[8192];
    memset(&s, 0, sizeof s);
    snprintf(path, sizeof path, "%s/model.safetensors", folder);
    Entry e[4];
    count = (int)rnd(5);
    for (int i = 0; i < 64; i++) numbers[i] = (float)i;
    for (int i = 0; i < count; i++) {
        char name[16];
        snprintf(name, sizeof name, "t%d", i);
        e[i] = entry(rnd(2) ? "adam_m." : "", name, 1 + rnd(8), rnd(9), numbers);
    }
    static const char* texts[] = { "\"a\":\"b\"", "\"a\\\"\\u0041\\\\\":\"\\n\\u00e4\\u20ac\",\"step\":\"12\"", "" };
    if (safetensors_write(path, texts[rnd(3)], e, count) != 0) abort();
    FILE* f = fopen(path, "rb");
    if (!f) abort();
    size_t n = fread(bytes, 1, sizeof bytes, f), header = 0;
    fclose(f);
    memcpy(&header, bytes, 8);
    int intact;
    size_t size = mutate(bytes, n, sizeof bytes, 8, &intact);
    for (int times = (int)rnd(3); times > 0 && size > 8; times--, intact = 0) {
        static const char json[] = "{}[]\",:0123456789-\\/unF326 e";
        size_t at = 8 + rnd(header < size - 8 ? header : size - 8);
        if (rnd(3)) bytes[at] = (unsigned char)json[rnd(sizeof json - 1)];
        else if (rnd(2)) { memmove(bytes + at, bytes + at + 1, size - at - 1); size--; header--; memcpy(bytes, &header, 8); }
        else if (size < sizeof bytes) { memmove(bytes + at + 1, bytes + at, size - at); size++; header++; memcpy(bytes, &header, 8); }
    }
    may_be_refused = !intact;
    write_input("model.safetensors", bytes, size);
    int code = setjmp(on_exit_call);
    if (code) {
        judge_refusal(code);
        if (!may_be_refused) wrong("refused a valid file");
        safetensors_free(&s);
        return;
    }
    safetensors_read(&s, path);
    if (s.count != count && !may_be_refused) wrong("%d tensors, not %d", s.count, count);
    for (int i = 0; i < s.count; i++) {
        const char* data = (const char*)s.entries[i].data;
        if (data < s.bytes || data + s.entries[i].bytes > s.bytes + s.size) wrong("tensor %s lies outside the file", s.entries[i].name);
    }
    for (int i = 0; i < s.pairs; i++) if (!safetensors_metadata(&s, s.metadata[2 * i])) wrong("lost metadata");
    tally->accepted++;
    if (s.count) {      // a model that asks for a shape gets that shape or an error
        const Entry* t = &s.entries[rnd(s.count)];
        size_t rows = 1 + rnd(8), cols = rnd(9);
        may_be_refused = 1;
        safetensors_copy(&s, t->name, copy, rows, cols);
    }
    safetensors_free(&s);
}

static const struct { const char* name; void (*round)(void); } targets[] = {
    { "loader", fuzz_loader },
    { "checkpoint", fuzz_checkpoint },
};

// ----------------------------------------------------------------------------

static void run_rounds(void (*round)(void), double seconds) {
    struct timespec start, now;
    clock_gettime(CLOCK_MONOTONIC, &start);
    double elapsed = 0;
    while (elapsed < seconds && !tally->wrong) {
        alarm(20); // a round takes well under a millisecond: SIGALRM ends one that hangs
        round();
        tally->rounds++;
        clock_gettime(CLOCK_MONOTONIC, &now);
        elapsed = (double)(now.tv_sec - start.tv_sec) + 1e-9 * (double)(now.tv_nsec - start.tv_nsec);
    }
    alarm(0);
}

int main(int argc, char** argv) {
    const int num_targets = (int)(sizeof targets / sizeof targets[0]);
    int which = -1;
    for (int i = 0; i < num_targets && argc > 1; i++) if (strcmp(argv[1], targets[i].name) == 0) which = i;
    double seconds = argc > 2 ? atof(argv[2]) : 10;
    fuzz_rng = argc > 3 ? strtoull(argv[3], NULL, 10) : 1;
    if (which < 0 || argc > 4 || !(seconds > 0)) {
        fprintf(stderr, "usage: fuzz TARGET [SECONDS [SEED]], where TARGET is one of:");
        for (int i = 0; i < num_targets; i++) fprintf(stderr, " %s", targets[i].name);
        fprintf(stderr, "\n");
        return 2;
    }
    const char* tmp = getenv("TMPDIR");
    snprintf(folder, sizeof folder, "%s/fuzz_XXXXXX", tmp && *tmp ? tmp : "/tmp");
    captured = tmpfile();
    tally = (struct Tally*)mmap(NULL, sizeof *tally, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (!mkdtemp(folder) || !captured || tally == MAP_FAILED) {
        perror("fuzz");
        return 2;
    }
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        run_rounds(targets[which].round, seconds);
        return 0; // through exit, so that the leak checker speaks
    }
    int status = -1;
    waitpid(child, &status, 0);
    printf("%s: %ld rounds, %ld accepted, %ld refused\n", argv[1], tally->rounds, tally->accepted, tally->refused);
    int passed = 0, failed = 0;
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
        failed++;
        printf("  FAIL  round %ld: %s %d\n", tally->rounds,
               WIFSIGNALED(status) ? WTERMSIG(status) == SIGALRM ? "hangs, signal" : "signal" : "sanitizer, exit code",
               WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
    } else if (tally->wrong) {
        failed++;
        printf("  FAIL  round %ld: %s\n", tally->rounds - 1, tally->what);
    } else if (tally->accepted == 0 || tally->refused == 0) {
        failed++;
        printf("  FAIL  a fuzzer whose files are all good, or all bad, tests nothing\n");
    } else {
        passed++;
    }
    char command[300];
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    if (failed) printf("  its files are kept in %s\n", folder);
    else if (system(command) != 0) printf("  could not remove %s\n", folder);
    printf("%d passed, %d failed\n", passed, failed);
    return failed > 0;
}
