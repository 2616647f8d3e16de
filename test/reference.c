// reference.c: the train file's forward pass against the equations written out once more, in the model's header, as plainly
// as can be. A gradient check cannot see a forward pass that computes the wrong thing. Built like gradcheck.c.
#include "model.h"

int main(void) {
    enum { B = 2, T = 13 };
    for (int i = 0; i < NUM_CASES; i++) {
        Model m;
        Config c = CASES[i].config;
        uint64_t rng = 17 + i;
        int tokens[B * T], targets[B * T], V = c.vocab;
        model_build(&m, &c, B, T, 0);
        draw_parameters(&m, 0.5, &rng);
        draw_tokens(tokens, B * T, V, &rng);
        draw_tokens(targets, B * T, V, &rng);
        targets[4] = -1;
        double loss = model_forward(&m, tokens, targets, 0), want_loss = 0, worst = 0;
        real* got = (real*)allocate(B * T * V * sizeof(real), "a test");
        double* want = (double*)allocate(B * T * V * sizeof(double), "a test");
        model_logits(&m, 0, B * T, got);
        for (int b = 0; b < B; b++) reference_logits(&m, tokens + b * T, T, want + b * T * V);
        for (int r = 0; r < B * T; r++) {
            double sum = 0;
            for (int v = 0; v < V; v++) {
                double error = fabs(got[r * V + v] - want[r * V + v]);
                worst = worse(worst, error);
                sum += exp(want[r * V + v]);
            }
            if (targets[r] >= 0) want_loss += (log(sum) - want[r * V + targets[r]]) / (B * T - 1);
        }
        check(worst <= 1e-11 && fabs(loss - want_loss) <= 1e-11, "%s: logits differ by %.0e at most, losses %.6f and %.6f", CASES[i].name, worst, loss, want_loss);
        free(got);
        free(want);
        model_free(&m);
    }
    return check_report();
}
