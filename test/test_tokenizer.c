// test_tokenizer.c: dev/tokenizer.h and the text handling of dev/prepare.c, against expectations by hand, against
// GPT-2's regular expression (as Python's `regex` module applies it) and against naive versions of the algorithms.
#define main prepare_main
#include "../dev/prepare.c"
#undef main
#include "check.h"
#include <sys/wait.h>

// Random numbers, the same on every machine (splitmix64).
static uint64_t rng = 1;
static uint32_t random_below(uint32_t n) {
    uint64_t z = rng += 0x9E3779B97F4A7C15ull;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ z >> 27) * 0x94D049BB133111EBull;
    return (uint32_t)((z ^ z >> 31) >> 32) % n;
}

// ----------------------------------------------------------------------------
// Where an error is expected: the call runs in a child, which must exit with code 2 and one line that contains `words`.

static int child_result(void (*call)(const void*), const void* arg, char* said, size_t size) {
    int fds[2], status = 0;
    if (pipe(fds) != 0) return -1;
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        dup2(fds[1], 2);
        close(fds[0]);
        call(arg);
        _exit(0);
    }
    close(fds[1]);
    size_t n = 0;
    ssize_t got;
    while ((got = read(fds[0], said + n, size - 1 - n)) > 0) n += (size_t)got;
    said[n] = 0;
    close(fds[0]);
    waitpid(pid, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static void check_dies(const char* what, void (*call)(const void*), const void* arg, const char* words) {
    char said[4096];
    int rc = child_result(call, arg, said, sizeof(said));
    char* line = strchr(said, '\n');
    int one_line = line && line[1] == 0;
    check(rc == 2 && one_line && strstr(said, words), "%s: exit code %d, says: %.*s", what, rc,
          (int)(line ? line - said : (long)strlen(said)), said);
}

static char folder[] = "/tmp/test_tokenizer.XXXXXX";
static const char* in_folder(const char* name) {
    static char path[2][256];
    static int turn = 0;
    turn = !turn;
    snprintf(path[turn], sizeof(path[turn]), "%s/%s", folder, name);
    return path[turn];
}

static void write_file(const char* path, const void* data, size_t n) {
    FILE* f = fopen(path, "wb");
    if (!f || fwrite(data, 1, n, f) != n || fclose(f) != 0) { perror(path); exit(1); }
}

static char* read_file(const char* path, size_t* n) {
    static char buffer[1 << 20];
    FILE* f = fopen(path, "rb");
    if (!f) { perror(path); exit(1); }
    *n = fread(buffer, 1, sizeof(buffer), f);
    fclose(f);
    return buffer;
}

// ----------------------------------------------------------------------------
// Pieces.

// Each string cut where GPT-2's expression cuts it, the cuts shown as `.
static const char* const splits[] = {
    "Hello` world", "Hello`,` world`!` ` How`'s` it` going`?",
    "I`'m` you`'re` he`'ll` they`'ve` she`'d` don`'t` it`'s", "IT`'`S` '`S` '`Re` '`VE` ''`s` ''` '`t",
    "'s`'ll`'re`'", "a` '`s` b", "x`'s`tore", "'", "'` s", "'`r` '`l` '`v", "end`'", "  ` leading", "trailing`   ",
    " ", "  ", "   ", "\n", "\n\n", " \n` a", "a` \n", "a`\n`\n`b", "a` ` b", "a`  ` b", "a`\t`b", "a` `\t`b",
    "a`\t` b", "\t`\t`a", "line`\r\n ` next", "tab`\t\t` x", "2024` years`,` 3`.`14159", "abc`123`def", "1`st` 22`nd",
    "x`86`_`64", "foo`_`bar", "__`init`__(`self`):", "!!!` ???", " !!", " !` a", "http`://`a`.`b`/`c`?`d`=`e`&`f`=`1",
    "<`unk`>` @-@` <|`endoftext`|>", "na\303\257ve` caf\303\251", "Stra\303\237e` \303\204pfel",
    "\344\275\240\345\245\275`\357\274\214`\344\270\226\347\225\214",
    "\343\201\223\343\202\223\343\201\253\343\201\241\343\201\257` \344\270\226\347\225\214",
    "\320\227\320\264\321\200\320\260\320\262\321\201\321\202\320\262\321\203\320\271`,` \320\274\320\270\321\200",
    "\331\241\331\242\331\243` \340\245\247\340\245\250", "x`\302\262` +` \302\275` \342\205\247` \342\221\240",
    "e`\314\201`a", "a`\302\240`b", "a`\302\240` b", "a`\343\200\200`\343\200\200`b", "a` `\343\200\200`b",
    " `\342\200\203`a", "\342\200\250`\342\200\251`x", "\342\200\213`zero` \342\200\213", "\357\273\277`bom",
    "it`\342\200\231`s` \342\200\230`q`\342\200\231", "\360\237\230\200\360\237\230\200` hi`\360\237\230\200",
    "a`\302\205`b", "a`\034`b` \037", "\177", "\360\235\222\234`\360\235\237\230",
    "\340\270\252\340\270\247`\340\270\261`\340\270\252\340\270\224`\340\270\265", "\360\236\244\200a",
    " \303\251\303\251` \303\251", "\302\252\302\265\302\272`\303\227\303\267",
};

// Cuts a text and writes ` between the pieces; returns the number of bytes written.
static size_t show_pieces(const char* text, size_t n, char* out) {
    size_t k = 0;
    for (const char *p = text, *q; p < text + n; p = q) {
        q = piece_end(p, text + n);
        if (q <= p || q > text + n) return 0;
        if (p > text) out[k++] = '`';
        memcpy(out + k, p, (size_t)(q - p));
        k += (size_t)(q - p);
    }
    return k;
}

static void check_split(const char* expected, size_t n) {
    char text[256], got[512];
    size_t k = 0;
    for (size_t i = 0; i < n; i++) if (expected[i] != '`') text[k++] = expected[i];
    char* exact = (char*)malloc(k);                     // so that a sanitizer sees reads past the end
    memcpy(exact, text, k);
    size_t m = show_pieces(exact, k, got);
    free(exact);
    check(m == n && memcmp(got, expected, n) == 0, "pieces of \"%s\"", expected);
}

static void test_pieces(void) {
    for (size_t i = 0; i < sizeof(splits) / sizeof(splits[0]); i++) check_split(splits[i], strlen(splits[i]));
    // Bytes that are no UTF-8 are signs, one by one: stray continuation, truncated, overlong, surrogate, above 0x10FFFF.
    const char* stray[] = { "a`\x80`b", "a` \x80\xFF`b", "\xC3", "a`\xC3`b", "\xC3\xA9`\xC3` \xC3\xA9", "\xE4\xBD",
                            "\xE4\xBD`a", "\xE4\xBD\xA0`\xE4\xBD", "\xC0\xAF!", "\xC1\x81`A", "\xE0\x82\x80",
                            "\xED\xA0\x80", "\xF4\x90\x80\x80", "\xF0\x80\x81\x81", "\xF0\x9D\x92`x",
                            "\xF8\x88\x80\x80\x80", "\xE0\x82\xA0`a", "\xFE\xFF!", "\x80`\xE4\xBD\xA0`\x80", " ` \x80",
                            "\n`\x80`\n" };
    for (size_t i = 0; i < sizeof(stray) / sizeof(stray[0]); i++) check_split(stray[i], strlen(stray[i]));
    check_split("\0\0` \0`a", 7);
    static const uint32_t chars[4][14] = {
        { 0, 0x1C, 0x1F, 0x40, 0x5B, 0xD7, 0x301, 0x378, 0x180E, 0x200B, 0x20AC, 0xFEFF, 0x1F600, 0x10FFFF },
        { 0x41, 0x7A, 0xAA, 0xB5, 0xE9, 0x2B0, 0x4E00, 0x9FFF, 0xAC00, 0xD7A3, 0x1E900, 0x20000, 0x323AF, 0x3B1 },
        { 0x30, 0x39, 0xB2, 0xB9, 0xBC, 0xBE, 0x660, 0x966, 0x2167, 0x2460, 0x3007, 0x1D7FF, 0x1FBF0, 0x1FBF9 },
        { 0x20, 0x9, 0xA, 0xD, 0x85, 0xA0, 0x1680, 0x2000, 0x200A, 0x2028, 0x2029, 0x202F, 0x205F, 0x3000 } };
    int wrong = 0;
    for (int kind = CHAR_OTHER; kind <= CHAR_SPACE; kind++)
        for (int i = 0; i < 14; i++) wrong += unicode_class(chars[kind][i]) != kind;
    check(wrong == 0, "classes of 56 characters: %d wrong", wrong);
    // The short way for ASCII agrees with the table.
    for (uint32_t c = wrong = 0; c < 128; c++) {
        size_t len;
        char s = (char)c;
        wrong += char_class(&s, &s + 1, &len) != unicode_class(c);
    }
    check(wrong == 0, "classes of ASCII: %d differ from the table", wrong);
    size_t count[4] = { 0, 0, 0, 0 };
    for (uint32_t c = 0; c <= 0x10FFFF; c++) count[unicode_class(c)]++;
    check(count[CHAR_LETTER] == 141028 && count[CHAR_NUMBER] == 1911 && count[CHAR_SPACE] == 25,
          "letters, numbers, white spaces in Unicode 16: %zu, %zu, %zu", count[1], count[2], count[3]);
}

// ----------------------------------------------------------------------------
// Naive versions.

// Encodes one piece by the definition: find the smallest merge anywhere, apply it everywhere from the left, and again.
static size_t naive_piece(const Tokenizer* t, const char* p, size_t n, int* id) {
    for (size_t i = 0; i < n; i++) id[i] = t->byte_id[(unsigned char)p[i]];
    for (;;) {
        int best = -1;
        for (int r = 0; r < t->n_merges && best < 0; r++)
            for (size_t i = 0; i + 1 < n && best < 0; i++)
                if (id[i] == t->left[r] && id[i + 1] == t->right[r]) best = r;
        if (best < 0) return n;
        size_t k = 0;
        for (size_t i = 0; i < n; i++) {
            if (i + 1 < n && id[i] == t->left[best] && id[i + 1] == t->right[best]) { id[k++] = 256 + best; i++; }
            else id[k++] = id[i];
        }
        n = k;
    }
}

static size_t naive_encode(const Tokenizer* t, const char* text, size_t n, int* out) {
    size_t k = 0;
    for (const char *p = text, *q; p < text + n; p = q) {
        q = piece_end(p, text + n);
        k += naive_piece(t, p, (size_t)(q - p), out + k);
    }
    return k;
}

// Learns merges by the definition: count every pair of neighbours in the whole text (pieces are kept apart by -1), take
// the most frequent, of equal ones the smallest, apply it; until `want` merges or no pair comes twice. Returns how many.
static int naive_train(const Tokenizer* bytes, const char* text, size_t n, int want, int* left, int* right) {
    int* id = (int*)malloc((2 * n + 1) * sizeof(int));
    int* seen = (int*)malloc(600 * 600 * sizeof(int));
    size_t m = 0;
    for (const char *p = text, *q; p < text + n; p = q) {
        q = piece_end(p, text + n);
        for (; p < q; p++) id[m++] = bytes->byte_id[(unsigned char)*p];
        id[m++] = -1;
    }
    int made = 0;
    for (; made < want; made++) {
        memset(seen, 0, 600 * 600 * sizeof(int));
        for (size_t i = 0; i + 1 < m; i++) if (id[i] >= 0 && id[i + 1] >= 0) seen[600 * id[i] + id[i + 1]]++;
        int best = 0;
        for (int i = 0; i < 600 * 600; i++) if (seen[i] > seen[best]) best = i;
        if (seen[best] < 2) break;
        left[made] = best / 600;
        right[made] = best % 600;
        size_t k = 0;
        for (size_t i = 0; i < m; i++) {
            if (i + 1 < m && id[i] == left[made] && id[i + 1] == right[made]) { id[k++] = 256 + made; i++; }
            else id[k++] = id[i];
        }
        m = k;
    }
    free(id);
    free(seen);
    return made;
}

// Random text of kind 0: few letters and spaces; 1: one letter, long runs; 2: random bytes; 3: words, signs, UTF-8.
static void random_text(char* out, size_t n, int kind) {
    static const char* const bits[] = {
        " the", " a", "ing", "'s", "'ll", " ", "  ", "\n", "\t", ".", ", ", "42", "x", "Qu",
        "\xC3\xA9", "\xE4\xBD\xA0", "\xF0\x9F\x98\x80", "\xE3\x80\x80", "\xFF", "\xCC\x81" };
    for (size_t i = 0; i < n; i++) {
        if (kind == 0) out[i] = "aab bcd "[random_below(8)];
        if (kind == 1) out[i] = random_below(50) ? 'a' : ' ';
        if (kind == 2) out[i] = (char)random_below(256);
        if (kind == 3) {
            const char* s = bits[random_below(sizeof(bits) / sizeof(bits[0]))];
            for (; *s && i < n; s++) out[i++] = *s;
            i--;
        }
    }
}

static int round_trips(const Tokenizer* t, const char* text, size_t n) {
    int* ids = NULL;
    size_t count = tokenizer_encode(t, text, n, &ids), at = 0, len;
    int ok = ids != NULL;
    for (size_t i = 0; i < count && ok; i++) {
        if (ids[i] < 0 || ids[i] >= t->vocab || ids[i] == t->eot) { ok = 0; break; }
        const char* s = tokenizer_decode(t, ids[i], &len);
        ok = at + len <= n && memcmp(s, text + at, len) == 0;
        at += len;
    }
    free(ids);
    return ok && at == n;
}

static int same_tokenizer(const Tokenizer* a, const Tokenizer* b) {
    return a->vocab == b->vocab && a->n_merges == b->n_merges && a->eot == b->eot &&
           memcmp(a->byte_id, b->byte_id, sizeof(a->byte_id)) == 0 &&
           memcmp(a->left, b->left, (size_t)a->n_merges * sizeof(int)) == 0 &&
           memcmp(a->right, b->right, (size_t)a->n_merges * sizeof(int)) == 0 &&
           memcmp(a->start, b->start, ((size_t)a->vocab + 1) * sizeof(size_t)) == 0 &&
           memcmp(a->bytes, b->bytes, a->start[a->vocab]) == 0;
}

// ----------------------------------------------------------------------------
// The tokenizers.

static void check_ids(const Tokenizer* t, const char* text, const int* expected, size_t n) {
    int* ids;
    size_t count = tokenizer_encode(t, text, strlen(text), &ids);
    check(count == n && memcmp(ids, expected, n * sizeof(int)) == 0, "\"%s\" is %zu tokens, as expected", text, count);
    free(ids);
}
#define CHECK_IDS(t, text, ...) do { int e[] = { __VA_ARGS__ }; check_ids(t, text, e, sizeof(e) / sizeof(int)); } while (0)

static void test_small_texts(const Tokenizer* t, const char* name) {
    int* ids = NULL;
    check(tokenizer_encode(t, "", 0, &ids) == 0 && ids != NULL, "%s: empty text is no tokens", name);
    free(ids);
    int ok = 1;
    for (int b = 0; b < 256; b++) { char c = (char)b; ok = ok && round_trips(t, &c, 1); }
    check(ok, "%s: each single byte comes back", name);
    char* text = (char*)malloc(100000);
    for (int b = 0, all = 1; b < 256; b += 15) {
        memset(text, b, 1000);
        for (size_t n = 1; n < 1000; n = n * 3 / 2 + 1) all = all && round_trips(t, text, n);
        if (b == 255) check(all, "%s: one repeated byte comes back, at all lengths", name);
    }
    for (int kind = 0; kind < 4; kind++) {
        ok = 1;
        for (int i = 0; i < 30; i++) {
            size_t n = 1 + random_below(i < 25 ? 300 : 100000);
            random_text(text, n, kind);
            ok = ok && round_trips(t, text, n);
        }
        check(ok, "%s: random text of kind %d comes back", name, kind);
    }
    free(text);
}

static void load(const void* path) {
    Tokenizer t;
    tokenizer_load(&t, (const char*)path);
}

static void test_gpt2_format(void) {
    // Ids of single bytes are facts of GPT-2's encoder.json.
    const char* merges = "#version: 0.2\n\xC4\xA0 t\nh e\n\xC4\xA0t he\ni n\nin g\nl l\n\xC3\x83 \xC2\xA9\n"
                         "\xC4\xA0 \xC4\xA0\n# #\n";
    Tokenizer t, u;
    write_file(in_folder("small.bpe"), merges, strlen(merges));
    tokenizer_load(&t, in_folder("small.bpe"));
    check(t.vocab == 266 && t.n_merges == 9 && tokenizer_eot(&t) == 265, "vocabulary 256 + 9 + 1, <|endoftext|> last");
    check(t.byte_id['!'] == 0 && t.byte_id['A'] == 32 && t.byte_id['a'] == 64 && t.byte_id['~'] == 93 &&
          t.byte_id[0xA1] == 94 && t.byte_id[0xFF] == 187 && t.byte_id[0] == 188 && t.byte_id['\n'] == 198 &&
          t.byte_id[' '] == 220 && t.byte_id[0x7F] == 221 && t.byte_id[0xA0] == 254 && t.byte_id[0xAD] == 255,
          "bytes have GPT-2's ids");
    CHECK_IDS(&t, " the", 258);
    CHECK_IDS(&t, "the", 83, 257);
    CHECK_IDS(&t, " then thing", 258, 77, 256, 71, 260);        // not th + ing: merges go by number, not from the left
    CHECK_IDS(&t, "he'll", 257, 6, 261);
    CHECK_IDS(&t, "caf\xC3\xA9", 66, 64, 69, 262);
    CHECK_IDS(&t, "    the", 263, 220, 258);                    // the last space belongs to the word
    CHECK_IDS(&t, "###", 264, 2);
    CHECK_IDS(&t, "<|endoftext|>", 27, 91, 68, 77, 67, 78, 69, 83, 68, 87, 83, 91, 29);
    size_t len;
    const char* s = tokenizer_decode(&t, 265, &len);
    check(len == 13 && memcmp(s, END_OF_TEXT, 13) == 0, "<|endoftext|> is decoded as that");
    s = tokenizer_decode(&t, 258, &len);
    check(len == 4 && memcmp(s, " the", 4) == 0, "token 258 is \" the\"");
    test_small_texts(&t, "small vocab.bpe");
    tokenizer_save(&t, in_folder("saved.tok"));
    tokenizer_load(&u, in_folder("saved.tok"));
    check(same_tokenizer(&t, &u), "saved and loaded again: the same");
    tokenizer_free(&t);
    tokenizer_free(&u);
    if (access("data/gpt2/vocab.bpe", R_OK) == 0) {             // only where the real file has been downloaded
        tokenizer_load(&t, "data/gpt2/vocab.bpe");
        check(t.vocab == 50257 && tokenizer_eot(&t) == 50256, "GPT-2: 50257 tokens");
        CHECK_IDS(&t, "Hello, world!", 15496, 11, 995, 0);
        CHECK_IDS(&t, " antidisestablishmentarianism", 1885, 29207, 44390, 3699, 1042);
        tokenizer_free(&t);
    }
}

static void test_bad_files(void) {
    struct { const char *what, *content, *words; } bad[] = {
        { "empty file", "", "is empty" },
        { "JSON instead", "{\"!\": 0, \"\\\"\": 1, \"#\": 2}\n", "is not a tokenizer" },
        { "a shorter file", "#vers\n", "is not a tokenizer" },
        { "almost \"bytes\"", "bytes", "is not a tokenizer" },
        { "cut in a line", "#version: 0.2\nh e\nt h", "middle of a line" },
        { "Windows line ends", "#version: 0.2\r\nh e\r\n", "line 2" },
        { "one side only", "#version: 0.2\nhe\n", "line 2" },
        { "empty line", "#version: 0.2\nh e\n\n", "line 3" },
        { "empty side", "#version: 0.2\n e\n", "line 2" },
        { "three sides", "#version: 0.2\nh e e\n", "line 2" },
        { "unknown token", "#version: 0.2\nh e\nth e\n", "line 3" },
        { "unknown second token", "#version: 0.2\nh e\nt her\n", "line 3" },
        { "twice", "#version: 0.2\nh e\nl o\nh e\n", "line 4" },
        { "another way to the same", "#version: 0.2\na b\nb c\nab c\na bc\n", "line 5" },
        { "fewer than announced", "#version: 0.2 merges: 3\nh e\nl o\n", "cut off" },
        { "more than announced", "#version: 0.2 merges: 1\nh e\nl o\n", "2 merges" },
        { "a character beyond the alphabet", "#version: 0.2\nh \xE2\x82\xAC\n", "line 2" },
        { "a truncated character", "#version: 0.2\nh \xC4\n", "line 2" } };
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        write_file(in_folder("bad.bpe"), bad[i].content, strlen(bad[i].content));
        check_dies(bad[i].what, load, in_folder("bad.bpe"), bad[i].words);
    }
    check_dies("missing file", load, in_folder("none"), "cannot open");
    check_dies("a folder", load, folder, "cannot read");
    // 65535 tokens at most: an alphabet of pairs and then pairs of pairs.
    char *big = (char*)malloc(2 << 20), *p = big;
    p += sprintf(p, "#version: 0.2\n");
    int n = 0;
    for (int a = 33; a < 127; a++) for (int b = 33; b < 127; b++, n++) p += sprintf(p, "%c %c\n", a, b);
    for (int a = 33; a < 127; a++) for (int b = 33; b < 127 && n < 65279; b++)
        for (int c = 33; c < 127 && n < 65279; c++, n++) p += sprintf(p, "%c%c %c\n", a, b, c);
    write_file(in_folder("big.bpe"), big, (size_t)(p - big));
    check_dies("65536 tokens", load, in_folder("big.bpe"), "more than 65535");
    p -= strlen("xx x\n");
    write_file(in_folder("big.bpe"), big, (size_t)(p - big));
    Tokenizer t;
    tokenizer_load(&t, in_folder("big.bpe"));
    check(t.vocab == 65535, "65535 tokens are allowed");
    tokenizer_free(&t);
    free(big);
}

