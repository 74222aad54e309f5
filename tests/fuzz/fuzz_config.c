// config.json out of the fuzzer's bytes. What is accepted must come out of our own config.json as it went in.
#include <stdlib.h>
#include <string.h>

#include "model/checkpoint/hf_config.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  ModelConfig config, again;
  Reason reason;
  if (!hf_config_parse((const char *)data, size, &config, &reason)) return 0;
  char *text = hf_config_write(&config, DTYPE_F32, NULL);
  if (!hf_config_parse(text, strlen(text), &again, &reason)) abort();
  char *twice = hf_config_write(&again, DTYPE_F32, NULL);
  if (strcmp(text, twice)) abort();
  free(text);
  free(twice);
  return 0;
}
