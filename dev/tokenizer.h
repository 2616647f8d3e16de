// tokenizer.h: text to token ids and back, the way GPT-2 does it: byte-pair encoding (BPE) over UTF-8 bytes.
//
// A BPE tokenizer is a list of merges. Every byte is a token to begin with; merge number r says "a token A
// followed by a token B becomes one token", and it makes token 256 + r. To encode, apply the merge of the
// smallest number that applies anywhere, and again, until none does. To learn the list from a text (training),
// make a merge of the pair of neighbours seen most often, apply it, count again, and so on.
//
//     "low lower"  pieces: "low" " lower"   merges: l o -> lo,  lo w -> low,  e r -> er
//                  bytes:  l o w            _ l o w e r
//                  tokens: low              _ low er            (_ is the space)
//
// Merges never cross the borders of pieces: GPT-2 first cuts the text by the regular expression
//     's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
// (a word keeps the space before it, and so does a number or a run of other signs), so that "dog", "dog." and "dog!"
// share a token. piece_end() below is that expression written out; \p{L}, \p{N}, \s are those of Unicode 16.
//
// Any bytes can be encoded, and decoding gives the same bytes back. A byte that is not part of valid UTF-8 counts
// as a sign of its own (as "?" does). The text "<|endoftext|>" is text here, with no special meaning: encoding never
// gives tokenizer_eot(); who wants documents separated puts that id between them.
//
// Files: there is one format, GPT-2's own vocab.bpe (elsewhere also called merges.txt). Line 1 is a comment that
// starts with "#version"; each further line is one merge, "A B". Bytes that don't print are written as other
// characters (the space as Ġ), see byte_alphabet(). What tokenizer_save writes adds "merges: N" to line 1,
// so that a cut-off file is noticed. A file whose only line is "bytes" is the tokenizer without merges.
//
// Measured: the ids are those of OpenAI's tiktoken on 28 MB of text (books, Wikipedia with its markup, JSON), on every
// character of Unicode and on 3 million random ones. One core encodes some 100 MB/s of text (its words repeat) and
// learns 4096 tokens from the 10.8 MB of WikiText-2 in 0.1 s.
//
//     tokenizer_bytes / _load / _train      set up a tokenizer: 256 tokens; from a file; learned from a text
//     tokenizer_encode / _decode / _eot     use it
//     tokenizer_save / _free
//
// Before this file is included there must be a function that prints its printf-like message and exits with code 2:
//     static void die(const char* fmt, ...);
#ifndef TOKENIZER_H
#define TOKENIZER_H
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { TOKENIZER_MAX_VOCAB = 65535 };                   // token files hold uint16
static const char END_OF_TEXT[] = "<|endoftext|>";

// ----------------------------------------------------------------------------
// What the algorithms below need: a map from a pair of tokens to a number, a map from a string to two, and a heap.

// malloc (old = NULL) or realloc of an array, which dies when there is no memory.
static void* tok_alloc(void* old, size_t count, size_t size) {
    if (count > SIZE_MAX / 2 / size) die("out of memory: %zu items of %zu bytes asked for", count, size);
    void* p = realloc(old, count * size + 1);           // + 1: an empty array is not NULL
    if (!p) die("out of memory: could not get %zu bytes", count * size);
    return p;
}

// Room for one more in an array of n: doubles the capacity when it is full.
static void* tok_grow(void* old, size_t n, size_t* cap, size_t size) {
    if (n < *cap) return old;
    *cap = *cap ? 2 * *cap : 1024;
    return tok_alloc(old, *cap, size);
}

// Two tokens side by side as one number. Ids are below 2^16. Smaller left first, then smaller right.
static uint32_t pair_key(int left, int right) { return (uint32_t)left << 16 | (uint32_t)right; }

// pair_key -> value >= 0. Open addressing; value -1 marks an empty slot.
typedef struct {
    uint32_t* keys;
    int* values;
    size_t n, slots;                                    // slots: a power of two (or 0), at most half full
} PairMap;

static size_t pair_map_slot(const PairMap* m, uint32_t key) {
    size_t i = (size_t)(key * 0x9E3779B97F4A7C15ull >> 32) & (m->slots - 1);
    while (m->values[i] >= 0 && m->keys[i] != key) i = (i + 1) & (m->slots - 1);
    return i;
}

static int pair_map_get(const PairMap* m, uint32_t key) {
    return m->slots ? m->values[pair_map_slot(m, key)] : -1;
}

static void pair_map_put(PairMap* m, uint32_t key, int value) {
    if (2 * (m->n + 1) > m->slots) {
        PairMap old = *m;
        m->slots = old.slots ? 2 * old.slots : 1024;
        m->keys = (uint32_t*)tok_alloc(NULL, m->slots, sizeof(uint32_t));
        m->values = (int*)tok_alloc(NULL, m->slots, sizeof(int));
        m->n = 0;
        for (size_t i = 0; i < m->slots; i++) m->values[i] = -1;
        for (size_t i = 0; i < old.slots; i++) if (old.values[i] >= 0) pair_map_put(m, old.keys[i], old.values[i]);
        free(old.keys);
        free(old.values);
    }
    size_t i = pair_map_slot(m, key);
    if (m->values[i] < 0) m->n++;
    m->keys[i] = key;
    m->values[i] = value;
}

// A string (a piece of text, or the bytes of a token) and what its user notes about it. The map does not copy the
// bytes: they must stay where they are.
typedef struct { const char* text; size_t len, at, count; uint64_t hash; } Word;
typedef struct {
    Word* words;                                        // in the order of their first coming
    size_t n, cap, slots;
    uint32_t* table;                                    // slots entries: 1 + index into words, or 0
} WordMap;

// The entry of a string; one with at = count = 0 is made if there is none. Valid until the next call.
static Word* word_map_at(WordMap* m, const char* text, size_t len) {
    if (2 * (m->n + 1) > m->slots) {
        m->slots = m->slots ? 2 * m->slots : 1024;
        free(m->table);
        m->table = (uint32_t*)tok_alloc(NULL, m->slots, sizeof(uint32_t));
        memset(m->table, 0, m->slots * sizeof(uint32_t));
        for (size_t w = 0; w < m->n; w++) {
            size_t i = (size_t)m->words[w].hash & (m->slots - 1);
            while (m->table[i]) i = (i + 1) & (m->slots - 1);
            m->table[i] = (uint32_t)w + 1;
        }
    }
    uint64_t hash = 0xCBF29CE484222325ull;              // FNV-1a, with the high bits folded in
    for (size_t i = 0; i < len; i++) hash = (hash ^ (unsigned char)text[i]) * 0x100000001B3ull;
    hash ^= hash >> 32;
    size_t i = (size_t)hash & (m->slots - 1);
    for (; m->table[i]; i = (i + 1) & (m->slots - 1)) {
        Word* w = &m->words[m->table[i] - 1];
        if (w->hash == hash && w->len == len && memcmp(w->text, text, len) == 0) return w;
    }
    if (m->n == UINT32_MAX - 1) die("more than 4 billion different pieces of text");
    m->words = (Word*)tok_grow(m->words, m->n, &m->cap, sizeof(Word));
    Word* w = &m->words[m->n++];
    w->text = text;
    w->len = len;
    w->at = w->count = 0;
    w->hash = hash;
    m->table[i] = (uint32_t)m->n;
    return w;
}

static void word_map_free(WordMap* m) { free(m->words); free(m->table); }

// A binary heap, smallest number first.
typedef struct { uint64_t* a; size_t n, cap; } KeyHeap;

static void key_heap_push(KeyHeap* h, uint64_t key) {
    h->a = (uint64_t*)tok_grow(h->a, h->n, &h->cap, sizeof(uint64_t));
    size_t i = h->n++;
    for (; i > 0 && h->a[(i - 1) / 2] > key; i = (i - 1) / 2) h->a[i] = h->a[(i - 1) / 2];
    h->a[i] = key;
}

