#include "data/manifest.h"

#include "data/file.h"
#include "data/json.h"

bool manifest_is_in(const char *folder) {
  Reason reason;
  cJSON *manifest = json_try_read(path_in(folder, "manifest.json").text, &reason);
  bool ours = json_is(manifest, "format", "lce.c shards");
  cJSON_Delete(manifest);
  return ours;
}

bool manifest_has_validation(const char *folder) {
  return path_exists(path_in(folder, "val_000000.bin").text) && manifest_is_in(folder);
}
