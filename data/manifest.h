// manifest.json, by which a folder says that tools/prepare_data.py made it: train_*.bin, val_*.bin where some
// documents were drawn for validation, and the tokenizer.json that made them.
#pragma once

#include <stdbool.h>

bool manifest_is_in(const char *folder);          // false where it is absent or another program's
bool manifest_has_validation(const char *folder); // where val_000000.bin is, too