static uint64_t key_heap_pop(KeyHeap* h) {
    uint64_t top = h->a[0], last = h->a[--h->n];
    size_t i = 0, child;
    while ((child = 2 * i + 1) < h->n) {
        if (child + 1 < h->n && h->a[child + 1] < h->a[child]) child++;
        if (h->a[child] >= last) break;
        h->a[i] = h->a[child];
        i = child;
    }
    h->a[i] = last;
    return top;
}

// ----------------------------------------------------------------------------
// Pieces: GPT-2's regular expression, by hand.

enum { CHAR_OTHER, CHAR_LETTER, CHAR_NUMBER, CHAR_SPACE };              // what the expression tells apart
static int unicode_class(uint32_t c);                   // one of these: at the end of this file, with its table

// The class of the character at p, and in *len its bytes. A byte that begins no whole character of UTF-8 (stray, cut
// off, an overlong form) is a CHAR_OTHER by itself; surrogates and numbers above 0x10FFFF are that by the table.
static int char_class(const char* p, const char* end, size_t* len) {
    const unsigned char* s = (const unsigned char*)p;
    size_t left = (size_t)(end - p);
    *len = 1;
    if (s[0] < 0x80) {
        if ((s[0] | 0x20) >= 'a' && (s[0] | 0x20) <= 'z') return CHAR_LETTER;
        if (s[0] >= '0' && s[0] <= '9') return CHAR_NUMBER;
        return s[0] == ' ' || (s[0] >= '\t' && s[0] <= '\r') ? CHAR_SPACE : CHAR_OTHER;
    }
    size_t n = s[0] < 0xC2 ? 1 : s[0] < 0xE0 ? 2 : s[0] < 0xF0 ? 3 : s[0] < 0xF5 ? 4 : 1;
    if (n == 1 || n > left) return CHAR_OTHER;
    uint32_t c = s[0] & (0xFFu >> (n + 1));
    for (size_t i = 1; i < n; i++) {
        if ((s[i] & 0xC0) != 0x80) return CHAR_OTHER;
        c = c << 6 | (s[i] & 0x3F);
    }
    if ((n == 3 && c < 0x800) || (n == 4 && c < 0x10000)) return CHAR_OTHER;
    *len = n;
    return unicode_class(c);
}

// Where the piece that starts at p ends (p < end, the end of the text). Nothing before p matters, so a text may
// be cut wherever a piece ends and its parts be encoded one by one.
static const char* piece_end(const char* p, const char* end) {
    size_t len, left = (size_t)(end - p);
    if (*p == '\'' && left > 1) {                       // 's|'t|'re|'ve|'m|'ll|'d
        if (p[1] == 's' || p[1] == 't' || p[1] == 'm' || p[1] == 'd') return p + 2;
        if (left > 2 && (!memcmp(p, "'re", 3) || !memcmp(p, "'ve", 3) || !memcmp(p, "'ll", 3))) return p + 3;
    }
    const char* start = *p == ' ' && left > 1 ? p + 1 : p;
    int kind = char_class(start, end, &len);
    if (kind != CHAR_SPACE) {                           // ␣?\p{L}+ | ␣?\p{N}+ | ␣?[^\s\p{L}\p{N}]+
        do start += len; while (start < end && char_class(start, end, &len) == kind);
        return start;
    }
    const char* last = p;                               // \s+(?!\S): white space, but if something follows, without its
    const char* q = p;                                  // last character, which may belong to that; \s+ if it is alone
    while (q < end && char_class(q, end, &len) == CHAR_SPACE) { last = q; q += len; }
    return q == end || last == p ? q : last;
}

// ----------------------------------------------------------------------------
// The tokenizer.

typedef struct {
    int vocab;                                          // number of tokens, ids 0 .. vocab - 1
    int n_merges;                                       // vocab = 256 + n_merges, + 1 if there is <|endoftext|>
    int eot;                                            // id of <|endoftext|>, -1 in the byte tokenizer
    int byte_id[256];                                   // byte -> id
    int* left;                                          // (n_merges) token 256 + r is left[r] followed by right[r]
    int* right;
    PairMap merges;                                     // (left, right) -> id of what they become
    char* bytes;                                        // the bytes of all tokens, one after another
    size_t* start;                                      // (vocab + 1) where each token's begin in it
    size_t bytes_cap;
} Tokenizer;

// Appends a token with room for its bytes, which the caller fills in.
static char* tokenizer_append(Tokenizer* t, size_t len) {
    size_t at = t->start[t->vocab];
    if (at + len > t->bytes_cap) {
        t->bytes_cap = 2 * (at + len);
        t->bytes = (char*)tok_alloc(t->bytes, t->bytes_cap, 1);
    }
    t->start[++t->vocab] = at + len;
    return t->bytes + at;
}

static void tokenizer_append_merge(Tokenizer* t, int left, int right) {
    size_t a = t->start[left + 1] - t->start[left], b = t->start[right + 1] - t->start[right];
    pair_map_put(&t->merges, pair_key(left, right), t->vocab);
    t->left[t->n_merges] = left;
    t->right[t->n_merges++] = right;
    char* p = tokenizer_append(t, a + b);
    memcpy(p, t->bytes + t->start[left], a);
    memcpy(p + a, t->bytes + t->start[right], b);
}

static void tokenizer_append_eot(Tokenizer* t) {
    t->eot = t->vocab;
    memcpy(tokenizer_append(t, strlen(END_OF_TEXT)), END_OF_TEXT, strlen(END_OF_TEXT));
}

// How vocab.bpe writes bytes as characters, and which id each byte has. The 188 bytes that Latin-1 prints stand for
// themselves and are ids 0 .. 187; the others follow in order, written as characters 256, 257, ... (so the space
// is Ġ, number 288).
static void byte_alphabet(int byte_of_id[256], int char_of_byte[256]) {
    int n = 0;
    for (int printed = 1; printed >= 0; printed--)
        for (int b = 0; b < 256; b++) {
            int prints = (b >= 33 && b <= 126) || (b >= 161 && b != 173);
            if (prints != printed) continue;
            char_of_byte[b] = prints ? b : 256 + n - 188;
            byte_of_id[n++] = b;
        }
}

// A tokenizer of the 256 bytes, in the order given.
static void tokenizer_begin(Tokenizer* t, const int byte_of_id[256], size_t bytes_cap) {
    memset(t, 0, sizeof(*t));
    t->eot = -1;
    t->left = (int*)tok_alloc(NULL, TOKENIZER_MAX_VOCAB, sizeof(int));
    t->right = (int*)tok_alloc(NULL, TOKENIZER_MAX_VOCAB, sizeof(int));
    t->start = (size_t*)tok_alloc(NULL, TOKENIZER_MAX_VOCAB + 1, sizeof(size_t));
    t->bytes_cap = bytes_cap + 512;
    t->bytes = (char*)tok_alloc(NULL, t->bytes_cap, 1);
    t->start[0] = 0;
    for (int id = 0; id < 256; id++) {
        *tokenizer_append(t, 1) = (char)byte_of_id[id];
        t->byte_id[byte_of_id[id]] = id;
    }
}

// The tokenizer without merges: token = byte.
static inline void tokenizer_bytes(Tokenizer* t) {
    int byte_of_id[256];
    for (int b = 0; b < 256; b++) byte_of_id[b] = b;
    tokenizer_begin(t, byte_of_id, 0);
}

static inline void tokenizer_free(Tokenizer* t) {
    free(t->left);
    free(t->right);
    free(t->merges.keys);
    free(t->merges.values);
    free(t->bytes);
    free(t->start);
    memset(t, 0, sizeof(*t));
}

static inline int tokenizer_eot(const Tokenizer* t) { return t->eot; }

// The bytes of one token (not ended by a zero byte; the token may be a part of a character) and their number.
static inline const char* tokenizer_decode(const Tokenizer* t, int id, size_t* len) {
    if (id < 0 || id >= t->vocab) die("token %d: the tokenizer has %d tokens, 0 to %d", id, t->vocab, t->vocab - 1);
    *len = t->start[id + 1] - t->start[id];
    return t->bytes + t->start[id];
}

