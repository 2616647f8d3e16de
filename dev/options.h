// options.h: one table of options drives the command line, --help, presets, and what a checkpoint remembers of a run.
//
// The including file defines `static void die(const char* fmt, ...)` and includes dev/safetensors.h before this header.
// Its main calls options_parse once, with its table of options and its table of presets; both stay its own.
#ifndef OPTIONS_H
#define OPTIONS_H
#include <math.h>

// kind: i integer, f number, s text, e one of the words in `word` (the value is its place: an int), b a flag (0 or 1).
// keep: what a checkpoint does with it. M: part of the model. D: of the data's order, on which --resume insists.
//       R: --resume takes it over unless it is given anew. Blank: not kept.
// set:  by whom: 0 default, 1 the preset, 2 the command line, 3 a checkpoint.
typedef struct {
    const char* name;
    char kind, keep;
    void* value;                        // int*, double* or const char**
    double low, high;                   // i and f: the range
    const char *word, *normal, *help;   // what stands for the value in --help; the default; one line
    int set;
} Option;

// A preset is a set of flags under a name; flags on the command line win over it.
typedef struct { const char *name, *flags, *help; } Preset;

static Option* options = NULL;          // the table that options_parse was given
static int option_count = 0;

// The option of this name, or NULL.
static Option* option_find(const char* name) {
    for (int i = 0; i < option_count; i++) if (!strcmp(options[i].name, name)) return &options[i];
    return NULL;
}

// Was the option given on the command line?
static int option_given(const char* name) { return option_find(name)->set == 2; }

// An option's value as text, as the command line would give it.
static void option_text(const Option* o, char* out, size_t size) {
    if (o->kind == 'i' || o->kind == 'b') snprintf(out, size, "%d", *(int*)o->value);
    if (o->kind == 'f') snprintf(out, size, "%.17g", *(double*)o->value);
    if (o->kind == 's') snprintf(out, size, "%s", *(const char**)o->value);
    if (o->kind == 'e') {
        const char* w = o->word;
        for (int i = *(int*)o->value; i > 0; i--) w += strcspn(w, "|") + 1;
        snprintf(out, size, "%.*s", (int)strcspn(w, "|"), w);
    }
}

// Sets an option from text, which must outlive it. Dies with what the option takes; `source` says whose text it was.
static void option_set(Option* o, const char* text, int set, const char* source) {
    if (o->kind == 's') *(const char**)o->value = text;
    if (o->kind == 'i' || o->kind == 'f' || o->kind == 'b') {
        char* end;
        double x = strtod(text, &end), low = o->kind == 'b' ? 0 : o->low, high = o->kind == 'b' ? 1 : o->high;
        if (end == text || *end) die("%s--%s takes a number, not '%s'", source, o->name, text);
        if (o->kind != 'f' && x != floor(x)) die("%s--%s takes a whole number, not '%s'", source, o->name, text);
        if (!(x >= low && x <= high)) die("%s--%s takes %.10g to %.10g, not '%s'", source, o->name, low, high, text);
        if (o->kind == 'f') *(double*)o->value = x; else *(int*)o->value = (int)x;
    }
    if (o->kind == 'e') {
        int i = 0;
        const char* w = o->word;
        size_t n = strlen(text);
        while (strcspn(w, "|") != n || strncmp(w, text, n)) {
            w += strcspn(w, "|");
            if (!*w) die("%s--%s takes one of %s, not '%s'", source, o->name, o->word, text);
            w++;
            i++;
        }
        *(int*)o->value = i;
    }
    o->set = set;
}

// Letters to insert, delete or change between two words (Levenshtein): the nearest is what was meant.
static int option_distance(const char* a, const char* b) {
    int row[64], n = (int)strnlen(b, 63);
    for (int j = 0; j <= n; j++) row[j] = j;
    for (int i = 0; a[i]; i++) {
        int corner = row[0];
        row[0] = i + 1;
        for (int j = 0; j < n; j++) {
            int best = corner + (a[i] != b[j]);
            corner = row[j + 1];
            if (row[j] + 1 < best) best = row[j] + 1;
            if (corner + 1 < best) best = corner + 1;
            row[j + 1] = best;
        }
    }
    return row[n];
}

static void options_help(const char* program, const Preset* presets, int preset_count) {
    printf("usage: %s [--preset NAME] [flags]\n\n", program);
    for (int i = 0; i < option_count; i++) {
        char left[80];
        snprintf(left, sizeof left, "--%s %s", options[i].name, options[i].word);
        printf("  %-36s %s", left, options[i].help);
        printf(options[i].normal[0] ? " (%s)\n" : "\n", options[i].normal);
    }
    printf("\npresets:\n");
    for (int i = 0; i < preset_count; i++) printf("  %-14s %s\n  %14s %s\n", presets[i].name, presets[i].help, "", presets[i].flags);
}

