// A training run on one backend: the model, its optimizer, the batch, and a step's work with them.
#pragma once

#include <signal.h>

#include "data/loader.h"
#include "model/checkpoint/weights.h"
#include "model/transformer.h"
#include "trainer/options.h"

enum { TRAINER_PENDING = 64 }; // steps whose results may wait on the device for trainer_collect

// The loss's outputs whose mean a run logs: X(name, the one of TOKEN_OUTPUTS, wanted, its table's name).
#define LOGGED_OUTPUTS(X)                                                                                    \
  X(z_loss, token_z_loss, o->pass.terms.z_loss > 0, "z-losses")                                              \
  X(accuracy, correct, o->metrics, "right predictions")                                                      \
  X(entropy, entropy, o->metrics, "entropies")                                                               \
  X(max_logit, max_logit, o->metrics, "largest logits")

// The results of a step; all but the norm are summed over the ranks in one all-reduce.
enum {
  RESULT_LOSS,
#define RESULT(name, ...) RESULT_##name,
  LOGGED_OUTPUTS(RESULT) RESULT_TILES_DROPPED,
  RESULT_TILES,
  RESULT_MASS_DROPPED,
  RESULT_STATISTICS, // number of results above
  RESULT_STOP = RESULT_STATISTICS,
  RESULT_SECONDS,
  RESULT_NORM,
  RESULTS
#undef RESULT
};

typedef struct {
  int64_t step, counted; // from 0; counted targets
  double grad_norm, learning_rate;
  // Means over the counted targets, in nats, by RESULT_...: 0 where none counted (skip_empty_step), NaN where
  // they are not requested.
  union {
    struct {
      double loss;
#define MEMBER(name, ...) double name;
      LOGGED_OUTPUTS(MEMBER)
#undef MEMBER
      double dropped_tiles, unused, dropped_mass; // --lce-sample: shares of the tiles and of the probability
    };
    double means[RESULT_STATISTICS];
  };
} StepResult;

typedef struct Trainer {
  const Options *options; // the caller's, like the backend; both must outlive the trainer
  Backend *backend;
  Model model;
  TransformerOptions transformer;
  // On the device, reserved once: the micro-batch, its losses, and scalars.
  Tensor tokens, targets, positions, documents, loss;
  Tensor statistics[RESULT_STATISTICS]; // of the micro-batch, if requested: views
  Tensor squares, scale;                // fp32 [1]: the gradients' sum of squares, the clip factor
  Tensor results; // fp32, of each pending step: sums of the statistics, and the gradient norm
  // On the host: the whole step's tokens and targets.
  int32_t *host_tokens, *host_targets, *host_positions, *host_documents;
  int64_t *host_max_counted; // of each micro-batch: counted targets, the maximum over the ranks
  StepResult pending[TRAINER_PENDING];
  int pending_count;
  int64_t skipped; // steps so far without a target that counts, those before a resume included: the caller's
  int32_t *token_bytes; // prompt_token_bytes of the validation data, or NULL; owned, set after trainer_create
  double bits_per_byte; // of the last validation: its losses in bits over its tokens' bytes; NaN: not known
  bool cut_short;       // the last validation, by a signal
  // Called with `observer` as a validation goes on: batches done, of how many, and their loss; NULL: nothing is.
  void (*on_validated)(void *observer, int64_t done, int64_t batches, double loss);
  void *observer;
  // Exchanged at each step; unused with one rank.
  const volatile sig_atomic_t *stop; // not 0 once a signal asks to stop; NULL: none does
  double step_seconds;
  bool stopping;         // some rank got such a signal
  double agreed_seconds; // of a step, the mean over the ranks
  double wire_bytes;     // sent by this rank in the last step
} Trainer;

// Reserves weights, gradients, moments and tables on the backend (a plan's too), and reads the first weights
// from options->origin or draws them. Fails if the (resolved) options, the memory or the files do not allow
// it.
void trainer_create(Trainer *trainer, const Options *options, Backend *backend);
void trainer_destroy(Trainer *trainer);