// ----------------------------------------------------------------------------
// Encoding.

// Memory that encoding needs besides its output: a piece's tokens as a doubly linked list, and the merges in sight.
typedef struct { size_t* prev; size_t* next; size_t cap; KeyHeap heap; } MergeSpace;

// Notes that the token at i and the one after it can merge. The smallest merge comes first, and of equal ones the
// leftmost: merge and position in one number.
static void merge_offer(const Tokenizer* t, const int* id, size_t i, size_t j, KeyHeap* heap) {
    int merged = pair_map_get(&t->merges, pair_key(id[i], id[j]));
    if (merged >= 0) key_heap_push(heap, (uint64_t)merged << 48 | (uint64_t)i);
}

// Merges the n tokens of one piece in place and returns how many are left: O(n log n), however long the piece.
static size_t merge_piece(const Tokenizer* t, int* id, size_t n, MergeSpace* s) {
    if (n > s->cap) {
        s->cap = 2 * n;
        s->prev = (size_t*)tok_alloc(s->prev, s->cap, sizeof(size_t));
        s->next = (size_t*)tok_alloc(s->next, s->cap, sizeof(size_t));
    }
    for (size_t i = 0; i < n; i++) { s->prev[i] = i - 1; s->next[i] = i + 1; }  // prev[0] wraps: above n, no token
    for (size_t i = 0; i + 1 < n; i++) merge_offer(t, id, i, i + 1, &s->heap);
    while (s->heap.n > 0) {
        uint64_t key = key_heap_pop(&s->heap);
        size_t i = (size_t)(key & 0xFFFFFFFFFFFFull), j = s->next[i];
        int merged = (int)(key >> 48);
        // An offer made earlier may be stale: one of the two has merged otherwise since (gone tokens have id -1).
        if (id[i] < 0 || j >= n || pair_map_get(&t->merges, pair_key(id[i], id[j])) != merged) continue;
        id[i] = merged;
        id[j] = -1;
        s->next[i] = s->next[j];
        if (s->next[i] < n) { s->prev[s->next[i]] = i; merge_offer(t, id, i, s->next[i], &s->heap); }
        if (s->prev[i] < n) merge_offer(t, id, s->prev[i], i, &s->heap);
    }
    size_t left = 0;
    for (size_t i = 0; i < n; i++) if (id[i] >= 0) id[left++] = id[i];
    return left;
}

// Encodes n bytes of text. *ids is allocated (also for n = 0) and the caller frees it; returns the number of ids.
static inline size_t tokenizer_encode(const Tokenizer* t, const char* text, size_t n, int** ids) {
    int* out = (int*)tok_alloc(NULL, n, sizeof(int));   // never more tokens than bytes
    const char* end = text + n;
    size_t count = 0;
    if (t->n_merges == 0) for (; count < n; count++) out[count] = t->byte_id[(unsigned char)text[count]];
    // Most pieces of a text have been seen before in it: those are copied from where their tokens were put then.
    WordMap seen;
    MergeSpace space;
    memset(&seen, 0, sizeof(seen));
    memset(&space, 0, sizeof(space));
    for (const char *p = text + count, *q; p < end; p = q) {
        q = piece_end(p, end);
        size_t len = (size_t)(q - p);
        Word* w = word_map_at(&seen, p, len);
        if (w->count) {
            memcpy(out + count, out + w->at, w->count * sizeof(int));
        } else {
            for (size_t i = 0; i < len; i++) out[count + i] = t->byte_id[(unsigned char)p[i]];
            w->at = count;
            w->count = merge_piece(t, out + count, len, &space);
        }
        count += w->count;
    }
    word_map_free(&seen);
    free(space.prev);
    free(space.next);
    free(space.heap.a);
    *ids = (int*)tok_alloc(out, count, sizeof(int));
    return count;
}

// ----------------------------------------------------------------------------
// Training.

// The different pieces of the text, one after another in one array of tokens; a piece that comes `weight` times
// stands there once. The tokens of a piece are a linked list, by position. Each token with a successor is an
// occurrence of the pair that the two form, and a pair's occurrences are a linked list too: a merge visits those
// and nothing else, so that all of training takes about as long as a few readings of the text.
typedef struct { uint32_t key; uint64_t count; int first; } Pair;       // first: position of an occurrence, or -1
typedef struct {
    int* id;                                            // (n) token at a position, -1 once merged into the one before
    int *prev, *next;                                   // (n) neighbours in the piece, or -1
    int* pair;                                          // (n) index of the pair that begins here
    int *prev_same, *next_same;                         // (n) neighbours among that pair's occurrences, or -1
    uint32_t* weight;                                   // (n)
    Pair* pairs;
    size_t n_pairs, pairs_cap;
    PairMap index;                                      // pair_key -> index into pairs
} Trainer;

static void trainer_link(Trainer* r, int at) {          // at and its successor are a pair now
    uint32_t key = pair_key(r->id[at], r->id[r->next[at]]);
    int p = pair_map_get(&r->index, key);
    if (p < 0) {
        if (r->n_pairs == INT32_MAX) die("too many different pairs to train on: take less text");
        r->pairs = (Pair*)tok_grow(r->pairs, r->n_pairs, &r->pairs_cap, sizeof(Pair));
        p = (int)r->n_pairs++;
        r->pairs[p].key = key;
        r->pairs[p].count = 0;
        r->pairs[p].first = -1;
        pair_map_put(&r->index, key, p);
    }
    Pair* pair = &r->pairs[p];
    pair->count += r->weight[at];
    r->pair[at] = p;
    r->prev_same[at] = -1;
    r->next_same[at] = pair->first;
    if (pair->first >= 0) r->prev_same[pair->first] = at;
    pair->first = at;
}

static void trainer_unlink(Trainer* r, int at) {        // at and its successor are about to change
    Pair* pair = &r->pairs[r->pair[at]];
    pair->count -= r->weight[at];
    if (r->next_same[at] >= 0) r->prev_same[r->next_same[at]] = r->prev_same[at];
    if (r->prev_same[at] >= 0) r->next_same[r->prev_same[at]] = r->next_same[at];
    else pair->first = r->next_same[at];
}

static int compare_ints(const void* a, const void* b) {
    int x = *(const int*)a, y = *(const int*)b;
    return (x > y) - (x < y);
}

// Makes every occurrence of pair p (left, right) the one token `merged`.
static void trainer_merge(Trainer* r, int p, int left, int right, int merged) {
    int* where = NULL;
    size_t n = 0, cap = 0;
    for (int at = r->pairs[p].first; at >= 0; at = r->next_same[at]) {
        where = (int*)tok_grow(where, n, &cap, sizeof(int));
        where[n++] = at;
    }
    if (left == right) qsort(where, n, sizeof(int), compare_ints);      // "aaa" is (aa)a, as in encoding, not a(aa)
    for (size_t k = 0; k < n; k++) {
        int at = where[k], gone = r->next[at];
        if (r->id[at] != left || gone < 0 || r->id[gone] != right) continue;    // the second pair of an "aaa"
        if (r->prev[at] >= 0) trainer_unlink(r, r->prev[at]);
        if (r->next[gone] >= 0) trainer_unlink(r, gone);
        trainer_unlink(r, at);
        r->id[at] = merged;
        r->id[gone] = -1;
        r->next[at] = r->next[gone];
        if (r->next[at] >= 0) r->prev[r->next[at]] = at;
        if (r->prev[at] >= 0) trainer_link(r, r->prev[at]);
        if (r->next[at] >= 0) trainer_link(r, at);
    }
    free(where);
}

// The most frequent pair first, of equally frequent ones that with the smaller key.
static uint64_t trainer_rank(const Pair* p) { return (uint64_t)(UINT32_MAX - (uint32_t)p->count) << 32 | p->key; }