static void train_vocab(const void* vocab) {
    Tokenizer t;
    tokenizer_train(&t, "aaaa", 4, *(const int*)vocab);
}

static void decode_id(const void* id) {
    Tokenizer t;
    size_t len;
    tokenizer_bytes(&t);
    tokenizer_decode(&t, *(const int*)id, &len);
}

static void save_to(const void* path) {
    Tokenizer t;
    tokenizer_bytes(&t);
    tokenizer_save(&t, (const char*)path);
}

static void test_training(void) {
    // By hand: aa comes most often (aaa holds it twice), then ab (as often as aa a, but smaller), then aa ab.
    Tokenizer t, u;
    tokenizer_train(&t, "aaabdaaabac", 11, 257 + 3);
    int a = t.byte_id['a'], b = t.byte_id['b'], c = t.byte_id['c'], d = t.byte_id['d'];
    check(t.n_merges == 3 && t.left[0] == a && t.right[0] == a && t.left[1] == a && t.right[1] == b && t.left[2] == 256 &&
          t.right[2] == 257, "aaabdaaabac: merges aa, ab, aaab");
    CHECK_IDS(&t, "aaabdaaabac", 258, d, 258, a, c);
    tokenizer_free(&t);

    char* text = (char*)malloc(20000);
    int left[300], right[300], *ids, *naive = (int*)malloc(20000 * sizeof(int));
    for (int kind = 0; kind < 4; kind++) {
        int same = 1, encodes = 1, total = 0;
        for (int i = 0; i < 6; i++) {
            size_t n = 200u << i;
            random_text(text, n, kind);
            tokenizer_train(&t, text, n, 257 + 20 * (i + 1));
            tokenizer_train(&u, text, n, 257 + 20 * (i + 1));
            int made = naive_train(&t, text, n, 20 * (i + 1), left, right);
            same = same && made == t.n_merges && memcmp(left, t.left, (size_t)made * sizeof(int)) == 0 &&
                   memcmp(right, t.right, (size_t)made * sizeof(int)) == 0 && same_tokenizer(&t, &u) &&
                   t.vocab == 257 + made && tokenizer_eot(&t) == 256 + made;
            total += made;
            random_text(text, n, i % 2 ? kind : 3);
            size_t count = tokenizer_encode(&t, text, n, &ids);
            encodes = encodes && count == naive_encode(&t, text, n, naive) && !memcmp(ids, naive, count * sizeof(int));
            free(ids);
            if (i == 5) {
                char name[64];
                snprintf(name, sizeof(name), "trained on kind %d", kind);
                test_small_texts(&t, name);
                tokenizer_save(&t, in_folder("trained.tok"));
                tokenizer_free(&u);
                tokenizer_load(&u, in_folder("trained.tok"));
                check(same_tokenizer(&t, &u), "%s: saved and loaded again: the same", name);
            }
            tokenizer_free(&t);
            tokenizer_free(&u);
        }
        check(same && total > 50, "training on kind %d: the naive trainer's merges (%d), and again the same", kind, total);
        check(encodes, "encoding with those: the naive encoder's tokens");
    }

    // Texts that don't have so many merges in them.
    struct { const char *text; size_t n; int vocab; } small[] = { { "", 0, 257 }, { "a", 1, 257 }, { "ab", 2, 257 },
        { "aa aa", 5, 258 }, { "aaaaaaaa", 8, 259 }, { "a a a a", 7, 258 }, { "abc abd", 7, 258 },
        { "\xFF\xFF\xFF", 3, 258 } };
    for (size_t i = 0; i < sizeof(small) / sizeof(small[0]); i++) {
        tokenizer_train(&t, small[i].text, small[i].n, 1000);
        check(t.vocab == small[i].vocab && tokenizer_eot(&t) == t.vocab - 1 && round_trips(&t, small[i].text, small[i].n),
              "trained on %zu bytes \"%s\" for 1000 tokens: %d", small[i].n, small[i].text, t.vocab);
        tokenizer_free(&t);
    }
    tokenizer_train(&t, "aaaa aaaa", 9, 257);
    check(t.vocab == 257 && t.n_merges == 0 && tokenizer_eot(&t) == 256, "257 tokens: no merges");
    check(round_trips(&t, "aaaa", 4), "and it encodes");
    tokenizer_free(&t);
    for (int v = 256; v >= -1; v -= 257) check_dies("vocabulary too small", train_vocab, &v, "257");
    int v = 65536;
    check_dies("vocabulary too large", train_vocab, &v, "65535");
    free(text);
    free(naive);
}