// Sets every option: its default, over it the preset's flag, over it the command line's. --help prints and ends.
static void options_parse(Option* table, int count, const Preset* presets, int preset_count, int argc, char** argv) {
    options = table;
    option_count = count;
    const char* preset = "";
    for (int i = 0; i < count; i++) option_set(&table[i], table[i].kind == 'b' ? "0" : table[i].normal, 0, "");
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--help") || !strcmp(argv[i], "-h")) { options_help(argv[0], presets, preset_count); exit(0); }
        Option* o = !strncmp(argv[i], "--", 2) ? option_find(argv[i] + 2) : NULL;
        if (!o) {
            int near = 0;
            const char* word = argv[i] + strspn(argv[i], "-");
            for (int k = 1; k < count; k++) if (option_distance(word, table[k].name) < option_distance(word, table[near].name)) near = k;
            die("unknown flag '%s'; did you mean --%s? (--help lists all)", argv[i], table[near].name);
        }
        if (o->kind != 'b' && i + 1 == argc) die("--%s needs a value: %s", o->name, o->word);
        option_set(o, o->kind == 'b' ? "1" : argv[++i], 2, "");
        if (!strcmp(o->name, "preset")) preset = argv[i];
    }
    if (!preset[0]) return;
    int k = 0, near = 0;
    while (k < preset_count && strcmp(presets[k].name, preset)) k++;
    if (k == preset_count) {
        for (k = 1; k < preset_count; k++) if (option_distance(preset, presets[k].name) < option_distance(preset, presets[near].name)) near = k;
        die("unknown preset '%s'; did you mean %s? (--help lists all)", preset, presets[near].name);
    }
    char *flags = strdup(presets[k].flags), *rest = flags, *name;       // stays: text options point into it
    while ((name = strtok_r(rest, " ", &rest))) {
        Option* o = option_find(name + 2);
        const char* value = o->kind == 'b' ? "1" : strtok_r(rest, " ", &rest);
        if (o->set == 0) option_set(o, value, 1, "preset: ");
    }
}

// Appends every option that a checkpoint keeps, as ,"name":"value".
static void options_remember(Text* metadata) {
    for (int i = 0; i < option_count; i++) if (options[i].keep != ' ') {
        char value[4096];
        option_text(&options[i], value, sizeof value);
        text_add(metadata, ",\"%s\":", options[i].name);
        text_add_json(metadata, value);
    }
}

// Takes over what checkpoint s of `program` remembers: the model and its tokenizer (ADOPT_MODEL), with them the shape of its
// batches (ADOPT_SHAPE, to evaluate it as it was trained), or the whole run (ADOPT_RUN). A flag that contradicts what cannot
// change is an error. s must outlive the options.
enum { ADOPT_MODEL, ADOPT_SHAPE, ADOPT_RUN };
static void options_adopt(const SafeTensors* s, const char* program, int what) {
    const char* wrote = safetensors_metadata(s, "program");
    if (!wrote || strcmp(wrote, program))
        die("%s is not a checkpoint of this program: its metadata says program '%s', not '%s'", s->path, wrote ? wrote : "", program);
    char source[512], given[4096];
    snprintf(source, sizeof source, "%s: ", s->path);
    for (int i = 0; i < option_count; i++) {
        Option* o = &options[i];
        const char* kept = safetensors_metadata(s, o->name);
        int shape = !strcmp(o->name, "batch") || !strcmp(o->name, "seq"), fixed = what == ADOPT_RUN && o->keep == 'D';
        if (o->keep == ' ') continue;
        if (what != ADOPT_RUN && o->keep != 'M' && strcmp(o->name, "tokenizer") && !(what == ADOPT_SHAPE && shape)) continue;
        if (!kept) die("%s does not say its --%s", s->path, o->name);
        option_text(o, given, sizeof given);
        int differs = strcmp(given, kept) != 0;
        if (o->keep == 'M' && o->set == 1 && differs) die("%s has --%s %s, the preset %s: leave --preset out", s->path, o->name, kept, given);
        if (o->keep == 'M' && o->set == 2 && differs) die("%s has --%s %s, not %s", s->path, o->name, kept, given);
        if (fixed && o->set == 2 && differs)
            die("%s has --%s %s, not %s (--init FILE starts a new run from its weights)", s->path, o->name, kept, given);
        if (o->set < 2) option_set(o, kept, 3, source);
    }
}
#endif
