// A whole model in float64, written from the families' formulas. It reads every weight by its Hugging Face
// name and does not depend on how model/ packs, orders or recomputes, so that the tests compare two independent
// accounts of the same model.
#ifndef LCE_TESTS_REFERENCE_MODEL_H
#define LCE_TESTS_REFERENCE_MODEL_H

#include "model/model.h"

typedef struct {
  const ModelConfig *config; // the model's; must outlive this
  const Parameter *table;    // likewise: names and shapes
  int64_t count;             // of tensors
  double **values;           // values[i]: table[i]'s elements, row-major; a test may change them
} ReferenceModel;

// Copies the weights from the backend.
ReferenceModel reference_model_read(const Model *model, Backend *backend);
void reference_model_free(ReferenceModel *model);

// logits [N, V] of N = batch * seq_len tokens.
void reference_model_logits(const ReferenceModel *model, const int32_t *tokens, int64_t batch,
                            int64_t seq_len, double *logits);
// loss [N]; 0 where the target is IGNORE_INDEX.
void reference_model_losses(const ReferenceModel *model, const int32_t *tokens, const int32_t *targets,
                            int64_t batch, int64_t seq_len, double *loss);

// inv_freq [D / 2] of the rotary positions, scaled as Llama 3.1 does where the configuration says so.
void reference_rotary_frequencies(const ModelConfig *config, double *inv_freq);

#endif