static void test_damaged_files(void) {
    // Cut anywhere, a saved file is refused. With any byte changed it is refused or is a tokenizer, but nothing crashes.
    char text[4000], said[4096];
    Tokenizer t;
    random_text(text, sizeof(text), 3);
    tokenizer_train(&t, text, sizeof(text), 257 + 40);
    tokenizer_save(&t, in_folder("whole.tok"));
    tokenizer_free(&t);
    size_t n;
    char *whole = read_file(in_folder("whole.tok"), &n), damaged[4096];
    int refused = 0, clean = 0, loaded = 0;
    for (size_t k = 0; k < n; k++) {
        write_file(in_folder("cut.tok"), whole, k);
        refused += child_result(load, in_folder("cut.tok"), said, sizeof(said)) == 2;
    }
    check(refused == (int)n, "cut after each of its %zu bytes: refused %d times", n, refused);
    for (int i = 0; i < 400; i++) {
        memcpy(damaged, whole, n);
        for (uint32_t k = 1 + random_below(3); k > 0; k--) damaged[random_below((uint32_t)n)] = (char)random_below(256);
        write_file(in_folder("damaged.tok"), damaged, n);
        int rc = child_result(load, in_folder("damaged.tok"), said, sizeof(said));
        clean += rc == 0 || (rc == 2 && strncmp(said, "error: ", 7) == 0);
        loaded += rc == 0;
    }
    check(clean == 400, "400 damaged files: %d refused in words, %d still valid, %d otherwise", clean - loaded, loaded,
          400 - clean);
}

