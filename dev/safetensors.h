// safetensors.h: reading and writing checkpoints. A safetensors file is 8 bytes of header length, a JSON header that names
// every tensor, and the numbers. Python's safetensors opens what is written here, and what is read is trusted in nothing.
//
// The including file defines `real` (float or double, what weights are kept in) and, before this header,
// static void die(const char* fmt, ...), which prints one line and ends the program.
#ifndef SAFETENSORS_H
#define SAFETENSORS_H
#include <ctype.h>
#include <errno.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

// One tensor of a file.
typedef struct { char name[64], dtype[8]; int ndim; size_t shape[4], bytes; const void* data; } Entry;

// A growing string. text_add appends as printf would.
typedef struct { char* chars; size_t length, capacity; } Text;
__attribute__((format(printf, 2, 3)))
static void text_add(Text* t, const char* fmt, ...) {
    va_list args;
    va_start(args, fmt);
    int n = vsnprintf(NULL, 0, fmt, args);
    va_end(args);
    if (t->length + n + 1 > t->capacity) {
        t->capacity = 2 * (t->length + n + 1);
        t->chars = (char*)realloc(t->chars, t->capacity);
        if (!t->chars) die("not enough memory for a text of %zu bytes", t->capacity);
    }
    va_start(args, fmt);
    vsnprintf(t->chars + t->length, n + 1, fmt, args);
    va_end(args);
    t->length += n;
}

// Appends s as a JSON string, quotes included.
static void text_add_json(Text* t, const char* s) {
    text_add(t, "\"");
    for (; *s; s++) {
        if (*s == '"' || *s == '\\') text_add(t, "\\%c", *s);
        else if ((unsigned char)*s < 32) text_add(t, "\\u%04x", *s);
        else text_add(t, "%c", *s);
    }
    text_add(t, "\"");
}

// Writes path whole or not at all: to a temporary name first, forced to disk, then renamed. metadata is the inside of a
// JSON object, `"key":"value",...`. Returns 0, or an errno; then path is as it was.
static int safetensors_write(const char* path, const char* metadata, const Entry* entries, int count) {
    Text h = {NULL, 0, 0};
    size_t offset = 0;
    text_add(&h, "{\"__metadata__\":{%s}", metadata);
    for (int i = 0; i < count; i++) {
        const Entry* e = &entries[i];
        text_add(&h, ",\"%s\":{\"dtype\":\"%s\",\"shape\":[", e->name, e->dtype);
        for (int d = 0; d < e->ndim; d++) text_add(&h, d ? ",%zu" : "%zu", e->shape[d]);
        text_add(&h, "],\"data_offsets\":[%zu,%zu]}", offset, offset + e->bytes);
        offset += e->bytes;
    }
    text_add(&h, "}");
    while (h.length % 8) text_add(&h, " ");
    Text name = {NULL, 0, 0};
    text_add(&name, "%s.tmp", path);
    errno = 0;
    FILE* f = fopen(name.chars, "wb");
    uint64_t length = h.length;
    int ok = f && fwrite(&length, 8, 1, f) == 1 && fwrite(h.chars, 1, h.length, f) == h.length;
    for (int i = 0; ok && i < count; i++) ok = fwrite(entries[i].data, 1, entries[i].bytes, f) == entries[i].bytes;
    ok = ok && fflush(f) == 0 && fsync(fileno(f)) == 0;
    int error = ok ? 0 : errno ? errno : EIO;
    if (f && fclose(f) != 0 && ok) error = errno;
    if (!error && rename(name.chars, path) != 0) error = errno;
    if (error && f) unlink(name.chars);
    free(name.chars);
    free(h.chars);
    return error;
}

// A file read whole: tensors point into `bytes`; metadata is pairs of key and value.
typedef struct { char* path; char* bytes; size_t size; Entry* entries; int count; char** metadata; int pairs; } SafeTensors;

