// model.h: one train_*.c, taken whole into a checker, with what every checker needs around it. The checkers are written
// once and compiled once per model; they use only what all the train files have in common: Config, Model, the tables of
// tensors, and model_build, model_init, model_forward, model_backward, model_logits, model_step, model_reset, model_update.
//
//     cc -DTRAIN_FILE='"../train_harmonic.c"' -DMODEL_FILE='"models/harmonic.h"' test/gradcheck.c
#ifndef MODEL_H
#define MODEL_H
#include <float.h>
#define TESTING                 // leaves out the train file's main
#include TRAIN_FILE

// The parameter of this name, as printf would write it; ends the program if the model has none.
__attribute__((format(printf, 2, 3)))
static const real* named(const Model* m, const char* format, ...) {
    char name[64];
    va_list args;
    va_start(args, format);
    vsnprintf(name, sizeof name, format, args);
    va_end(args);
    for (int i = 0; i < m->table.count; i++)
        if (!strcmp(m->table.tensors[i].name, name)) return m->param_memory + m->table.tensors[i].offset;
    die("the model has no parameter '%s'", name);
}

#include MODEL_FILE
#include "check.h"

enum { NUM_CASES = sizeof CASES / sizeof CASES[0] };

static double norm_of(const real* x, size_t n) {
    double sum = 0;
    for (size_t i = 0; i < n; i++) sum += (double)x[i] * x[i];
    return sqrt(sum);
}

// ‖a - b‖ / ‖b‖. NaN, or a zero b against which nothing can be judged, gives NaN, which fails every check.
static double relative_error(const real* a, const real* b, size_t n) {
    double sum = 0;
    for (size_t i = 0; i < n; i++) sum += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
    return sqrt(sum) / norm_of(b, n);
}

// The largest |a - b|, relative to b's root mean square.
static double largest_error(const real* a, const real* b, size_t n) {
    double worst = 0;
    for (size_t i = 0; i < n; i++) {
        double d = fabs((double)a[i] - b[i]);
        worst = worse(worst, d);
    }
    return worst / (norm_of(b, n) / sqrt((double)n));
}

static int same_bits(const real* a, const real* b, size_t n) { return memcmp(a, b, n * sizeof(real)) == 0; }

static real* copy_of(const real* x, size_t n) { return (real*)memcpy(allocate(n * sizeof(real), "a copy"), x, n * sizeof(real)); }

// n numbers from N(0, deviation)
static void draw(real* x, size_t n, double deviation, uint64_t* rng) {
    for (size_t i = 0; i < n; i++) x[i] = deviation * rng_normal(rng);
}

static void draw_tokens(int* tokens, size_t n, int vocab, uint64_t* rng) {
    for (size_t i = 0; i < n; i++) tokens[i] = rng_next(rng) % vocab;
}

// Sets all parameters to N(0, deviation): no bias, norm or weight stays at 0 or 1, where mistakes could hide.
static void draw_parameters(Model* m, double deviation, uint64_t* rng) {
    for (int i = 0; i < m->table.count; i++) draw(m->param_memory + m->table.tensors[i].offset, m->table.tensors[i].size, deviation, rng);
}

// Sets every carried state to N(0, 0.3). The same seed gives the same states.
static void draw_states(Acts* a, uint64_t seed) {
    for (int i = 0; i < a->states.count; i++) draw(a->state_memory + a->states.tensors[i].offset, a->states.tensors[i].size, 0.3, &seed);
}

// The command line with nothing on it: what options_adopt, which reads a checkpoint's own, must find.
static void no_options(void) {
    char* argv[] = {"test", NULL};
    options_parse(option_table, sizeof option_table / sizeof *option_table, presets, sizeof presets / sizeof *presets, 1, argv);
}

static void set_threads(int n) {
#ifdef _OPENMP
    omp_set_num_threads(n);
#else
    (void)n;
#endif
}

// A hash of all bits of n numbers (FNV-1a, 64 bits).
static uint64_t hash_bits(const void* x, size_t bytes) {
    uint64_t h = 0xcbf29ce484222325;
    for (size_t i = 0; i < bytes; i++) h = (h ^ ((const unsigned char*)x)[i]) * 0x100000001b3;
    return h;
}
#endif