static void test_long_pieces(void) {
    size_t n = 1 << 20;
    char* text = (char*)malloc(n);
    Tokenizer t;
    for (int kind = 0; kind < 4; kind++) {
        for (size_t i = 0; i < n; i++)
            text[i] = kind == 0 ? 'a' : kind == 1 ? (char)('a' + random_below(26)) : kind == 2 ? ' ' : "ab"[i % 2];
        double start = seconds();
        tokenizer_train(&t, text, n, 1000);
        int ok = round_trips(&t, text, n);
        double took = seconds() - start;
        check(ok && took < 20, "one piece of 1 MB, kind %d: trained and encoded in %.1f s", kind, took);
        tokenizer_free(&t);
    }
    free(text);
}

static void test_bytes(void) {
    Tokenizer t;
    tokenizer_bytes(&t);
    check(t.vocab == 256 && tokenizer_eot(&t) == -1, "bytes: 256 tokens, no <|endoftext|>");
    CHECK_IDS(&t, "Az \xFF", 'A', 'z', ' ', 255);
    test_small_texts(&t, "bytes");
    tokenizer_save(&t, in_folder("bytes.tok"));
    Tokenizer u, v;
    tokenizer_load(&u, in_folder("bytes.tok"));
    tokenizer_load(&v, "bytes");
    check(same_tokenizer(&t, &u) && same_tokenizer(&t, &v), "bytes: by name and from a file the same");
    tokenizer_free(&t);
    tokenizer_free(&u);
    tokenizer_free(&v);
    int ids[] = { -1, 256, 1 << 30 };
    for (int i = 0; i < 3; i++) check_dies("a token that isn't", decode_id, &ids[i], "the tokenizer has 256 tokens");
}