// Learns a tokenizer of `vocab` tokens from a text: 256 bytes, vocab - 257 merges, and <|endoftext|> as the last id.
// A pair that occurs only once is never merged, so a short text gives fewer merges and a smaller vocabulary: t->vocab
// says how many. The same text gives the same tokenizer everywhere.
static inline void tokenizer_train(Tokenizer* t, const char* text, size_t n, int vocab) {
    if (vocab < 257 || vocab > TOKENIZER_MAX_VOCAB)
        die("a BPE tokenizer has 257 (the bytes and %s) to %d tokens, not %d", END_OF_TEXT, TOKENIZER_MAX_VOCAB, vocab);
    if (n >= UINT32_MAX) die("a tokenizer is trained on less than 4 GiB of text, not on %zu bytes: take a part", n);
    int byte_of_id[256], char_of_byte[256];
    byte_alphabet(byte_of_id, char_of_byte);
    tokenizer_begin(t, byte_of_id, 0);

    // The different pieces and how often each comes.
    WordMap pieces;
    memset(&pieces, 0, sizeof(pieces));
    size_t total = 0;
    for (const char *p = text, *q; p < text + n; p = q) {
        q = piece_end(p, text + n);
        Word* w = word_map_at(&pieces, p, (size_t)(q - p));
        if (w->count++ == 0) total += w->len;
    }
    if (total > INT32_MAX) die("too many different pieces to train on (%zu bytes): take less text", total);

    Trainer r;
    memset(&r, 0, sizeof(r));
    int** arrays[] = { &r.id, &r.prev, &r.next, &r.pair, &r.prev_same, &r.next_same };
    for (int i = 0; i < 6; i++) *arrays[i] = (int*)tok_alloc(NULL, total, sizeof(int));
    r.weight = (uint32_t*)tok_alloc(NULL, total, sizeof(uint32_t));
    int at = 0;
    for (size_t w = 0; w < pieces.n; w++) {
        int len = (int)pieces.words[w].len;
        for (int i = 0; i < len; i++, at++) {
            r.id[at] = t->byte_id[(unsigned char)pieces.words[w].text[i]];
            r.prev[at] = i > 0 ? at - 1 : -1;
            r.next[at] = i + 1 < len ? at + 1 : -1;
            r.weight[at] = (uint32_t)pieces.words[w].count;
        }
    }
    word_map_free(&pieces);
    for (int i = 0; i < at; i++) if (r.next[i] >= 0) trainer_link(&r, i);

    // A pair's count rises only while the merge that makes one of its tokens is applied. So a pair enters the heap after
    // that, and later its place there can only be too good: then it goes back in with its count of today.
    KeyHeap heap;
    memset(&heap, 0, sizeof(heap));
    for (size_t ranked = 0; t->vocab < vocab - 1;) {
        for (; ranked < r.n_pairs; ranked++)
            if (r.pairs[ranked].count > 1) key_heap_push(&heap, trainer_rank(&r.pairs[ranked]));
        if (heap.n == 0) break;
        uint64_t rank = key_heap_pop(&heap);
        int p = pair_map_get(&r.index, (uint32_t)rank);
        if (rank != trainer_rank(&r.pairs[p])) {
            if (r.pairs[p].count > 1) key_heap_push(&heap, trainer_rank(&r.pairs[p]));
            continue;
        }
        int left = (int)(r.pairs[p].key >> 16), right = (int)(r.pairs[p].key & 0xFFFF);
        trainer_merge(&r, p, left, right, t->vocab);
        tokenizer_append_merge(t, left, right);
    }
    tokenizer_append_eot(t);
    for (int i = 0; i < 6; i++) free(*arrays[i]);
    free(heap.a);
    free(r.weight);
    free(r.pairs);
    free(r.index.keys);
    free(r.index.values);
}

// ----------------------------------------------------------------------------
// Files.

// Opens a file for writing under a temporary name (PATH.tmp, put into tmp), so that what is at PATH stays whole until
// file_commit. What is there and is no file of its own (a pipe, /dev/stdout, a link) is written to directly.
static FILE* file_create(const char* path, char* tmp, size_t tmp_size) {
    struct stat st;
    int special = lstat(path, &st) == 0 && !S_ISREG(st.st_mode);
    if (snprintf(tmp, tmp_size, "%s%s", path, special ? "" : ".tmp") >= (int)tmp_size) die("%s: name too long", path);
    FILE* f = fopen(tmp, "wb");
    if (!f) die("%s: cannot write: %s", path, strerror(errno));
    return f;
}

// Closes what file_create opened; if anything could not be written, dies and leaves nothing.
static void file_close(FILE* f, const char* tmp, const char* path) {
    int renames = strcmp(tmp, path) != 0;
    int bad = fflush(f) != 0 || ferror(f) || (renames && fsync(fileno(f)) != 0);
    int why = errno;
    if (fclose(f) != 0 && !bad) { bad = 1; why = errno; }
    if (bad && renames) unlink(tmp);
    if (bad) die("%s: cannot write: %s", path, strerror(why));
}

// Gives it its name.
static void file_commit(const char* tmp, const char* path) {
    if (strcmp(tmp, path) == 0 || rename(tmp, path) == 0) return;
    int why = errno;
    unlink(tmp);
    die("%s: cannot write: %s", path, strerror(why));
}

// Writes the tokenizer as the head of this file describes. tokenizer_load gives back the same one.
static inline void tokenizer_save(const Tokenizer* t, const char* path) {
    char tmp[4096];
    FILE* f = file_create(path, tmp, sizeof(tmp));
    int byte_of_id[256], char_of_byte[256];
    byte_alphabet(byte_of_id, char_of_byte);
    if (t->eot < 0) fprintf(f, "bytes\n");
    else fprintf(f, "#version: 0.2 merges: %d\n", t->n_merges);
    for (int r = 0; r < t->n_merges; r++) {
        for (int side = 0; side < 2; side++) {
            size_t len;
            const char* s = tokenizer_decode(t, side ? t->right[r] : t->left[r], &len);
            if (side) fputc(' ', f);
            for (size_t i = 0; i < len; i++) {
                int c = char_of_byte[(unsigned char)s[i]];
                if (c < 128) fputc(c, f);
                else { fputc(0xC0 | c >> 6, f); fputc(0x80 | (c & 0x3F), f); }
            }
        }
        fputc('\n', f);
    }
    file_close(f, tmp, path);
    file_commit(tmp, path);
}

// Reads the characters of one side of a merge, up to `stop`, as the bytes they stand for. Returns their number, or
// -1 if a character is none of the 256. *p is left behind `stop`.
static long read_token(const char** p, const char* end, char stop, const int byte_of_char[512], char* out) {
    long n = 0;
    for (; *p < end && **p != stop; (*p)++) {
        unsigned c = (unsigned char)**p;
        if (c >= 0xC0 && *p + 1 < end) c = (c & 0x1F) << 6 | ((unsigned char)*++*p & 0x3F);
        if (c >= 512 || byte_of_char[c] < 0) return -1;
        out[n++] = (char)byte_of_char[c];
    }
    if (*p == end) return -1;
    (*p)++;
    return n;
}