// What is left of the header while it is parsed.
typedef struct { const char *at, *end, *path; } Json;
__attribute__((noreturn))
static void json_die(const Json* j, const char* what) { die("%s: not a sound safetensors file: %s in its header", j->path, what); }
static int json_next(Json* j, char c) {         // skips blanks; takes c if it comes next
    while (j->at < j->end && isspace((unsigned char)*j->at)) j->at++;
    if (j->at < j->end && *j->at == c) { j->at++; return 1; }
    return 0;
}
static void json_expect(Json* j, char c) {
    char what[] = "no 'x' where one must stand";
    what[4] = c;
    if (!json_next(j, c)) json_die(j, what);
}
static size_t json_number(Json* j) {
    size_t n = 0;
    json_next(j, '\0');
    if (j->at == j->end || !isdigit((unsigned char)*j->at)) json_die(j, "no number where one must stand");
    for (; j->at < j->end && isdigit((unsigned char)*j->at); j->at++) {
        if (n > (SIZE_MAX - 9) / 10) json_die(j, "a number past 64 bits");
        n = 10 * n + (*j->at - '0');
    }
    return n;
}
static char* json_string(Json* j) {             // mallocs
    Text t = {NULL, 0, 0};
    json_expect(j, '"');
    text_add(&t, "%s", "");
    while (j->at < j->end && *j->at != '"') {
        char c = *j->at++;
        if (c == '\\') {
            char e = j->at < j->end ? *j->at++ : 0;
            unsigned u = 0;
            if (e == 'u') {
                for (int i = 0; i < 4; i++, j->at++) {
                    if (j->at == j->end || !isxdigit((unsigned char)*j->at)) json_die(j, "a broken \\u escape");
                    u = 16 * u + (isdigit((unsigned char)*j->at) ? *j->at - '0' : (*j->at | 32) - 'a' + 10);
                }
                if (u >= 0x800) text_add(&t, "%c%c%c", 0xe0 | u >> 12, 0x80 | (u >> 6 & 63), 0x80 | (u & 63));
                else if (u >= 0x80) text_add(&t, "%c%c", 0xc0 | u >> 6, 0x80 | (u & 63));
                else if (u == 0) json_die(j, "a NUL");
                else text_add(&t, "%c", u);
                continue;
            }
            const char *from = "\"\\/bfnrt", *to = "\"\\/\b\f\n\r\t", *p = e ? strchr(from, e) : NULL;
            if (!p) json_die(j, "an unknown escape");
            c = to[p - from];
        }
        else if ((unsigned char)c < 32) json_die(j, "a control character inside a string");
        text_add(&t, "%c", c);
    }
    json_expect(j, '"');
    return t.chars;
}

// Reads and checks path. Dies, naming the file and what is wrong, unless every tensor lies inside the file and has as many
// bytes as its shape and dtype say.
static void safetensors_read(SafeTensors* s, const char* path) {
    memset(s, 0, sizeof *s);
    struct stat info;
    FILE* f = fopen(path, "rb");
    if (!f || fstat(fileno(f), &info) != 0) die("cannot open %s: %s", path, strerror(errno));
    if (!S_ISREG(info.st_mode)) die("%s is not a file: a checkpoint is a .safetensors file that this program wrote", path);
    s->size = info.st_size;
    s->path = strdup(path);
    s->bytes = (char*)malloc(s->size + 1);
    if (!s->bytes) die("not enough memory to read the %zu bytes of %s", s->size, path);
    if (fread(s->bytes, 1, s->size, f) != s->size) die("cannot read %s: %s", path, strerror(errno));
    fclose(f);
    uint64_t length = 0;
    if (s->size < 8) die("%s: not a safetensors file: it has only %zu bytes", path, s->size);
    memcpy(&length, s->bytes, 8);
    if (length > s->size - 8) die("%s: not a safetensors file, or cut off: its header would have %llu bytes, the file has %zu",
                                  path, (unsigned long long)length, s->size);
    const char* data = s->bytes + 8 + length;
    size_t data_bytes = s->size - 8 - length;
    Json j = { s->bytes + 8, data, path };
    json_expect(&j, '{');
    for (int first = 1; !json_next(&j, '}'); first = 0) {
        if (!first) json_expect(&j, ',');
        char* name = json_string(&j);
        json_expect(&j, ':');
        json_expect(&j, '{');
        if (!strcmp(name, "__metadata__")) {
            for (int first_pair = 1; !json_next(&j, '}'); first_pair = 0) {
                if (!first_pair) json_expect(&j, ',');
                s->metadata = (char**)realloc(s->metadata, (s->pairs + 1) * 2 * sizeof(char*));
                s->metadata[2 * s->pairs] = json_string(&j);
                json_expect(&j, ':');
                s->metadata[2 * s->pairs + 1] = json_string(&j);
                s->pairs++;
            }
            free(name);
            continue;
        }
        s->entries = (Entry*)realloc(s->entries, (s->count + 1) * sizeof(Entry));
        Entry* e = &s->entries[s->count++];
        memset(e, 0, sizeof *e);
        if (strlen(name) >= sizeof e->name) json_die(&j, "a name of more than 63 letters");
        for (const char* c = name; *c; c++) if ((unsigned char)*c < 32) json_die(&j, "a control character in a name");
        strcpy(e->name, name);
        size_t count = 1, start = 0, end = 0;
        for (int first_field = 1; !json_next(&j, '}'); first_field = 0) {
            if (!first_field) json_expect(&j, ',');
            char* field = json_string(&j);
            json_expect(&j, ':');
            if (!strcmp(field, "dtype")) {
                char* dtype = json_string(&j);
                snprintf(e->dtype, sizeof e->dtype, "%s", dtype);
                free(dtype);
            } else if (!strcmp(field, "shape")) {
                json_expect(&j, '[');
                for (; !json_next(&j, ']'); e->ndim++) {
                    if (e->ndim == 4) json_die(&j, "a tensor of more than 4 dimensions");
                    if (e->ndim) json_expect(&j, ',');
                    size_t n = e->shape[e->ndim] = json_number(&j);
                    if (n && count > SIZE_MAX / 8 / n) json_die(&j, "a shape too large for any memory");
                    count *= n;
                }
            } else if (!strcmp(field, "data_offsets")) {
                json_expect(&j, '[');
                start = json_number(&j);
                json_expect(&j, ',');
                end = json_number(&j);
                json_expect(&j, ']');
            } else json_die(&j, "an unknown field");
            free(field);
        }
        size_t width = !strcmp(e->dtype, "F64") || !strcmp(e->dtype, "I64") ? 8 : !strcmp(e->dtype, "F32") || !strcmp(e->dtype, "I32") ? 4
                     : !strcmp(e->dtype, "BF16") || !strcmp(e->dtype, "F16") ? 2 : 0;
        if (!width) die("%s: the dtype of tensor %s is none of F64 F32 F16 BF16 I64 I32", path, name);
        if (start > end || end > data_bytes) die("%s is cut off: tensor %s ends at byte %zu of %zu", path, name, end, data_bytes);
        e->bytes = end - start;
        if (e->bytes != count * width) die("%s: tensor %s has %zu bytes, its shape asks for %zu", path, name, e->bytes, count * width);
        e->data = data + start;
        free(name);
    }
    json_next(&j, '\0');
    while (j.at < j.end && *j.at == ' ') j.at++;
    if (j.at != j.end) json_die(&j, "something after the last brace");
}

