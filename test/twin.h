// twin.h: the C program as test/twin.cu sees it. train_X.c and train_X.cu define the same names, so they cannot be in one
// program as they are: test/twin_ref.c includes the .c and exports this, and twin.cu includes the .cu. `config` is a
// Config, which both declare alike.
#ifndef TWIN_H
#define TWIN_H
#include <stddef.h>
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif
// The model. Memories are the .c's: PARAM, GRAD of the table's tensors by name, STATE of the carried states by number.
enum { REF_PARAM, REF_GRAD };
typedef struct Ref Ref;
size_t ref_config_size(void);
Ref* ref_build(const void* config, int B, int T);
void ref_free(Ref* r);
void ref_init(Ref* r, uint64_t seed);
int ref_tensors(const Ref* r);
const char* ref_tensor_name(const Ref* r, int i);
float* ref_tensor(Ref* r, int kind, const char* name, size_t* size);            // NULL: no such tensor
float* ref_state(Ref* r, int step, int i, size_t* size);                        // step: 1 the one-token state; NULL past the last
double ref_forward(Ref* r, const int* tokens, const int* targets, int train);
void ref_backward(Ref* r);
void ref_zero_grad(Ref* r);
void ref_counts(const Ref* r, size_t* counted, size_t* correct);
void ref_logits(Ref* r, size_t row, size_t n, float* out);
const float* ref_step(Ref* r, int token);
double ref_update(Ref* r, double lr, double weight_decay, double clip);

// What models/X.h says: the configurations to try (NULL: there is no i-th), and of one of them what the checkers must know.
const char* ref_case(int i, void* config);
void ref_config_at(void* config, int vocab, int channels);
int ref_zero_by_structure(const void* config, const char* tensor, int T);
int ref_carries(const void* config);

// The layers, with the .c's own signatures.
void ref_embedding_forward(float* x, const int* tokens, const float* wte, float scale, size_t rows, size_t C);
void ref_embedding_backward(float* dwte, const int* tokens, const float* dx, float scale, size_t rows, size_t C);
void ref_linear_forward(float* out, const float* inp, const float* w, const float* bias, size_t rows, size_t IC, size_t OC, size_t ldw, int add);
void ref_linear_backward(float* dinp, float* dw, float* dbias, const float* dout, const float* inp, const float* w, size_t rows, size_t IC, size_t OC, size_t ldw);
double ref_head_loss(float* dy, float* dhead, const float* y, const float* head, const int* targets, double scale, size_t rows, size_t C, size_t V, size_t* counted, size_t* correct);
void ref_silu_forward(float* out, const float* z, size_t rows, size_t C);
void ref_silu_backward(float* d, const float* z, size_t rows, size_t C);
void ref_layernorm_forward(float* out, float* mean, float* rstd, const float* x, const float* w, const float* b, size_t rows, size_t C);
void ref_layernorm_backward(float* dx, float* dw, float* db, const float* dout, const float* x, const float* mean, const float* rstd, const float* w, size_t rows, size_t C);
void ref_rmsnorm_forward(float* out, float* rstd, const float* x, const float* w, size_t rows, size_t C);
void ref_rmsnorm_backward(float* dx, float* dw, const float* dout, const float* x, const float* rstd, const float* w, size_t rows, size_t C);
void ref_gelu_forward(float* out, const float* z, size_t rows, size_t C);
void ref_gelu_backward(float* d, const float* z, size_t rows, size_t C);
void ref_swiglu_forward(float* out, const float* z, const float* up, size_t rows, size_t C);
void ref_swiglu_backward(float* d, float* dup, const float* z, const float* up, size_t rows, size_t C);
void ref_positions_forward(float* x, const float* wpe, size_t past, size_t B, size_t T, size_t C);
void ref_positions_backward(float* dwpe, const float* dx, size_t B, size_t T, size_t C);
void ref_rope_table(float* table, size_t past, size_t T, size_t D);
void ref_rope(float* x, const float* table, int sign, size_t B, size_t T, size_t W, size_t heads, size_t D);
void ref_attention_forward(float* out, float* lse, const float* qkv, size_t window, size_t block, size_t B, size_t T, size_t H, size_t G, size_t D);
void ref_attention_backward(float* dqkv, float* delta, const float* dout, const float* out, const float* lse, const float* qkv, size_t window, size_t block, size_t B, size_t T, size_t H, size_t G, size_t D);
void ref_attention_step(float* out, const float* q, const float* cache, size_t room, size_t t, size_t first, size_t H, size_t G, size_t D);
void ref_linear_attention_forward(float* out, float* den, float* state, const float* qkv, size_t B, size_t T, size_t H, size_t G, size_t D);
void ref_linear_attention_backward(float* dqkv, float* state, const float* dout, const float* out, const float* den, const float* qkv, size_t B, size_t T, size_t H, size_t G, size_t D);
void ref_scan_forward(float* s, const float* ga, const float* gb, const float* s0, double lo, double hi, size_t B, size_t T, size_t C);
void ref_scan_backward(float* dga, float* dgb, const float* ds, const float* s, const float* ga, const float* gb, const float* s0, double lo, double hi, size_t B, size_t T, size_t C);
void ref_short_conv_forward(float* out, const float* x, const float* w, const float* bias, float* window, size_t B, size_t T, size_t C, size_t K);
void ref_short_conv_backward(float* dx, float* dw, float* dbias, const float* dout, const float* x, const float* w, size_t B, size_t T, size_t C, size_t K);
// Forward, then backward. state: in and out, or NULL. The two scans keep what they need in between to themselves.
void ref_selective_scan(float* y, float* state, float* dx, float* ddt, float* dbc, float* da_log, float* db_dt, float* dd, const float* dy, const float* x, const float* dt, const float* bc,
                        const float* a_log, const float* b_dt, const float* d, size_t L, size_t B, size_t T, size_t E, size_t N);
void ref_ssd(float* y, float* state, float* dxbc, float* ddt, float* da_log, float* db_dt, float* dd, const float* dy, const float* xbc, const float* dt,
             const float* a_log, const float* b_dt, const float* d, size_t L, size_t B, size_t T, size_t H, size_t P, size_t N);
void ref_long_conv(float* c, float* dp, float* dk, float* dd, const float* dc, const float* p, const float* k, const float* d, size_t B, size_t T, size_t C);
void ref_sine_forward(float* out, const float* x, const float* freq, size_t rows, size_t F);
void ref_sine_backward(float* d, float* dfreq, const float* x, const float* freq, size_t rows, size_t F);
void ref_filter_window(float* k, size_t first, size_t rows, size_t S, size_t C);
void ref_filter_positions(float* z, size_t first, size_t rows, size_t S, size_t emb);
#ifdef __cplusplus
}
#endif
#endif
