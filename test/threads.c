// threads.c: the same bits for any number of threads: losses, gradients and parameters over three AdamW steps, with 1, 2
// and 3 threads, under every flag; and once more on the same model, for bits that depend on what memory held before.
#include "model.h"

enum { B = 3, T = 23, STEPS = 3 };

// Three steps from the same start; a hash of all that came out.
static uint64_t three_steps(const Config* c, int threads) {
    Model m;
    uint64_t seed = 5, hashes[2 * STEPS + 1];
    int tokens[B * T], targets[B * T];
    set_threads(threads);
    flush_denormals();
    model_build(&m, c, B, T, 1);
    model_init(&m, 1);
    for (int k = 0; k < STEPS; k++) {
        draw_tokens(tokens, B * T, c->vocab, &seed);
        draw_tokens(targets, B * T, c->vocab, &seed);
        targets[k] = -1;
        model_zero_grad(&m);
        double loss = model_forward(&m, tokens, targets, 1);
        model_backward(&m);
        double norm = model_update(&m, 1e-3, 0.1, 1);
        if (!isfinite(loss) || !(norm > 0)) return rng_next(&(uint64_t){(uint64_t)(now() * 1e9)});     // equal to nothing
        hashes[2 * k] = hash_bits(&loss, sizeof loss);
        hashes[2 * k + 1] = hash_bits(m.grad_memory, m.table.total * sizeof(real));
    }
    hashes[2 * STEPS] = hash_bits(m.param_memory, m.table.total * sizeof(real));
    model_free(&m);
    return hash_bits(hashes, sizeof hashes);
}

int main(void) {
#ifndef _OPENMP
    printf("skipped: built without OpenMP, there is only one thread\n");
    check(1, "one thread");
    return check_report();
#else
    omp_set_dynamic(0);
    for (int i = 0; i < NUM_CASES; i++) {
        Config c = config_at(CASES[i].config, i == 0 ? 1301 : 301, BLOCK + 8);    // several blocks of rows, channels, vocabulary
        uint64_t one = three_steps(&c, 1), again = three_steps(&c, 1), two = three_steps(&c, 2), three = three_steps(&c, 3);
        check(one == two && one == three && one == again, "%s: %016llx with 1, 2 and 3 threads", CASES[i].name, (unsigned long long)one);
        if (i == 0) {
            c.vocab++;
            check(one != three_steps(&c, 1), "planted: another model gives other bits");
        }
    }
    return check_report();
#endif
}
