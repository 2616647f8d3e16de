// dump_check.c: reads a file that --dump wrote, with a parser of its own that shares nothing with the one in dev/, and
// recomputes the loss from the dumped logits.
//
//     dump_check FILE.safetensors
#include "check.h"
#include <ctype.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct { char name[64], dtype[8]; size_t shape[4], start, end; int ndim; } Found;
static Found found[1000];
static int count = 0;
static unsigned char* bytes;
static size_t header, data_bytes;

// Everything between {"NAME":{ ... }, as plainly as it can be read: the header is ours and has no nested braces but these.
static int parse(const char* at) {
    if (*at++ != '{') return 0;
    while (*at == '"' || *at == ',') {
        if (*at == ',') at++;
        Found f = {0};
        int n = 0;
        if (sscanf(at, "\"%63[^\"]\":{%n", f.name, &n) != 1 || !n) return 0;
        at += n;
        const char* end = strchr(at, '}');
        if (!end) return 0;
        if (strcmp(f.name, "__metadata__") != 0) {
            const char *dtype = strstr(at, "\"dtype\":\""), *shape = strstr(at, "\"shape\":["), *offsets = strstr(at, "\"data_offsets\":[");
            if (!dtype || !shape || !offsets || offsets > end) return 0;
            sscanf(dtype, "\"dtype\":\"%7[^\"]", f.dtype);
            for (shape += 9; *shape != ']' && f.ndim < 4; shape += *shape == ',') f.shape[f.ndim++] = strtoull(shape, (char**)&shape, 10);
            if (sscanf(offsets, "\"data_offsets\":[%zu,%zu]", &f.start, &f.end) != 2 || count == 1000) return 0;
            found[count++] = f;
        }
        at = end + 1;
    }
    return *at == '}' && strspn(at + 1, " ") == strlen(at + 1);
}

static const Found* get(const char* name) {
    for (int i = 0; i < count; i++) if (!strcmp(found[i].name, name)) return &found[i];
    return NULL;
}
static const void* data(const Found* f) { return bytes + 8 + header + f->start; }

int main(int argc, char** argv) {
    FILE* f = argc == 2 ? fopen(argv[1], "rb") : NULL;
    if (!f) return fprintf(stderr, "usage: dump_check FILE.safetensors\n"), 2;
    fseek(f, 0, SEEK_END);
    size_t size = ftell(f);
    rewind(f);
    bytes = malloc(size + 1);
    if (!bytes || fread(bytes, 1, size, f) != size || size < 8) return fprintf(stderr, "cannot read %s\n", argv[1]), 2;
    fclose(f);
    for (int i = 7; i >= 0; i--) header = header << 8 | bytes[i];
    if (!check(header < size - 8 && header % 8 == 0, "a header of %zu bytes in a file of %zu", header, size)) return check_report();
    data_bytes = size - 8 - header;
    char* text = malloc(header + 1);
    memcpy(text, bytes + 8, header);
    text[header] = 0;
    if (!check(parse(text), "the header is sound: %d tensors", count)) return check_report();

    size_t covered = 0;
    int in_order = 1, sized = 1;
    for (int i = 0; i < count; i++) {
        size_t n = 4;
        for (int d = 0; d < found[i].ndim; d++) n *= found[i].shape[d];
        in_order &= found[i].start == covered;
        covered = found[i].end;
        sized &= found[i].end - found[i].start == n && (!strcmp(found[i].dtype, "F32") || !strcmp(found[i].dtype, "I32"));
    }
    check(in_order && covered == data_bytes, "the tensors follow one another and fill the file");
    check(sized, "every tensor has the bytes that its shape asks for");

    const Found *tokens = get("tokens"), *targets = get("targets"), *logits = get("logits"), *loss = get("loss");
    if (!check(tokens && targets && logits && loss, "tokens, targets, logits and loss are there")) return check_report();
    size_t B = tokens->shape[0], T = tokens->shape[1], V = logits->shape[2];
    check(tokens->ndim == 2 && targets->ndim == 2 && logits->ndim == 3 && targets->shape[0] == B && targets->shape[1] == T && logits->shape[0] == B
          && logits->shape[1] == T && !strcmp(tokens->dtype, "I32") && !strcmp(logits->dtype, "F32"), "their shapes: (%zu,%zu) and (%zu,%zu,%zu)", B, T, B, T, V);
    const int32_t *in = data(tokens), *out = data(targets);
    const float* z = data(logits);
    double sum = 0, counted = 0;
    int in_range = 1, shifted = 1;
    for (size_t r = 0; r < B * T; r++) {
        in_range &= in[r] >= 0 && in[r] < (int)V && out[r] >= -1 && out[r] < (int)V;
        shifted &= r % T == T - 1 || out[r] < 0 || out[r] == in[r + 1];
        if (!in_range || out[r] < 0) continue;
        double top = z[r * V], total = 0;
        for (size_t v = 0; v < V; v++) top = fmax(top, z[r * V + v]);
        for (size_t v = 0; v < V; v++) total += exp(z[r * V + v] - top);
        sum += log(total) + top - z[r * V + out[r]];
        counted++;
    }
    check(in_range && shifted, "tokens lie in [0, V), each target is the next token");
    double stated = *(const float*)data(loss);
    check(fabs(sum / counted - stated) <= 1e-5 * stated, "the loss from the logits, %.6f, is the loss stated, %.6f", sum / counted, stated);

    int parameters = 0, paired = 1, alive = 1;
    for (int i = 0; i < count; i++) {
        if (strncmp(found[i].name, "param.", 6) != 0) continue;
        char name[64];
        snprintf(name, sizeof name, "grad.%.58s", found[i].name + 6);
        const Found* g = get(name);
        parameters++;
        if (!g || g->ndim != found[i].ndim || memcmp(g->shape, found[i].shape, sizeof g->shape)) { paired = 0; continue; }
        double norm = 0;
        for (size_t k = 0; k < (g->end - g->start) / 4; k++) norm += ((const float*)data(g))[k] * ((const float*)data(g))[k];
        alive &= norm > 0 && isfinite(norm);
    }
    check(parameters > 3 && paired, "%d parameters, each with a gradient of its shape", parameters);
    check(alive, "every gradient is finite and not zero");
    free(text);
    free(bytes);
    return check_report();
}