// Loads "bytes", GPT-2's vocab.bpe or a file of tokenizer_save.
static inline void tokenizer_load(Tokenizer* t, const char* path) {
    if (strcmp(path, "bytes") == 0) { tokenizer_bytes(t); return; }
    FILE* f = fopen(path, "rb");
    if (!f) die("%s: cannot open this tokenizer: %s (a file, or bytes)", path, strerror(errno));
    char* text = NULL;
    size_t n = 0, cap = 0, got = 1;
    while (got > 0) {
        text = (char*)tok_grow(text, n, &cap, 1);
        n += got = fread(text + n, 1, cap - n, f);
        if (n > 64u << 20) die("%s: too large for a tokenizer: expected GPT-2's vocab.bpe or a saved tokenizer", path);
    }
    if (ferror(f)) die("%s: cannot read: %s", path, strerror(errno));
    fclose(f);
    if (n == 6 && memcmp(text, "bytes\n", 6) == 0) { free(text); tokenizer_bytes(t); return; }
    const char* fault = n == 0 ? "is empty" : n < 9 || memcmp(text, "#version", 8) ? "is not a tokenizer"
                        : text[n - 1] != '\n' ? "ends in the middle of a line: cut off?" : NULL;
    if (fault) die("%s %s (expected GPT-2's vocab.bpe, or a tokenizer that prepare saved)", path, fault);

    int byte_of_id[256], char_of_byte[256], byte_of_char[512];
    byte_alphabet(byte_of_id, char_of_byte);
    for (int c = 0; c < 512; c++) byte_of_char[c] = -1;
    for (int b = 0; b < 256; b++) byte_of_char[char_of_byte[b]] = b;
    tokenizer_begin(t, byte_of_id, n);                  // tokens have fewer bytes than their lines: t->bytes won't
    WordMap ids;                                        // move, and this map from tokens to ids may point into it
    memset(&ids, 0, sizeof(ids));
    for (int id = 0; id < 256; id++) {
        Word* w = word_map_at(&ids, t->bytes + id, 1);
        w->at = (size_t)id;
        w->count = 1;
    }
    const char *p = text, *end = text + n;
    char* token = (char*)tok_alloc(NULL, n, 1);         // left and right side by side
    int expected = -1;
    const char* line_end = (const char*)memchr(text, '\n', n);
    for (; p < line_end; p++) if (line_end - p > 8 && memcmp(p, "merges: ", 8) == 0) expected = atoi(p + 8);
    p++;
    while (p < end) {
        int line = t->n_merges + 2;
        long a = read_token(&p, end, ' ', byte_of_char, token);
        long b = a < 1 ? -1 : read_token(&p, end, '\n', byte_of_char, token + a);
        if (b < 1) die("%s, line %d: not a merge, \"A B\"", path, line);
        Word* w = word_map_at(&ids, token, (size_t)a);
        int left = w->count ? (int)w->at : -1;
        w = word_map_at(&ids, token + a, (size_t)b);
        int right = w->count ? (int)w->at : -1;
        if (left < 0 || right < 0) die("%s, line %d: merges a token that no line before it makes", path, line);
        w = word_map_at(&ids, token, (size_t)(a + b));
        if (w->count) die("%s, line %d: makes a token that is there already", path, line);
        if (t->vocab == TOKENIZER_MAX_VOCAB - 1) die("%s: more than %d tokens", path, TOKENIZER_MAX_VOCAB);
        w->at = (size_t)t->vocab;
        w->count = 1;
        tokenizer_append_merge(t, left, right);
        w->text = t->bytes + t->start[t->vocab - 1];    // these bytes stay
    }
    if (expected >= 0 && expected != t->n_merges)
        die("%s: %d merges where its first line says %d: cut off?", path, t->n_merges, expected);
    tokenizer_append_eot(t);
    word_map_free(&ids);
    free(token);
    free(text);
}

// ----------------------------------------------------------------------------
// Unicode 16: which characters are \p{L}, \p{N} and \s. An entry is 4 * (first character of a run) + (its class); a run
// ends where the next begins.

