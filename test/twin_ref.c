// twin_ref.c: train_X.c behind the names of twin.h, for test/twin.cu to be compared with.
//
//     cc -c -DTRAIN_FILE='"../train_harmonic.c"' -DMODEL_FILE='"models/harmonic.h"' test/twin_ref.c
#define TESTING
#include TRAIN_FILE
#include MODEL_FILE
#include "twin.h"

struct Ref { Model m; };

size_t ref_config_size(void) { return sizeof(Config); }
Ref* ref_build(const void* config, int B, int T) {
    Ref* r = (Ref*)calloc(1, sizeof(Ref));
    if (!r) die("not enough memory for a reference model");
    model_build(&r->m, (const Config*)config, B, T, 1);
    return r;
}
void ref_free(Ref* r) { model_free(&r->m); free(r); }
void ref_init(Ref* r, uint64_t seed) { model_init(&r->m, seed); }
int ref_tensors(const Ref* r) { return r->m.table.count; }
const char* ref_tensor_name(const Ref* r, int i) { return r->m.table.tensors[i].name; }
float* ref_tensor(Ref* r, int kind, const char* name, size_t* size) {
    for (int i = 0; i < r->m.table.count; i++) {
        const Tensor* t = &r->m.table.tensors[i];
        *size = t->size;
        if (!strcmp(t->name, name)) return (kind == REF_PARAM ? r->m.param_memory : r->m.grad_memory) + t->offset;
    }
    return NULL;
}
float* ref_state(Ref* r, int step, int i, size_t* size) {
    Acts* a = step ? &r->m.step : &r->m.acts;
    if (i >= a->states.count) return NULL;
    *size = a->states.tensors[i].size;
    return a->state_memory + a->states.tensors[i].offset;
}
double ref_forward(Ref* r, const int* tokens, const int* targets, int train) { return model_forward(&r->m, tokens, targets, train); }
void ref_backward(Ref* r) { model_backward(&r->m); }
void ref_zero_grad(Ref* r) { model_zero_grad(&r->m); }
void ref_counts(const Ref* r, size_t* counted, size_t* correct) { *counted = r->m.counted; *correct = r->m.correct; }
void ref_logits(Ref* r, size_t row, size_t n, float* out) { model_logits(&r->m, row, n, out); }
const float* ref_step(Ref* r, int token) { return model_step(&r->m, token); }
double ref_update(Ref* r, double lr, double weight_decay, double clip) { return model_update(&r->m, lr, weight_decay, clip); }

void ref_embedding_forward(float* x, const int* tokens, const float* wte, float scale, size_t rows, size_t C) { embedding_forward(x, tokens, wte, scale, rows, C); }
void ref_embedding_backward(float* dwte, const int* tokens, const float* dx, float scale, size_t rows, size_t C) { embedding_backward(dwte, tokens, dx, scale, rows, C); }
void ref_linear_forward(float* out, const float* inp, const float* w, const float* bias, size_t rows, size_t IC, size_t OC, size_t ldw, int add) {
    linear_forward(out, inp, w, bias, rows, IC, OC, ldw, add);
}
void ref_linear_backward(float* dinp, float* dw, float* dbias, const float* dout, const float* inp, const float* w, size_t rows, size_t IC, size_t OC, size_t ldw) {
    linear_backward(dinp, dw, dbias, dout, inp, w, rows, IC, OC, ldw);
}
double ref_head_loss(float* dy, float* dhead, const float* y, const float* head, const int* targets, double scale, size_t rows, size_t C, size_t V, size_t* counted, size_t* correct) {
    float* logits = (float*)allocate(smin(rows, HEAD_ROWS) * V * sizeof(float), "logits");
    double loss = head_loss(dy, dhead, y, head, targets, logits, scale, rows, C, V, counted, correct);
    free(logits);
    return loss;
}
#ifdef HAS_SILU
void ref_silu_forward(float* out, const float* z, size_t rows, size_t C) { silu_forward(out, z, rows, C); }
void ref_silu_backward(float* d, const float* z, size_t rows, size_t C) { silu_backward(d, z, rows, C); }
#endif
#ifdef HAS_LAYERNORM
void ref_layernorm_forward(float* out, float* mean, float* rstd, const float* x, const float* w, const float* b, size_t rows, size_t C) {
    layernorm_forward(out, mean, rstd, x, w, b, rows, C);
}
void ref_layernorm_backward(float* dx, float* dw, float* db, const float* dout, const float* x, const float* mean, const float* rstd, const float* w, size_t rows, size_t C) {
    layernorm_backward(dx, dw, db, dout, x, mean, rstd, w, rows, C);
}
#endif
#ifdef HAS_SCAN
void ref_scan_forward(float* s, const float* ga, const float* gb, const float* s0, double lo, double hi, size_t B, size_t T, size_t C) {
    scan_forward(s, ga, gb, s0, lo, hi, B, T, C);
}
void ref_scan_backward(float* dga, float* dgb, const float* ds, const float* s, const float* ga, const float* gb, const float* s0, double lo, double hi, size_t B, size_t T, size_t C) {
    scan_backward(dga, dgb, ds, s, ga, gb, s0, lo, hi, B, T, C);
}
#endif
