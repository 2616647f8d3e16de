// learn.c: does it learn? Each model on the bytes of this very file, and on the generated tasks, for a few seconds. The
// bounds, in the model's header, leave room for three standard deviations over seeds. What is subtly wrong in a gradient
// is for gradcheck.c to find: much can be learned with a bad one.
//
//     learn          the test, seed 1
//     learn SEED     the figures for another seed, to set the bounds by
#include "model.h"

// steps of AdamW on batches from next(); returns the loss in nats over the last tenth, and the accuracy there.
static double learn(Model* m, void (*next)(Model*), int* tokens, int* targets, int steps, double lr, double* accuracy) {
    double sum = 0, correct = 0, counted = 0;
    for (int k = 1; k <= steps; k++) {
        next(m);
        model_reset(&m->acts, NULL);
        model_zero_grad(m);
        double loss = model_forward(m, tokens, targets, 1);
        model_backward(m);
        model_update(m, lr * (k < steps / 10 ? 10.0 * k / steps : 0.5 + 0.5 * cos(3.14159 * k / steps)), 0.1, 1);
        if (k > steps - steps / 10) sum += loss / (steps / 10), correct += m->correct, counted += m->counted;
    }
    *accuracy = correct / counted;
    return sum;
}

static DataLoader loader;
static void next_task(Model* m) { (void)m; loader_next(&loader); }

static unsigned char text[1 << 16];
static size_t length;
static uint64_t rng;
static int tokens[1 << 12], targets[1 << 12];
static void next_text(Model* m) {           // rows that start anywhere
    for (int b = 0; b < m->B; b++) {
        size_t start = rng_next(&rng) % (length - m->T);
        for (int t = 0; t < m->T; t++) tokens[b * m->T + t] = text[start + t], targets[b * m->T + t] = text[start + t + 1];
    }
}

// Bits per byte of the best that one can do with the byte before alone, having counted this very text.
static double pair_entropy(void) {
    static int pairs[256][256], firsts[256];
    for (size_t i = 0; i + 1 < length; i++) pairs[text[i]][text[i + 1]]++, firsts[text[i]]++;
    double bits = 0;
    for (int a = 0; a < 256; a++) for (int b = 0; b < 256; b++)
        if (pairs[a][b]) bits -= pairs[a][b] * log2((double)pairs[a][b] / firsts[a]) / (length - 1);
    return bits;
}

int main(int argc, char** argv) {
    int seed = argc > 1 ? atoi(argv[1]) : 1;
    set_threads(1);             // models this small only lose by a second one
    flush_denormals();
    double accuracy, loss;
    Model m;

    FILE* f = fopen(__FILE__, "rb");
    if (!f) die("cannot open %s, which this test learns to write: run it in the folder where it was built", __FILE__);
    length = fread(text, 1, sizeof text, f);
    fclose(f);
    Config c = config_at(LEARN[0].config, 256, LEARN[0].config.channels);
    model_build(&m, &c, 8, 64, 1);
    model_init(&m, seed);
    rng = seed;
    double start = now();
    loss = learn(&m, next_text, tokens, targets, LEARN[0].steps, LEARN[0].lr, &accuracy) / log(2);
    check(loss <= LEARN[0].bound && loss < pair_entropy(), "the %zu bytes of %s: %.3f bits/byte (bound %.2f; knowing only the byte before, and the text: %.3f), %.1f s",
          length, __FILE__, loss, LEARN[0].bound, pair_entropy(), now() - start);
    model_free(&m);

    for (size_t i = 1; i < sizeof LEARN / sizeof LEARN[0]; i++) {
        c = LEARN[i].config;
        config_describe(&c);
        printf("\n");
        model_build(&m, &c, 32, LEARN[i].seq, 1);
        model_init(&m, seed);
        loader_task(&loader, LEARN[i].task, 32, LEARN[i].seq, c.vocab, seed);
        start = now();
        loss = learn(&m, next_task, loader.tokens, loader.targets, LEARN[i].steps, LEARN[i].lr, &accuracy);
        check(accuracy >= LEARN[i].bound, "%s, %d tokens of %d: accuracy %.3f (bound %.2f), %.1f s", LEARN[i].task, LEARN[i].seq, c.vocab, accuracy, LEARN[i].bound, now() - start);
        loader_free(&loader);
        model_free(&m);
    }
    return check_report();
}
