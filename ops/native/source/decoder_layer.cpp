// The two halves of a decoder layer around its attention, each one call: with few rows, the calls themselves are what
// takes time beside reading the weights.
#include "kernels.h"
#include "scratch.h"

using namespace ucm;

namespace {

struct Weight {
    const float *panels, *bias;
    int64_t in, outputs, width;

    void multiply(const float* x, int64_t x_stride, float* out, int64_t rows) const {
        ucm_linear(x, x_stride, panels, bias, out, rows, in, outputs, width);
    }
};

struct Layer {
    const float *input_norm, *output_norm;
    float input_eps, output_eps;
    Weight qkv, attention_out, gate_up, down;
    int64_t heads, kv_heads, head_size;
    const float* angles;
    int64_t max_position, rotary_size;
};

thread_local Scratch scratch;

}  // namespace

// residual += hidden; qkv [rows, qkv.outputs] = its norm times the weight, query and key rotated. -1, or the first row
// whose position has no angles: then qkv is not valid.
extern "C" int64_t ucm_before_attention(
    const Layer* layer, const float* hidden, int64_t hidden_stride, float* residual, int64_t residual_stride,
    const int64_t* positions, int64_t rows, float* qkv) {
    const int64_t size = layer->qkv.in, outputs = layer->qkv.outputs;
    float* normed = scratch.take(rows * size);
    ucm_rms_norm(hidden, hidden_stride, residual, residual_stride, layer->input_norm, normed, rows, size,
                 layer->input_eps);
    layer->qkv.multiply(normed, size, qkv, rows);
    return ucm_rotary(qkv, outputs, layer->heads, qkv + layer->heads * layer->head_size, outputs, layer->kv_heads,
                      positions, rows, layer->angles, layer->max_position, layer->head_size, layer->rotary_size);
}

// residual += projected attention; out [rows, size] = the feed-forward network of its norm.
extern "C" void ucm_after_attention(
    const Layer* layer, const float* attention, int64_t attention_stride, float* residual, int64_t residual_stride,
    int64_t rows, float* out) {
    const int64_t size = layer->attention_out.outputs, inner = layer->down.in;
    float* projected = scratch.take(rows * (2 * size + 3 * inner));
    float *normed = projected + rows * size, *gates = normed + rows * size, *gated = gates + rows * 2 * inner;
    layer->attention_out.multiply(attention, attention_stride, projected, rows);
    ucm_rms_norm(projected, size, residual, residual_stride, layer->output_norm, normed, rows, size,
                 layer->output_eps);
    layer->gate_up.multiply(normed, size, gates, rows);
    ucm_silu_and_mul(gates, 2 * inner, gated, rows, inner);
    layer->down.multiply(gated, inner, out, rows);
}
