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
const char* ref_case(int i, void* config) {
    if ((size_t)i >= sizeof CASES / sizeof CASES[0]) return NULL;
    memcpy(config, &CASES[i].config, sizeof(Config));
    return CASES[i].name;
}
void ref_config_at(void* config, int vocab, int channels) {
    Config c = config_at(*(Config*)config, vocab, channels);
    memcpy(config, &c, sizeof c);
}
int ref_zero_by_structure(const void* config, const char* tensor, int T) { return zero_by_structure((const Config*)config, tensor, T); }
int ref_carries(const void* config) { return carries((const Config*)config); }
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
#ifdef HAS_RMSNORM
void ref_rmsnorm_forward(float* out, float* rstd, const float* x, const float* w, size_t rows, size_t C) { rmsnorm_forward(out, rstd, x, w, rows, C); }
void ref_rmsnorm_backward(float* dx, float* dw, const float* dout, const float* x, const float* rstd, const float* w, size_t rows, size_t C) { rmsnorm_backward(dx, dw, dout, x, rstd, w, rows, C); }
#endif
#ifdef HAS_GELU
void ref_gelu_forward(float* out, const float* z, size_t rows, size_t C) { gelu_forward(out, z, rows, C); }
void ref_gelu_backward(float* d, const float* z, size_t rows, size_t C) { gelu_backward(d, z, rows, C); }
#endif
#ifdef HAS_SWIGLU
void ref_swiglu_forward(float* out, const float* z, const float* up, size_t rows, size_t C) { swiglu_forward(out, z, up, rows, C); }
void ref_swiglu_backward(float* d, float* dup, const float* z, const float* up, size_t rows, size_t C) { swiglu_backward(d, dup, z, up, rows, C); }
#endif
#ifdef HAS_POSITIONS
void ref_positions_forward(float* x, const float* wpe, size_t past, size_t B, size_t T, size_t C) { positions_forward(x, wpe, past, B, T, C); }
void ref_positions_backward(float* dwpe, const float* dx, size_t B, size_t T, size_t C) { positions_backward(dwpe, dx, B, T, C); }
#endif
#ifdef HAS_ATTENTION
void ref_rope_table(float* table, size_t past, size_t T, size_t D) { rope_table(table, past, T, D); }
void ref_rope(float* x, const float* table, int sign, size_t B, size_t T, size_t W, size_t heads, size_t D) { rope(x, table, sign, B, T, W, heads, D); }
void ref_attention_forward(float* out, float* lse, const float* qkv, size_t window, size_t block, size_t B, size_t T, size_t H, size_t G, size_t D) { attention_forward(out, lse, qkv, window, block, B, T, H, G, D); }
void ref_attention_backward(float* dqkv, float* delta, const float* dout, const float* out, const float* lse, const float* qkv, size_t window, size_t block, size_t B, size_t T, size_t H, size_t G, size_t D) { attention_backward(dqkv, delta, dout, out, lse, qkv, window, block, B, T, H, G, D); }
void ref_attention_step(float* out, const float* q, const float* cache, size_t room, size_t t, size_t first, size_t H, size_t G, size_t D) { attention_step(out, q, cache, room, t, first, H, G, D); }
void ref_linear_attention_forward(float* out, float* den, float* state, const float* qkv, size_t B, size_t T, size_t H, size_t G, size_t D) { linear_attention_forward(out, den, state, qkv, B, T, H, G, D); }
void ref_linear_attention_backward(float* dqkv, float* state, const float* dout, const float* out, const float* den, const float* qkv, size_t B, size_t T, size_t H, size_t G, size_t D) { linear_attention_backward(dqkv, state, dout, out, den, qkv, B, T, H, G, D); }
#endif
#ifdef HAS_SCAN
void ref_scan_forward(float* s, const float* ga, const float* gb, const float* s0, double lo, double hi, size_t B, size_t T, size_t C) {
    scan_forward(s, ga, gb, s0, lo, hi, B, T, C);
}
void ref_scan_backward(float* dga, float* dgb, const float* ds, const float* s, const float* ga, const float* gb, const float* s0, double lo, double hi, size_t B, size_t T, size_t C) {
    scan_backward(dga, dgb, ds, s, ga, gb, s0, lo, hi, B, T, C);
}
#endif
#ifdef HAS_SHORT_CONV
void ref_short_conv_forward(float* out, const float* x, const float* w, const float* bias, float* window, size_t B, size_t T, size_t C, size_t K) {
    short_conv_forward(out, x, w, bias, window, B, T, C, K);
}
void ref_short_conv_backward(float* dx, float* dw, float* dbias, const float* dout, const float* x, const float* w, size_t B, size_t T, size_t C, size_t K) {
    short_conv_backward(dx, dw, dbias, dout, x, w, B, T, C, K);
}
#endif
#ifdef HAS_SELECTIVE_SCAN
void ref_selective_scan(float* y, float* state, float* dx, float* ddt, float* dbc, float* da_log, float* db_dt, float* dd, const float* dy, const float* x, const float* dt, const float* bc,
                        const float* a_log, const float* b_dt, const float* d, size_t L, size_t B, size_t T, size_t E, size_t N) {
    float* starts = (float*)allocate(B * num_chunks(T, L) * N * E * sizeof(float), "a scan");
    float* work = (float*)allocate(scan_work(L, B, E, N) * sizeof(float), "a scan");
    selective_scan_forward(y, starts, x, dt, bc, a_log, b_dt, d, state, L, B, T, E, N);
    selective_scan_backward(dx, ddt, dbc, da_log, db_dt, dd, dy, x, dt, bc, starts, a_log, b_dt, d, work, L, B, T, E, N);
    free(starts); free(work);
}
#endif
#ifdef HAS_SSD
void ref_ssd(float* y, float* state, float* dxbc, float* ddt, float* da_log, float* db_dt, float* dd, const float* dy, const float* xbc, const float* dt,
             const float* a_log, const float* b_dt, const float* d, size_t L, size_t B, size_t T, size_t H, size_t P, size_t N) {
    float* states = (float*)allocate(B * (num_chunks(T, L) + 1) * H * N * P * sizeof(float), "a scan");
    float* work = (float*)allocate(ssd_work(L, B, T, H, P, N) * sizeof(float), "a scan");
    ssd_forward(y, states, xbc, dt, a_log, b_dt, d, state, L, B, T, H, P, N);
    ssd_backward(dxbc, ddt, da_log, db_dt, dd, dy, states, xbc, dt, a_log, b_dt, d, work, L, B, T, H, P, N);
    free(states); free(work);
}
#endif
#ifdef HAS_LONG_CONV
void ref_long_conv(float* c, float* dp, float* dk, float* dd, const float* dc, const float* p, const float* k, const float* d, size_t B, size_t T, size_t C) {
    size_t N = fft_length(T);
    float* tw = (float*)allocate(2 * N * sizeof(float), "twiddles");
    fft_twiddles(tw, N);
    long_conv_forward(c, p, k, d, tw, N, B, T, C);
    long_conv_backward(dp, dk, dd, dc, p, k, d, tw, N, B, T, C);
    free(tw);
}
void ref_sine_forward(float* out, const float* x, const float* freq, size_t rows, size_t F) { sine_forward(out, x, freq, rows, F); }
void ref_sine_backward(float* d, float* dfreq, const float* x, const float* freq, size_t rows, size_t F) { sine_backward(d, dfreq, x, freq, rows, F); }
void ref_filter_window(float* k, size_t first, size_t rows, size_t S, size_t C) { filter_window(k, first, rows, S, C); }
void ref_filter_positions(float* z, size_t first, size_t rows, size_t S, size_t emb) { filter_positions(z, first, rows, S, emb); }
#endif
