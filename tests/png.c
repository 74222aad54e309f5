#include "tests/png.h"

#include <stdlib.h>

#ifdef HAVE_STB
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wall"
#pragma GCC diagnostic ignored "-Wextra"
#pragma GCC diagnostic ignored "-Wunused-function"
#pragma GCC diagnostic ignored "-Wsign-compare"
#pragma GCC diagnostic ignored "-Wunused-but-set-variable"
#define STB_IMAGE_IMPLEMENTATION
#define STBI_ONLY_PNG
#include <stb/stb_image.h>
#pragma GCC diagnostic pop
#endif

Image image_read(const char *path) {
  Image image = {0};
#ifdef HAVE_STB
  int channels;
  image.rgb = stbi_load(path, &image.width, &image.height, &channels, 3);
#else
  (void)path;
#endif
  return image;
}

void image_free(Image *image) {
  free(image->rgb);
  *image = (Image){0};
}
