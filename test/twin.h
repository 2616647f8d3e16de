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
void ref_scan_forward(float* s, const float* ga, const float* gb, const float* s0, double lo, double hi, size_t B, size_t T, size_t C);
void ref_scan_backward(float* dga, float* dgb, const float* ds, const float* s, const float* ga, const float* gb, const float* s0, double lo, double hi, size_t B, size_t T, size_t C);
#ifdef __cplusplus
}
#endif
#endif