static void safetensors_free(SafeTensors* s) {
    for (int i = 0; i < 2 * s->pairs; i++) free(s->metadata[i]);
    free(s->metadata); free(s->entries); free(s->bytes); free(s->path);
    memset(s, 0, sizeof *s);
}

// The value of a metadata key, or NULL.
static const char* safetensors_metadata(const SafeTensors* s, const char* key) {
    for (int i = 0; i < s->pairs; i++) if (!strcmp(s->metadata[2 * i], key)) return s->metadata[2 * i + 1];
    return NULL;
}

// Copies tensor `name` to out; dies if it is missing or not of this shape (cols 0: one dimension).
static void safetensors_copy(const SafeTensors* s, const char* name, real* out, size_t rows, size_t cols) {
    const Entry* e = NULL;
    for (int i = 0; i < s->count; i++) if (!strcmp(s->entries[i].name, name)) e = &s->entries[i];
    if (!e) die("%s has no tensor '%s'", s->path, name);
    if (strcmp(e->dtype, sizeof(real) == 4 ? "F32" : "F64")) die("%s: tensor %s is %s, not %s", s->path, name, e->dtype, sizeof(real) == 4 ? "F32" : "F64");
    if (e->ndim != (cols ? 2 : 1) || e->shape[0] != rows || (cols && e->shape[1] != cols)) {
        if (cols) die("%s: tensor %s is not of shape (%zu, %zu)", s->path, name, rows, cols);
        die("%s: tensor %s is not of shape (%zu)", s->path, name, rows);
    }
    memcpy(out, e->data, e->bytes);
}

// An entry for writing: a tensor of `rows` x `cols` (cols 0: one dimension) named prefix + name.
static Entry entry(const char* prefix, const char* name, size_t rows, size_t cols, const real* data) {
    Entry e;
    memset(&e, 0, sizeof e);
    snprintf(e.name, sizeof e.name, "%s%s", prefix, name);
    strcpy(e.dtype, sizeof(real) == 4 ? "F32" : "F64");
    e.ndim = cols ? 2 : 1;
    e.shape[0] = rows;
    e.shape[1] = cols;
    e.bytes = rows * (cols ? cols : 1) * sizeof(real);
    e.data = data;
    return e;
}
#endif