// In train.c: the learning rate of a step, counted from 0; after the last one it stays as it is.
double schedule_rate(const Options *options, int64_t step);
// In train.c: an optimizer step on the loader's batches (a plan has no loader). Asynchronous: up to
// TRAINER_PENDING results wait on the device.
typedef void TrainStep(Trainer *trainer, const Loader *loader, int64_t step);
TrainStep train_step;

// --- the parts of train.c's step ---------------------------------------------------------------------------

// Around all else of a step. `result` has what the host knows; trainer_collect adds what the device computed.
void trainer_begin_step(Trainer *trainer);
void trainer_end_step(Trainer *trainer, StepResult result);
// If no target counts, ends the step without a loss and without an update. All ranks agree.
bool skip_empty_step(Trainer *trainer, int64_t step, int64_t counted);
// Reads this rank's micro-batches of the step; returns how many targets count in all ranks'. A plan has no
// loader, and all count.
int64_t trainer_load(Trainer *trainer, const Loader *loader, int64_t step);
// Copies micro-batch m to the device; in a plan it has only its shape. `masked` lists the positions of the
// targets that count, then the ignored ones: the loss is computed for the former.
Batch trainer_micro_batch(Trainer *trainer, int64_t m);
Batch trainer_copy_batch(Trainer *trainer, int64_t m, bool masked);
// Settings of transformer_train for micro-batch m of the step: with gradients summed over the ranks.
TransformerOptions pass_options(Trainer *trainer, int64_t step, int64_t m);
// Every options->verify_every steps: runs the first pass, which has just ended, again. Fails if a loss or a
// gradient differs in a bit; else all is as before.
void trainer_verify(Trainer *trainer, int64_t step, const Batch *batch, const TransformerOptions *pass,
                    float scale);
// Sums the statistics of the micro-batch (its losses, ...) to the step's results, and these over the ranks.
void trainer_add_statistics(Trainer *trainer, bool accumulate);
void trainer_share_results(Trainer *trainer);
// The place on the device of a result of the step under way, by RESULT_...: fp32 [1].
Tensor trainer_result(const Trainer *trainer, int which);

// --- between steps: call these on all ranks ----------------------------------------------------------------

// Waits for the pending steps and writes their results; returns how many.
int trainer_collect(Trainer *trainer, StepResult results[TRAINER_PENDING]);
// --dump: writes first-step/first_step.safetensors: tokens, targets and loss [B, T] and "grad.NAME" of every
// weight, before clipping, of the last step, which had one micro-batch on one rank.
void trainer_dump(const Trainer *trainer);
// The mean loss over `batches` validation batches (0: all), spread evenly over all, in nats per counted
// token: the same number whatever the number of ranks, which share them. Sets bits_per_byte, and cut_short if
// a signal to a rank cuts it short (NaN).
double trainer_validate(Trainer *trainer, const Loader *loader, int64_t batches);
// Continues `prompt` by options->generation.max_new_tokens tokens, drawn with `seed`. The caller frees the
// tokens (prompt included); *count receives how many. All ranks but rank 0 get NULL.
int32_t *trainer_sample(Trainer *trainer, const int32_t *prompt, int64_t prompt_count, uint64_t seed,
                        int64_t *count);
// Forward and backward of the micro-batch on the device, without an update; the gradients are overwritten.
void trainer_gradient_pass(Trainer *trainer);

// --- the machine that a run computes on --------------------------------------------------------------------

// Not 0 once a signal asks the run to stop; it then saves its weights.
extern volatile sig_atomic_t stop_requested;
void stop_on_signals(void);
// Ends the program by the signal that stopped the run, if one did: a shell's loop of runs ends with it.
void end_by_signal(void);

// Creates the backend that the options select, and resolves their dtypes. Without a GPU --device cuda fails,
// and --device auto prints why none is used. The caller destroys it.
Backend *machine_open(Options *options);
// Sends rank 0's bytes (a multiple of 4) to all ranks, through the backend's stack.
void machine_broadcast(Backend *backend, void *bytes, size_t count);

// Bytes that the ledger may use: the device's memory less the backend's own; 0: unknown.
size_t machine_usable_bytes(const Backend *backend);
// The least of all ranks, for what they choose alike: options->host_bytes, no_sampling and no_codes become
// those of all, and card that of rank 0.
size_t machine_agreed_bytes(Backend *backend, Options *options);