static const uint32_t unicode_runs[] = {
    0x0, 0x27, 0x38, 0x83, 0x84, 0xC2, 0xE8, 0x105, 0x16C, 0x185, 0x1EC, 0x217, 0x218, 0x283, 0x284, 0x2A9, 0x2AC,
    0x2CA, 0x2D0, 0x2D5, 0x2D8, 0x2E6, 0x2E9, 0x2EC, 0x2F2, 0x2FC, 0x301, 0x35C, 0x361, 0x3DC, 0x3E1, 0xB08, 0xB19,
    0xB48, 0xB81, 0xB94, 0xBB1, 0xBB4, 0xBB9, 0xBBC, 0xDC1, 0xDD4, 0xDD9, 0xDE0, 0xDE9, 0xDF8, 0xDFD, 0xE00, 0xE19,
    0xE1C, 0xE21, 0xE2C, 0xE31, 0xE34, 0xE39, 0xE88, 0xE8D, 0xFD8, 0xFDD, 0x1208, 0x1229, 0x14C0, 0x14C5, 0x155C,
    0x1565, 0x1568, 0x1581, 0x1624, 0x1741, 0x17AC, 0x17BD, 0x17CC, 0x1881, 0x192C, 0x1982, 0x19A8, 0x19B9, 0x19C0,
    0x19C5, 0x1B50, 0x1B55, 0x1B58, 0x1B95, 0x1B9C, 0x1BB9, 0x1BC2, 0x1BE9, 0x1BF4, 0x1BFD, 0x1C00, 0x1C41, 0x1C44,
    0x1C49, 0x1CC0, 0x1D35, 0x1E98, 0x1EC5, 0x1EC8, 0x1F02, 0x1F29, 0x1FAC, 0x1FD1, 0x1FD8, 0x1FE9, 0x1FEC, 0x2001,
    0x2058, 0x2069, 0x206C, 0x2091, 0x2094, 0x20A1, 0x20A4, 0x2101, 0x2164, 0x2181, 0x21AC, 0x21C1, 0x2220, 0x2225,
    0x223C, 0x2281, 0x2328, 0x2411, 0x24E8, 0x24F5, 0x24F8, 0x2541, 0x2544, 0x2561, 0x2588, 0x259A, 0x25C0, 0x25C5,
    0x2604, 0x2615, 0x2634, 0x263D, 0x2644, 0x264D, 0x26A4, 0x26A9, 0x26C4, 0x26C9, 0x26CC, 0x26D9, 0x26E8, 0x26F5,
    0x26F8, 0x2739, 0x273C, 0x2771, 0x2778, 0x277D, 0x2788, 0x279A, 0x27C1, 0x27C8, 0x27D2, 0x27E8, 0x27F1, 0x27F4,
    0x2815, 0x282C, 0x283D, 0x2844, 0x284D, 0x28A4, 0x28A9, 0x28C4, 0x28C9, 0x28D0, 0x28D5, 0x28DC, 0x28E1, 0x28E8,
    0x2965, 0x2974, 0x2979, 0x297C, 0x299A, 0x29C0, 0x29C9, 0x29D4, 0x2A15, 0x2A38, 0x2A3D, 0x2A48, 0x2A4D, 0x2AA4,
    0x2AA9, 0x2AC4, 0x2AC9, 0x2AD0, 0x2AD5, 0x2AE8, 0x2AF5, 0x2AF8, 0x2B41, 0x2B44, 0x2B81, 0x2B88, 0x2B9A, 0x2BC0,
    0x2BE5, 0x2BE8, 0x2C15, 0x2C34, 0x2C3D, 0x2C44, 0x2C4D, 0x2CA4, 0x2CA9, 0x2CC4, 0x2CC9, 0x2CD0, 0x2CD5, 0x2CE8,
    0x2CF5, 0x2CF8, 0x2D71, 0x2D78, 0x2D7D, 0x2D88, 0x2D9A, 0x2DC0, 0x2DC5, 0x2DCA, 0x2DE0, 0x2E0D, 0x2E10, 0x2E15,
    0x2E2C, 0x2E39, 0x2E44, 0x2E49, 0x2E58, 0x2E65, 0x2E6C, 0x2E71, 0x2E74, 0x2E79, 0x2E80, 0x2E8D, 0x2E94, 0x2EA1,
    0x2EAC, 0x2EB9, 0x2EE8, 0x2F41, 0x2F44, 0x2F9A, 0x2FCC, 0x3015, 0x3034, 0x3039, 0x3044, 0x3049, 0x30A4, 0x30A9,
    0x30E8, 0x30F5, 0x30F8, 0x3161, 0x316C, 0x3175, 0x3178, 0x3181, 0x3188, 0x319A, 0x31C0, 0x31E2, 0x31FC, 0x3201,
    0x3204, 0x3215, 0x3234, 0x3239, 0x3244, 0x3249, 0x32A4, 0x32A9, 0x32D0, 0x32D5, 0x32E8, 0x32F5, 0x32F8, 0x3375,
    0x337C, 0x3381, 0x3388, 0x339A, 0x33C0, 0x33C5, 0x33CC, 0x3411, 0x3434, 0x3439, 0x3444, 0x3449, 0x34EC, 0x34F5,
    0x34F8, 0x3539, 0x353C, 0x3551, 0x355C, 0x3562, 0x357D, 0x3588, 0x359A, 0x35E4, 0x35E9, 0x3600, 0x3615, 0x365C,
    0x3669, 0x36C8, 0x36CD, 0x36F0, 0x36F5, 0x36F8, 0x3701, 0x371C, 0x379A, 0x37C0, 0x3805, 0x38C4, 0x38C9, 0x38D0,
    0x3901, 0x391C, 0x3942, 0x3968, 0x3A05, 0x3A0C, 0x3A11, 0x3A14, 0x3A19, 0x3A2C, 0x3A31, 0x3A90, 0x3A95, 0x3A98,
    0x3A9D, 0x3AC4, 0x3AC9, 0x3AD0, 0x3AF5, 0x3AF8, 0x3B01, 0x3B14, 0x3B19, 0x3B1C, 0x3B42, 0x3B68, 0x3B71, 0x3B80,
    0x3C01, 0x3C04, 0x3C82, 0x3CD0, 0x3D01, 0x3D20, 0x3D25, 0x3DB4, 0x3E21, 0x3E34, 0x4001, 0x40AC, 0x40FD, 0x4102,
    0x4128, 0x4141, 0x4158, 0x4169, 0x4178, 0x4185, 0x4188, 0x4195, 0x419C, 0x41B9, 0x41C4, 0x41D5, 0x4208, 0x4239,
    0x423C, 0x4242, 0x4268, 0x4281, 0x4318, 0x431D, 0x4320, 0x4335, 0x4338, 0x4341, 0x43EC, 0x43F1, 0x4924, 0x4929,
    0x4938, 0x4941, 0x495C, 0x4961, 0x4964, 0x4969, 0x4978, 0x4981, 0x4A24, 0x4A29, 0x4A38, 0x4A41, 0x4AC4, 0x4AC9,
    0x4AD8, 0x4AE1, 0x4AFC, 0x4B01, 0x4B04, 0x4B09, 0x4B18, 0x4B21, 0x4B5C, 0x4B61, 0x4C44, 0x4C49, 0x4C58, 0x4C61,
    0x4D6C, 0x4DA6, 0x4DF4, 0x4E01, 0x4E40, 0x4E81, 0x4FD8, 0x4FE1, 0x4FF8, 0x5005, 0x59B4, 0x59BD, 0x5A03, 0x5A05,
    0x5A6C, 0x5A81, 0x5BAC, 0x5BBA, 0x5BC5, 0x5BE4, 0x5C01, 0x5C48, 0x5C7D, 0x5CC8, 0x5D01, 0x5D48, 0x5D81, 0x5DB4,
    0x5DB9, 0x5DC4, 0x5E01, 0x5ED0, 0x5F5D, 0x5F60, 0x5F71, 0x5F74, 0x5F82, 0x5FA8, 0x5FC2, 0x5FE8, 0x6042, 0x6068,
    0x6081, 0x61E4, 0x6201, 0x6214, 0x621D, 0x62A4, 0x62A9, 0x62AC, 0x62C1, 0x63D8, 0x6401, 0x647C, 0x651A, 0x6541,
    0x65B8, 0x65C1, 0x65D4, 0x6601, 0x66B0, 0x66C1, 0x6728, 0x6742, 0x676C, 0x6801, 0x685C, 0x6881, 0x6954, 0x6A02,
    0x6A28, 0x6A42, 0x6A68, 0x6A9D, 0x6AA0, 0x6C15, 0x6CD0, 0x6D15, 0x6D34, 0x6D42, 0x6D68, 0x6E0D, 0x6E84, 0x6EB9,
    0x6EC2, 0x6EE9, 0x6F98, 0x7001, 0x7090, 0x7102, 0x7128, 0x7135, 0x7142, 0x7169, 0x71F8, 0x7201, 0x722C, 0x7241,
    0x72EC, 0x72F5, 0x7300, 0x73A5, 0x73B4, 0x73B9, 0x73D0, 0x73D5, 0x73DC, 0x73E9, 0x73EC, 0x7401, 0x7700, 0x7801,
    0x7C58, 0x7C61, 0x7C78, 0x7C81, 0x7D18, 0x7D21, 0x7D38, 0x7D41, 0x7D60, 0x7D65, 0x7D68, 0x7D6D, 0x7D70, 0x7D75,
    0x7D78, 0x7D7D, 0x7DF8, 0x7E01, 0x7ED4, 0x7ED9, 0x7EF4, 0x7EF9, 0x7EFC, 0x7F09, 0x7F14, 0x7F19, 0x7F34, 0x7F41,
    0x7F50, 0x7F59, 0x7F70, 0x7F81, 0x7FB4, 0x7FC9, 0x7FD4, 0x7FD9, 0x7FF4, 0x8003, 0x802C, 0x80A3, 0x80A8, 0x80BF,
    0x80C0, 0x817F, 0x8180, 0x81C2, 0x81C5, 0x81C8, 0x81D2, 0x81E8, 0x81FD, 0x8202, 0x8228, 0x8241, 0x8274, 0x8409,
    0x840C, 0x841D, 0x8420, 0x8429, 0x8450, 0x8455, 0x8458, 0x8465, 0x8478, 0x8491, 0x8494, 0x8499, 0x849C, 0x84A1,
    0x84A4, 0x84A9, 0x84B8, 0x84BD, 0x84E8, 0x84F1, 0x8500, 0x8515, 0x8528, 0x8539, 0x853C, 0x8542, 0x860D, 0x8616,
    0x8628, 0x9182, 0x9270, 0x93AA, 0x9400, 0x9DDA, 0x9E50, 0xB001, 0xB394, 0xB3AD, 0xB3BC, 0xB3C9, 0xB3D0, 0xB3F6,
    0xB3F8, 0xB401, 0xB498, 0xB49D, 0xB4A0, 0xB4B5, 0xB4B8, 0xB4C1, 0xB5A0, 0xB5BD, 0xB5C0, 0xB601, 0xB65C, 0xB681,
    0xB69C, 0xB6A1, 0xB6BC, 0xB6C1, 0xB6DC, 0xB6E1, 0xB6FC, 0xB701, 0xB71C, 0xB721, 0xB73C, 0xB741, 0xB75C, 0xB761,
    0xB77C, 0xB8BD, 0xB8C0, 0xC003, 0xC004, 0xC015, 0xC01E, 0xC020, 0xC086, 0xC0A8, 0xC0C5, 0xC0D8, 0xC0E2, 0xC0ED,
    0xC0F4, 0xC105, 0xC25C, 0xC275, 0xC280, 0xC285, 0xC3EC, 0xC3F1, 0xC400, 0xC415, 0xC4C0, 0xC4C5, 0xC63C, 0xC64A,
    0xC658, 0xC681, 0xC700, 0xC7C1, 0xC800, 0xC882, 0xC8A8, 0xC922, 0xC940, 0xC946, 0xC980, 0xCA02, 0xCA28, 0xCAC6,
    0xCB00, 0xD001, 0x13700, 0x13801, 0x29234, 0x29341, 0x293F8, 0x29401, 0x29834, 0x29841, 0x29882, 0x298A9, 0x298B0,
    0x29901, 0x299BC, 0x299FD, 0x29A78, 0x29A81, 0x29B9A, 0x29BC0, 0x29C5D, 0x29C80, 0x29C89, 0x29E24, 0x29E2D, 0x29F38,
    0x29F41, 0x29F48, 0x29F4D, 0x29F50, 0x29F55, 0x29F74, 0x29FC9, 0x2A008, 0x2A00D, 0x2A018, 0x2A01D, 0x2A02C, 0x2A031,
    0x2A08C, 0x2A0C2, 0x2A0D8, 0x2A101, 0x2A1D0, 0x2A209, 0x2A2D0, 0x2A342, 0x2A368, 0x2A3C9, 0x2A3E0, 0x2A3ED, 0x2A3F0,
    0x2A3F5, 0x2A3FC, 0x2A402, 0x2A429, 0x2A498, 0x2A4C1, 0x2A51C, 0x2A581, 0x2A5F4, 0x2A611, 0x2A6CC, 0x2A73D, 0x2A742,
    0x2A768, 0x2A781, 0x2A794, 0x2A799, 0x2A7C2, 0x2A7E9, 0x2A7FC, 0x2A801, 0x2A8A4, 0x2A901, 0x2A90C, 0x2A911, 0x2A930,
    0x2A942, 0x2A968, 0x2A981, 0x2A9DC, 0x2A9E9, 0x2A9EC, 0x2A9F9, 0x2AAC0, 0x2AAC5, 0x2AAC8, 0x2AAD5, 0x2AADC, 0x2AAE5,
    0x2AAF8, 0x2AB01, 0x2AB04, 0x2AB09, 0x2AB0C, 0x2AB6D, 0x2AB78, 0x2AB81, 0x2ABAC, 0x2ABC9, 0x2ABD4, 0x2AC05, 0x2AC1C,
    0x2AC25, 0x2AC3C, 0x2AC45, 0x2AC5C, 0x2AC81, 0x2AC9C, 0x2ACA1, 0x2ACBC, 0x2ACC1, 0x2AD6C, 0x2AD71, 0x2ADA8, 0x2ADC1,
    0x2AF8C, 0x2AFC2, 0x2AFE8, 0x2B001, 0x35E90, 0x35EC1, 0x35F1C, 0x35F2D, 0x35FF0, 0x3E401, 0x3E9B8, 0x3E9C1, 0x3EB68,
    0x3EC01, 0x3EC1C, 0x3EC4D, 0x3EC60, 0x3EC75, 0x3EC78, 0x3EC7D, 0x3ECA4, 0x3ECA9, 0x3ECDC, 0x3ECE1, 0x3ECF4, 0x3ECF9,
    0x3ECFC, 0x3ED01, 0x3ED08, 0x3ED0D, 0x3ED14, 0x3ED19, 0x3EEC8, 0x3EF4D, 0x3F4F8, 0x3F541, 0x3F640, 0x3F649, 0x3F720,
    0x3F7C1, 0x3F7F0, 0x3F9C1, 0x3F9D4, 0x3F9D9, 0x3FBF4, 0x3FC42, 0x3FC68, 0x3FC85, 0x3FCEC, 0x3FD05, 0x3FD6C, 0x3FD99,
    0x3FEFC, 0x3FF09, 0x3FF20, 0x3FF29, 0x3FF40, 0x3FF49, 0x3FF60, 0x3FF69, 0x3FF74, 0x40001, 0x40030, 0x40035, 0x4009C,
    0x400A1, 0x400EC, 0x400F1, 0x400F8, 0x400FD, 0x40138, 0x40141, 0x40178, 0x40201, 0x403EC, 0x4041E, 0x404D0, 0x40502,
    0x405E4, 0x4062A, 0x40630, 0x40A01, 0x40A74, 0x40A81, 0x40B44, 0x40B86, 0x40BF0, 0x40C01, 0x40C82, 0x40C90, 0x40CB5,
    0x40D06, 0x40D09, 0x40D2A, 0x40D2C, 0x40D41, 0x40DD8, 0x40E01, 0x40E78, 0x40E81, 0x40F10, 0x40F21, 0x40F40, 0x40F46,
    0x40F58, 0x41001, 0x41278, 0x41282, 0x412A8, 0x412C1, 0x41350, 0x41361, 0x413F0, 0x41401, 0x414A0, 0x414C1, 0x41590,
    0x415C1, 0x415EC, 0x415F1, 0x4162C, 0x41631, 0x4164C, 0x41651, 0x41658, 0x4165D, 0x41688, 0x4168D, 0x416C8, 0x416CD,
    0x416E8, 0x416ED, 0x416F4, 0x41701, 0x417D0, 0x41801, 0x41CDC, 0x41D01, 0x41D58, 0x41D81, 0x41DA0, 0x41E01, 0x41E18,
    0x41E1D, 0x41EC4, 0x41EC9, 0x41EEC, 0x42001, 0x42018, 0x42021, 0x42024, 0x42029, 0x420D8, 0x420DD, 0x420E4, 0x420F1,
    0x420F4, 0x420FD, 0x42158, 0x42162, 0x42181, 0x421DC, 0x421E6, 0x42201, 0x4227C, 0x4229E, 0x422C0, 0x42381, 0x423CC,
    0x423D1, 0x423D8, 0x423EE, 0x42401, 0x4245A, 0x42470, 0x42481, 0x424E8, 0x42601, 0x426E0, 0x426F2, 0x426F9, 0x42702,
    0x42740, 0x4274A, 0x42801, 0x42804, 0x42841, 0x42850, 0x42855, 0x42860, 0x42865, 0x428D8, 0x42902, 0x42924, 0x42981,
    0x429F6, 0x429FC, 0x42A01, 0x42A76, 0x42A80, 0x42B01, 0x42B20, 0x42B25, 0x42B94, 0x42BAE, 0x42BC0, 0x42C01, 0x42CD8,
    0x42D01, 0x42D58, 0x42D62, 0x42D81, 0x42DCC, 0x42DE2, 0x42E01, 0x42E48, 0x42EA6, 0x42EC0, 0x43001, 0x43124, 0x43201,
    0x432CC, 0x43301, 0x433CC, 0x433EA, 0x43401, 0x43490, 0x434C2, 0x434E8, 0x43502, 0x43529, 0x43598, 0x435BD, 0x43618,
    0x43982, 0x439FC, 0x43A01, 0x43AA8, 0x43AC1, 0x43AC8, 0x43B09, 0x43B14, 0x43C01, 0x43C76, 0x43C9D, 0x43CA0, 0x43CC1,
    0x43D18, 0x43D46, 0x43D54, 0x43DC1, 0x43E08, 0x43EC1, 0x43F16, 0x43F30, 0x43F81, 0x43FDC, 0x4400D, 0x440E0, 0x4414A,
    0x441C0, 0x441C5, 0x441CC, 0x441D5, 0x441D8, 0x4420D, 0x442C0, 0x44341, 0x443A4, 0x443C2, 0x443E8, 0x4440D, 0x4449C,
    0x444DA, 0x44500, 0x44511, 0x44514, 0x4451D, 0x44520, 0x44541, 0x445CC, 0x445D9, 0x445DC, 0x4460D, 0x446CC, 0x44705,
    0x44714, 0x44742, 0x44769, 0x4476C, 0x44771, 0x44774, 0x44786, 0x447D4, 0x44801, 0x44848, 0x4484D, 0x448B0, 0x448FD,
    0x44904, 0x44A01, 0x44A1C, 0x44A21, 0x44A24, 0x44A29, 0x44A38, 0x44A3D, 0x44A78, 0x44A7D, 0x44AA4, 0x44AC1, 0x44B7C,
    0x44BC2, 0x44BE8, 0x44C15, 0x44C34, 0x44C3D, 0x44C44, 0x44C4D, 0x44CA4, 0x44CA9, 0x44CC4, 0x44CC9, 0x44CD0, 0x44CD5,
    0x44CE8, 0x44CF5, 0x44CF8, 0x44D41, 0x44D44, 0x44D75, 0x44D88, 0x44E01, 0x44E28, 0x44E2D, 0x44E30, 0x44E39, 0x44E3C,
    0x44E41, 0x44ED8, 0x44EDD, 0x44EE0, 0x44F45, 0x44F48, 0x44F4D, 0x44F50, 0x45001, 0x450D4, 0x4511D, 0x4512C, 0x45142,
    0x45168, 0x4517D, 0x45188, 0x45201, 0x452C0, 0x45311, 0x45318, 0x4531D, 0x45320, 0x45342, 0x45368, 0x45601, 0x456BC,
    0x45761, 0x45770, 0x45801, 0x458C0, 0x45911, 0x45914, 0x45942, 0x45968, 0x45A01, 0x45AAC, 0x45AE1, 0x45AE4, 0x45B02,
    0x45B28, 0x45B42, 0x45B90, 0x45C01, 0x45C6C, 0x45CC2, 0x45CF0, 0x45D01, 0x45D1C, 0x46001, 0x460B0, 0x46281, 0x46382,
    0x463CC, 0x463FD, 0x4641C, 0x46425, 0x46428, 0x46431, 0x46450, 0x46455, 0x4645C, 0x46461, 0x464C0, 0x464FD, 0x46500,
    0x46505, 0x46508, 0x46542, 0x46568, 0x46681, 0x466A0, 0x466A9, 0x46744, 0x46785, 0x46788, 0x4678D, 0x46790, 0x46801,
    0x46804, 0x4682D, 0x468CC, 0x468E9, 0x468EC, 0x46941, 0x46944, 0x46971, 0x46A28, 0x46A75, 0x46A78, 0x46AC1, 0x46BE4,
    0x46F01, 0x46F84, 0x46FC2, 0x46FE8, 0x47001, 0x47024, 0x47029, 0x470BC, 0x47101, 0x47104, 0x47142, 0x471B4, 0x471C9,
    0x47240, 0x47401, 0x4741C, 0x47421, 0x47428, 0x4742D, 0x474C4, 0x47519, 0x4751C, 0x47542, 0x47568, 0x47581, 0x47598,
    0x4759D, 0x475A4, 0x475A9, 0x47628, 0x47661, 0x47664, 0x47682, 0x476A8, 0x47B81, 0x47BCC, 0x47C09, 0x47C0C, 0x47C11,
    0x47C44, 0x47C49, 0x47CD0, 0x47D42, 0x47D68, 0x47EC1, 0x47EC4, 0x47F02, 0x47F54, 0x48001, 0x48E68, 0x49002, 0x491BC,
    0x49201, 0x49510, 0x4BE41, 0x4BFC4, 0x4C001, 0x4D0C0, 0x4D105, 0x4D11C, 0x4D181, 0x50FEC, 0x51001, 0x5191C, 0x58401,
    0x58478, 0x584C2, 0x584E8, 0x5A001, 0x5A8E4, 0x5A901, 0x5A97C, 0x5A982, 0x5A9A8, 0x5A9C1, 0x5AAFC, 0x5AB02, 0x5AB28,
    0x5AB41, 0x5ABB8, 0x5AC01, 0x5ACC0, 0x5AD01, 0x5AD10, 0x5AD42, 0x5AD68, 0x5AD6E, 0x5AD88, 0x5AD8D, 0x5ADE0, 0x5ADF5,
    0x5AE40, 0x5B501, 0x5B5B4, 0x5B5C2, 0x5B5E8, 0x5B901, 0x5BA02, 0x5BA5C, 0x5BC01, 0x5BD2C, 0x5BD41, 0x5BD44, 0x5BE4D,
    0x5BE80, 0x5BF81, 0x5BF88, 0x5BF8D, 0x5BF90, 0x5C001, 0x61FE0, 0x62001, 0x63358, 0x633FD, 0x63424, 0x6BFC1, 0x6BFD0,
    0x6BFD5, 0x6BFF0, 0x6BFF5, 0x6BFFC, 0x6C001, 0x6C48C, 0x6C4C9, 0x6C4CC, 0x6C541, 0x6C54C, 0x6C555, 0x6C558, 0x6C591,
    0x6C5A0, 0x6C5C1, 0x6CBF0, 0x6F001, 0x6F1AC, 0x6F1C1, 0x6F1F4, 0x6F201, 0x6F224, 0x6F241, 0x6F268, 0x733C2, 0x733E8,
    0x74B02, 0x74B50, 0x74B82, 0x74BD0, 0x74D82, 0x74DE4, 0x75001, 0x75154, 0x75159, 0x75274, 0x75279, 0x75280, 0x75289,
    0x7528C, 0x75295, 0x7529C, 0x752A5, 0x752B4, 0x752B9, 0x752E8, 0x752ED, 0x752F0, 0x752F5, 0x75310, 0x75315, 0x75418,
    0x7541D, 0x7542C, 0x75435, 0x75454, 0x75459, 0x75474, 0x75479, 0x754E8, 0x754ED, 0x754FC, 0x75501, 0x75514, 0x75519,
    0x7551C, 0x75529, 0x75544, 0x75549, 0x75A98, 0x75AA1, 0x75B04, 0x75B09, 0x75B6C, 0x75B71, 0x75BEC, 0x75BF1, 0x75C54,
    0x75C59, 0x75CD4, 0x75CD9, 0x75D3C, 0x75D41, 0x75DBC, 0x75DC1, 0x75E24, 0x75E29, 0x75EA4, 0x75EA9, 0x75F0C, 0x75F11,
    0x75F30, 0x75F3A, 0x76000, 0x77C01, 0x77C7C, 0x77C95, 0x77CAC, 0x780C1, 0x781B8, 0x78401, 0x784B4, 0x784DD, 0x784F8,
    0x78502, 0x78528, 0x78539, 0x7853C, 0x78A41, 0x78AB8, 0x78B01, 0x78BB0, 0x78BC2, 0x78BE8, 0x79341, 0x793B0, 0x793C2,
    0x793E8, 0x79741, 0x797B8, 0x797C1, 0x797C6, 0x797EC, 0x79F81, 0x79F9C, 0x79FA1, 0x79FB0, 0x79FB5, 0x79FBC, 0x79FC1,
    0x79FFC, 0x7A001, 0x7A314, 0x7A31E, 0x7A340, 0x7A401, 0x7A510, 0x7A52D, 0x7A530, 0x7A542, 0x7A568, 0x7B1C6, 0x7B2B0,
    0x7B2B6, 0x7B2C0, 0x7B2C6, 0x7B2D4, 0x7B406, 0x7B4B8, 0x7B4BE, 0x7B4F8, 0x7B801, 0x7B810, 0x7B815, 0x7B880, 0x7B885,
    0x7B88C, 0x7B891, 0x7B894, 0x7B89D, 0x7B8A0, 0x7B8A5, 0x7B8CC, 0x7B8D1, 0x7B8E0, 0x7B8E5, 0x7B8E8, 0x7B8ED, 0x7B8F0,
    0x7B909, 0x7B90C, 0x7B91D, 0x7B920, 0x7B925, 0x7B928, 0x7B92D, 0x7B930, 0x7B935, 0x7B940, 0x7B945, 0x7B94C, 0x7B951,
    0x7B954, 0x7B95D, 0x7B960, 0x7B965, 0x7B968, 0x7B96D, 0x7B970, 0x7B975, 0x7B978, 0x7B97D, 0x7B980, 0x7B985, 0x7B98C,
    0x7B991, 0x7B994, 0x7B99D, 0x7B9AC, 0x7B9B1, 0x7B9CC, 0x7B9D1, 0x7B9E0, 0x7B9E5, 0x7B9F4, 0x7B9F9, 0x7B9FC, 0x7BA01,
    0x7BA28, 0x7BA2D, 0x7BA70, 0x7BA85, 0x7BA90, 0x7BA95, 0x7BAA8, 0x7BAAD, 0x7BAF0, 0x7C402, 0x7C434, 0x7EFC2, 0x7EFE8,
    0x80001, 0xA9B80, 0xA9C01, 0xADCE8, 0xADD01, 0xAE078, 0xAE081, 0xB3A88, 0xB3AC1, 0xBAF84, 0xBAFC1, 0xBB978, 0xBE001,
    0xBE878, 0xC0001, 0xC4D2C, 0xC4D41, 0xC8EC0,
};

static int unicode_class(uint32_t c) {
    size_t low = 0, high = sizeof(unicode_runs) / sizeof(unicode_runs[0]);      // the run is in [low, high)
    while (high - low > 1) {
        size_t middle = (low + high) / 2;
        if (unicode_runs[middle] >> 2 <= c) low = middle; else high = middle;
    }
    return (int)(unicode_runs[low] & 3);
}
#endif