static void test_saving(void) {
    check_dies("save into a folder that isn't there", save_to, in_folder("no/such/file"), "cannot write");
    check_dies("save over a folder", save_to, folder, "cannot write");
    if (access("/dev/full", W_OK) == 0 && symlink("/dev/full", in_folder("full")) == 0)
        check_dies("save to a full disk", save_to, in_folder("full"), "No space");
    write_file(in_folder("kept.tok"), "old\n", 4);
    mkdir(in_folder("kept.tok.tmp"), 0777);             // the temporary file can't be made: the old one stays
    check_dies("save where the temporary file can't be", save_to, in_folder("kept.tok"), "cannot write");
    size_t n;
    check(memcmp(read_file(in_folder("kept.tok"), &n), "old\n", 4) == 0 && n == 4, "and the old file is whole");
}

// prepare encodes a text in chunks: the tokens must be those of the whole.
static void test_chunks(void) {
    static char text[60000];
    int *whole, *part, ok = 1, cuts = 0;
    Tokenizer t;
    random_text(text, sizeof(text), 3);
    tokenizer_train(&t, text, sizeof(text), 400);
    for (int kind = 0; kind < 4; kind++)
        for (chunk_bytes = 2; chunk_bytes < 5000; chunk_bytes = chunk_bytes * 3 + 1) {
            random_text(text, sizeof(text), kind);
            size_t n = tokenizer_encode(&t, text, sizeof(text), &whole), at = 0, size;
            for (size_t i = 0; i < sizeof(text); i += size, cuts++) {
                size = chunk_size(text + i, sizeof(text) - i);
                size_t m = tokenizer_encode(&t, text + i, size, &part);
                ok = ok && size > 0 && at + m <= n && memcmp(part, whole + at, m * sizeof(int)) == 0;
                at += m;
                free(part);
            }
            ok = ok && at == n;
            free(whole);
        }
    check(ok && cuts > 1000, "in chunks (%d of them) the same tokens", cuts);
    tokenizer_free(&t);
}

// Splits go neither through a character nor through <|endoftext|>, and lose nothing.
static void test_split(void) {
    const char* text = "\xF0\x9F\x98\x80\xE4\xBD\xA0<|endoftext|>ab<|endoftext|>cd\xC3\xA9";
    size_t n = strlen(text);
    int whole = 1, characters = 1, documents = 1;
    for (size_t cut = 1; cut < n - 1; cut++)
        for (int docs = 0; docs < 2; docs++) {
            TextList all = { NULL, 0, 0 }, a = { NULL, 0, 0 }, b = { NULL, 0, 0 };
            text_list_add(&all, text, n / 3);           // as two texts that follow one another
            text_list_add(&all, text + n / 3, n - n / 3);
            text_list_split(&all, ((double)cut + 0.5) / (double)n, docs && cut < 33, &a, &b);
            size_t first = text_list_bytes(&a);
            whole = whole && first + text_list_bytes(&b) == n && first >= cut && a.texts[0].data == text &&
                    b.texts[b.n - 1].data + b.texts[b.n - 1].n == text + n;
            if (first != n / 3) characters = characters && (text[first] & 0xC0) != 0x80;
            free(all.texts); free(a.texts); free(b.texts);
            if (!docs) continue;
            TextList one = { NULL, 0, 0 }, c = { NULL, 0, 0 }, d = { NULL, 0, 0 };
            text_list_add(&one, text, n);
            text_list_split(&one, ((double)cut + 0.5) / (double)n, 1, &c, &d);
            first = text_list_bytes(&c);
            if (cut < 33) documents = documents && (first == 20 || first == 35);
            free(one.texts); free(c.texts); free(d.texts);
        }
    check(whole, "split: the two parts are the whole");
    check(characters, "split: no character is cut");
    check(documents, "split: documents stay whole");
}

int main(void) {
    if (!mkdtemp(folder)) { perror(folder); return 1; }
    test_pieces();
    test_bytes();
    test_gpt2_format();
    test_bad_files();
    test_training();
    test_damaged_files();
    test_long_pieces();
    test_saving();
    test_chunks();
    test_split();
    char command[64];
    snprintf(command, sizeof(command), "rm -r %s", folder);
    if (system(command) != 0) fprintf(stderr, "%s is left\n", folder);
    return check_report();
}
